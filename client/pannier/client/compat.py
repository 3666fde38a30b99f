"""What the client uses of torch without a public name, in one place.

Checked against torch 2.9 and 2.13. Everything else in the client imports public
names, or these.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.distributed_c10d import (
    Store,
    _get_default_store,
    _get_process_group_store,
)
from torch.distributed.tensor import DTensor

GLOBAL_PLANNING = (
    "create_global_plan",
    "_create_global_plan",
    "_create_global_plan_with_caching",
    "_dedup_save_plans",
)
"""Methods by which a DefaultSavePlanner makes the global plan."""

_PLAN_CACHING = "_enable_plan_caching"


def group_store(process_group: dist.ProcessGroup | None) -> Store:
    """The key-value store behind a process group (None: the default group).

    Raises ValueError when ``torch.distributed`` isn't initialised.
    """
    if process_group is None:
        return _get_default_store()
    return _get_process_group_store(process_group)


def has_size(dtype: torch.dtype) -> bool:
    """Whether DCP knows the size of a dtype's elements; it can't plan those of the others."""
    try:
        torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]
    except TypeError:
        return False
    return True


def local_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """This rank's parts of a tensor; ``[value]`` for one that isn't distributed.

    Unlike ``to_local()`` it adds nothing to the autograd graph.
    """
    if isinstance(value, DTensor):
        return [value._local_tensor]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def caches_plans(planner: SavePlanner) -> bool:
    """Whether ``planner`` reads and fills torch's plan cache."""
    return bool(getattr(planner, _PLAN_CACHING, False))


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
    "AsyncCollectiveTensor",
    "FakeTensor",
    "ShardedTensor",
    "StorageInfo",
    "caches_plans",
    "group_store",
    "has_size",
    "local_tensors",
    "without_plan_cache",
]
