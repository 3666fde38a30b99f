"""Kinds of state that are spread over the ranks; see :mod:`support.states.states`."""

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
)
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from support.states.states import PLAIN, Kind, Layout, State, noise, normal


class Model(nn.Module):
    """Sizes that no number of ranks divides; some parameters have fewer rows than ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 3)
        self.head = nn.Linear(3, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        with torch.no_grad():
            for name, value in values.items():
                value.copy_((normal(name, tuple(value.shape), seed) * 100).to(value.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(self.norm(self.up(x)))) * self.scale
        return out


def _dtensors(layout: Layout, placements: dict[str, list[Placement]], *names: str) -> Any:
    mesh = layout.mesh(*names)

    def build(seed: int) -> State:
        shapes = [(7, 5), (1, 4), (2, 3), (0, 3), (5, 1), (3, 6, 2)]
        state: State = {}
        for name, placed in placements.items():
            for shape in shapes:
                full = noise(f"{name}{shape}", shape, torch.float32, seed)
                key = f"{name}.{'x'.join(map(str, shape))}"
                state[key] = distribute_tensor(full, mesh, placed, src_data_rank=None)
        return state

    return build


def _one_dimension(layout: Layout, seed: int) -> State:
    placements: dict[str, list[Placement]] = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "replicated": [Replicate()],
    }
    state: State = _dtensors(layout, placements, "one")(seed)
    zero_dim = noise("0-dim", (), torch.bfloat16, seed)
    state["0-dim"] = distribute_tensor(
        zero_dim, layout.mesh("one"), [Replicate()], src_data_rank=None
    )
    return state


def _two_dimensions(layout: Layout, seed: int) -> State:
    placements: dict[str, list[Placement]] = {
        "rows, columns": [Shard(0), Shard(1)],
        "columns, rows": [Shard(1), Shard(0)],
        "rows, rows": [Shard(0), Shard(0)],
        "rows, replicated": [Shard(0), Replicate()],
        "replicated, rows": [Replicate(), Shard(0)],
        "replicated": [Replicate(), Replicate()],
    }
    state: State = _dtensors(layout, placements, "one", "two")(seed)
    return state


def _strided_dtensors(layout: Layout, seed: int) -> State:
    state = _one_dimension(layout, seed)
    mesh = layout.mesh("one")
    for key in ("rows.7x5", "columns.3x6x2"):
        tensor = state[key]
        local = tensor.to_local()
        # The same values with other strides, as a transposed weight has them.
        turned = local.transpose(0, 1).contiguous().transpose(0, 1)
        state[key] = DTensor.from_local(
            turned, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return state


def _fsdp2(layout: Layout, seed: int) -> State:
    model = Model(seed)
    for part in (model.up, model.down):
        fully_shard(part, mesh=layout.mesh("shard"))
    fully_shard(model, mesh=layout.mesh("shard"))
    return {"model": model.state_dict()}


def _hsdp(layout: Layout, seed: int) -> State:
    model = Model(seed)
    fully_shard(model, mesh=layout.mesh("replicate", "shard"))
    return {"model": model.state_dict()}


def _hsdp_big(layout: Layout, seed: int) -> State:
    model = nn.Linear(300, 301, bias=False)
    with torch.no_grad():
        model.weight.copy_(normal("big", (301, 300), seed))
    fully_shard(model, mesh=layout.mesh("replicate", "shard"))
    return {"model": model.state_dict()}


def _fsdp2_tp(layout: Layout, seed: int) -> State:
    mesh = layout.mesh("data", "tensor")
    model = Model(seed)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return {"model": model.state_dict()}


def _optimizer(layout: Layout, seed: int) -> State:
    model = Model(seed)
    fully_shard(model, mesh=layout.mesh("shard"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 1000, betas=(0.8, 0.9))
    parameters, state = get_state_dict(model, optimizer)
    for name, values in state["state"].items():
        weight = parameters[name]
        # Exactly rounded, so the same whichever elements a rank has.
        values["exp_avg"].copy_(weight * 2)
        values["exp_avg_sq"].copy_(weight * weight)
        values["step"].fill_(seed)
    return {"model": parameters, "optim": state}


def _fsdp1(layout: Layout, seed: int) -> State:
    model = FullyShardedDataParallel(
        Model(seed), device_id=torch.device("cpu"), use_orig_params=True
    )
    FullyShardedDataParallel.set_state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    )
    state = model.state_dict()
    assert layout.ranks == 1 or isinstance(state["up.weight"], ShardedTensor)
    return {"model": state}


def _sharded_tensor(layout: Layout, seed: int) -> State:
    """Several shards on a rank, of different sizes."""
    full = noise("sharded", (17, 3), torch.float32, seed)
    starts = [0, 2, 3, 7, 8, 13, 16, 17]
    shards = [
        LocalShard.from_tensor_and_offsets(
            full[start:end].clone(), shard_offsets=[start, 0], rank=layout.rank
        )
        for number, (start, end) in enumerate(itertools.pairwise(starts))
        if number % layout.ranks == layout.rank
    ]
    return {"table": init_from_local_shards(shards, 17, 3)}


def _whole(kind: Kind) -> Kind:
    """The same checkpoint, loaded into plain tensors that every rank has whole."""

    def build(layout: Layout, seed: int) -> State:
        state: State = _gathered(kind.build(layout, seed))
        return state

    return Kind(f"{kind.name}, whole", build)


def _gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, dict):
        return {key: _gathered(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_gathered(child) for child in value]
    return value


SHARDED = [
    Kind("DTensor", _one_dimension),
    Kind("DTensor, other strides", _strided_dtensors),
    Kind("DTensor, 2-D mesh", _two_dimensions),
    Kind("FSDP2", _fsdp2),
    Kind("HSDP", _hsdp),
    Kind("HSDP, big", _hsdp_big, most_bytes=301 * 300 * 4 + 20_000),
    Kind("FSDP2 x TP", _fsdp2_tp),
    Kind("optimizer", _optimizer),
    Kind("FSDP1", _fsdp1, ranks=(2, 3, 4)),
    Kind("ShardedTensor", _sharded_tensor),
]

KINDS = {kind.name: kind for kind in PLAIN + SHARDED}
WHOLE = {
    kind.name: _whole(kind)
    for kind in SHARDED
    if kind.name not in ("FSDP1", "ShardedTensor", "HSDP, big")
}
"""Other targets for what a kind saved."""
