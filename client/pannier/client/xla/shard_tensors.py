"""XLA tensors as DCP's default planners take them: parts that this process's devices hold.

In: XLA tensors, plain or wrapped. Out: tensors that make their own items, as DTensor does: one for
each part, at its place in the whole, without padding. Values cross between host and devices by way of
:class:`Fetcher` (from them, a batch ahead) and :class:`Incoming` (to them, once all of a tensor has
been read). Not thread-safe.
"""

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.xla import runtime
from pannier.client.xla.runtime import Chunk, Kind
from pannier.wire.errors import InvalidRequestError

BATCH_BYTES: Final = 64 << 20
"""Of small tensors that cross together; more are not held on the host."""


class XlaTensor(torch.Tensor):
    """An XLA tensor that DCP plans by its parts. Operations see the tensor it stands for.

    Args:
        key: its name, for errors.
        tensor: plain or wrapped; to be made after ``xla_runtime.settle()``.

    Raises InvalidRequestError: it is sharded in a way that has no parts.
    """

    source: torch.Tensor
    """The plain XLA tensor."""
    is_sharded: bool
    """Whether devices hold different parts."""
    chunks: list[Chunk]
    """Its parts on this process's devices; one, at 0, when it isn't sharded."""

    @staticmethod
    def __new__(cls, key: str, tensor: torch.Tensor) -> "XlaTensor":
        """A tensor without data of its own."""
        source = runtime.global_tensor(tensor)
        kind = runtime.kind(source)
        if kind is Kind.MANUAL:
            raise InvalidRequestError(
                f"{key!r} is inside a region of manual sharding, so that its shape is a shard's: "
                "leave the region (disable_manual_sharding) first"
            )
        self: XlaTensor = torch_compat.wrapper(cls, source, requires_grad=tensor.requires_grad)
        self.source = source
        self.is_sharded = kind is Kind.SHARDED and source.numel() > 0
        if self.is_sharded:
            self.chunks = runtime.chunks(source)
        else:
            self.chunks = [Chunk(0, torch.Size([0] * source.dim()), source.shape)]
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation on the tensors that these stand for."""
        return function(*_unwrapped(args), **_unwrapped(dict(kwargs or {})))

    __torch_function__: ClassVar[Any] = torch_compat.plain_torch_function

    def chunk_at(self, index: MetadataIndex) -> Chunk:
        """The part that an item stands for."""
        for chunk in self.chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return chunk
        raise InvalidRequestError(
            f"{index.fqn!r}: this process's devices hold no part at {index.offset}"
        )


class Outgoing(XlaTensor):
    """One whose parts are saved."""

    number: int
    """Among the fetcher's."""
    fetcher: "Fetcher"

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """One item per part. Its index is the ordinal of the local shard."""
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        kind = WriteItemType.SHARD if self.is_sharded else WriteItemType.TENSOR
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, chunk.ordinal if self.is_sharded else None),
                type=kind,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=chunk.offsets, sizes=chunk.sizes),
                    properties=properties,
                    size=self.size(),
                ),
            )
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The part of an item, in host memory."""
        return self.fetcher.take(self, self.chunk_at(index))


class Fetcher:
    """Brings the parts of one save to the host: each tensor's all at once, when the first is taken.

    Small tensors cross in batches, together with those that are taken next. A tensor's parts are let go
    of when the last that is expected has been taken. Of tensors without items nothing crosses.
    """

    def __init__(self) -> None:
        self._tensors: list[Outgoing] = []
        self._expected: dict[int, int] = {}
        """By tensor, in the order in which they are taken: how many of its parts still are."""
        self._here: dict[int, list[torch.Tensor]] = {}

    def wrap(self, key: str, tensor: torch.Tensor) -> Outgoing:
        """A tensor of the save."""
        wrapped = Outgoing(key, tensor)
        wrapped.fetcher, wrapped.number = self, len(self._tensors)
        self._tensors.append(wrapped)
        return wrapped

    def expect(self, tensors: Iterable[Any]) -> None:
        """What will be taken, in order: a tensor for each of its parts. Others' are passed over."""
        self._expected.clear()
        self._here.clear()
        for tensor in tensors:
            if isinstance(tensor, Outgoing) and tensor.fetcher is self:
                self._expected[tensor.number] = self._expected.get(tensor.number, 0) + 1

    def take(self, tensor: Outgoing, chunk: Chunk) -> torch.Tensor:
        """A part of a tensor, without padding; a view of what crossed, which nobody else changes."""
        number = tensor.number
        if number not in self._here:
            self._fetch(tensor)
        shard = self._here[number][chunk.ordinal]
        left = self._expected.get(number, 1) - 1
        if left > 0:
            self._expected[number] = left
        else:
            self._expected.pop(number, None)
            del self._here[number]
        part = shard[tuple(slice(0, size) for size in chunk.sizes)]
        return part if part.dtype == tensor.dtype else part.to(tensor.dtype)

    def clear(self) -> None:
        """Lets go of all that hasn't been taken."""
        self._expected.clear()
        self._here.clear()

    def _fetch(self, first: Outgoing) -> None:
        batch = [first]
        size = _bytes(first)
        for number in self._expected:
            each = self._tensors[number]
            if each is first or number in self._here:
                continue
            size += _bytes(each)
            if size > BATCH_BYTES:
                break
            batch.append(each)
        sharded = [each for each in batch if each.is_sharded]
        whole = [each for each in batch if not each.is_sharded]
        if sharded:
            shards = runtime.fetch_shards([each.source for each in sharded])
            for each, parts in zip(sharded, shards, strict=True):
                self._here[each.number] = parts
        if whole:
            values = runtime.fetch_whole([each.source for each in whole])
            for each, value in zip(whole, values, strict=True):
                self._here[each.number] = [value]


class Incoming(XlaTensor):
    """One whose parts are loaded: read into host memory, then given to the devices together.

    The memory is taken when the first item is read, and let go of with the last.
    """

    pending: int
    """Items that are still to be read."""
    is_covered: bool
    """Whether they are all of it."""
    buffers: dict[torch.Size, torch.Tensor]
    """By offset; with padding."""

    @staticmethod
    def __new__(cls, key: str, tensor: torch.Tensor) -> "Incoming":
        """A tensor for which nothing is to be read yet."""
        self: Any = XlaTensor.__new__(cls, key, tensor)
        self.pending, self.is_covered = 0, False
        self.buffers = {}
        wrapped: Incoming = self
        return wrapped

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The parts that are wanted here."""
        return [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Where a part is to be read to."""
        chunk = self.chunk_at(index)
        if not self.buffers:
            self.buffers = self._empty() if self.is_covered else self._current()
        return self.buffers[chunk.offsets][tuple(slice(0, size) for size in chunk.sizes)]

    def expect(self, items: int, elements: int) -> None:
        """How much will be read. What isn't, stays as it is."""
        self.pending = items
        self.is_covered = elements >= sum(math.prod(chunk.sizes) for chunk in self.chunks)

    def committed(self) -> None:
        """An item has been read. With the last one the devices get the new value."""
        self.pending -= 1
        if self.pending or not self.buffers:
            return
        if self.is_sharded:
            runtime.load_shards(self.source, self.buffers)
        else:
            (value,) = self.buffers.values()
            runtime.load_whole(self.source, value)
        self.buffers = {}

    def _empty(self) -> dict[torch.Size, torch.Tensor]:
        shape = runtime.padded(self.source) if self.is_sharded else self.shape
        return {
            chunk.offsets: torch.zeros(shape, dtype=self.dtype, device="cpu")
            for chunk in self.chunks
        }

    def _current(self) -> dict[torch.Size, torch.Tensor]:
        if not self.is_sharded:
            (value,) = runtime.fetch_whole([self.source])
            return {self.chunks[0].offsets: value}
        (shards,) = runtime.fetch_shards([self.source])
        return {chunk.offsets: shards[chunk.ordinal] for chunk in self.chunks}


def on_host(value: Any) -> Any:
    """An object with the XLA tensors in its lists, tuples and dictionaries as tensors of the host.

    So that whoever unpickles it needs no torch_xla. The same object when there are none.
    """
    if not runtime.is_loaded() or not runtime.holds_xla(value):
        return value
    if isinstance(value, torch.Tensor):
        return runtime.global_tensor(value).detach().cpu()
    if isinstance(value, Mapping):
        inner = {key: on_host(each) for key, each in value.items()}
        if not isinstance(value, MutableMapping):
            return inner
        # Of its own class, with whatever else it has.
        copied = copy.copy(value)
        copied.update(inner)
        return copied
    if hasattr(value, "_fields"):
        return type(value)(*map(on_host, value))
    return type(value)(map(on_host, value))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, XlaTensor):
        return value.source
    if isinstance(value, list | tuple):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, dict):
        return {key: _unwrapped(inner) for key, inner in value.items()}
    return value


def _bytes(tensor: Outgoing) -> int:
    """What crosses of a tensor, without padding and replicas."""
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks) * tensor.dtype.itemsize
