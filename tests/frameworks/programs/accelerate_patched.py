"""Accelerate's own save_state and load_state within ``patch_dcp()``, with FSDP2 on two ranks."""

import os

import torch
import torch.distributed as dist

from frameworks.cpu_accelerator import cpu_accelerator
from frameworks.progress import tensors_of
from pannier import client
from support.states.bits import differences

accelerator = cpu_accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)


def step() -> list[torch.Tensor]:
    accelerator.backward(model(torch.ones(4, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return [each.detach().clone() for each in tensors_of(model, [optimizer.optimizer])]


saved = step()
with client.patch_dcp():
    accelerator.save_state(f"{os.environ['ROOT']}/step-1")
assert differences(step(), saved)
with client.patch_dcp():
    accelerator.load_state(f"{os.environ['ROOT']}/step-1")
assert not differences(tensors_of(model, [optimizer.optimizer]), saved)
print("loaded bit for bit", flush=True)
client.close()
dist.destroy_process_group()
