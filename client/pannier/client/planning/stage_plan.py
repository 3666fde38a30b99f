"""The plan by which one save of this rank is staged: that of the last one, or a new one from the coordinator.

In: a state dict and a planner. Out: the layout of the data files, and the values that are staged into
them. Also plans and reserves memory before training starts. Runs on the caller's thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client.planning.local_plan import PlannerRun, expand
from pannier.client.planning.plan_cache import (
    CachedPlan,
    PlanCache,
    PlanScope,
    planner_options,
)
from pannier.client.staging import device_copy, stager
from pannier.client.staging.arena import Arena
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import Staged
from pannier.client.staging.values import PlannerValues, StateValues
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import BusyError

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
