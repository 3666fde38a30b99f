"""Two ranks save what is alike from step to step, and what is not on one of them.

Environment: ROOT, REFERENCE (directories), REPORT (directory).
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pannier import client
from pannier.client.saves.save import Save
from pannier.client.staging.stager import Staged
from pannier.client.transport.connection import SidecarConnection

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
report: dict[str, list[str]] = {}
asked: list[str] = []
until_staged: list[str] = []
"""What the training loop may have waited for."""


class Model:
    """Sharded and replicated parameters in new tensors at each save; a ``Stateful``."""

    def __init__(self, step: int, shards: int = 0) -> None:
        self.step = step
        self.shards = shards

    def state_dict(self) -> dict[str, Any]:
        torch.manual_seed(self.step)
        weight = torch.randn(16, 6)
        return {
            "sharded": distribute_tensor(weight, mesh, [Shard(self.shards)]),
            "replicated": distribute_tensor(weight * 2, mesh, [Replicate()]),
            "large": torch.full((300, 1000), float(self.step)),
            "plain": torch.randn(7, 5) if self.step % 2 else torch.randn(5, 7).t(),
            "note": [self.step, "x"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class Own(DefaultSavePlanner):
    """A planner that might do anything."""


def state(step: int, *, shards: int = 0, extra: bool = False) -> dict[str, Any]:
    made = {"model": Model(step, shards), f"rng{rank}": torch.full((9,), step + rank), "step": step}
    if extra:
        made[f"extra{rank}"] = {"more": torch.full((3,), step)}
    return made


def save(step: int, planner: Any = None, **options: Any) -> None:
    name = f"step-{step}"
    dcp.save(
        state(step, **options),
        checkpoint_id=f"{os.environ['REFERENCE']}/{name}",
        planner=None if planner is None else Own(),
    )
    asked.clear()
    handle = client.async_save(
        state(step, **options), checkpoint_id=f"{os.environ['ROOT']}/{name}", planner=planner
    )
    handle.result(60)
    report[name] = [*until_staged]


def main() -> None:
    unary = SidecarConnection.call_repeatedly

    def counted(self: SidecarConnection, method: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        return unary(self, method, *args, **kwargs)

    staged = Save.staged

    def noted(self: Save, state: Staged) -> None:
        until_staged[:] = asked
        staged(self, state)

    SidecarConnection.call_repeatedly = counted  # type: ignore[method-assign]
    Save.staged = noted  # type: ignore[method-assign]
    client.prepare(state(0), os.environ["ROOT"])
    save(1)
    save(2)
    # One rank's structure changes, and stays so.
    save(3, extra=rank == 1)
    save(4, extra=rank == 1)
    # Through torch, with the same client, in between.
    writer = client.StorageWriter(f"{os.environ['ROOT']}/step-5")
    dcp.save(state(5), storage_writer=writer)
    dcp.save(state(5), checkpoint_id=f"{os.environ['REFERENCE']}/step-5")
    save(6, extra=rank == 1)
    # Another layout on both, then the first again.
    save(7, shards=1)
    save(8, shards=0)
    # Another planner.
    save(9, planner=Own())
    save(10, planner=Own())
    save(11)
    Path(os.environ["REPORT"], f"{rank}.json").write_text(json.dumps(report))
    client.close()
    dist.destroy_process_group()


main()
