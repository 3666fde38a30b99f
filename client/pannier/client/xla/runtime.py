"""All that the client uses of torch_xla.

In: XLA tensors, plain ones or ``XLAShardedTensor``. Out: their sharding, and their local shards, to
and from host memory. torch_xla is not imported here: a process that hasn't imported it has no XLA
tensors. Checked against torch_xla 2.9, which has no public names for most of this. Not thread-safe,
as torch_xla's tracing isn't.
"""

import enum
import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from pannier.wire.errors import InvalidRequestError

COPY_DESCRIPTION: Final = "copied by torch_xla, nothing overlaps"
"""How values are copied to the host; human-readable."""
_TILES: Final = re.compile(r"devices=\[([\d,]+)\]")


class Kind(enum.Enum):
    """What ``torch_xla.distributed.spmd.ShardingType`` means to a checkpoint."""

    WHOLE = enum.auto()
    """Not sharded, or replicated on every device."""
    SHARDED = enum.auto()
    MANUAL = enum.auto()
    """Inside a region of manual sharding, where its shape is a shard's."""


_KINDS: Final = {
    None: Kind.WHOLE,
    0: Kind.WHOLE,  # REPLICATED
    1: Kind.WHOLE,  # MAXIMAL: all of it on one device
    3: Kind.SHARDED,  # TILED
    4: Kind.MANUAL,
    5: Kind.SHARDED,  # PARTIAL: tiled over some of the mesh's dimensions, replicated over the others
    6: Kind.WHOLE,  # UNKNOWN: replicated until propagation finds more
}


class Chunk(NamedTuple):
    """A part of a tensor that a local device holds; without padding, never empty."""

    ordinal: int
    """Index of the first local shard that has this part."""
    offsets: torch.Size
    sizes: torch.Size


def is_loaded() -> bool:
    """Whether there can be XLA tensors in this process."""
    return "torch_xla" in sys.modules


def is_xla(value: Any) -> bool:
    """Whether a value is an XLA tensor, plain or wrapped."""
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def holds_xla(value: Any) -> bool:
    """Whether there is an XLA tensor in a value, at any depth of mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "xla"
    if isinstance(value, Mapping):
        return any(map(holds_xla, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_xla, value))


def settle() -> None:
    """Runs the traced operations; returns when the devices are done.

    Afterwards each tensor has its data and its propagated sharding.
    """
    sys.modules["torch_xla"].sync()
    _model().wait_device_ops()


def global_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain XLA tensor in an ``XLAShardedTensor``; any other tensor itself."""
    inner = getattr(tensor, "global_tensor", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def kind(tensor: torch.Tensor) -> Kind:
    """How a plain XLA tensor is sharded. Raises InvalidRequestError for an unknown sharding type."""
    number = _bindings()._get_xla_sharding_type(tensor)
    try:
        return _KINDS[number]
    except KeyError:
        raise InvalidRequestError(f"torch_xla's sharding type {number} can't be saved") from None


def specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The sharding of each plain XLA tensor as text, with mesh and tiling; empty: not sharded."""
    found: list[str] = _bindings()._get_xla_sharding_specs(list(tensors))
    return found


def chunks(tensor: torch.Tensor) -> list[Chunk]:
    """The parts of a sharded plain XLA tensor that this process's devices hold, each once.

    Without devices that hold only padding. To be called after :func:`settle`.
    """
    found: dict[tuple[int, ...], Chunk] = {}
    for ordinal, chunk in enumerate(_local(tensor)):
        if math.prod(chunk.sizes):
            found.setdefault(tuple(chunk.offsets), chunk._replace(ordinal=ordinal))
    return list(found.values())


def fetch_shards(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """All local shards of sharded plain XLA tensors, in order of their ordinals, in host memory.

    Fetches them in one batch, with padding. To be called after :func:`settle`.
    """
    shards = _bindings()._get_local_shards(list(tensors))
    return [[shard for shard, _ in each] for each in shards]


def fetch_whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Plain XLA tensors that aren't sharded, in host memory; fetched in one batch."""
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        # torch_xla's own call ignores these bits.
        return [tensor.cpu() for tensor in tensors]
    found: list[torch.Tensor] = _bindings()._xla_get_cpu_tensors(list(tensors))
    return found


def padded(tensor: torch.Tensor) -> torch.Size:
    """Shape of each shard of a sharded plain XLA tensor, padding included."""
    (spec,) = specs([tensor])
    match = _TILES.search(spec)
    if match is None:
        raise InvalidRequestError(f"torch_xla's sharding {spec!r} can't be restored")
    tiles = map(int, match[1].split(","))
    # Further dimensions of the mesh hold replicas.
    return torch.Size([-(-size // tile) for size, tile in zip(tensor.shape, tiles, strict=False)])


def load_shards(tensor: torch.Tensor, parts: Mapping[torch.Size, torch.Tensor]) -> None:
    """Replaces what the local devices hold of a sharded plain XLA tensor; its sharding stays.

    Args:
        tensor: keeps its identity; tensors that share its data see the new data.
        parts: by offset, host tensors of the padded shape, one for each of :func:`chunks`.
    """
    padding = torch.zeros(padded(tensor), dtype=tensor.dtype, device="cpu")
    shards = [parts.get(chunk.offsets, padding) for chunk in _local(tensor)]
    _bindings()._load_local_shards(tensor, shards, local_devices())


def load_whole(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the value of a plain XLA tensor that isn't sharded; a replicated one stays marked."""
    sharding = _bindings()._get_xla_op_sharding(tensor)
    with torch.no_grad():
        tensor.copy_(value)
    if sharding is not None and _bindings()._get_xla_op_sharding(tensor) is None:
        _bindings()._xla_mark_sharding(tensor, sharding)


def mark_like(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives an XLA tensor the sharding of another of its shape, if that has one."""
    sharding = _bindings()._get_xla_op_sharding(global_tensor(other))
    if sharding is not None and tensor.shape == other.shape:
        _bindings()._xla_mark_sharding(global_tensor(tensor), sharding)


def local_devices() -> list[str]:
    """This process's devices, in the order of local shards."""
    found: list[str] = list(_bindings()._xla_get_runtime_devices())
    return found


def _local(tensor: torch.Tensor) -> list[Chunk]:
    """The part that each local device holds, in order, without padding; it may be empty."""
    found = []
    (local,) = _bindings()._get_local_shard_replica_and_indices([tensor])
    for ordinal, (_, indices) in enumerate(local):
        if indices is Ellipsis:
            offsets, sizes = torch.Size([0] * tensor.dim()), tensor.shape
        else:
            offsets = torch.Size([index.start for index in indices])
            sizes = torch.Size([max(0, index.stop - index.start) for index in indices])
        found.append(Chunk(ordinal, offsets, sizes))
    return found


def _bindings() -> Any:
    return sys.modules["torch_xla"]._XLAC


@functools.cache
def _model() -> Any:
    import torch_xla.core.xla_model

    return torch_xla.core.xla_model
