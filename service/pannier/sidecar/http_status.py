"""What a sidecar's process tells over HTTP: metrics, and the status page, of all jobs that it serves.

In: what the jobs have in common, and the sidecars of this moment. Out: a web server, if one is wanted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from pannier.daemon.http_server import serve_http
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_page import StatusPage
from pannier.daemon.status_service import DaemonInfo
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
    daemon_info: DaemonInfo,
    sidecars: Callable[[], Collection[Served]],
) -> Iterator[None]:
    """Serves at ``address`` (None: nowhere) as long as the context lasts.

    Args:
        sidecars: those that are there now; asked by any thread.

    Raises ConfigurationError when it can't listen there.
    """
    metrics = Metrics("sidecar", daemon_info)
    metrics.add(
        lambda: shared.tally.collect(
            daemon_info.backlog(),
            sum((each.trainers() for each in sidecars()), Counter[str]()),
            attached=all(each.attached for each in sidecars()),
        )
    )
    pages = StatusPage(shared.status_registry, daemon_info)
    with serve_http(address, pages.routes(metrics), setting="--metrics"):
        yield
