"""This rank's parts of its groups' last plans, and the states they were made for.

In: a save's state dict and planner. Out: this rank's part of the plan of the group's last save to the same
root, without an RPC, if the state has the same structure. A ``DefaultSavePlanner`` is not even run when
the state has the fingerprint of one that it planned; the plans of other planners are compared by digest. The
coordinator confirms the reuse once the save's bytes are under way
(:mod:`pannier.client.saves.save`).

Only the last part can be reused: the parts of all ranks in one save are one plan, and those of different saves
may be none. So a rank that asks for a new plan and gets no answer has no part any more. Thread-safe.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.state_fingerprint import StateFingerprint, fingerprint
from pannier.client.staging.layout import planned_layout
from pannier.client.staging.values import StateSlots, StateValues, state_slots
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names

_MOST_PLANS: Final = 8
"""Groups and roots with a cached plan; the least recently used are evicted."""
_MOST_STATES: Final = 2
"""States that one plan serves: with gradients and without, for example."""
_METHODS: Final = (
    *("set_up_planner", "create_local_plan", "finish_plan"),
    *("resolve_data", "lookup_object", "transform_object"),
)
_METHODS_OF: Final = attrgetter(*_METHODS)
_OURS: Final = _METHODS_OF(DefaultSavePlanner)


class PlanScope(NamedTuple):
    """Where a plan can be reused: by one group in one incarnation, below one root."""

    incarnation: str
    group: str
    root: str


class PlannerOptions(NamedTuple):
    """What a ``DefaultSavePlanner``'s local plan depends on besides the state."""

    flatten_sharded_tensors: bool
    dedup_save_to_lowest_rank: bool


def planner_options(planner: SavePlanner | None) -> PlannerOptions | None:
    """The planner's options; None for one that must be run: a subclass, patched, or not flattening."""
    if planner is None:
        planner = _DEFAULT
    if (
        type(planner) is not DefaultSavePlanner
        or not planner.flatten_state_dict
        or not vars(planner).keys().isdisjoint(_METHODS)
        or _METHODS_OF(DefaultSavePlanner) != _OURS
    ):
        return None
    return PlannerOptions(
        bool(planner.flatten_sharded_tensors), bool(planner.dedup_save_to_lowest_rank)
    )


_DEFAULT: Final = DefaultSavePlanner()


class CachedPlan:
    """One rank's part of a plan. Immutable but for the manifest that has it and the states it serves.

    Args:
        scope: where it can be reused.
        run: the run that made the local plan.
        final: the final plan for it, of an earlier save.
        checkpoint_id: of that save; empty: only the plan was made, so that no manifest has it.

    Raises what :func:`pannier.client.staging.layout.planned_layout` raises.
    """

    def __init__(
        self,
        scope: PlanScope,
        run: PlannerRun,
        final: plan_pb2.FinalPlan,
        checkpoint_id: str = "",
    ) -> None:
        self.scope = scope
        self.message = run.message
        self.digest = run.digest
        self._source = (checkpoint_id, final.attempt if checkpoint_id else "")
        """Checkpoint and attempt of a save whose manifest has this part."""
        self.layout = planned_layout(run.items, final)
        self._final = final
        self._attempt = object_names.Attempt.parse(final.attempt)
        self._states: list[tuple[PlannerOptions, StateFingerprint, StateSlots]] = []

    @property
    def plan_id(self) -> str:
        """Id of the global plan that this part was first made for."""
        return self._final.plan_id

    @property
    def staged_positions(self) -> bytes:
        """A column: the items of the local plan that this rank writes."""
        return self._final.positions

    def claim(self) -> sidecar_pb2.CachedPlanClaim:
        """The claim of a save to use this part."""
        checkpoint_id, attempt = self._source
        return sidecar_pb2.CachedPlanClaim(
            part=self._final.part,
            digest=self.digest,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
        )

    def confirm(self, checkpoint_id: str, attempt: str) -> None:
        """Records that the attempt's manifest has this part, too."""
        self._source = (checkpoint_id, attempt)

    def attempt(self, number: int) -> str:
        """Name of the attempt that is the group's ``number``-th save."""
        return dataclasses.replace(self._attempt, number=number).name

    def equals(self, final: plan_pb2.FinalPlan, number: int) -> bool:
        """Whether ``final`` is this part for the ``number``-th save."""
        return (final.part, final.attempt) == (self._final.part, self.attempt(number))

    def add_state(
        self, options: PlannerOptions, state: Mapping[str, Any], items: Sequence[WriteItem]
    ) -> StateValues | None:
        """Lets states like ``state``, for which ``items`` were planned, match this plan; returns its values.

        None: it has no fingerprint, or some values need more than a copy.
        """
        known = fingerprint(state)
        values = known.values(state) if known is not None else None
        if known is None or values is None or [item.index.fqn for item in items] != known.fqns:
            return None
        slots = state_slots(self.layout, known.fqns, values)
        if slots is None:
            return None
        self._states = [(options, known, slots), *self._states[: _MOST_STATES - 1]]
        return StateValues(slots, values)

    def match(self, options: PlannerOptions | None, state: Mapping[str, Any]) -> StateValues | None:
        """The values of ``state``; None when no state of its structure was added."""
        for planned_with, known, slots in self._states:
            if planned_with == options:
                values = known.values(state)
                if values is not None:
                    return StateValues(slots, values)
        return None


class PlanCache:
    """The last part of each group and root. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[PlanScope, CachedPlan] = OrderedDict()

    def last(self, scope: PlanScope) -> CachedPlan | None:
        """The part of the scope's last save."""
        with self._lock:
            plan = self._plans.get(scope)
            if plan is not None:
                self._plans.move_to_end(scope)
            return plan

    def add(self, plan: CachedPlan) -> None:
        """Caches a part, as that of the last save."""
        with self._lock:
            self._plans[plan.scope] = plan
            self._plans.move_to_end(plan.scope)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)

    def drop(self, scope: PlanScope, plan: CachedPlan | None = None) -> None:
        """Drops the part of a scope, whose next save is planned again.

        Args:
            plan: only if it is still the last one.
        """
        with self._lock:
            if plan is None or self._plans.get(scope) is plan:
                self._plans.pop(scope, None)

    def clear(self) -> None:
        """Drops all parts."""
        with self._lock:
            self._plans.clear()
