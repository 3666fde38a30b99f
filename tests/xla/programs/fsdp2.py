"""Two ranks of plain torch train with FSDP2 and save; torch_xla can't be imported.

Environment: CHECKPOINT (path), EXPECTED (file for the whole state on the host).
"""

import os
import sys

sys.modules["torch_xla"] = None  # type: ignore[assignment]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from pannier import client  # noqa: E402
from support.states.sharded_states import Model  # noqa: E402


def whole(value: object) -> object:
    """A state with DTensors as whole tensors."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner) for inner in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Model(seed=5)
fully_shard(model.up, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
for step in range(2):
    torch.manual_seed(step)
    model(torch.randn(6, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optimizer_state, "epoch": 7}
client.save(state, checkpoint_id=os.environ["CHECKPOINT"])
expected = whole(state)
if dist.get_rank() == 0:
    torch.save(expected, os.environ["EXPECTED"])
client.close()
dist.barrier()
dist.destroy_process_group()
