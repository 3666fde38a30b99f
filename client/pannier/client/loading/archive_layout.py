"""Where the raw bytes of a plain tensor lie in an archive of ``torch.save``.

In: an archive, as a function that reads any part of it, and what ``.metadata`` has about it. Out:
dtype, shape, strides and the offset of the first element; None for anything but a plain tensor in
this machine's byte order, which is left to ``torch.load``. An archive that this version of torch
wrote is recognised by its first and last bytes; of any other, the zip directory and ``data.pkl`` are
read, the latter with an unpickler that allows the names of plain tensors only. No size or offset in
it is trusted. Thread-safe.
"""

import io
import math
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from pannier.client.staging import archives
from pannier.wire.errors import IntegrityError, StorageError

ReadAt = Callable[[int, memoryview], None]
"""Fills a view with the bytes of an archive from an offset on."""

_END_BYTES: Final = 22
"""The record at the very end of a zip file."""
_HEADER_BYTES: Final = 30
"""A member's header in the zip format, without its name and extra fields."""
_BLOCK_BYTES: Final = 8 << 10
_MOST_BLOCKS: Final = 32
"""Most blocks of directory and pickle that are read. Those of a plain tensor fit into two."""
_NATIVE: Final = sys.byteorder.encode()
_STORAGES: Final = {
    ("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
} | {(module, "UntypedStorage"): torch.uint8 for module in ("torch", "torch.storage")}
"""The dtypes of the classes that a pickle names for a tensor's storage."""


class PlainTensor(NamedTuple):
    """A strided tensor, or a part of one, in an archive."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """Of its first element, in bytes from the start of the archive."""

    @property
    def span(self) -> int:
        """Bytes from the first to the end of the last element."""
        if 0 in self.shape:
            return 0
        last = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return (last + 1) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its bytes are all of :attr:`span`, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def narrow(self, offsets: Sequence[int], sizes: Sequence[int]) -> "PlainTensor":
        """A part of it. Raises IntegrityError: it has no such part."""
        if any(
            offset < 0 or size < 0 or offset + size > own
            for offset, size, own in zip(offsets, sizes, self.shape, strict=False)
        ):
            raise IntegrityError(
                f"elements {tuple(offsets)} to {tuple(map(sum, zip(offsets, sizes, strict=False)))} "
                f"are wanted of a tensor of {self.shape}"
            )
        start = sum(o * stride for o, stride in zip(offsets, self.strides, strict=False))
        count = min(len(sizes), len(self.shape))
        return self._replace(
            shape=(*sizes[:count], *self.shape[count:]),
            offset=self.offset + start * self.dtype.itemsize,
        )

    def blocks(self, most: int) -> Iterator[tuple[tuple[int, ...], "PlainTensor"]]:
        """Parts whose span is at most ``most`` bytes, or one element, and their offsets in it."""
        yield from self._blocks((0,) * len(self.shape), most)

    def _blocks(
        self, at: tuple[int, ...], most: int
    ) -> Iterator[tuple[tuple[int, ...], "PlainTensor"]]:
        if self.span <= most or math.prod(self.shape) <= 1:
            yield at, self
            return
        dim = max(
            (each for each, size in enumerate(self.shape) if size > 1),
            key=lambda each: self.strides[each],
        )
        size, step = self.shape[dim], self.strides[dim] * self.dtype.itemsize
        row = self.span - (size - 1) * step
        rows = max(1, min(size - 1, (most - row) // step + 1 if step else size - 1))
        for start in range(0, size, rows):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            offsets[dim], sizes[dim] = start, min(rows, size - start)
            inner = self.narrow(offsets, sizes)
            yield from inner._blocks((*at[:dim], at[dim] + start, *at[dim + 1 :]), most)

    def view(self, content: memoryview) -> torch.Tensor:
        """The tensor in the bytes of its span: a view of them where they are aligned."""
        if not len(content):
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(content, dtype=self.dtype)
        if flat.data_ptr() % self.dtype.itemsize:
            # torch writes archives back to back, and doesn't copy complex numbers from unaligned addresses.
            flat = torch.frombuffer(bytearray(content), dtype=self.dtype)
        return flat.view(self.shape) if self.is_dense else flat.as_strided(self.shape, self.strides)


class Expected(NamedTuple):
    """What this torch writes for a tensor."""

    tensor: PlainTensor
    head: bytes
    """Its first bytes."""
    end: bytes
    """Its last bytes; empty for an empty tensor's archive, which is all head."""


@lru_cache(maxsize=16384)
def expect(dtype: torch.dtype, shape: torch.Size, length: int) -> Expected | None:
    """The archive that this torch writes for a plain tensor; None when it isn't ``length`` bytes long."""
    if dtype not in archives.DTYPES or not math.prod(shape) * dtype.itemsize < length:
        return None
    try:
        archive = archives.archive(dtype, shape)
    except (OSError, MemoryError):  # a size that no machine has
        return None
    if archive.length != length:
        return None
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    tensor = PlainTensor(dtype, tuple(shape), tuple(reversed(strides)), len(archive.head))
    return Expected(tensor, archive.head, archive.tail[-_END_BYTES:])


def expect_item(metadata: Metadata, length: int, item: ReadItem) -> Expected | None:
    """The archive that this torch writes for an item's stored tensor; None when it isn't ``length`` bytes long."""
    stored = metadata.state_dict_metadata.get(item.storage_index.fqn)
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
    return expect(dtype, shape, length)


def find_tensor(
    read: ReadAt, length: int, expected: Expected | None, peek: ReadAt | None = None
) -> PlainTensor | None:
    """The tensor in an archive; None for what isn't a plain one.

    Args:
        peek: as ``read``, for bytes that are only compared with ``expected``.

    Raises:
        IntegrityError: the archive contradicts itself.
        StorageError: it can't be read.
    """
    if expected is not None:
        head = _bytes_at(peek or read, 0, len(expected.head))
        end = _bytes_at(peek or read, length - len(expected.end), len(expected.end))
        if (head, end) == (expected.head, expected.end):
            return expected.tensor
    return _parse(read, length)


def find_in(content: memoryview, expected: Expected | None) -> PlainTensor | None:
    """:func:`find_tensor` in bytes that were read."""
    if expected is not None:
        head, end = content[: len(expected.head)], content[len(content) - len(expected.end) :]
        if bytes(head) == expected.head and bytes(end) == expected.end:
            return expected.tensor
    return _parse(reading(content), len(content))


def reading(content: memoryview) -> ReadAt:
    """Reads from bytes in memory."""

    def read(offset: int, target: memoryview) -> None:
        target[:] = content[offset : offset + len(target)]

    return read


def unpickle(content: memoryview) -> Any:
    """Loads any object from an archive, with torch's allow-list. Raises what ``torch.load`` raises."""
    file: Any = _ArchiveFile(reading(content), len(content))
    return torch.load(file, map_location="cpu", weights_only=True)


class _ArchiveFile(io.RawIOBase):
    """An archive as a file that ``zipfile`` and ``torch.load`` take, without a copy."""

    def __init__(self, read: ReadAt, length: int) -> None:
        self._read = read
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._read(self._position, view[:count])
        self._position += count
        return count


def _bytes_at(read: ReadAt, offset: int, count: int) -> bytes:
    content = bytearray(count)
    read(offset, memoryview(content))
    return bytes(content)


class _NotPlainError(Exception):
    """The archive doesn't hold a plain tensor in this machine's byte order."""


def _parse(read: ReadAt, length: int) -> PlainTensor | None:
    cached = _in_blocks(read, length)
    try:
        return _described(_Members(cached, length)) if length else None
    except (IntegrityError, StorageError):
        raise
    except _NotPlainError:
        return None
    except Exception as error:  # a damaged directory or pickle can raise anything
        if _bytes_at(cached, 0, min(2, length)) == b"PK":
            raise IntegrityError(f"{type(error).__name__}: {error}") from error
        # Formats of torch before 1.6, or anything else.
        return None


def _in_blocks(read: ReadAt, length: int) -> ReadAt:
    """Reads whole blocks, each once."""
    blocks: dict[int, bytes] = {}

    def read_at(offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            number, start = divmod(offset + done, _BLOCK_BYTES)
            if number not in blocks:
                if len(blocks) == _MOST_BLOCKS:
                    raise _NotPlainError
                first = number * _BLOCK_BYTES
                blocks[number] = _bytes_at(read, first, min(_BLOCK_BYTES, length - first))
            part = blocks[number][start : start + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    return read_at


class _Members:
    """The members of a zip archive. Raises what ``zipfile`` raises."""

    def __init__(self, read: ReadAt, length: int) -> None:
        self._read = read
        self._length = length
        with zipfile.ZipFile(_ArchiveFile(read, length)) as archive:
            self._infos = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._infos if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _NotPlainError
        self._folder = pickles[0].removesuffix("data.pkl")

    def place(self, name: str) -> tuple[int, int] | None:
        """Offset and length of a member's bytes; None: there is no such member.

        Raises IntegrityError: they lie outside the archive.
        """
        info = self._infos.get(self._folder + name)
        if info is None:
            return None
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise _NotPlainError
        if not 0 <= info.header_offset <= self._length - _HEADER_BYTES:
            raise IntegrityError(f"the header of its member {name} lies outside the archive")
        header = _bytes_at(self._read, info.header_offset, _HEADER_BYTES)
        names, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + _HEADER_BYTES + names + extra
        if header[:4] != b"PK\x03\x04" or start + info.file_size > self._length:
            raise IntegrityError(f"its member {name} lies outside the archive")
        return start, info.file_size

    def content(self, name: str) -> bytes | None:
        """A small member; None: there is no such member."""
        place = self.place(name)
        if place is None:
            return None
        if place[1] > _MOST_BLOCKS * _BLOCK_BYTES:
            raise _NotPlainError
        return _bytes_at(self._read, *place)


class _Pickled(NamedTuple):
    """A tensor as ``data.pkl`` describes it; the fields may be anything."""

    storage: Any
    offset: Any
    size: Any
    stride: Any
    dtype: Any


class _Storage(NamedTuple):
    dtype: Any
    key: str
    elements: int


class _Unpickler(pickle.Unpickler):
    """Raises _NotPlainError for every name that a plain tensor's pickle hasn't."""

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage, with the key of its record in the archive."""
        kind, dtype, key, _device, count = pid[:5]
        if kind != "storage" or type(key) is not str or type(count) is not int:
            raise IntegrityError(f"its pickle refers to {pid!r:.120}")
        return _Storage(dtype, key, count)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            # Bound methods: a pickle could change the defaults of a plain function.
            return self._typed if name.endswith("v2") else self._untyped
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._parameter
        if (module, name) in _STORAGES:
            return _STORAGES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _NotPlainError

    def _typed(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, *rest: Any
    ) -> _Pickled:
        if any(rest):
            # Conjugated or negated.
            raise _NotPlainError
        return _Pickled(storage, offset, size, stride, storage.dtype)

    def _untyped(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        *rest: Any,
    ) -> _Pickled:
        return self._typed(storage, offset, size, stride, grad, hooks, *rest)._replace(dtype=dtype)

    def _parameter(self, data: Any, _grad: Any, _hooks: Any) -> Any:
        return data


def _described(members: _Members) -> PlainTensor:
    order = members.content("byteorder")
    if order != _NATIVE and (
        order is not None or torch.serialization.get_default_load_endianness() is not None
    ):
        raise _NotPlainError
    found = _Unpickler(io.BytesIO(members.content("data.pkl") or b"")).load()
    if not isinstance(found, _Pickled) or found.dtype not in archives.DTYPES:
        raise _NotPlainError
    storage, tensor = (
        found.storage,
        PlainTensor(found.dtype, found.size, found.stride, found.offset),
    )
    numbers = (found.offset, *found.size, *found.stride)
    if any(type(each) is not int or each < 0 for each in numbers) or len(found.size) != len(
        found.stride
    ):
        raise IntegrityError(f"its pickle describes a tensor of {found.size} by {found.stride}")
    place = members.place(f"data/{storage.key}")
    held = storage.elements * storage.dtype.itemsize
    first = found.offset * found.dtype.itemsize
    if place is None or place[1] < held or (tensor.span and first + tensor.span > held):
        raise IntegrityError(
            f"its pickle describes {first + tensor.span} bytes of a storage of {held}, of which it has "
            f"{place[1] if place else 0}"
        )
    return tensor._replace(
        shape=tuple(found.size), strides=tuple(found.stride), offset=place[0] + first
    )
