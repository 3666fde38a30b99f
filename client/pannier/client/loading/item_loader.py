"""Loads a plan's items: decides what is read and where to, and fills the planner's tensors.

In: the read items of each range of a data file. Out: reads for
:mod:`pannier.client.loading.range_reader`; with their bytes, tensors and objects are handed to the
planner. The raw bytes of a large plain tensor go straight into the planner's tensor where that has
their dtype and order; else through buffers of a bounded size. Small archives are read together and
whole, as is what isn't a plain tensor: that is unpickled. Planners are called by one thread. Errors
name the item, the file and the bytes. Blocking; for one load of one rank.
"""

import ctypes
import io
import posixpath
import zipfile
import zlib
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from pannier.client import torch_compat
from pannier.client.loading import archive_layout
from pannier.client.loading.archive_layout import Expected, PlainTensor
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.range_reader import KeyIndex, Range, Read
from pannier.client.restore.sources import RangeSource
from pannier.wire import records
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError

_TARGETS: Final = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
"""Methods by which a DefaultLoadPlanner hands out its tensors."""
_UNDIVIDED: Final = ("xla",)
"""Devices to which a tensor is copied at once."""


class ItemLoader:
    """Loads items of one checkpoint.

    Args:
        directory: the checkpoint.
        metadata: the checkpoint's: what each item is, and where it is stored.
        planner: takes the values.
        request_bytes: longer archives are read in parts, plain tensors straight into their targets.
    """

    def __init__(
        self, directory: StorageDir, metadata: Metadata, planner: LoadPlanner, request_bytes: int
    ) -> None:
        self._directory = directory
        self._metadata = metadata
        self._planner = planner
        self._request_bytes = request_bytes
        # Another planner may hand out the same memory again, once it is committed.
        self._in_turn = any(
            getattr(type(planner), name, None) is not getattr(DefaultLoadPlanner, name)
            for name in _TARGETS
        )
        self._targets = _Targets()
        self._copies: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        """Items, targets and sources, to be copied together."""

    def locate(self, item: ReadItem) -> Range:
        """The bytes that hold an item. Raises InvalidRequestError: they can't be read here."""
        info = self._metadata.storage_data.get(item.storage_index)
        if not isinstance(info, torch_compat.StorageInfo):
            raise InvalidRequestError(
                f"{self._name(item)} is stored in a way that Pannier can't read: {info!r:.120}"
            )
        transforms = getattr(info, "transform_descriptors", None)
        if transforms:
            raise InvalidRequestError(
                f"{self._name(item)} was transformed by {list(transforms)} when it was saved; load it "
                "with torch's FileSystemReader and the extensions that it was saved with"
            )
        path = _normal(info.relative_path)
        if path is None:
            raise InvalidRequestError(
                f"{self._name(item)} lies outside the checkpoint, in {info.relative_path}"
            )
        if info.offset < 0 or info.length < 0:
            raise InvalidRequestError(f"{self._name(item)} has an invalid offset or length: {info}")
        return Range(path, info.offset, info.length)

    def _name(self, item: ReadItem) -> str:
        return f"{item.storage_index.fqn!r} of {self._directory.url}"

    def is_large(self, source: Range, items: Sequence[ReadItem]) -> bool:
        """Whether a range may be a tensor that is read in parts."""
        return source.length > self._request_bytes and not any(
            item.type is LoadItemType.BYTE_IO for item in items
        )

    def find_tensor(
        self, source: Range, item: ReadItem, bytes_of: RangeSource, index: KeyIndex
    ) -> PlainTensor | None:
        """The tensor in a range; None for what isn't a plain one. Thread-safe.

        Raises:
            StorageError: it can't be read.
            IntegrityError: the archive contradicts itself.
        """

        def read(offset: int, target: memoryview) -> None:
            at = source.offset + offset
            with index.naming(source.file, at, at + len(target)):
                bytes_of.read_into(source.file, at, target)

        try:
            return archive_layout.find_tensor(read, source.length, self._expected(source, item))
        except IntegrityError as error:
            raise self._unreadable(source, item, error) from error

    def _expected(self, source: Range, item: ReadItem) -> Expected | None:
        stored = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        at, chunks = item.storage_index, stored.chunks
        number = at.index or 0
        if number >= len(chunks) or chunks[number].offsets != at.offset:
            # It is only a hint.
            number = next((n for n, each in enumerate(chunks) if each.offsets == at.offset), -1)
        dtype, shape = stored.properties.dtype, chunks[number].sizes if number >= 0 else None
        if not isinstance(shape, torch.Size) or not isinstance(dtype, torch.dtype):
            return None
        return archive_layout.expect(dtype, shape, source.length)

    def reads(
        self, items: Mapping[Range, Sequence[ReadItem]], tensors: Mapping[Range, PlainTensor | None]
    ) -> Iterator[Read | None]:
        """What to read, in the order of ``items``; calls the planner as it is taken.

        Args:
            items: by range, sorted by file and offset.
            tensors: those in large ranges, from :meth:`find_tensor`.
        """
        for source, held in items.items():
            tensor = tensors.get(source)
            if tensor is None:
                yield Read(source, self._user_of_archive(source, held))
                continue
            for item in held:
                if self._in_turn:
                    yield None
                yield from self._reads_of(source, tensor, item)

    def _user_of_archive(
        self, source: Range, items: Sequence[ReadItem]
    ) -> Callable[[memoryview], None]:
        return lambda content: self._load(source, content, items)

    def _reads_of(
        self, source: Range, tensor: PlainTensor, item: ReadItem
    ) -> Iterator[Read | None]:
        part = self._part(source, tensor, item)
        target = self._resolve(item, part.dtype, part.shape)
        if not part.span:
            self._planner.commit_tensor(item, target)
            return
        start = source.offset
        memory = _memory_of(target) if part.is_dense and part.dtype is target.dtype else None
        if memory is not None:
            if not self._targets.add(target.data_ptr(), target.data_ptr() + len(memory)):
                yield None

            def commit(_: memoryview) -> None:
                # As copy_ does.
                torch.autograd.graph.increment_version(target)
                self._planner.commit_tensor(item, target)

            yield Read(Range(source.file, start + part.offset, part.span), commit, memory)
        else:
            most = self._request_bytes if _is_divisible(target) else part.span
            blocks = list(part.blocks(most))
            for number, (at, block) in enumerate(blocks, 1):
                span = Range(source.file, start + block.offset, block.span)
                use = self._user_of_block(item, target, at, block, is_last=number == len(blocks))
                yield Read(span, use)

    def _user_of_block(
        self,
        item: ReadItem,
        target: torch.Tensor,
        at: Sequence[int],
        block: PlainTensor,
        *,
        is_last: bool,
    ) -> Callable[[memoryview], None]:
        def use(content: memoryview) -> None:
            narrow_tensor_by_index(target, at, block.shape).copy_(block.view(content))
            if is_last:
                self._planner.commit_tensor(item, target)

        return use

    def copy_gathered(self) -> None:
        """Makes the copies that were gathered; before their bytes are gone."""
        gathered, self._copies = self._copies, []
        if gathered:
            _, targets, sources = zip(*gathered, strict=True)
            torch_compat.copy_all(list(targets), list(sources))
        for item, target, _ in gathered:
            self._planner.commit_tensor(item, target)

    def _load(self, source: Range, content: memoryview, items: Sequence[ReadItem]) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_object(source, content, item)
                continue
            if tensor is None:
                tensor = self._tensor_in(source, content, item)
            value = tensor
            if tensor.shape != item.lengths:
                value = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = self._resolve(item, value.dtype, value.shape)
            if not self._in_turn and _is_divisible(target) and _is_divisible(value):
                self._copies.append((item, target, value))
                continue
            target.copy_(value)
            self._planner.commit_tensor(item, target)

    def _resolve(self, item: ReadItem, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if target.shape == torch.Size(shape) and not target.is_meta:
            return target
        raise InvalidRequestError(
            f"{self._name(item)} can't be loaded: {dtype} of {tuple(shape)} is stored, the planner wants "
            f"{target.dtype} of {tuple(target.size())} on {target.device}"
        )

    def _load_object(self, source: Range, content: memoryview, item: ReadItem) -> None:
        try:
            self._planner.load_bytes(item, io.BytesIO(content))
        except Exception as error:
            # If the archive is intact, the planner failed for another reason than its bytes.
            if isinstance(error, PannierError) or _is_intact(content):
                raise
            raise self._unreadable(source, item, error) from error

    def _tensor_in(self, source: Range, content: memoryview, item: ReadItem) -> torch.Tensor:
        """The tensor in an archive that was read; a view of its bytes if it is a plain one."""

        if not self.is_large(source, (item,)):
            try:
                found = archive_layout.find_in(content, self._expected(source, item))
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


class _Targets:
    """The memory of the tensors that are filled by several threads."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        """Start and end of each, sorted; they don't overlap."""

    def add(self, start: int, end: int) -> bool:
        """False where it overlaps with one before: tied weights must not be written at the same time."""
        at = bisect(self._places, (start, end))
        is_new = (at == 0 or self._places[at - 1][1] <= start) and (
            at == len(self._places) or end <= self._places[at][0]
        )
        if not is_new:
            self._places.clear()
            at = 0
        self._places.insert(at, (start, end))
        return is_new


@lru_cache(maxsize=256)
def _normal(path: str) -> str | None:
    """A file's path in the checkpoint; None: it lies outside."""
    path = posixpath.normpath(path)
    return None if path.startswith(("/", "../")) or path in ("..", ".") else path


def _memory_of(target: torch.Tensor) -> memoryview | None:
    """The memory of a plain row-major tensor on the host; None: it isn't one."""
    if not _is_divisible(target) or target.device.type != "cpu" or not target.is_contiguous():
        return None
    address = target.data_ptr()
    if not address:
        # A wrapper of functionalization, which has another tensor's memory.
        return None
    memory = (ctypes.c_char * target.nbytes).from_address(address)
    # Threads may still write to it when an exception of a signal handler has ended the load.
    memory.owner = target  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _is_divisible(tensor: torch.Tensor) -> bool:
    """Whether its elements may be copied part by part, or together with those of others."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type not in _UNDIVIDED
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_intact(content: memoryview) -> bool:
    """Whether this is an archive of torch.save whose members match their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError):
        return False
