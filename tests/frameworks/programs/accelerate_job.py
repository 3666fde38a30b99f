"""Trains with Accelerate and FSDP2 as docs/frameworks.md has it: with a scheduler, random inputs and a registered object."""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from frameworks.progress import documented, resumed, stepped, tensors_of
from pannier import client

WIDTH = 1024


class Progress:
    """What the trainer counts."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


PartialState(cpu=True)
# Accelerate shards on accelerators only, which it infers from this.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
# Each rank draws its own inputs, from the random state that it saves.
torch.manual_seed(1 + accelerator.process_index)
progress = Progress()


def train_step() -> None:
    accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    progress.step += 1
    stepped(progress.step, tensors_of(model, [optimizer.optimizer]))


changes = {
    "gs://bucket/run": os.environ["ROOT"],
    "10_000": os.environ["STEPS"],
    "500": "2",
    "while ": "resumed(progress.step)\nwhile ",
}
names = {
    "accelerator": accelerator,
    "progress": progress,
    "train_step": train_step,
    "resumed": resumed,
}
exec(documented("Accelerate", changes), names)
client.close()
dist.destroy_process_group()
