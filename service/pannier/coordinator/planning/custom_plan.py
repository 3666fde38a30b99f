"""The global plan of a custom planner, which takes and makes torch's own objects.

In: a class's name, and the local plans of a save. Out: what the class plans, as
:mod:`~pannier.coordinator.planning.global_plan` would. The class runs here without a state dict. CPU-bound;
any thread.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from pannier.coordinator.planning.arrays import Ints, read_column
from pannier.coordinator.planning.columns import InvalidPlanError, RankPlan
from pannier.coordinator.planning.global_plan import GlobalPlan, Slots, make_body, place_items
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire.errors import ConfigurationError
from pannier.wire.plan_codec import decode_items, metadata_columns
from pannier.wire.plan_columns import decode_mappings, parse_mappings


def load(name: str) -> type[SavePlanner]:
    """The class of this name. Raises ConfigurationError unless it can plan here."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # the module may be a script
        raise ConfigurationError(
            f"--planner {name} can't be imported by {sys.executable}: {type(error).__name__}: {error}. The class "
            "must be in a module, not in the script itself or a function, and the module in a package that is "
            "installed there or in a directory of PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, SavePlanner)):
        raise ConfigurationError(f"--planner {name} is not a SavePlanner class")
    _instance(found)
    return found


def _instance(cls: type[SavePlanner]) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise ConfigurationError(
            f"--planner {cls.__module__}:{cls.__qualname__} can't be made without arguments: {error}"
        ) from error


@dataclass(frozen=True)
class _Assigned:
    owner: int
    position: int


def make_custom_plan(cls: type[SavePlanner], plans: Sequence[RankPlan], attempt: str) -> GlobalPlan:
    """The global plan that the class makes. Raises InvalidPlanError, also for any exception of the class."""
    planner = _instance(cls)
    options = plans[0].plan.options
    planner.flatten_state_dict = options.flatten_state_dict
    planner.flatten_sharded_tensors = options.flatten_sharded_tensors
    planner.dedup_save_to_lowest_rank = options.dedup_save_to_lowest_rank
    # Its cache is class-wide and would mix saves up.
    planner._enable_plan_caching = False
    local = [_decode(plan.plan, flattens=options.flatten_state_dict) for plan in plans]
    # A user's code: whatever it raises is the save's failure.
    try:
        global_plans, metadata = planner.create_global_plan(local)
    except Exception as error:
        raise InvalidPlanError(
            f"{options.planner}.create_global_plan raised {type(error).__name__}: {error}"
        ) from error
    assigned = _assign(options.planner, plans, local, global_plans)
    return _encode(options.planner, plans, metadata, assigned, attempt)


def _decode(plan: plan_pb2.LocalPlan, *, flattens: bool) -> SavePlan:
    mappings = decode_mappings(parse_mappings(plan.mappings)) if flattens else None
    return SavePlan(decode_items(plan.items), planner_data=mappings)


def _assign(
    name: str,
    plans: Sequence[RankPlan],
    local: Sequence[SavePlan],
    global_plans: Sequence[SavePlan],
) -> dict[MetadataIndex, _Assigned]:
    """The owner of each (key, offset), and its position in the owner's local plan."""
    if len(global_plans) != len(local):
        raise InvalidPlanError(f"{name} made {len(global_plans)} plans for {len(local)} ranks")
    assigned: dict[MetadataIndex, _Assigned] = {}
    for owner, (plan, mine, final) in enumerate(zip(plans, local, global_plans, strict=True)):
        positions: dict[MetadataIndex, int] = {}
        for position, item in enumerate(mine.items):
            positions.setdefault(item.index, position)
        for item in final.items:
            held = positions.get(item.index)
            if held is None or not _same(item, mine.items[held]):
                raise InvalidPlanError(
                    f"{name} assigns rank {plan.rank} {item.index.fqn!r} at "
                    f"{item.index.offset}, which isn't in that rank's own plan",
                    [plan],
                )
            if item.index in assigned:
                other = plans[assigned[item.index].owner]
                raise InvalidPlanError(
                    f"{name} assigns both rank {other.rank} and rank {plan.rank} "
                    f"{item.index.fqn!r} at {item.index.offset}",
                    [other, plan],
                )
            assigned[item.index] = _Assigned(owner, held)
    return assigned


def _same(item: WriteItem, own: WriteItem) -> bool:
    return item.type == own.type and item.tensor_data == own.tensor_data


def _encode(
    name: str,
    plans: Sequence[RankPlan],
    metadata: Metadata,
    assigned: dict[MetadataIndex, _Assigned],
    attempt: str,
) -> GlobalPlan:
    message = metadata_columns(metadata)
    indices = [item.index for item in decode_items(message.items)]
    listed: set[MetadataIndex] = set()
    for index in indices:
        if index in listed:
            raise InvalidPlanError(
                f"{name} lists {index.fqn!r} at {index.offset} more than once in the metadata"
            )
        listed.add(index)
        if index not in assigned:
            raise InvalidPlanError(
                f"{name} lists {index.fqn!r} at {index.offset} in the metadata, but no rank is assigned "
                "to write it"
            )
    if unlisted := assigned.keys() - listed:
        keys = sorted({index.fqn for index in unlisted})[:4]
        raise InvalidPlanError(f"{name} has ranks write {keys}, which the metadata doesn't list")
    owner = np.array([assigned[index].owner for index in indices], np.int64)
    position = np.array([assigned[index].position for index in indices], np.int64)
    names, assignment = place_items(
        [plan.rank for plan in plans], owner, position, _slots(plans, owner, position)
    )
    body = make_body(records_pb2.PlanManifest(metadata=message), assignment)
    return GlobalPlan(attempt, names, assignment, body)


def _slots(plans: Sequence[RankPlan], owner: Ints, position: Ints) -> Slots:
    columns = np.zeros((3, len(owner)), np.int64)
    for index in np.unique(owner).tolist():
        own, rows = plans[index].plan, owner == index
        for column, lengths in zip(columns, (own.head, own.body, own.tail), strict=True):
            column[rows] = read_column(lengths)[position[rows]]
    return Slots(*columns)
