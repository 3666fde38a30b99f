"""XLA tensors in the form that DCP's default planners take: the parts that this process's devices hold.

In: XLA tensors, plain or wrapped. Out: tensors that make their own items, as DTensor does: one for
each part, with its offset in the global tensor, without padding. :class:`Fetcher` moves values to the
host, in batches; :class:`Incoming` moves them to the devices once a whole tensor has been read. Not
thread-safe.
"""

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

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
"""Bytes of small tensors that are fetched together; no more of them are kept on the host."""


class ShardView(NamedTuple):
    """The value of one item: a part of an XLA tensor that this process's devices hold."""

    leaf: int
    """Identifies the tensor among those of the save. A state may hold one tensor under two keys."""
    tensor: torch.Tensor
    """Plain."""
    is_sharded: bool
    chunk: Chunk


@dataclass(frozen=True)
class Sharding:
    """What the items of a plain XLA tensor depend on besides its dtype and shape."""

    spec: str
    """See :func:`pannier.client.xla.runtime.specs`."""
    is_sharded: bool
    chunks: list[Chunk]

    def views(self, leaf: int, tensor: torch.Tensor) -> list[ShardView]:
        """The values of the tensor's items."""
        return [ShardView(leaf, tensor, self.is_sharded, chunk) for chunk in self.chunks]


def shardings(tensors: Sequence[torch.Tensor]) -> list[Sharding] | None:
    """The shardings of plain XLA tensors, after ``settle()``; None when one can't be planned."""
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


class XlaTensor(torch.Tensor):
    """An XLA tensor that DCP plans by its parts. Operations run on the tensor it wraps.

    Args:
        key: its name, for errors.
        tensor: plain or wrapped. ``runtime.settle()`` must have been called.

    Raises InvalidRequestError: it is sharded manually, so that its parts aren't known.
    """

    source: torch.Tensor
    """The plain XLA tensor."""
    is_sharded: bool
    """Whether devices hold different parts."""
    chunks: list[Chunk]
    """Its parts on this process's devices; one, at 0, when it isn't sharded."""

    @staticmethod
    def __new__(cls, key: str, tensor: torch.Tensor) -> "XlaTensor":
        """Makes a tensor without data of its own."""
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
        """Runs an operation on the wrapped tensors."""
        return function(*_unwrapped(args), **_unwrapped(dict(kwargs or {})))

    __torch_function__: ClassVar[Any] = torch_compat.plain_torch_function

    def chunk_at(self, index: MetadataIndex) -> Chunk:
        """The part of an item."""
        for chunk in self.chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return chunk
        raise InvalidRequestError(
            f"{index.fqn!r}: this process's devices hold no part at {index.offset}"
        )


class Outgoing(XlaTensor):
    """An XLA tensor that is saved.

    Args:
        number: identifies it among the fetcher's tensors.
    """

    number: int
    fetcher: "Fetcher"

    @staticmethod
    def __new__(cls, key: str, tensor: torch.Tensor, fetcher: "Fetcher", number: int) -> "Outgoing":
        """Makes a tensor whose values come from ``fetcher``."""
        self: Any = XlaTensor.__new__(cls, key, tensor)
        self.fetcher, self.number = fetcher, number
        outgoing: Outgoing = self
        return outgoing

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
        return self.fetcher.take(self.part_at(index))

    def part_at(self, index: MetadataIndex) -> ShardView:
        """The part of an item, for the fetcher."""
        return ShardView(self.number, self.source, self.is_sharded, self.chunk_at(index))


class Fetcher:
    """Fetches the parts of one save to the host: all of a tensor's when the first is taken.

    Small tensors are fetched in batches, together with those that are taken next. A tensor's parts are
    freed when the last expected one has been taken. Tensors without expected parts are not fetched.
    """

    def __init__(self) -> None:
        self._expected: dict[int, _Expected] = {}
        """By tensor, in the order in which they are taken."""
        self._fetched: dict[int, list[torch.Tensor]] = {}

    def expect(self, parts: Iterable[ShardView]) -> None:
        """Announces what will be taken, in order."""
        self.clear()
        for part in parts:
            self._expected.setdefault(part.leaf, _Expected(part)).add(part)

    def take(self, part: ShardView) -> torch.Tensor:
        """A part of a tensor, without padding: a view of the fetched shard, which nothing else uses."""
        number, chunk = part.leaf, part.chunk
        if number not in self._fetched:
            self._fetch(part)
        shard = self._fetched[number][chunk.ordinal]
        expected = self._expected.get(number)
        if expected is not None and expected.count > 1:
            expected.count -= 1
        else:
            self._expected.pop(number, None)
            del self._fetched[number]
        view = shard[tuple(slice(0, size) for size in chunk.sizes)]
        return view if view.dtype == part.tensor.dtype else view.to(part.tensor.dtype)

    def clear(self) -> None:
        """Frees all that hasn't been taken."""
        self._expected.clear()
        self._fetched.clear()

    def _fetch(self, first: ShardView) -> None:
        batch = [self._expected.get(first.leaf) or _Expected(first)]
        size = batch[0].size
        for number, each in self._expected.items():
            if number == first.leaf or number in self._fetched:
                continue
            size += each.size
            if size > BATCH_BYTES:
                break
            batch.append(each)
        sharded = [each.part for each in batch if each.part.is_sharded]
        whole = [each.part for each in batch if not each.part.is_sharded]
        if sharded:
            shards = runtime.fetch_shards([part.tensor for part in sharded])
            self._fetched.update(zip((part.leaf for part in sharded), shards, strict=True))
        if whole:
            values = runtime.fetch_whole([part.tensor for part in whole])
            self._fetched.update(
                (part.leaf, [value]) for part, value in zip(whole, values, strict=True)
            )


class _Expected:
    """The parts of one tensor that are still to be taken."""

    def __init__(self, part: ShardView) -> None:
        self.part = part
        """One of them."""
        self.count = 0
        self.size = 0
        """Bytes, without padding and replicas."""

    def add(self, part: ShardView) -> None:
        """Counts another part."""
        self.count += 1
        self.size += math.prod(part.chunk.sizes) * part.tensor.dtype.itemsize


class Incoming(XlaTensor):
    """An XLA tensor that is loaded: read into host memory, then moved to the devices in one call.

    The host memory is allocated when the first item is read, and freed after the last.
    """

    pending: int
    """Items that are still to be read."""
    is_covered: bool
    """Whether the items cover all of this process's parts."""
    buffers: dict[torch.Size, torch.Tensor]
    """By offset of the part; with padding."""

    @staticmethod
    def __new__(cls, key: str, tensor: torch.Tensor) -> "Incoming":
        """Makes a tensor without items."""
        self: Any = XlaTensor.__new__(cls, key, tensor)
        self.pending, self.is_covered = 0, False
        self.buffers = {}
        incoming: Incoming = self
        return incoming

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The parts that are to be read."""
        return [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory that a part is to be read into."""
        chunk = self.chunk_at(index)
        if not self.buffers:
            self.buffers = self._empty() if self.is_covered else self._current()
        return self.buffers[chunk.offsets][tuple(slice(0, size) for size in chunk.sizes)]

    def expect(self, items: int, elements: int) -> None:
        """Announces how much will be read. Elements that are not read keep their values."""
        self.pending = items
        self.is_covered = elements >= sum(math.prod(chunk.sizes) for chunk in self.chunks)

    def committed(self) -> None:
        """Called after each item that was read; after the last, the devices get the new value."""
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
    """The object with the XLA tensors in its lists, tuples and dictionaries copied to the host.

    The result can be unpickled without torch_xla. Returns the same object if it has no XLA tensors.
    """
    if not runtime.is_loaded() or not runtime.holds_xla(value):
        return value
    if isinstance(value, torch.Tensor):
        return runtime.global_tensor(value).detach().cpu()
    if isinstance(value, Mapping):
        inner = {key: on_host(each) for key, each in value.items()}
        if not isinstance(value, MutableMapping):
            return inner
        # A copy keeps its class and its attributes.
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
