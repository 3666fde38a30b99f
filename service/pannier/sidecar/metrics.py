"""What this host's ranks have done since the sidecar started: counters for Prometheus, and trace spans.

In: changes of saves, as a listener of :class:`~pannier.sidecar.save_registry.SaveRegistry`. Out:
counters that never decrease, and spans of the phases of ended saves (:mod:`pannier.common.tracing`).
Nothing is counted while bytes move: the ranks' own figures are read when metrics are scraped, and
added up when their save has ended. On the event loop; the HTTP server's threads read them there.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pannier.common import tracing
from pannier.daemon.http_server import serve_http
from pannier.daemon.loads.load_metrics import load_families, read_families
from pannier.daemon.metrics import (
    ActiveSaves,
    Metrics,
    backlog_families,
    failures_total,
    ranks_waiting,
    saves_ended,
    saves_under_way,
)
from pannier.daemon.status_page import StatusPage, read_on_loop
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.sidecar.save_state import Phase, RankSave, Save
from pannier.sidecar.status import rank_status, save_state

_PHASES: Final = ("staged", "ingested", "uploaded", "durable")
_JOBS_KEPT: Final = 256


@dataclass(frozen=True)
class _Amounts:
    """Figures of one rank in one save, or of several."""

    staged: int = 0
    ingested: int = 0
    uploaded: int = 0
    durable: int = 0
    retries: int = 0
    stalled_s: float = 0.0

    @staticmethod
    def of(rank: RankSave) -> "_Amounts":
        status = rank_status(rank)
        return _Amounts(
            status.bytes_staged,
            status.bytes_ingested,
            status.bytes_uploaded,
            status.bytes_durable,
            status.retries,
            status.stalled_s,
        )

    def largest(self, other: "_Amounts") -> "_Amounts":
        """The larger value of each figure: an upload that starts over must not lower a counter."""
        return _Amounts(*map(max, astuple(self), astuple(other)))

    def __add__(self, other: "_Amounts") -> "_Amounts":
        return _Amounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "_Amounts") -> "_Amounts":
        return _Amounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class SaveMetrics:
    """Counters of all saves."""

    def __init__(self) -> None:
        self._under_way: dict[str, Save] = {}
        self._seen: dict[RankSave, _Amounts] = {}
        """The largest figures so far of ranks under way."""
        self._baseline: dict[RankSave, _Amounts] = {}
        """What an earlier sidecar process had done."""
        self._past: OrderedDict[str, _Amounts] = OrderedDict()
        """Sums of ended saves, by job."""
        self._ended: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """See :data:`pannier.sidecar.save_registry.Listener`."""
        if rank is not None:
            return
        if save.outcome is None:
            self._under_way.setdefault(save.key, save)
        elif self._under_way.pop(save.key, None) is not None:
            self._add_up(save)
            self._ended[save.outcome.state] += 1

    def set_baseline(self, saves: Iterable[Save]) -> None:
        """Leaves out what an earlier process did for these saves; before their trainers are served."""
        for save in saves:
            for rank in save.ranks.values():
                self._baseline[rank] = _Amounts.of(rank)

    def collect(
        self, backlog: Backlog, trainers: Counter[str], *, connected: bool
    ) -> Iterable[Metric]:
        """The metric families.

        Args:
            backlog: what waits for storage.
            trainers: connected ranks by job.
            connected: the coordinator is attached and responsive.
        """
        amounts = dict(self._past)
        failures, ended = self._failures.copy(), self._ended.copy()
        saves = list(self._under_way.values())
        for save in saves:
            ranks = list(save.ranks.values())
            failures.update(rank.failure.kind for rank in ranks if rank.failure is not None)
            amounts[save.id.job] = self._sum(ranks, amounts.get(save.id.job, _Amounts()))
        states = Counter(int(save_state(save)) for save in saves)
        # By the wall clock, as in the journal: a restart of the sidecar makes no save younger.
        now = time.time()
        oldest_s = max((now - save.created_at for save in saves), default=0.0)
        yield from backlog_families(backlog)
        yield from saves_under_way(ActiveSaves(states, max(0.0, oldest_s)))
        yield saves_ended(ended)
        yield failures_total(failures)
        yield from _families(amounts)
        ranks_by_job = GaugeMetricFamily(
            "pannier_trainers", "Ranks whose client is connected.", labels=["training_job"]
        )
        for job, count in trainers.items():
            ranks_by_job.add_metric([job], count)
        yield ranks_by_job
        yield GaugeMetricFamily(
            "pannier_coordinator_connected",
            "1 while the coordinator is attached and responsive, else 0.",
            int(connected),
        )

    def _sum(self, ranks: Iterable[RankSave], total: _Amounts) -> _Amounts:
        for rank in ranks:
            seen = _Amounts.of(rank).largest(self._seen.get(rank, _Amounts()))
            self._seen[rank] = seen
            total += seen - self._baseline.get(rank, _Amounts())
        return total

    def _add_up(self, save: Save) -> None:
        ranks = list(save.ranks.values())
        self._past[save.id.job] = self._sum(ranks, self._past.get(save.id.job, _Amounts()))
        while len(self._past) > _JOBS_KEPT:
            self._past.popitem(last=False)
        self._failures.update(rank.failure.kind for rank in ranks if rank.failure is not None)
        for rank in ranks:
            self._seen.pop(rank, None)
            self._baseline.pop(rank, None)


def _families(amounts: dict[str, _Amounts]) -> Iterable[Metric]:
    moved = CounterMetricFamily(
        "pannier_bytes",
        "Bytes of this host's ranks, by the phase that they have reached.",
        labels=["training_job", "phase"],
    )
    retries = CounterMetricFamily(
        "pannier_upload_retries",
        "Times that storage was asked again for the same part of an upload.",
        labels=["training_job"],
    )
    stalls = CounterMetricFamily(
        "pannier_stall_seconds",
        "Seconds that saves held training loops up, planning and staging, summed over ranks.",
        labels=["training_job"],
    )
    for job, each in amounts.items():
        for phase in _PHASES:
            moved.add_metric([job, phase], getattr(each, phase))
        retries.add_metric([job], each.retries)
        stalls.add_metric([job], each.stalled_s)
    yield from (moved, retries, stalls)


def trace_save(save: Save, rank: RankSave | None, urgent: bool) -> None:
    """Exports the spans of an ended save; see :data:`pannier.sidecar.save_registry.Listener`."""
    if save.outcome is None or rank is not None or not urgent:
        return
    for each in save.ranks.values():
        tracing.export_parts(save.id, each.rank, _spans(each))


def _spans(rank: RankSave) -> list[tracing.Interval]:
    """The spans that began and ended since this sidecar started."""
    fields: dict[str, str | int | float] = {
        "pannier.checkpoint": rank.save.checkpoint_id,
        "pannier.attempt": rank.attempt,
        "pannier.rank": rank.rank,
        "pannier.host": rank.host,
        "pannier.retries": rank.transfer.retries,
        "pannier.transport": rank.transfer.transport,
    }
    spans = [
        tracing.Interval(
            f"upload {file.name}",
            file.upload.opened_at,
            file.upload.stored_at,
            {**fields, "pannier.bytes": file.size},
        )
        for file in rank.files.values()
        if file.upload.stored_at is not None
    ]
    begin, ingested = (rank.reached.get(each.wire) for each in (Phase.STREAMING, Phase.INGESTED))
    durable = rank.reached.get(Phase.DURABLE.wire)
    error = rank.failure.message if rank.failure is not None else ""
    if begin is not None and ingested is not None:
        spans.append(tracing.Interval("ingest", begin, ingested, fields, "" if durable else error))
    if ingested is not None and durable is not None:
        last = max((span.end for span in spans), default=ingested)
        spans.append(tracing.Interval("write receipt", min(last, durable), durable, fields))
    return spans


@contextmanager
def serving_http(
    address: str | None,
    metrics: SaveMetrics,
    board: StatusRegistry,
    daemon_info: DaemonInfo,
    *,
    trainers: Callable[[], Counter[str]],
    connected: Callable[[], bool],
) -> Iterator[None]:
    """Serves metrics and the status page at ``address`` (None: nowhere) as long as the context lasts.

    Args:
        trainers: connected ranks by job.
        connected: whether the coordinator is attached and responsive.

    Raises ConfigurationError when it can't listen there.
    """
    read_state = read_on_loop(asyncio.get_running_loop())
    served = Metrics("sidecar", daemon_info)

    def collect() -> list[Metric]:
        return [
            *metrics.collect(daemon_info.backlog(), trainers(), connected=connected()),
            ranks_waiting(daemon_info.waits("")),
            *load_families(daemon_info.loads),
            *read_families(daemon_info.loads),
        ]

    served.add(lambda: read_state(collect))
    page = StatusPage(board, daemon_info, read_state)
    with serve_http(address, page.routes(served), setting="--metrics"):
        yield
