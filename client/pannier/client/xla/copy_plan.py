"""Stages XLA tensors whose plan is known: no planner and no items, only a few calls of torch_xla.

In: the offset of each part of each tensor in the data files. Out: the bytes there. Each tensor of
which a part is saved is fetched to the host once; small ones in batches, which are freed once they
are copied. Immutable; :meth:`FetchPlan.run` is not thread-safe, as torch_xla isn't.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pannier.client.user_errors import located
from pannier.client.xla import runtime, shard_tensors
from pannier.client.xla.shard_tensors import ShardView

Copy = Callable[[torch.Tensor, torch.Tensor, int, int], None]
"""Copies a tensor to a view of a data file, of which index and offset are given."""


class ShardTarget(NamedTuple):
    """Where a part is copied to."""

    value: int
    """Index of the part among the values."""
    file: int
    """Index of the data file."""
    tensor: int
    """Index among the tensors of the file."""
    raw: int
    """Offset of its elements in the file."""


@dataclass
class _Fetch:
    """The parts of one tensor."""

    is_sharded: bool
    size: int = 0
    """Bytes."""
    targets: list[ShardTarget] = field(default_factory=list)

    def add(self, target: ShardTarget, part: ShardView) -> None:
        """Adds a part."""
        self.targets.append(target)
        self.size += math.prod(part.chunk.sizes) * part.tensor.dtype.itemsize


class FetchPlan:
    """The fetches of a copy plan, in batches. Immutable.

    Args:
        targets: of parts with elements.
        values: of the state that the copy plan was made for.
    """

    def __init__(self, targets: Sequence[ShardTarget], values: Sequence[Any]) -> None:
        tensors: dict[int, _Fetch] = {}
        for target in targets:
            part: ShardView = values[target.value]
            tensors.setdefault(part.leaf, _Fetch(part.is_sharded)).add(target, part)
        self._batches = list(_batched(list(tensors.values())))

    def __bool__(self) -> bool:
        return bool(self._batches)

    def run(
        self,
        values: Sequence[Any],
        views: Sequence[Sequence[torch.Tensor]],
        copy: Copy,
        end_batch: Callable[[], None],
    ) -> None:
        """Fetches the parts and copies them to their views.

        Args:
            values: of a state with the same structure.
            views: by file, the elements of each of its tensors as a tensor.
            copy: copies a part to its view.
            end_batch: called after each batch.

        Raises what torch_xla raises when it can't fetch them.
        """
        with located("the state's XLA tensors can't be saved"):
            for batch in self._batches:
                self._copy(batch, values, views, copy)
                end_batch()

    @staticmethod
    def _copy(
        batch: Sequence[_Fetch],
        values: Sequence[Any],
        views: Sequence[Sequence[torch.Tensor]],
        copy: Copy,
    ) -> None:
        for fetch, parts in _fetched(batch, values):
            for target in fetch.targets:
                chunk = values[target.value].chunk
                source = parts[chunk.ordinal][tuple(slice(0, size) for size in chunk.sizes)]
                view = views[target.file][target.tensor]
                copy(
                    source if source.dtype == view.dtype else source.to(view.dtype),
                    view,
                    target.file,
                    target.raw,
                )


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
    """Fetches a batch: of each tensor its local shards, or all of it as a single one."""

    def tensors(fetches: Sequence[_Fetch]) -> list[torch.Tensor]:
        return [values[fetch.targets[0].value].tensor for fetch in fetches]

    sharded = [fetch for fetch in batch if fetch.is_sharded]
    if sharded:
        yield from zip(sharded, runtime.fetch_shards(tensors(sharded)), strict=True)
    whole = [fetch for fetch in batch if not fetch.is_sharded]
    if whole:
        for fetch, value in zip(whole, runtime.fetch_whole(tensors(whole)), strict=True):
            yield fetch, [value]
