"""Loads every kind of state with plain DCP and with the client, and compares bit for bit.

Environment: ROOTS (JSON: directory or URL to number of writers and names of kinds), READERS
(JSON: number of ranks, descending, to what loads: dcp, client or both), REPORT (directory), SEED.
"""

import json
import os
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from support.processes.worlds import worlds
from support.states.bits import differences
from support.states.dcp_readers import plain_load
from support.states.sharded_states import KINDS, WHOLE
from support.states.states import Colour, Kind, Layout, Position

warnings.filterwarnings("ignore")
torch.serialization.add_safe_globals([TwoTensor, Position, Colour])
OTHER = 987


def load(
    kind: Kind, saved: Kind, directory: str, layout: Layout, readers: str
) -> dict[str, list[str]]:
    """What differs, by way of loading."""
    wanted = kind.expected(layout, int(os.environ["SEED"]))
    planner = saved.load_planner() if saved.load_planner else None
    found = {}
    for how in readers.split():
        try:
            state = kind.build(layout, OTHER)
            assert differences(state, wanted), "loading would change nothing"
            if how == "dcp":
                plain_load(state, directory, planner=planner)
            else:
                from pannier import client

                client.load(state, checkpoint_id=directory, planner=planner)
            found[how] = differences(state, wanted)
        except (Exception, CheckpointException):  # noqa: BLE001 - it goes to the report
            found[how] = [traceback.format_exc()]
    return found


def report_on(rank: int, ranks: int, readers: str) -> dict[str, list[str]]:
    """What differs, by kind and how it was loaded, for this number of ranks."""
    report = {}
    for root, (writers, names) in json.loads(os.environ["ROOTS"]).items():
        layout = Layout(rank, ranks, writers)
        for name in names:
            saved = KINDS[name]
            for kind in (saved, WHOLE.get(name)):
                if kind is not None and ranks in kind.ranks:
                    for how, found in load(kind, saved, f"{root}/{name}", layout, readers).items():
                        report[f"{name}|{kind.name}|{how}|{root}"] = found
    return report


READERS = {int(ranks): how for ranks, how in json.loads(os.environ["READERS"]).items()}
for size in worlds(*READERS):
    report = report_on(dist.get_rank(), size, READERS[size])
    path = Path(os.environ["REPORT"]) / f"{size}-{dist.get_rank()}.json"
    path.write_text(json.dumps(report))
