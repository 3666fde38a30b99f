"""The plan that one save of this rank goes by: a cached one, or a new one from the coordinator.

In: a state dict and a planner. Out: how large an arena to take, and how to stage into it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client.planning.local_plan import PlannerRun, expand
from pannier.client.planning.plan_cache import (
    CachedPlan,
    Match,
    Options,
    Owner,
    PlanCache,
    options_of,
)
from pannier.client.staging import stager
from pannier.client.staging.arena import Arena
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import Staged
from pannier.client.transport.membership import Entry
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError


@dataclass(frozen=True)
class Agreed:
    """See the module."""

    attempt: str
    plan_id: str
    sizes: list[int]
    """Bytes of each data file of slots, in order."""
    stage: Callable[[Arena, DeviceCopies | None], Staged]
    """Copies the state into an arena of these sizes; see :func:`pannier.client.staging.stager.stage`."""
    cached: CachedPlan | None
    """What the coordinator has yet to agree to; None: it has."""


@dataclass(frozen=True)
class Wish:
    """What is to be saved, and how."""

    owner: Owner
    number: int
    """Of the save in its group."""
    checkpoint_id: str
    is_coordinator: bool
    """Whether this is the first rank of its group."""
    state: dict[str, Any]
    """Expanded (:func:`pannier.client.planning.local_plan.expand`)."""
    planner: SavePlanner | None


def wish_of(
    entry: Entry,
    context: sidecar_pb2.SaveContext,
    state_dict: Mapping[str, Any],
    planner: SavePlanner | None,
) -> Wish:
    """The wish that a call with these arguments means."""
    root, _ = object_names.split_checkpoint_id(entry.checkpoint_id)
    return Wish(
        owner=Owner(context.save.incarnation, entry.group.name, root),
        number=entry.number,
        checkpoint_id=entry.checkpoint_id,
        is_coordinator=entry.group.is_coordinator,
        state=expand(state_dict),
        planner=planner,
    )


def agree(plans: PlanCache, wish: Wish, ask: Callable[[PlannerRun], plan_pb2.FinalPlan]) -> Agreed:
    """The plan of a save; a new one is kept for the next.

    Args:
        plans: those of earlier saves.
        wish: what is to be saved.
        ask: the coordinator's answer to a local plan; waits for all ranks.

    Raises:
        InvalidRequestError: see :class:`PlannerRun`.
        PannierError: whatever ``ask`` raises.
    """
    options = options_of(wish.planner)
    match = plans.match(wish.owner, options, wish.state)
    if match is not None:
        return _by_match(match, wish)
    planning = PlannerRun(
        wish.state,
        wish.planner,
        is_coordinator=wish.is_coordinator,
        checkpoint_id=wish.checkpoint_id,
    )
    known = plans.find(wish.owner, planning.digest)
    final = ask(planning) if known is None else known.final(wish.number)
    items = planning.finish(final)
    kept = keep(plans, wish, planning, final if known is None else known, options)
    match = kept.match(options, wish.state) if kept is not None and options is not None else None
    if match is not None:
        # The plan is new, but the quickest way to stage is the one of all later saves.
        return replace(_by_match(match, wish), cached=known)
    return Agreed(
        attempt=final.attempt,
        plan_id=final.plan_id,
        sizes=[file.size for file in final.files],
        stage=lambda arena, devices: stager.stage(planning, items, final, arena, devices),
        cached=known,
    )


def keep(
    plans: PlanCache,
    wish: Wish,
    planning: PlannerRun,
    plan: plan_pb2.FinalPlan | CachedPlan,
    options: Options | None,
) -> CachedPlan | None:
    """Remembers an agreed plan, and that it is the one of the wish's state.

    None when it can serve no other save.
    """
    if isinstance(plan, plan_pb2.FinalPlan):
        try:
            plan = CachedPlan(wish.owner, planning.message, planning.digest, plan)
        except InvalidRequestError:
            # Names that can't be made for another save: it is planned anew.
            return None
    if options is not None:
        plan.learn(options, wish.state, planning.items)
    plans.keep(plan)
    return plan


def _by_match(match: Match, wish: Wish) -> Agreed:
    plan = match.plan
    names = plan.names(wish.number)
    return Agreed(
        attempt=plan.attempt(wish.number),
        plan_id=plan.plan_id,
        sizes=plan.sizes,
        stage=lambda arena, devices: match.route.stage(match.values, arena, names, devices),
        cached=plan,
    )
