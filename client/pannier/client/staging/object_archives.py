"""Objects as DCP stores them: pickled by ``torch.save``.

In: what isn't a tensor. Out: the bytes of an archive. Pickling takes about as long as
copying a megabyte, and most of an optimizer's settings never change.
"""

import io
from functools import lru_cache
from typing import Any, Final

import torch

from pannier.client.xla.shard_tensors import on_host

_REMEMBERED: Final = frozenset({int, float, bool, str, type(None)})
_LONGEST: Final = 16
"""Entries of a tuple and characters of a string that are remembered."""


def serialized(value: Any) -> bytes:
    """The archive of an object, as ``DefaultSavePlanner`` makes it. Raises what pickling raises.

    Tensors of XLA devices in it become the host's.
    """
    known = _recognised(value)
    if known is None:
        return _saved(value)
    options = (
        torch.serialization.get_crc32_options(),
        torch.serialization.get_default_load_endianness(),
    )
    return _remembered(known, options)


def _recognised(value: Any) -> tuple[Any, ...] | None:
    """What tells a small immutable value from all that would be stored otherwise."""
    kind = type(value)
    if kind is float:
        # 0.0 == -0.0, but they are stored differently; so are NaNs.
        return (kind, value.hex()) if value == value else None
    if kind in _REMEMBERED:
        return (kind, value) if kind is not str or len(value) <= _LONGEST else None
    if kind is tuple and len(value) <= _LONGEST:
        parts = tuple(map(_recognised, value))
        return None if None in parts else (kind, parts)
    return None


@lru_cache(maxsize=4096)
def _remembered(known: tuple[Any, ...], _options: object) -> bytes:
    return _saved(_value(known))


def _value(known: tuple[Any, ...]) -> Any:
    kind, value = known
    if kind is float:
        return float.fromhex(value)
    return tuple(map(_value, value)) if kind is tuple else value


def _saved(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(on_host(value), sink)
    return sink.getvalue()
