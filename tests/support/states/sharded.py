"""A state whose parts lie on all ranks, the same values on any number of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def full_weight(seed: int) -> torch.Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(seed))


def make_state(seed: int) -> dict[str, Any]:
    """Sharded unevenly and in two dimensions, replicated, with fewer rows than ranks, and plain."""
    noise = torch.Generator().manual_seed(seed)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    rows = 2 if size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (rows, size // rows))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise)

    return {
        "weight": distribute_tensor(full_weight(seed), mesh, [Shard(0)]),
        "columns": distribute_tensor(random(5, 13).bfloat16(), mesh, [Shard(1)]),
        "grid": distribute_tensor(random(9, 10), grid, [Shard(0), Shard(1)]),
        "mixed": distribute_tensor(random(7, 3), grid, [Replicate(), Shard(0)]),
        "few": distribute_tensor(random(2, 4), mesh, [Shard(0)]),
        "copied": distribute_tensor(random(4), mesh, [Replicate()]),
        "plain": random(3, 2),
        "scalar": torch.tensor(float(seed)),
        "deep": {"step": seed, "names": ["a", str(seed)], "pair": (seed, 2)},
    }
