"""What a worker of Ray Train runs: the loop of docs/frameworks.md, with a model of two ranks.

Ranks report their steps in ``<STORE>/rank-<n>``, of all worker groups.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from frameworks.progress import documented, stepped, tensors_of

WIDTH = 64


class Training:
    """A DCP Stateful. The first worker of the first group kills itself after step 5."""

    step = 0

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train_step(self) -> dict[str, float]:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        loss = self.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stepped(self.step, tensors_of(self.model, [self.optimizer]))
        marker = Path(os.environ["STORE"]) / "killed"
        if self.step == 5 and dist.get_rank() == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": loss.item()}

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def train_loop(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    with open(f"{os.environ['STORE']}/rank-{rank}", "a") as sys.stdout:
        names: dict[str, Any] = {"make_training": Training}
        exec(documented("Ray Train", {}), names)
        names["train_loop"](config)
