"""What XLA programs have saved, read by torch alone, on two ranks.

Environment: ROOTS (JSON: by number of devices, the directory of the checkpoints), KINDS (JSON), REPORT.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.modules["torch_xla"] = None  # type: ignore[assignment]
# From here on nothing can import it.

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import CheckpointException, FileSystemReader  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from support.states.bits import differences  # noqa: E402
from support.states.xla_states import KINDS  # noqa: E402

warnings.filterwarnings("ignore")
SEED, OTHER = 3, 987


def distributed(value: Any, mesh: Any) -> Any:
    """A state with its matrices sharded by columns over the ranks, whichever rank saved them."""
    if isinstance(value, dict):
        return {key: distributed(inner, mesh) for key, inner in value.items()}
    if isinstance(value, list):
        return [distributed(inner, mesh) for inner in value]
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.numel():
        return distribute_tensor(value, mesh, [Shard(1)], src_data_rank=None)
    return value


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    report = {}
    for devices, root in json.loads(os.environ["ROOTS"]).items():
        for name in json.loads(os.environ["KINDS"]):
            kind = KINDS[name]
            for how, place in (("plain", lambda state, _: state), ("DTensor", distributed)):
                try:
                    state = place(kind.values(OTHER), mesh)
                    dcp.load(state, storage_reader=FileSystemReader(f"{root}/{name}"))
                    found = differences(state, place(kind.values(SEED), mesh))
                except (Exception, CheckpointException):  # noqa: BLE001 - it goes to the report
                    found = [traceback.format_exc()]
                report[f"{name}|{devices}|{how}"] = found
    path = Path(os.environ["REPORT"]) / f"plain-{dist.get_rank()}.json"
    path.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


main()
