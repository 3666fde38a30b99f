"""How long each phase of a save took on this rank, and what it cost.

In: the ends of phases. Out: seconds by phase, the save's cost, and its spans. Not thread-safe: of one save.
"""

import time
from collections.abc import Iterable

from pannier.common import tracing
from pannier.common.save_interval import SaveCost
from pannier.v1 import save_pb2, sidecar_pb2


class PhaseTimes:
    """See the module. ``plan``, ``stage``, perhaps ``copy``, ``ingest``, ``commit``; made by the trainer's call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By phase, in order."""
        self._waited_s = 0.0
        self._began = self._phase_began = time.monotonic()
        self._is_traced = False

    def begin(self) -> None:
        """The first phase begins now: so far the call has waited for the sidecar."""
        self.waited(time.monotonic() - self._began)

    def waited(self, seconds: float) -> None:
        """The call has just waited for so long, which belongs to no phase."""
        self._waited_s += seconds
        self._began += seconds
        self._phase_began += seconds

    def end(self, phase: str) -> None:
        """``phase`` ends now, and the next one begins."""
        now = time.monotonic()
        self.seconds[phase] = now - self._phase_began
        self._phase_began = now

    @property
    def stalled_s(self) -> float:
        """How long the trainer's call took: the phases after that run in the background."""
        return self._waited_s + self.seconds.get("plan", 0.0) + self.seconds.get("stage", 0.0)

    def cost(self, ranks: Iterable[save_pb2.RankStatus]) -> SaveCost:
        """What the save took until now, when it is committed; ``ranks``: what all ranks reported."""
        durable_s = self._waited_s + time.monotonic() - self._began
        return SaveCost(
            stalled_s=max(self.stalled_s, *(rank.stalled_s for rank in ranks), 0.0),
            ingested_s=durable_s - self.seconds["commit"],
            durable_s=durable_s,
        )

    def trace(self, context: sidecar_pb2.SaveContext, size: int, error: str = "") -> None:
        """Exports the spans of this rank's part, if tracing is on; only once."""
        was_traced, self._is_traced = self._is_traced, True
        if was_traced:
            return
        parts, begin = [], self._began
        for phase, seconds in self.seconds.items():
            parts.append(tracing.Interval(phase, begin, begin + seconds))
            begin += seconds
        attributes: tracing.Attributes = {
            "pannier.checkpoint": context.checkpoint_id,
            "pannier.rank": context.rank,
            "pannier.host": context.host,
            "pannier.bytes": size,
        }
        own = tracing.Interval("async_save", self._began, time.monotonic(), attributes, error)
        tracing.export_rank(context.save, context.rank, own, parts)
