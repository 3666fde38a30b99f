"""Trains with Accelerate and FSDP2 as docs/frameworks.md has it: with a scheduler, random inputs and a registered object."""

import os

import torch
import torch.distributed as dist

from frameworks.cpu_accelerator import cpu_accelerator
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


accelerator = cpu_accelerator()
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
