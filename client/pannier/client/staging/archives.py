"""The ``torch.save`` archives that DCP stores: of plain tensors, without the tensor, and of objects.

In: a dtype and a shape. Out: the bytes before and after the raw ones. They depend on nothing else
as long as the tensor is fresh, detached, contiguous and on the CPU: so offsets are known when the
plan is, and no tensor is serialised. In: an object. Out: its pickle as an archive; the archives of
small immutable values are cached, for pickling takes about as long as copying a megabyte, and most
of an optimizer's settings never change. Thread-safe.
"""

import io
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, Final, NamedTuple, cast

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client.xla.shard_tensors import on_host

_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_CACHED_TYPES: Final = frozenset({int, float, bool, str, type(None)})
_MOST_CACHED: Final = 16
"""Most entries of a tuple and characters of a string that are cached."""


def _existing(*names: str) -> set[torch.dtype]:
    return {getattr(torch, name) for name in names if hasattr(torch, name)}


def _can_copy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except NotImplementedError:
        return False
    return True


DTYPES: Final = frozenset(
    _existing(
        *("float64", "float32", "float16", "bfloat16"),
        *("complex128", "complex64", "complex32", "bcomplex32"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    # torch 2.9 has the dtype, but can't copy it.
    | set(filter(_can_copy, _existing("float4_e2m1fn_x2")))
)
"""The dtypes whose archives need no tensor: raw bytes without quantisation parameters. Others are serialised."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive is ``head``, then ``body`` raw row-major bytes, then ``tail``."""

    head: bytes
    body: int
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.body + len(self.tail)


@lru_cache(maxsize=16384)
def archive(dtype: torch.dtype, shape: Sequence[int]) -> Archive:
    """The archive of a row-major tensor. ``shape`` is hashable: a tuple or torch.Size.

    Loads with ``torch.load(weights_only=True)``. Thread-safe.

    Raises ValueError for a dtype that isn't in :data:`DTYPES`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} has no archive template")
    body = math.prod(shape) * dtype.itemsize
    sink = _Sink(body)
    with torch.serialization.skip_data():
        torch.save(_hollow(dtype, shape, body), cast("IO[bytes]", sink))
    head, tail = sink.parts()
    return Archive(head, body, tail)


class Part(NamedTuple):
    """The part of a tensor that an item stores, by its plan."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def archive(self) -> Archive:
        """What is stored for it."""
        return archive(self.dtype, self.shape)


def planned_part(item: WriteItem) -> Part | None:
    """What an item stores; None if archives of its dtype have no template, or it is no tensor."""
    data = item.tensor_data
    if item.type is WriteItemType.BYTE_IO or data is None:
        return None
    if data.properties.dtype not in DTYPES:
        return None
    shape, offsets = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    return Part(data.properties.dtype, shape, offsets, tuple(data.size))


def _hollow(dtype: torch.dtype, shape: Sequence[int], nbytes: int) -> torch.Tensor:
    """A tensor that takes address space but no memory.

    ``torch.empty`` would fill it when deterministic algorithms are on.
    """
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    reserved = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(reserved, dtype=dtype).view(tuple(shape))


class _Sink:
    """A file that keeps what is written; its one seek stands for the raw bytes."""

    def __init__(self, body: int) -> None:
        self._body = body
        self._written = bytearray()
        self._skipped_at: int | None = None

    def parts(self) -> tuple[bytes, bytes]:
        """The bytes before and after the raw ones."""
        cut = self._skipped_at
        if cut is None:
            if self._body:
                raise RuntimeError("torch.save wrote no raw bytes under skip_data")
            cut = len(self._written)
        return bytes(self._written[:cut]), bytes(self._written[cut:])

    def flush(self) -> None:
        pass

    def write(self, data: Any, /) -> int:
        self._written += data
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_CUR or offset != self._body or self._skipped_at is not None:
            raise RuntimeError(f"torch.save sought {offset} from {whence} under skip_data")
        self._skipped_at = len(self._written)
        return self.tell()

    def tell(self) -> int:
        return len(self._written) + (self._body if self._skipped_at is not None else 0)


def serialized(value: Any) -> bytes:
    """The archive of an object, as ``DefaultSavePlanner`` makes it. Raises what pickling raises.

    XLA tensors in it are moved to the host.
    """
    key = _cache_key(value)
    if key is None:
        return _pickled(value)
    options = (
        torch.serialization.get_crc32_options(),
        torch.serialization.get_default_load_endianness(),
    )
    return _cached_archive(key, options)


def _cache_key(value: Any) -> tuple[Any, ...] | None:
    """Identifies a small immutable value by type and content; None: it is not cached."""
    kind = type(value)
    if kind is float:
        # 0.0 == -0.0, but they are stored differently; so are NaNs.
        return (kind, value.hex()) if value == value else None
    if kind in _CACHED_TYPES:
        return (kind, value) if kind is not str or len(value) <= _MOST_CACHED else None
    if kind is tuple and len(value) <= _MOST_CACHED:
        keys = tuple(map(_cache_key, value))
        return None if None in keys else (kind, keys)
    return None


@lru_cache(maxsize=4096)
def _cached_archive(key: tuple[Any, ...], _options: object) -> bytes:
    return _pickled(_value(key))


def _value(key: tuple[Any, ...]) -> Any:
    kind, value = key
    if kind is float:
        return float.fromhex(value)
    return tuple(map(_value, value)) if kind is tuple else value


def _pickled(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(on_host(value), sink)
    return sink.getvalue()


def unknown_globals(archive: bytes | memoryview) -> list[str]:
    """The names in an archive that torch unpickles only after ``add_safe_globals``; empty also if it is damaged."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(archive)))
    except Exception:  # noqa: BLE001 - the bytes may be anything
        return []
