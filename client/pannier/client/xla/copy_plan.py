"""The way of XLA tensors to their places, when the plan is known: no planner, no items, a few calls.

In: which parts of which tensors go where. Out: the bytes there. Each tensor with a part to be saved
crosses to the host once; small ones in batches, which are let go of when they are copied. Not
thread-safe.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pannier.client.staging.arena import FileBuffer
from pannier.client.staging.host_copy import Transfers
from pannier.client.user_errors import located
from pannier.client.xla import runtime, shard_tensors
from pannier.client.xla.runtime import Chunk, Kind


class ShardView(NamedTuple):
    """One item's value: a part of an XLA tensor that this process's devices hold."""

    leaf: int
    """Number of the tensor in its state. Not every state has one tensor under two names."""
    tensor: torch.Tensor
    is_sharded: bool
    chunk: Chunk


@dataclass(frozen=True)
class Sharding:
    """What, besides dtype and shape, a plain XLA tensor's items are made from."""

    spec: str
    is_sharded: bool
    chunks: list[Chunk]

    def parts(self, leaf: int, tensor: torch.Tensor) -> list[ShardView]:
        """The values of its items."""
        return [ShardView(leaf, tensor, self.is_sharded, chunk) for chunk in self.chunks]


def shardings(tensors: Sequence[torch.Tensor]) -> list[Sharding] | None:
    """How plain XLA tensors are sharded; None when one can't be planned. After ``settle()``."""
    found = []
    for tensor, spec in zip(tensors, runtime.specs(tensors), strict=True):
        kind = runtime.kind(tensor)
        if kind is Kind.MANUAL:
            return None
        is_sharded = kind is Kind.SHARDED and tensor.numel() > 0
        whole = [Chunk(0, torch.Size([0] * tensor.dim()), tensor.shape)]
        chunks = runtime.chunks(tensor) if is_sharded else whole
        found.append(Sharding(spec, is_sharded, chunks))
    return found


def have_changed(tensors: Sequence[torch.Tensor], known: Sequence[Sharding]) -> bool:
    """Whether tensors are sharded in another way than is known. After ``settle()``."""
    return runtime.specs(tensors) != [each.spec for each in known]


class ShardTarget(NamedTuple):
    """Where a part goes."""

    value: int
    """Index of the part among the values."""
    file: int
    slot: int
    """Number of its slot in the file."""
    raw: int
    """Where its elements begin in the file."""


@dataclass
class _Fetch:
    """One tensor's parts."""

    is_sharded: bool
    size: int = 0
    """Bytes."""
    places: list[ShardTarget] = field(default_factory=list)


class FetchPlan:
    """All fetches of a plan. Immutable.

    Args:
        places: of parts with elements.
        values: that the plan was made for.
    """

    def __init__(self, places: Sequence[ShardTarget], values: Sequence[Any]) -> None:
        tensors: dict[int, _Fetch] = {}
        for place in places:
            part: ShardView = values[place.value]
            fetch = tensors.setdefault(part.leaf, _Fetch(part.is_sharded))
            fetch.places.append(place)
            fetch.size += math.prod(part.chunk.sizes) * part.tensor.dtype.itemsize
        self._batches = list(_batched(list(tensors.values())))

    def __bool__(self) -> bool:
        return bool(self._batches)

    def run(
        self,
        values: Sequence[Any],
        views: Sequence[Sequence[torch.Tensor]],
        buffers: Sequence[FileBuffer],
        transfers: Transfers,
    ) -> None:
        """Brings the values to their places.

        Args:
            values: like those that the plan was made for.
            views: each slot's elements as a tensor, by file.
            buffers: by file.
            transfers: makes the copies.

        Raises what torch_xla raises when it can't fetch them.
        """
        with located("the state's XLA tensors can't be saved"):
            self._run(values, views, buffers, transfers)

    def _run(
        self,
        values: Sequence[Any],
        views: Sequence[Sequence[torch.Tensor]],
        buffers: Sequence[FileBuffer],
        transfers: Transfers,
    ) -> None:
        for batch in self._batches:
            for fetch, parts in _fetched(batch, values):
                for place in fetch.places:
                    chunk = values[place.value].chunk
                    source = parts[chunk.ordinal][tuple(slice(0, size) for size in chunk.sizes)]
                    target = views[place.file][place.slot]
                    transfers.copy_to_view(
                        source if source.dtype == target.dtype else source.to(target.dtype),
                        target,
                        buffers[place.file],
                        place.raw,
                    )
            transfers.bound()


def _batched(fetches: Sequence[_Fetch]) -> Iterator[list[_Fetch]]:
    batch: list[_Fetch] = []
    size = 0
    for fetch in fetches:
        if batch and size + fetch.size > shard_tensors.BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(fetch)
        size += fetch.size
    if batch:
        yield batch


def _fetched(
    batch: Sequence[_Fetch], values: Sequence[Any]
) -> Iterator[tuple[_Fetch, list[torch.Tensor]]]:
    """Each tensor's local shards, or the whole of it as the only one."""

    def tensors(fetches: Sequence[_Fetch]) -> list[torch.Tensor]:
        return [values[fetch.places[0].value].tensor for fetch in fetches]

    sharded = [fetch for fetch in batch if fetch.is_sharded]
    if sharded:
        yield from zip(sharded, runtime.fetch_shards(tensors(sharded)), strict=True)
    whole = [fetch for fetch in batch if not fetch.is_sharded]
    if whole:
        for fetch, value in zip(whole, runtime.fetch_whole(tensors(whole)), strict=True):
            yield fetch, [value]
