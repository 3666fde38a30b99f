"""Two ranks save by a cached plan, of which the second misses calls of the first and then joins it again.

Environment: ROOT (of the checkpoints), REPORT (directory), SIDECARS (an address for each rank).
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pannier import client
from pannier.wire.errors import SaveAbortedError

dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["PANNIER_SIDECAR"] = os.environ["SIDECARS"].split()[rank]
report: dict[str, Any] = {}


def save(step: int) -> client.SaveHandle:
    # A list of objects goes to the objects file, by whose name the receipt finds it.
    state = {f"weight.{rank}": torch.full((1000,), float(step)), f"note.{rank}": [step, rank]}
    return client.async_save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}", timeout=60)


def outcome(step: int) -> Any:
    """The attempt, or the error's text and the ranks that it names."""
    try:
        return save(step).result().attempt
    except SaveAbortedError as error:
        return [str(error), sorted(error.failures)]


save(1).result()
dist.barrier()
if rank == 0:
    for step in (2, 3):
        report[f"step-{step}"] = outcome(step)
dist.barrier()
for step in (4, 5, 6):
    report[f"step-{step}"] = outcome(step)
client.close()
(Path(os.environ["REPORT"]) / f"{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
