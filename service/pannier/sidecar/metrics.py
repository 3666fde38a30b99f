"""What this host's ranks have done since the sidecar was started: bytes, retries, stalls, failures.

In: changes of saves. Out: counters for Prometheus, which never go back. Nothing is counted while
bytes move: the ranks' own figures are read when somebody asks, and added up when their
save has ended. Thread-safe.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pannier.daemon.metrics import (
    ActiveSaves,
    backlog_families,
    failures_total,
    saves_ended,
    saves_under_way,
)
from pannier.daemon.status_service import Backlog
from pannier.sidecar.save_state import RankSave, Save
from pannier.sidecar.status import rank_status, state_of

_PHASES: Final = ("staged", "ingested", "uploaded", "durable")
_JOBS_KEPT: Final = 256


@dataclass(frozen=True)
class _Amounts:
    """Of one rank in one save, or of several."""

    staged: int = 0
    ingested: int = 0
    uploaded: int = 0
    durable: int = 0
    retries: int = 0
    stalled_s: float = 0.0

    @staticmethod
    def of(rank: RankSave) -> "_Amounts":
        told = rank_status(rank)
        return _Amounts(
            told.bytes_staged,
            told.bytes_ingested,
            told.bytes_uploaded,
            told.bytes_durable,
            told.retries,
            told.stalled_s,
        )

    def least(self, other: "_Amounts") -> "_Amounts":
        """The larger of each: an upload that begins anew takes nothing back."""
        return _Amounts(*map(max, astuple(self), astuple(other)))

    def __add__(self, other: "_Amounts") -> "_Amounts":
        return _Amounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "_Amounts") -> "_Amounts":
        return _Amounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Tally:
    """A listener of :class:`pannier.sidecar.save_state.Saves`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[str, Save] = {}
        self._seen: dict[RankSave, _Amounts] = {}
        """The most that was seen of ranks under way."""
        self._before: dict[RankSave, _Amounts] = {}
        """What a former life of the sidecar had done."""
        self._past: OrderedDict[str, _Amounts] = OrderedDict()
        """Of ended saves, by job."""
        self._ended: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()

    def changed(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """See :data:`pannier.sidecar.save_state.Listener`."""
        if rank is not None:
            return
        with self._lock:
            if save.verdict is None:
                self._under_way.setdefault(save.key, save)
            elif self._under_way.pop(save.key, None) is not None:
                self._fold(save)

    def begin(self, saves: Iterable[Save]) -> None:
        """What is there of these was done by a former life; called before their trainers are served."""
        with self._lock:
            for save in saves:
                for rank in list(save.ranks.values()):
                    self._before[rank] = _Amounts.of(rank)

    def drop(self, saves: Iterable[Save]) -> None:
        """Nobody follows these any more; what they have moved stays counted."""
        with self._lock:
            for save in saves:
                if self._under_way.pop(save.key, None) is not None:
                    self._count(save)

    def collect(
        self, backlog: Backlog, trainers: Counter[str], *, attached: bool
    ) -> Iterable[Metric]:
        """The families, with what waits and who is connected.

        Args:
            attached: the coordinator was heard a moment ago.
        """
        with self._lock:
            amounts = dict(self._past)
            failures, ended = self._failures.copy(), self._ended.copy()
            saves = list(self._under_way.values())
            for save in saves:
                ranks = list(save.ranks.values())
                failures.update(rank.failure.kind for rank in ranks if rank.failure is not None)
                amounts[save.id.job] = self._sum(ranks, amounts.get(save.id.job, _Amounts()))
        states = Counter(int(state_of(save)) for save in saves)
        oldest = min((save.start for save in saves), default=None)
        yield from backlog_families(backlog)
        yield from saves_under_way(
            ActiveSaves(states, 0.0 if oldest is None else time.monotonic() - oldest)
        )
        yield saves_ended(ended)
        yield failures_total(failures)
        yield from _families(amounts)
        connected = GaugeMetricFamily(
            "pannier_trainers", "Ranks whose client is connected.", labels=["training_job"]
        )
        for job, count in trainers.items():
            connected.add_metric([job], count)
        yield connected
        yield GaugeMetricFamily(
            "pannier_coordinator_connected",
            "1 while the coordinator is attached and was heard a moment ago, else 0.",
            int(attached),
        )

    def _sum(self, ranks: Iterable[RankSave], total: _Amounts) -> _Amounts:
        for rank in ranks:
            seen = _Amounts.of(rank).least(self._seen.get(rank, _Amounts()))
            self._seen[rank] = seen
            total += seen - self._before.get(rank, _Amounts())
        return total

    def _fold(self, save: Save) -> None:
        assert save.verdict is not None
        self._count(save)
        self._ended[save.verdict.state] += 1

    def _count(self, save: Save) -> None:
        ranks = list(save.ranks.values())
        self._past[save.id.job] = self._sum(ranks, self._past.get(save.id.job, _Amounts()))
        while len(self._past) > _JOBS_KEPT:
            self._past.popitem(last=False)
        self._failures.update(rank.failure.kind for rank in ranks if rank.failure is not None)
        for rank in ranks:
            self._seen.pop(rank, None)
            self._before.pop(rank, None)


def _families(amounts: dict[str, _Amounts]) -> Iterable[Metric]:
    moved = CounterMetricFamily(
        "pannier_bytes",
        "Bytes of this host's ranks that have come so far.",
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
