"""The plan by which one save of this rank is staged: its part of the group's last plan, or of a new one.

In: a save's state dict and planner. Out: the layout of the data files, and the values that are staged into them;
without an RPC if the state has the structure of the group's last save to the same root. A ``DefaultSavePlanner`` is
not even run when the state has the fingerprint of one that it planned; the plans of other planners are compared by
digest. The coordinator confirms the reuse once the save's bytes are under way (:mod:`pannier.client.saves.save`).
Also plans and reserves memory before training starts.

Only the last part can be reused: the parts of all ranks in one save are one plan, and those of different saves
may be none. So a rank that asks for a new plan and gets no answer has no part any more. The cache is thread-safe;
plans are resolved on the caller's thread.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from pannier.client.planning.local_plan import PlannerRun, expand
from pannier.client.planning.state_fingerprint import StateFingerprint, fingerprint
from pannier.client.staging import device_copy, stager
from pannier.client.staging.arena import Arena
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.layout import (
    PlannerValues,
    StateSlots,
    StateValues,
    planned_layout,
    state_slots,
)
from pannier.client.staging.stager import Staged
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import BusyError

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


RequestPlan = Callable[[PlannerRun], plan_pb2.FinalPlan]
"""Sends a local plan to the coordinator; returns once every rank's plan has arrived."""


@dataclass(frozen=True)
class SaveSpec:
    """What is to be saved, where, and with which planner."""

    scope: PlanScope
    number: int
    """Number of the save in its group."""
    checkpoint_id: str
    is_coordinator: bool
    """Whether this is the first rank of its group."""
    state: dict[str, Any]
    """Expanded (:func:`pannier.client.planning.local_plan.expand`)."""
    planner: SavePlanner | None

    run: PlannerRun | None = None
    """The planner's run, if it was made ahead."""

    def run_planner(self) -> PlannerRun:
        """The local plan. Raises what :class:`PlannerRun` raises."""
        return self.run or PlannerRun(
            self.state,
            self.planner,
            is_coordinator=self.is_coordinator,
            checkpoint_id=self.checkpoint_id,
        )


@dataclass(frozen=True)
class StagePlan:
    """How one save is staged."""

    attempt: str
    part: CachedPlan
    """This rank's part of the plan."""
    values: StateValues | PlannerValues
    is_confirmed: bool
    """False: the part is that of an earlier save, and the coordinator has yet to confirm it."""

    @property
    def plan_id(self) -> str:
        """Id of the global plan that the part was first made for."""
        return self.part.plan_id

    @property
    def sizes(self) -> list[int]:
        """Bytes of each data file, in order; 0 for the objects file."""
        return self.part.layout.sizes

    def stage(self, arena: Arena, devices: DeviceCopies | None) -> Staged:
        """Copies the state into an arena of these sizes; see :func:`pannier.client.staging.stager.stage`."""
        return stager.stage(self.part.layout, self.values, arena, devices)


def save_spec(
    context: sidecar_pb2.SaveContext, state_dict: Mapping[str, Any], planner: SavePlanner | None
) -> SaveSpec:
    """The spec of the save with this context.

    Raises InvalidRequestError: the state dict is not a mapping; and whatever a ``state_dict()`` raises.
    """
    root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
    return SaveSpec(
        scope=PlanScope(context.save.incarnation, context.save.group, root),
        number=context.save.number,
        checkpoint_id=context.checkpoint_id,
        is_coordinator=context.rank == context.ranks[0],
        state=expand(state_dict),
        planner=planner,
    )


def plan_ahead(
    context: sidecar_pb2.SaveContext, state_dict: Mapping[str, Any], planner: SavePlanner | None
) -> SaveSpec:
    """A spec with its local plan. Raises what :func:`save_spec` and :class:`PlannerRun` raise."""
    spec = save_spec(context, state_dict, planner)
    return replace(spec, run=spec.run_planner())


def resolve_plan(plans: PlanCache, spec: SaveSpec, request_plan: RequestPlan) -> StagePlan:
    """The plan of a save, from the cache if it is there; a new one is cached.

    Raises:
        InvalidRequestError: see :class:`PlannerRun`.
        PannierError: whatever ``request_plan`` raises.
    """
    options = planner_options(spec.planner)
    part, is_confirmed = plans.last(spec.scope), False
    values: StateValues | PlannerValues | None = None
    if part is not None:
        values = part.match(options, spec.state)
    if part is None or values is None:
        run = spec.run_planner()
        if part is None or part.digest != run.digest:
            # Without the answer it isn't known what the others take for this rank's part.
            plans.drop(spec.scope)
            part = CachedPlan(spec.scope, run, request_plan(run), spec.checkpoint_id)
            is_confirmed = True
        values = run.finish(part.layout.positions)
        if options is not None:
            # Staged without the planner, as all later saves are, though this save ran it.
            values = part.add_state(options, spec.state, run.items) or values
        plans.add(part)
    return StagePlan(part.attempt(spec.number), part, values, is_confirmed)


def prepare(
    plans: PlanCache,
    spec: SaveSpec,
    request_plan: RequestPlan,
    acquire: Callable[[list[int]], Arena],
    release: Callable[[Arena], None],
    arenas: int,
) -> None:
    """Plans and reserves memory, so that the first save costs no more than later ones.

    Args:
        plans: caches the plan.
        spec: of a save like those to come; its number belongs to this call alone.
        request_plan: see :data:`RequestPlan`.
        acquire: takes an arena with files of these sizes from the pool.
        release: returns it.
        arenas: how many to reserve.

    Raises:
        InvalidRequestError: see :class:`PlannerRun`.
        SaveAbortedError: another rank can't take part; with failures by rank.
        PannierError: there is no memory, or a rank or daemon doesn't answer.
    """
    spec = replace(spec, run=spec.run_planner())
    plans.drop(spec.scope)
    plan = resolve_plan(plans, spec, request_plan)
    plan.part.confirm("", "")  # No manifest has it.
    held: list[Arena] = []
    try:
        for _ in range(arenas):
            try:
                arena = acquire(plan.sizes)
            except BusyError:
                if not held:
                    raise
                break  # Saves will wait for each other's.
            held.append(arena)
            layout = plan.part.layout
            layout.close(arena, layout.open(arena))
            device_copy.prepare_arena(arena, spec.state)
    finally:
        for arena in held:
            release(arena)
