"""Saves every kind of state, each to a directory of its own, and overwrites it at once.

Environment: ROOT (directory or URL of the checkpoints), REPORT (directory), SEED,
KINDS (JSON, default all), AGAIN: another save of the
same structure goes before each.
"""

import json
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from support.states.bits import differences, overwrite
from support.states.sharded_states import KINDS
from support.states.states import Kind, Layout

warnings.filterwarnings("ignore")


def save(kind: Kind, state: dict[str, Any], directory: str, layout: Layout) -> list[str]:
    planner = kind.planner() if kind.planner else None
    if os.environ.get("WITH") == "dcp":
        dcp.save(state, checkpoint_id=directory, planner=planner)
        return []
    from pannier import client

    if "AGAIN" in os.environ:
        # The save that counts goes by this one's plan.
        before = kind.build(layout, int(os.environ["SEED"]) + 1)
        client.save(before, checkpoint_id=f"{directory} before", planner=planner)
        planner = kind.planner() if kind.planner else None
    handle = client.async_save(state, checkpoint_id=directory, planner=planner)
    found = [
        f"changed by the save: {text}"
        for text in differences(state, kind.build(layout, int(os.environ["SEED"])))
    ]
    overwrite(state)
    result = handle.result(60)
    if result.checkpoint_id != directory:
        found.append(f"the result is of {result.checkpoint_id}")
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layout = Layout(dist.get_rank(), dist.get_world_size())
    report = {}
    for name, kind in KINDS.items():
        if name not in json.loads(os.environ.get("KINDS", json.dumps([*KINDS]))):
            continue
        try:
            state = kind.build(layout, int(os.environ["SEED"]))
            report[name] = save(kind, state, f"{os.environ['ROOT']}/{name}", layout)
        except (Exception, CheckpointException):  # noqa: BLE001 - it goes to the report
            report[name] = [traceback.format_exc()]
    path = Path(os.environ["REPORT"]) / f"{layout.rank}.json"
    path.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


main()
