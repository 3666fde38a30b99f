"""Loads a plan's items: decides what is read and where to, and fills the planner's tensors.

In: the read items of each range of a data file. Out: reads for
:mod:`pannier.client.loading.range_reader`; with their bytes, tensors and objects are handed to the
planner. The raw bytes of a large plain tensor go straight into the planner's tensor if that has
their dtype and order; else they go through buffers of a bounded size. Small archives are read
together and whole. Archives of anything but plain tensors are also read whole, and unpickled.
Planners are called by one thread. Errors name the item, the file and the bytes. Blocking; for one
load of one rank.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from pannier.client import torch_compat
from pannier.client.loading import archive_layout
from pannier.client.loading.archive_layout import Expected, PlainTensor
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.range_reader import KeyIndex, Range, Read
from pannier.client.loading.target_memory import TargetMemory, is_divisible, memory_of
from pannier.client.restore.sources import Sources
from pannier.client.staging import archives
from pannier.client.user_errors import add_note
from pannier.wire import records
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError

_TARGETS: Final = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
"""Methods by which a DefaultLoadPlanner hands out its tensors."""


class ItemLoader:
    """Loads items of one checkpoint.

    Args:
        directory: the checkpoint.
        metadata: the checkpoint's: what each item is.
        planner: takes the values.
        sources: of the bytes. Archives longer than a request are read in parts, and the raw bytes of
            plain tensors straight into their targets where reads are short.
    """

    def __init__(
        self, directory: StorageDir, metadata: Metadata, planner: LoadPlanner, sources: Sources
    ) -> None:
        self._directory = directory
        self._metadata = metadata
        self._planner = planner
        self._sources = sources
        # Another planner may hand out the same memory again, once it is committed.
        self._one_at_a_time = any(
            getattr(type(planner), name, None) is not getattr(DefaultLoadPlanner, name)
            for name in _TARGETS
        )
        self._targets = TargetMemory()
        self._unverified_archives: dict[Range, Expected] = {}
        """Expected archives of which no byte was compared yet. Their heads are read with the data, since
        separate requests would take long."""
        self._copies: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        """Items, targets and sources, to be copied together."""

    def _name(self, item: ReadItem) -> str:
        return f"{item.storage_index.fqn!r} of {self._directory.url}"

    def is_large(self, source: Range, items: Sequence[ReadItem]) -> bool:
        """Whether a range may be a tensor that is read in parts."""
        return source.length > self._sources.request_bytes(source.file) and not any(
            item.type is LoadItemType.BYTE_IO for item in items
        )

    def find_tensor(self, source: Range, item: ReadItem, index: KeyIndex) -> PlainTensor | None:
        """The tensor in a range; None for what isn't a plain one. Thread-safe.

        Raises:
            StorageError: it can't be read.
            IntegrityError: the archive contradicts itself.
        """

        def reading(way: Callable[[str, int, memoryview], None]) -> archive_layout.ReadAt:
            def read(offset: int, target: memoryview) -> None:
                at = source.offset + offset
                with index.naming(source.file, at, at + len(target)):
                    way(source.file, at, target)

            return read

        sources = self._sources
        expected = archive_layout.expect_item(self._metadata, source.length, item)
        if expected is not None and not sources.is_near(source.file):
            self._unverified_archives[source] = expected
            return expected.tensor
        try:
            return archive_layout.find_tensor(
                reading(sources.read_into), source.length, expected, reading(sources.peek)
            )
        except IntegrityError as error:
            raise self._unreadable(source, item, error) from error

    def reads(
        self, items: Mapping[Range, Sequence[ReadItem]], tensors: Mapping[Range, PlainTensor | None]
    ) -> Iterator[Read | None]:
        """The reads, in the order of ``items``; calls the planner while they are taken.

        Args:
            items: by range, sorted by file and offset.
            tensors: those in large ranges, from :meth:`find_tensor`.
        """
        for source, held in items.items():
            tensor = tensors.get(source)
            if tensor is None:
                yield Read(source, self._user_of_archive(source, held))
            elif self._one_at_a_time:
                for item in held:
                    yield None
                    yield from self._tensor_reads(source, tensor, [item])
            else:
                yield from self._tensor_reads(source, tensor, held)

    def _user_of_archive(
        self, source: Range, items: Sequence[ReadItem]
    ) -> Callable[[memoryview], None]:
        targets = {}
        if not self._one_at_a_time:
            # Resolved before later tensors are read, which may go into the same memory.
            for number, item in enumerate(items):
                if item.type is not LoadItemType.BYTE_IO:
                    targets[number] = self._planner.resolve_tensor(item).detach()
                    self._targets.add(targets[number])
        return lambda content: self._load(source, content, items, targets)

    def _tensor_reads(
        self, source: Range, tensor: PlainTensor, items: Sequence[ReadItem]
    ) -> Iterator[Read | None]:
        targets: dict[int, torch.Tensor] = {}
        reads = self._reads_of(source, tensor, items, targets)
        expected = self._unverified_archives.get(source)
        if expected is None:
            yield from reads
            return
        head = bytearray(len(expected.head))
        yield self._head_read(source, memoryview(head))
        # Yields one read behind, to recognise the last one: it loads an archive of another layout.
        waiting: list[Read | None] = []
        for each in reads:
            yield from (each and _if_equal(head, expected.head, each) for each in waiting)
            waiting = [each]

        def load_unexpected() -> None:
            self._load_unexpected(source, items, targets)

        yield from (
            each and _if_equal(head, expected.head, each, load_unexpected) for each in waiting
        )

    def _head_read(self, source: Range, head: memoryview) -> Read:
        place = Range(source.file, source.offset, len(head))
        if self._sources.is_shared(source.file):
            return Read(place, lambda _: None, head)

        # Without a target: it is read together with the first part.
        def use(content: memoryview) -> None:
            head[:] = content

        return Read(place, use)

    def _load_unexpected(
        self, source: Range, items: Sequence[ReadItem], targets: Mapping[int, torch.Tensor]
    ) -> None:
        """Loads an archive of the expected length but of another layout; none of it was committed."""
        content = np.empty(source.length, np.uint8).data
        self._sources.read_into(source.file, source.offset, content)
        self._load(source, content, items, targets)

    def _reads_of(
        self,
        source: Range,
        tensor: PlainTensor,
        items: Sequence[ReadItem],
        targets: dict[int, torch.Tensor],
    ) -> Iterator[Read | None]:
        """The reads of the parts of a tensor; each byte is read once, also if parts lie side by side.

        Puts the items' targets into ``targets``, by their position.
        """
        parts = [
            _Part(
                item, self._part(source, tensor, item), self._planner.resolve_tensor(item).detach()
            )
            for item in items
        ]
        targets.update(enumerate(part.target for part in parts))
        for part in parts:
            self._check(part.item, part.target, part.stored.dtype, part.stored.shape, torch.strided)
        if sum(part.stored.span for part in parts) > tensor.span:
            yield from self._block_reads(source, tensor, parts)
            return
        for part in parts:
            memory = None
            start = source.offset + part.stored.offset
            if part.is_direct and self._sources.fills_targets(
                source.file, start, start + part.stored.span
            ):
                memory = memory_of(part.target)
            if memory is None:
                origin = part.item.storage_offsets
                yield from self._block_reads(source, part.stored, [part], origin)
                continue
            if not self._targets.add(part.target):
                yield None
                self._targets.start_again(part.target)
            yield Read(Range(source.file, start, part.stored.span), self._user(part), memory)

    def _user(self, part: "_Part") -> Callable[[memoryview], None]:
        def commit(_: memoryview) -> None:
            # As copy_ does.
            torch.autograd.graph.increment_version(part.target)
            self._planner.commit_tensor(part.item, part.target)

        return commit

    def _block_reads(
        self,
        source: Range,
        tensor: PlainTensor,
        parts: Sequence["_Part"],
        origin: Sequence[int] | None = None,
    ) -> Iterator[Read]:
        """Reads a tensor, which begins at ``origin`` of the stored one, through buffers."""
        for part in parts:
            self._targets.add(part.target)
        if not tensor.span:
            for part in parts:
                self._planner.commit_tensor(part.item, part.target)
            return
        most = tensor.span
        if all(is_divisible(part.target) for part in parts):
            most = self._sources.request_bytes(source.file)
            if (expected := self._unverified_archives.get(source)) is not None:
                most = max(1, most - len(expected.head))
        blocks = list(tensor.blocks(most))
        for number, (at, block) in enumerate(blocks, 1):
            span = Range(source.file, source.offset + block.offset, block.span)
            offsets = at if origin is None else [*map(sum, zip(at, origin, strict=False))]
            yield Read(
                span, self._user_of_block(parts, offsets, block, is_last=number == len(blocks))
            )

    def _user_of_block(
        self, parts: Sequence["_Part"], at: Sequence[int], block: PlainTensor, *, is_last: bool
    ) -> Callable[[memoryview], None]:
        def use(content: memoryview) -> None:
            value = block.view(content)
            for part in parts:
                part.fill(value, at)
                if is_last:
                    self._planner.commit_tensor(part.item, part.target)

        return use

    def copy_gathered(self) -> None:
        """Makes the copies that were gathered; before their bytes are gone."""
        gathered, self._copies = self._copies, []
        if gathered:
            _, targets, sources = zip(*gathered, strict=True)
            torch_compat.copy_all(list(targets), list(sources))
        for item, target, _ in gathered:
            self._planner.commit_tensor(item, target)

    def _load(
        self,
        source: Range,
        content: memoryview,
        items: Sequence[ReadItem],
        targets: Mapping[int, torch.Tensor],
    ) -> None:
        """``targets``: by the item's position; the planner is asked now for those that are missing."""
        tensor: torch.Tensor | None = None
        for number, item in enumerate(items):
            if item.type is LoadItemType.BYTE_IO:
                self._load_object(source, content, item)
                continue
            if tensor is None:
                tensor = self._tensor_in(source, content, item)
            value = tensor
            if tensor.shape != item.lengths:
                value = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = targets.get(number)
            if target is None:
                target = self._planner.resolve_tensor(item).detach()
            self._check(item, target, value.dtype, value.shape, value.layout)
            if not self._one_at_a_time and is_divisible(target) and is_divisible(value):
                self._copies.append((item, target, value))
                continue
            target.copy_(value)
            self._planner.commit_tensor(item, target)

    def _check(
        self,
        item: ReadItem,
        target: torch.Tensor,
        dtype: torch.dtype,
        shape: Sequence[int],
        layout: torch.layout,
    ) -> None:
        if target.shape == torch.Size(shape) and not target.is_meta and target.layout is layout:
            return
        kinds = f" ({layout})", f" ({target.layout})"
        stored, wanted = kinds if target.layout is not layout else ("", "")
        raise InvalidRequestError(
            f"{self._name(item)} can't be loaded: {dtype} of {tuple(shape)}{stored} is stored, the planner "
            f"wants {target.dtype} of {tuple(target.size())}{wanted} on {target.device}"
        )

    def _load_object(self, source: Range, content: memoryview, item: ReadItem) -> None:
        try:
            self._planner.load_bytes(item, io.BytesIO(content))
        except Exception as error:
            if isinstance(error, PannierError):
                raise
            if not _is_intact(content):
                raise self._unreadable(source, item, error) from error
            # The planner failed for another reason than its bytes.
            where = f"{self._name(item)} can't be loaded from {source.file}"
            if type(self._planner).load_bytes is not DefaultLoadPlanner.load_bytes:
                add_note(error, where)
                raise
            raise InvalidRequestError(
                f"{where}: {type(error).__name__}: {error}. It is unpickled, so that this process must be able "
                "to import what it refers to"
            ) from error

    def _tensor_in(self, source: Range, content: memoryview, item: ReadItem) -> torch.Tensor:
        """The tensor in an archive that was read; a view of its bytes if it is a plain one."""

        if not self.is_large(source, (item,)):
            try:
                found = archive_layout.find_in(
                    content, archive_layout.expect_item(self._metadata, source.length, item)
                )
            except IntegrityError as error:
                raise self._unreadable(source, item, error) from error
            if found is not None:
                return found.view(content[found.offset : found.offset + found.span])
        try:
            tensor = archive_layout.unpickle(content)
        except Exception as error:  # the bytes may be anything
            if self._is_safetensors(source.file):
                name = f"{self._directory.url}/{source.file}"
                raise InvalidRequestError(
                    f"{item.storage_index.fqn!r} can't be read: "
                    + records.describe_safetensors_file(name)
                ) from error
            if unknown := archives.unknown_globals(content):
                raise InvalidRequestError(
                    f"{self._name(item)} can't be loaded from {source.file}: it refers to {', '.join(unknown)}, "
                    "which torch unpickles only if it is allowed to. If you trust the checkpoint's author, call "
                    "torch.serialization.add_safe_globals([...]) with it first"
                ) from error
            raise self._unreadable(source, item, error) from error
        if not isinstance(tensor, torch.Tensor):
            raise IntegrityError(
                f"{item.storage_index.fqn!r}: {self._directory.url}/{source.file} holds a "
                f"{type(tensor).__name__} where its metadata has a tensor"
            )
        return tensor

    def _unreadable(self, source: Range, item: ReadItem, error: Exception) -> IntegrityError:
        text = (
            f"{error}" if isinstance(error, IntegrityError) else f"{type(error).__name__}: {error}"
        )
        return IntegrityError(
            f"{item.storage_index.fqn!r} can't be read from bytes {source.offset} to {source.end} of "
            f"{self._directory.url}/{source.file}: {text}"
        )

    def _part(self, source: Range, tensor: PlainTensor, item: ReadItem) -> PlainTensor:
        try:
            return tensor.narrow(item.storage_offsets, item.lengths)
        except IntegrityError as error:
            raise self._unreadable(source, item, error) from error

    def _is_safetensors(self, file: str) -> bool:
        head = bytearray(records.SAFETENSORS_HEAD)
        try:
            self._directory.read_into(file, 0, memoryview(head))
        except StorageError:  # shorter, or removed meanwhile
            return False
        return records.is_safetensors(bytes(head))


@dataclass(frozen=True, slots=True)
class _Part:
    """What an item wants of a stored tensor."""

    item: ReadItem
    stored: PlainTensor
    target: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the stored bytes are those of a row-major tensor of the target's dtype."""
        return (
            bool(self.stored.span)
            and self.stored.is_dense
            and self.stored.dtype is self.target.dtype
        )

    def fill(self, value: torch.Tensor, at: Sequence[int]) -> None:
        """Copies the elements of this part that ``value``, which lies at ``at`` of the stored tensor, has."""
        mine, theirs, sizes = [], [], []
        for own, length, start, size in zip(
            self.item.storage_offsets, self.item.lengths, at, value.shape, strict=False
        ):
            first, end = max(own, start), min(own + length, start + size)
            if first >= end:
                return
            mine.append(first - own)
            theirs.append(first - start)
            sizes.append(end - first)
        target = narrow_tensor_by_index(self.target, mine, sizes)
        target.copy_(narrow_tensor_by_index(value, theirs, sizes))


def _if_equal(
    found: bytearray, wanted: bytes, read: Read, otherwise: Callable[[], None] = lambda: None
) -> Read:
    """The read, whose bytes are used only if ``found`` equals ``wanted``; else calls ``otherwise``."""
    return read._replace(use=lambda content: read.use(content) if found == wanted else otherwise())


def _is_intact(content: memoryview) -> bool:
    """Whether this is an archive of torch.save whose members match their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError):
        return False
