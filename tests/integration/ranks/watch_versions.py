"""Reads checkpoints with plain DCP and with the client over and over until a file appears; reports what it saw.

Environment: TARGETS (JSON), READER (file that says it has begun), STOP (file), REPORT (file).
"""

import json
import os
import traceback
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException

from pannier import client
from support.states.dcp_readers import plain_load

warnings.filterwarnings("ignore")


def read(target: str, how: str) -> list[int]:
    """The versions of its parts."""
    state = {
        "sharded": torch.zeros(1001, 64),
        "plain": torch.zeros(10_000, dtype=torch.int64),
        "more.0": torch.zeros(100, dtype=torch.int64),
        "version": 0,
    }
    if how == "client":
        client.load(state, checkpoint_id=target, no_dist=True)
    else:
        plain_load(state, target, no_dist=True)
    values = [*state["sharded"].unique(), *state["plain"].unique(), *state["more.0"].unique()]
    return sorted({int(value) for value in [*values, state["version"]]})


report: dict[str, list[object]] = {}
stop = Path(os.environ["STOP"])
last = False
while not last:
    last = stop.exists()
    for target in json.loads(os.environ["TARGETS"]):
        for how in ("dcp", "client"):
            seen = report.setdefault(f"{how} {target}", [])
            try:
                seen.append(read(target, how))
            except (Exception, CheckpointException):  # noqa: BLE001 - it goes to the report
                seen.append(traceback.format_exc())
    Path(os.environ["READER"]).touch()
Path(os.environ["REPORT"]).write_text(json.dumps(report))
