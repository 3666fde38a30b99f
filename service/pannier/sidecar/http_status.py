"""What a sidecar's process tells over HTTP: metrics, and the status page, of all jobs that it serves.

In: what the jobs have in common, and the sidecars of this moment. Out: a web server, if one is wanted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from pannier.daemon.http_server import serving_web
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_page import Pages
from pannier.daemon.status_service import Vitals
from pannier.sidecar.process_resources import Shared


class Served(Protocol):
    """One of the sidecars."""

    @property
    def attached(self) -> bool:
        """Whether its coordinator was heard a moment ago."""

    def trainers(self) -> Counter[str]:
        """Connected ranks by job."""


@contextmanager
def told(
    address: str | None,
    shared: Shared,
    vitals: Vitals,
    sidecars: Callable[[], Collection[Served]],
) -> Iterator[None]:
    """Serves at ``address`` (None: nowhere) as long as the context lasts.

    Args:
        sidecars: those that are there now; asked by any thread.

    Raises ConfigurationError when it can't listen there.
    """
    metrics = Metrics("sidecar", vitals)
    metrics.add(
        lambda: shared.tally.collect(
            vitals.backlog(),
            sum((each.trainers() for each in sidecars()), Counter[str]()),
            attached=all(each.attached for each in sidecars()),
        )
    )
    pages = Pages(shared.board, vitals)
    with serving_web(address, pages.routes(metrics), setting="--metrics"):
        yield
