"""Loads a plan's items from the archives that were read: bytes in, the planner's tensors filled.

In: the bytes of a range of a data file, and the read items that it holds. Out: tensors and objects,
handed to the planner. Errors name the item, the file and the bytes. Blocking; for one load of one
rank.
"""

import io
import os
import posixpath
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from pannier.client import torch_compat
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.range_reader import Range
from pannier.wire import records
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError


class ItemLoader:
    """Loads items of one checkpoint.

    Args:
        directory: the checkpoint.
        storage_data: of its ``Metadata``: where each item is stored.
        planner: takes the values.
    """

    def __init__(
        self, directory: StorageDir, storage_data: Mapping[Any, Any], planner: LoadPlanner
    ) -> None:
        self._directory = directory
        self._storage_data = storage_data
        self._planner = planner

    def locate(self, item: ReadItem) -> Range:
        """The bytes that hold an item. Raises InvalidRequestError: they can't be read here."""
        info = self._storage_data.get(item.storage_index)
        what = f"{item.storage_index.fqn!r} of {self._directory.url}"
        if not isinstance(info, torch_compat.StorageInfo):
            raise InvalidRequestError(
                f"{what} is stored in a way that Pannier can't read: {info!r:.120}"
            )
        transforms = getattr(info, "transform_descriptors", None)
        if transforms:
            raise InvalidRequestError(
                f"{what} was transformed by {list(transforms)} when it was saved; load it with "
                "torch's FileSystemReader and the extensions that it was saved with"
            )
        path = posixpath.normpath(info.relative_path)
        if path.startswith(("/", "../")) or path in ("..", "."):
            raise InvalidRequestError(
                f"{what} lies outside the checkpoint, in {info.relative_path}"
            )
        if info.offset < 0 or info.length < 0:
            raise InvalidRequestError(f"{what} has an invalid offset or length: {info}")
        return Range(path, info.offset, info.length)

    def load(self, source: Range, content: memoryview, items: Sequence[ReadItem]) -> None:
        """Loads all items that a range holds.

        Raises:
            IntegrityError: the bytes are not the archive that should be there.
            InvalidRequestError: the archive's format is none that Pannier reads.
        """
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_object(source, content, item)
                continue
            if tensor is None:
                tensor = self._load_tensor(source, content, item)
            value = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = self._planner.resolve_tensor(item).detach()
            if target.size() != value.size():
                raise InvalidRequestError(
                    f"{item.storage_index.fqn!r}: the planner wants {tuple(target.size())} where "
                    f"{self._directory.url} has {tuple(value.size())}"
                )
            target.copy_(value)
            self._planner.commit_tensor(item, target)

    def _load_object(self, source: Range, content: memoryview, item: ReadItem) -> None:
        try:
            self._planner.load_bytes(item, io.BytesIO(content))
        except Exception as error:
            # If the archive is intact, the planner failed for another reason than its bytes.
            if isinstance(error, PannierError) or _is_intact(content):
                raise
            raise self._unreadable(source, item, error) from error

    def _load_tensor(self, source: Range, content: memoryview, item: ReadItem) -> torch.Tensor:
        try:
            tensor = torch.load(_MemoryFile(content), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
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
        return IntegrityError(
            f"{item.storage_index.fqn!r} can't be read from bytes {source.offset} to "
            f"{source.offset + source.length} of {self._directory.url}/{source.file}: "
            f"{type(error).__name__}: {error}"
        )

    def _is_safetensors(self, file: str) -> bool:
        head = bytearray(records.SAFETENSORS_HEAD)
        try:
            self._directory.read_into(file, 0, memoryview(head))
        except StorageError:  # shorter, or removed meanwhile
            return False
        return records.is_safetensors(bytes(head))


def _is_intact(content: memoryview) -> bool:
    """Whether this is an archive of torch.save whose members match their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError):
        return False


class _MemoryFile(io.RawIOBase):
    """Bytes in memory as the file that torch.load takes, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._content)}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        chunk = self._content[self._position : self._position + len(view)]
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
