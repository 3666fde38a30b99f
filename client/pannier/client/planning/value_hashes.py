"""Hashes of a rank's replicated values, by which the coordinator finds keys whose values differ by rank.

In: the values of a local plan's items. Out: a hash by key, equal for equal values on any rank: of content
alone, where a pickle also depends on which objects are shared. Values of types that have no rule here have
no hash, and aren't compared. Pure functions.
"""

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import crc32c
import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client import torch_compat

_MOST_PARTS: Final = 200_000
"""An object of more parts isn't compared: the caller's thread would take long."""
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)
_BY_REPR: Final = (*_SCALARS, enum.Enum, PurePath, torch.dtype, torch.device, range, slice)


class _NotComparableError(Exception):
    """The value has a part without a rule, or too many parts."""


def value_hashes(
    items: Sequence[WriteItem], values: Mapping[str, Any], *, tensors: bool
) -> dict[str, int]:
    """The hash of each value that other ranks may hold, too, by its key, and offset if it is a part.

    Args:
        items: of the local plan.
        values: by key.
        tensors: whether tensors are read, which takes the time of a copy from their device. Objects always are.
    """
    found = {}
    for item in items:
        value = values.get(item.index.fqn)
        if item.type is WriteItemType.BYTE_IO:
            digest = _hash(value)
        elif tensors and isinstance(value, torch.Tensor):
            digest = _hash_tensor(value)
        else:
            continue
        if digest is not None:
            offset = tuple(item.index.offset or ()) if item.type is WriteItemType.SHARD else ()
            found[item.index.fqn + (f" at {offset}" if offset else "")] = digest
    return found


def _hash(value: Any) -> int | None:
    try:
        return int.from_bytes(_Hasher().digest(value), "little")
    except (_NotComparableError, RecursionError):
        return None


def _hash_tensor(value: torch.Tensor) -> int | None:
    parts = torch_compat.local_tensors(value)
    if len(parts) != 1 or type(parts[0].detach()) is not torch.Tensor:
        return None
    try:
        return _hash(parts[0].detach().cpu())
    except (RuntimeError, NotImplementedError):  # another layout, or a device without copies
        return None


class _Hasher:
    """Digests of nested values; one for each value."""

    def __init__(self) -> None:
        self._parts = 0

    def digest(self, value: Any) -> bytes:
        """Raises _NotComparableError."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _NotComparableError
        kind = type(value)
        parts: list[bytes]
        if isinstance(value, _BY_REPR):
            parts = [repr(value).encode(errors="backslashreplace")]
        elif isinstance(value, Mapping):
            # In any order: that of keys often depends on the rank.
            parts = sorted(self.digest(k) + self.digest(v) for k, v in value.items())
        elif isinstance(value, set | frozenset):
            parts = sorted(map(self.digest, value))
        elif isinstance(value, list | tuple):
            parts = [self.digest(each) for each in value]
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            parts = _tensor_parts(value)
        elif isinstance(value, np.ndarray | np.generic):
            parts = _array_parts(np.asarray(value))
        else:
            raise _NotComparableError
        head = f"{kind.__module__}.{kind.__qualname__} {len(parts)}".encode()
        return hashlib.blake2b(b"\0".join((head, *parts)), digest_size=8).digest()


def _tensor_parts(tensor: torch.Tensor) -> list[bytes]:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise _NotComparableError
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = dense.view(torch.uint8).numpy() if len(dense) else np.zeros(0, np.uint8)
    return [repr((tensor.dtype, tuple(tensor.shape))).encode(), _checksum(raw)]


def _array_parts(array: "np.ndarray[Any, Any]") -> list[bytes]:
    if array.dtype.hasobject:
        raise _NotComparableError
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else array[:0]
    return [repr((array.dtype.str, array.shape)).encode(), _checksum(raw)]


def _checksum(raw: "np.ndarray[Any, Any]") -> bytes:
    return struct.pack("<I", crc32c.crc32c(raw.data) if raw.size else 0)
