"""What a coordinator and a sidecar would make of one rank's plan and staged files."""

import ctypes
import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from pannier.client import torch_compat
from pannier.client.planning.local_plan import PlannerRun, expand
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.layout import planned_layout
from pannier.client.staging.stager import Staged, stage
from pannier.v1 import plan_pb2
from pannier.wire import file_layout, object_names, plan_columns
from pannier.wire.plan_columns import decode_column, encode_column
from support.plan_messages import columns

ATTEMPT = "i1-a1-g00000000-s1"


def plan(
    state: Any, planner: SavePlanner | None = None, checkpoint_id: str = "/checkpoints/step-1"
) -> PlannerRun:
    return PlannerRun(expand(state), planner, is_coordinator=True, checkpoint_id=checkpoint_id)


def final_plan(
    message: plan_pb2.LocalPlan, positions: Sequence[int] | None = None, rank: int = 0
) -> plan_pb2.FinalPlan:
    """The answer to a local plan, of which this rank is to write ``positions`` (None: all)."""
    lengths = [decode_column(column) for column in (message.head, message.body, message.tail)]
    head = lengths[0]
    chosen = range(len(head)) if positions is None else positions
    slots = [p for p in chosen if head[p]]
    laid = file_layout.lay_out(*([column[p] for p in slots] for column in lengths))
    files = [
        plan_pb2.PlannedFile(name=object_names.data_file(ATTEMPT, rank, n), size=size)
        for n, size in enumerate(laid.sizes)
    ]
    if len(slots) < len(chosen):
        files.append(plan_pb2.PlannedFile(name=object_names.objects_file(ATTEMPT, rank)))
    slotted = iter(zip(laid.file, laid.offset, laid.length, strict=True))
    places = [next(slotted) if head[p] else (len(files) - 1, 0, 0) for p in chosen]
    file, offset, length = zip(*places, strict=True) if places else ((), (), ())
    return plan_pb2.FinalPlan(
        plan_id="plan",
        attempt=ATTEMPT,
        positions=encode_column(chosen),
        files=files,
        placement=plan_pb2.Placement(**columns(file=file, offset=offset, length=length)),
    )


def stage_by(
    planning: PlannerRun,
    final: plan_pb2.FinalPlan,
    pool: ArenaPool,
    devices: DeviceCopies | None = None,
) -> Staged:
    """Stages what the planner resolves; the arena is the caller's to release."""
    layout = planned_layout(planning.items, final)
    values = planning.finish(layout.positions)
    return stage(layout, values, pool.acquire(layout.sizes), devices)


def stage_all(planning: PlannerRun, pool: ArenaPool) -> tuple[Staged, Arena]:
    staged = stage_by(planning, final_plan(planning.message), pool)
    return staged, staged.arena


def write_files(directory: Path, staged: Staged) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in staged.files:
        (directory / file.name).write_bytes(ctypes.string_at(file.address, file.size))


def write_checkpoint(
    directory: Path, message: plan_pb2.LocalPlan, items: list[WriteItem], staged: Staged
) -> None:
    """A directory that plain ``dcp.load`` reads: the staged files and their metadata."""
    write_files(directory, staged)
    _, metadata = create_default_global_save_plan([SavePlan(items)])
    storage = {
        item.index: torch_compat.StorageInfo(*placed)
        for item, placed in zip(items, staged.locations, strict=True)
    }
    metadata = dataclasses.replace(
        metadata,
        planner_data=plan_columns.decode_mappings(plan_columns.parse_mappings(message.mappings)),
        storage_data=storage,
    )
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
