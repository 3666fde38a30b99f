"""A trainer that calls torch.distributed.checkpoint, within ``patch_dcp()`` as docs/frameworks.md has it."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from frameworks.progress import documented, resumed, stepped, tensors_of
from pannier import client

WIDTH = 1024
ROOT, STEPS = os.environ["ROOT"], int(os.environ["STEPS"])


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self) -> None:
        self._resume()
        resumed(self.step)
        while self.step < STEPS:
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            stepped(self.step, tensors_of(self.model, [self.optimizer]))
            if self.step % 2 == 0:
                dcp.async_save(self._state(), checkpoint_id=f"{ROOT}/step-{self.step}")

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def _resume(self) -> None:
        newest = client.latest(ROOT, include="ingested")
        if newest is None:
            return
        state = self._state()
        dcp.load(state, checkpoint_id=newest)
        self.step = state["step"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


dist.init_process_group("gloo")
exec(documented("Code that calls DCP", {}), {"trainer": Trainer()})
client.close()
dist.destroy_process_group()
