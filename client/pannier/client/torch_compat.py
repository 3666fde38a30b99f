"""What the client uses of torch without a public name, in one place.

Checked against torch 2.9, 2.13 and 2.15. Everything else in the client imports public
names, or these.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.distributed_c10d import (
    Store,
    _get_default_store,
    _get_process_group_store,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

try:
    # Since torch 2.14.
    from torch.distributed.checkpoint.protocol import (  # type: ignore[import-not-found,unused-ignore]
        _is_checkpointable_tensor,
        _validate_checkpointable_tensor_metadata,
    )
except ImportError:
    _is_checkpointable_tensor = None

GLOBAL_PLANNING = (
    "create_global_plan",
    "_create_global_plan",
    "_create_global_plan_with_caching",
    "_dedup_save_plans",
)
"""Methods by which a DefaultSavePlanner makes the global plan."""

MEMORY_FORMATS: Final = (_MEM_FORMAT_ENCODING, MEM_FORMAT_ENCODING)
"""Enums of a pickled ``TensorProperties``: of today's, and of the one that torch before 2.3 had."""

_PLAN_CACHING = "_enable_plan_caching"


_FILES: Final = ("FileSystemReader", "FileSystemWriter", "FsspecReader", "FsspecWriter")


def is_plain_files(storage: object) -> bool:
    """Whether it is torch's own reader or writer of DCP's files, by a path or by fsspec.

    False for subclasses, for safetensors, and for files that extensions transform.
    """
    # By name: those for fsspec are in another module since torch 2.15, and need fsspec.
    kind = type(storage)
    if kind.__name__ not in _FILES or not kind.__module__.startswith(
        "torch.distributed.checkpoint."
    ):
        return False
    extensions = getattr(getattr(storage, "transforms", None), "extensions", ())
    form = getattr(storage, "serialization_format", None)
    return not extensions and getattr(form, "value", "torch_save") == "torch_save"


def group_store(process_group: dist.ProcessGroup | None) -> Store:
    """The key-value store behind a process group (None: the default group).

    Raises ValueError when ``torch.distributed`` isn't initialised.
    """
    if process_group is None:
        return _get_default_store()
    return _get_process_group_store(process_group)


def group_name(process_group: dist.ProcessGroup | None) -> str:
    """The name of a process group (None: the default group), the same on all its ranks."""
    group = dist.group.WORLD if process_group is None else process_group
    return str(getattr(group, "group_name", ""))


def own_connection(store: Store) -> Store:
    """A separate connection to the same store, which doesn't wait for calls of the first.

    One that can't be cloned is returned itself.
    """
    try:
        # Not in the stubs of all versions.
        clone: Store = store.clone()  # type: ignore[attr-defined,unused-ignore]
        return clone
    except (AttributeError, RuntimeError):
        return store


def on_current_device() -> Callable[[], AbstractContextManager[object]]:
    """A factory of contexts for another thread: they set this thread's device there, as NCCL needs it."""
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            index = module.current_device()
            return functools.partial(module.device, index)
    return nullcontext


def has_size(dtype: torch.dtype) -> bool:
    """Whether DCP knows the size of a dtype's elements; it can't plan those of the others."""
    try:
        torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]
    except TypeError:
        return False
    return True


def local_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """This rank's parts of a tensor; ``[value]`` for one that isn't distributed.

    Unlike ``to_local()`` it doesn't extend the autograd graph.
    """
    if isinstance(value, DTensor):
        # torch_xla's XLAShardedTensor is a DTensor by name, but without a local one.
        return [getattr(value, "_local_tensor", value)]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


LOCAL_TENSOR: Final = attrgetter("_local_tensor")
"""The local tensor of a value of the very type DTensor."""


def dtensors_are_planned_by_torch() -> bool:
    """Whether the method that makes a DTensor's items is torch's own."""
    method = DTensor.__create_write_items__
    return (method.__module__ or "").startswith("torch.")


def dtensor_facts(values: Sequence[DTensor]) -> tuple[list[Any], list[type]]:
    """What, besides the local tensors, the items of DTensors are made from."""
    # The types as well: in torch 2.9 ``_StridedShard(0, split_factor=2) == Shard(0)``.
    # https://github.com/pytorch/pytorch/blob/v2.9.0/torch/distributed/tensor/placement_types.py
    placements = chain.from_iterable(map(_PLACEMENTS, values))
    return list(map(_SPEC, values)), list(map(type, placements))


_PLACEMENTS: Final = attrgetter("_spec.placements")
_SPEC: Final = attrgetter("_spec.placements", "_spec.mesh", "shape", "requires_grad")


def in_mesh(value: DTensor) -> bool:
    """Whether this rank is in a DTensor's mesh; else DCP plans no item for it."""
    return value.device_mesh.get_coordinate() is not None


def shard_problem(value: torch.Tensor) -> str:
    """Why DCP can't store or load this rank's part of a tensor at its offset; empty: it can."""
    if isinstance(value, DTensor):
        return _dtensor_problem(value)
    # Few tensors have this attribute: only they are checked further.
    if hasattr(value, "global_shape") and _is_checkpointable_tensor is not None:
        return _description_problem(value)
    return ""


def _description_problem(value: torch.Tensor) -> str:
    """Why a tensor's ``CheckpointableTensor`` attributes are invalid; empty: they are valid, or missing."""
    try:
        if _is_checkpointable_tensor(value):
            _validate_checkpointable_tensor_metadata(value)
    except (ValueError, TypeError) as error:
        return f"what it says of its shards as a CheckpointableTensor is wrong: {error}"
    return ""


def _dtensor_problem(value: DTensor) -> str:
    """Why DCP would save or load a wrong region for this rank's part of a DTensor; empty: it wouldn't.

    DCP describes a part by its offset and shape. With FSDP over tensor parallelism, whose first placement
    is a ``_StridedShard``, a part is one block of the global tensor. In other layouts with that placement a
    part has rows from several places; and since torch 2.10 DCP takes another rank's shape if the mesh doesn't
    divide the global tensor evenly.
    """
    placements = getattr(value, "placements", ())
    dims = {each.dim for each in placements if isinstance(each, StridedShard)}
    if not dims or not in_mesh(value):
        return ""
    layout = f"a DTensor with placements {tuple(placements)} over a mesh of {tuple(value.device_mesh.shape)}"
    if any(not _is_block(value, dim) for dim in dims):
        return (
            f"{layout} has rows from several places on this rank, which DCP can't describe; redistribute it to "
            "Shard or Replicate first"
        )
    (local,) = local_tensors(value)
    (described,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if described.sizes == local.shape:
        return ""
    return (
        f"{layout} has {tuple(local.shape)} of {tuple(value.shape)} on this rank, where DCP would describe "
        f"{tuple(described.sizes)}; pad it to a size that the mesh divides, or redistribute it first"
    )


def _is_block(value: DTensor, dim: int) -> bool:
    """Whether this rank's rows of a dimension are contiguous in the global tensor."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    rows = torch.arange(value.shape[dim], device="cpu")
    for mesh_dim, placement in enumerate(value.placements):
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim:
            pieces = int(getattr(placement, "split_factor", 1))
            count, own = mesh.size(mesh_dim), coordinate[mesh_dim]
            rows = torch.cat([_chunk(_chunk(rows, pieces, i), count, own) for i in range(pieces)])
    return not len(rows) or int(rows[-1] - rows[0]) == len(rows) - 1


def _chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """The ``index``-th of ``count`` chunks as DTensor makes them, of which the last may be empty."""
    size = -(-len(tensor) // count)
    return tensor[index * size : (index + 1) * size]


def sharded_facts(value: ShardedTensor) -> tuple[Any, ...]:
    """What, besides the local shards' tensors, a ShardedTensor's items are made from."""
    data = value.metadata()
    kept = data.tensor_properties
    shards = [shard.metadata for shard in value.local_shards()]
    return (
        tuple(data.size),
        (kept.dtype, kept.layout, kept.requires_grad, kept.memory_format, kept.pin_memory),
        [(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards],
    )


def wrapper(cls: type[torch.Tensor], tensor: torch.Tensor, *, requires_grad: bool) -> Any:
    """A new tensor of a subclass without data, with the shape, dtype and device of another."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        tensor.shape,
        dtype=tensor.dtype,
        layout=tensor.layout,
        device=tensor.device,
        requires_grad=requires_grad,
    )


plain_torch_function: Final = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of subclasses that don't override torch functions."""


def uses_old_flattening() -> bool:
    """Whether DCP flattens as torch 2.3 did, which it does while it loads such a checkpoint."""
    return getattr(_version, "_derived_version", None) is not None


def without_torch_functions() -> AbstractContextManager[None]:
    """Reads attributes of tensors without modes such as ``torch.set_default_device``."""
    return torch._C.DisableTorchFunction()


def copy_all(
    targets: list[torch.Tensor] | tuple[torch.Tensor, ...],
    sources: list[torch.Tensor] | tuple[torch.Tensor, ...],
    *,
    non_blocking: bool = False,
) -> None:
    """``target.copy_(source)`` for each; in one call, without the GIL, where torch has that."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources, non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def caches_plans(planner: SavePlanner) -> bool:
    """Whether ``planner`` reads and fills torch's plan cache."""
    return bool(getattr(planner, _PLAN_CACHING, False))


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors of one dtype and device, row-major, in one tensor.

    For a single contiguous tensor, a view of it. Makes one call for any number of tensors.
    """
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def version(tensor: torch.Tensor) -> int:
    """The number of in-place changes of a tensor and its views; 0 where torch doesn't count them.

    Changes by fused optimizers aren't counted.
    """
    return 0 if tensor.is_inference() else tensor._version


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether ``_apply_optimizer_in_backward`` gave the parameter a separate optimizer."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))


def backward_is_running() -> bool:
    """Whether the calling thread runs inside a ``backward()``."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def without_plan_cache(planner: SavePlanner) -> Iterator[None]:
    """Keeps ``planner`` from reading and filling torch's plan cache.

    The cache belongs to the class *name*, ignores dtypes, and is shared with
    ``dcp.save``: a plan from it may describe other tensors.
    """
    if not caches_plans(planner):
        yield
        return
    own = vars(planner).get(_PLAN_CACHING)
    setattr(planner, _PLAN_CACHING, False)
    try:
        yield
    finally:
        if own is None:
            delattr(planner, _PLAN_CACHING)
        else:
            setattr(planner, _PLAN_CACHING, own)


__all__ = [
    "GLOBAL_PLANNING",
    "LOCAL_TENSOR",
    "MEMORY_FORMATS",
    "AsyncCollectiveTensor",
    "FakeTensor",
    "ShardedTensor",
    "StorageInfo",
    "Store",
    "StridedShard",
    "backward_is_running",
    "caches_plans",
    "copy_all",
    "dtensor_facts",
    "dtensors_are_planned_by_torch",
    "flatten_state_dict",
    "flattened",
    "group_name",
    "group_store",
    "has_size",
    "in_mesh",
    "local_tensors",
    "on_current_device",
    "own_connection",
    "plain_torch_function",
    "set_element",
    "shard_problem",
    "sharded_facts",
    "steps_in_backward",
    "uses_old_flattening",
    "version",
    "without_plan_cache",
    "without_torch_functions",
    "wrapper",
]
