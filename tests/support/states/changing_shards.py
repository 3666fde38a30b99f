"""A training with FSDP2 whose shards change between saves; see :mod:`support.states.changing`.

For one rank of a group (:mod:`support.processes.absent_ranks`).
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pannier.client.torch_compat import StridedShard, local_tensors

_METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


class ShardedTraining:
    """A model, sharded in two units, its optimizer, and a tensor with a layout of its own."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.BatchNorm1d(3))
        fully_shard(self.model[0], mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.renew_optimizer()
        self.extra = distribute_tensor(torch.randn(6, 9), self.mesh, [Shard(0)])
        self.plain = torch.randn(2, 9)
        fuse(self)
        step(self)

    def renew_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": self.extra,
            "fused": self.fused,
            "plain": self.plain,
        }


def step(t: ShardedTraining) -> None:
    for unit in _units(t):
        unit.reshard()
    for parameter in t.model.parameters():
        parameter.grad = torch.full_like(parameter, t.chance.random())
    t.optimizer.step()


def gather(t: ShardedTraining) -> None:
    """All parameters are whole, as between a forward pass and its backward pass."""
    for unit in _units(t):
        unit.unshard()


def gather_and_shard_again(t: ShardedTraining) -> None:
    gather(t)
    for unit in _units(t):
        unit.reshard()


def _units(t: ShardedTraining) -> list[FSDPModule]:
    return [unit for unit in t.model.modules() if isinstance(unit, FSDPModule)]


def reshard(t: ShardedTraining) -> None:
    """Another placement of the same tensor; the local part may have the same shape."""
    t.extra = t.extra.redistribute(placements=[t.chance.choice(_PLACEMENTS)])


_PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())


def fuse(t: ShardedTraining) -> None:
    """FSDP over tensor parallelism, or one mesh dimension after the other: equal shapes, other rows."""
    size = dist.get_world_size()
    columns = 2 if size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (size // columns, columns))
    first = t.chance.choice([Shard(0), StridedShard(0, split_factor=columns)])
    rows = 2 * size
    t.fused = DTensor.from_local(
        torch.randn(2, 3),
        grid,
        [first, Shard(0)],
        run_check=False,
        shape=torch.Size((rows, 3)),
        stride=(3, 1),
    )


def describe(t: ShardedTraining) -> None:
    """Tensors that say themselves where their rows belong, as Megatron-FSDP's uneven shards do."""
    for tensor in (*local_tensors(t.extra), t.plain):
        describe_as(tensor, row=t.chance.randrange(4))


def stop_describing(t: ShardedTraining) -> None:
    for tensor in (*local_tensors(t.extra), t.plain):
        for name in _METHODS:
            vars(tensor).pop(name, None)


def describe_as(tensor: Any, row: int) -> None:
    """Makes a tensor say that its first row is this one of a larger global tensor."""
    offsets = torch.Size((row, *[0] * (tensor.dim() - 1)))
    whole = torch.Size((row + tensor.shape[0] + 3, *tensor.shape[1:]))
    chunk = ChunkStorageMetadata(offsets, tensor.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), whole)

    def items(fqn: str, value: object) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]

    tensor.__create_write_items__ = items
    tensor.__create_chunk_list__ = lambda: [chunk]
    tensor.__get_tensor_shard__ = lambda index: tensor


def replace_local(t: ShardedTraining) -> None:
    """The same layout, over new memory."""
    local = torch.randn_like(t.extra.to_local())
    t.extra = DTensor.from_local(
        local,
        t.mesh,
        t.extra.placements,
        run_check=False,
        shape=t.extra.shape,
        stride=t.extra.stride(),
    )


def change_shape(t: ShardedTraining) -> None:
    """Sizes that leave this rank another part, or none."""
    rows = t.chance.randrange(1, 9)
    t.extra = distribute_tensor(torch.randn(rows, 9), t.mesh, [Shard(0)])


def cast_extra(t: ShardedTraining) -> None:
    t.extra = t.extra.to(t.chance.choice([torch.float32, torch.float16, torch.bfloat16]))


def replace_moments(t: ShardedTraining) -> None:
    for moments in t.optimizer.state.values():
        moments["exp_avg"] = moments["exp_avg"] * 2 + 1


def start_again(t: ShardedTraining) -> None:
    """The model is wrapped again, as after a change of its layers."""
    renewed = ShardedTraining(t.chance.randrange(1 << 30))
    t.model, t.optimizer = renewed.model, renewed.optimizer


CHANGES: dict[str, Callable[[ShardedTraining], None]] = {
    change.__name__: change
    for change in (
        *(step, gather, gather_and_shard_again, reshard, replace_local, change_shape),
        *(cast_extra, replace_moments, start_again, fuse, describe, stop_describing),
    )
}
