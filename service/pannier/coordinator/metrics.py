"""The coordinator's metrics: undecided saves, and how others have ended; and a span per save.

In: saves, as they change. Out: metric families, collected by any thread from values read on the event
loop; and, for a save that has ended, its span (:mod:`pannier.common.tracing`).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pannier.common import tracing
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.coordinator.saves.registry import ENDED_KEPT, Registry
from pannier.coordinator.saves.save import Save
from pannier.daemon.metrics import ActiveSaves, SaveCounts, saves_under_way
from pannier.daemon.status_page import StateReader
from pannier.v1 import save_pb2

_KEPT: Final = 2 * ENDED_KEPT


class CoordinatorMetrics:
    """Made on the event loop.

    Args:
        counts: receives the outcomes of saves.
        attached: sidecars with an open stream.
        retention: its count of failures is exported.
        read_state: runs a function on the event loop, for any thread.
    """

    def __init__(
        self,
        registry: Registry,
        counts: SaveCounts,
        attached: Callable[[], Sequence[SidecarPeer]],
        retention: Retention,
        read_state: StateReader,
    ) -> None:
        self._registry = registry
        self._counts = counts
        self._attached = attached
        self._retention = retention
        self._read_state = read_state
        self._known: OrderedDict[str, bool] = OrderedDict()
        """By key of a save: whether it has ended."""
        registry.listen(self._changed)

    def collect(self) -> Iterable[Metric]:
        """The families. Any thread."""
        under, sidecars = self._read_state(self._now)
        yield from saves_under_way(under)
        yield GaugeMetricFamily(
            "pannier_sidecars", "Sidecars that are attached to the coordinator.", sidecars
        )
        yield CounterMetricFamily(
            "pannier_retention_failures",
            "Times that checking a root for checkpoints to remove failed.",
            self._retention.failures,
        )
        yield from self._counts.collect()

    def _now(self) -> tuple[ActiveSaves, int]:
        saves = self._registry.undecided()
        oldest = min((save.deadlines.start for save in saves), default=None)
        age_s = 0.0 if oldest is None else time.monotonic() - oldest
        return ActiveSaves(Counter(save.state.value for save in saves), age_s), len(
            self._attached()
        )

    def _changed(self, save: Save) -> None:
        ended = self._known.get(save.key)
        if ended is None:
            self._counts.began(save.context.save.job, save.deadlines.created_at)
        elif ended or not save.ended:
            return
        self._known[save.key] = save.ended
        if save.ended:
            status = save_view.status(save, ranks=False)
            self._counts.ended(status)
            record_span(save, status)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


def record_span(save: Save, status: save_pb2.SaveStatus) -> None:
    """Records the span of a save that has ended, with its phases."""
    start = save.deadlines.start
    reached = (
        ("plan", status.planned_s),
        ("ingest", status.ingested_s),
        ("upload", status.durable_s),
        ("commit", status.committed_s),
    )
    parts, begin = [], 0.0
    for name, end in reached:
        if end:
            parts.append(tracing.Interval(name, start + begin, start + end))
            begin = end
    state = save_pb2.SaveState.Name(status.state).removeprefix("SAVE_STATE_")
    about: tracing.Attributes = {
        "pannier.checkpoint": status.checkpoint_id,
        "pannier.attempt": status.attempt,
        "pannier.state": state,
        "pannier.ranks": len(save.context.ranks),
        "pannier.bytes": status.bytes_total,
    }
    failed = save.outcome.text() if status.state == save_pb2.SAVE_STATE_ABORTED else ""
    own = tracing.Interval("save", start, time.monotonic(), about, failed)
    tracing.export_save(save.context.save, own, parts)
