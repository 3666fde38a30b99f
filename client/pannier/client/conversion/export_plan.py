"""Which tensors of a checkpoint go to which file of an export, under which names.

In: a checkpoint's metadata and what the caller chose. Out: the planned tensors, in the order of their
files. What a safetensors file can't hold is refused here, by name, before anything is read. Pure.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pannier.wire.errors import IntegrityError, InvalidRequestError
from pannier.wire.failures import shorten

_RESERVED: Final = "__metadata__"
"""The entry of a safetensors header that isn't a tensor's."""
_NAMED: Final = 4
"""Keys that an error spells out."""


@dataclass(frozen=True)
class Choice:
    """What the caller chose; see :func:`pannier.client.export`."""

    prefix: str
    keys: tuple[str, ...] | None
    exclude: tuple[str, ...]
    dtype: torch.dtype | None
    """Of all floating-point tensors; None: as they are stored."""
    max_file_bytes: int


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of an export."""

    key: str
    """In the checkpoint."""
    name: str
    """In the export."""
    dtype: torch.dtype
    """In the export."""
    shape: torch.Size
    file: int
    """Number of its file, from 1."""

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_export(stored: Mapping[str, Any], choice: Choice) -> list[PlannedTensor]:
    """The tensors of an export, by file.

    Args:
        stored: ``state_dict_metadata`` of the checkpoint.
        choice: which of it, and how.

    Raises:
        InvalidRequestError: nothing is chosen, or something that can't be exported; with the keys.
        IntegrityError: the checkpoint has only a part of a tensor.
    """
    names = _choose(stored, choice)
    _check_values({key: stored[key] for key in names})
    planned: list[PlannedTensor] = []
    number, filled = 1, 0
    for key, name in names.items():
        tensor: TensorStorageMetadata = stored[key]
        dtype = tensor.properties.dtype
        if choice.dtype is not None and dtype.is_floating_point:
            dtype = choice.dtype
        size = math.prod(tensor.size) * dtype.itemsize
        if filled and filled + size > choice.max_file_bytes:
            number, filled = number + 1, 0
        filled += size
        planned.append(PlannedTensor(key, name, dtype, tensor.size, number))
    return planned


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype, or its name; None stays. Raises InvalidRequestError."""
    if dtype is None:
        return None
    found: Any = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidRequestError(
            f"dtype={dtype!r} is no floating-point dtype: give one like torch.bfloat16, or its name"
        )
    return found


def _choose(stored: Mapping[str, Any], choice: Choice) -> dict[str, str]:
    """The names of the chosen keys."""
    below = {
        key: key.removeprefix(choice.prefix) for key in stored if key.startswith(choice.prefix)
    }
    if not below:
        raise InvalidRequestError(
            f"prefix={choice.prefix!r}: no key begins with it; {_describe(stored)}"
        )
    for key, name in below.items():
        if not name or (choice.prefix and name.startswith(".")):
            raise InvalidRequestError(
                f"prefix={choice.prefix!r} leaves {name!r} of {key!r}: end it with the dot that separates "
                "it from the names"
            )
    chosen = below
    if choice.keys is not None:
        chosen = _matching(below, choice.keys, "keys")
    for key in _matching(below, choice.exclude, "exclude"):
        chosen.pop(key, None)
    if not chosen:
        raise InvalidRequestError(f"keys and exclude leave nothing; {_describe(below.values())}")
    return chosen


def _matching(below: Mapping[str, str], patterns: Sequence[str], argument: str) -> dict[str, str]:
    found: set[str] = set()
    for pattern in patterns:
        matching = {
            key
            for key, name in below.items()
            if name == pattern or fnmatch.fnmatchcase(name, pattern)
        }
        if not matching:
            raise InvalidRequestError(
                f"{argument}: no name matches {pattern!r}; {_describe(below.values())}"
            )
        found |= matching
    return {key: name for key, name in below.items() if key in found}


def _describe(names: Iterable[str]) -> str:
    """``there are 'model.*' (812), 'step'``."""
    groups = Counter(
        f"{first}.*" if rest else first
        for first, _, rest in (name.partition(".") for name in names)
    )
    texts = [
        f"{group!r} ({count})" if group.endswith("*") else f"{group!r}"
        for group, count in groups.items()
    ]
    return f"there are {shorten(texts, 16)}" if texts else "the checkpoint is empty"


def _check_values(stored: Mapping[str, Any]) -> None:
    others = [key for key, value in stored.items() if not isinstance(value, TensorStorageMetadata)]
    if others:
        raise InvalidRequestError(
            f"{keys_text(others)} can't be exported: only tensors can, and this is another object; choose "
            "tensors with prefix and keys, or leave it out with exclude"
        )
    layouts = [k for k, v in stored.items() if v.properties.layout is not torch.strided]
    if layouts:
        raise InvalidRequestError(
            f"{keys_text(layouts)} can't be exported: safetensors holds strided tensors, not "
            f"{stored[layouts[0]].properties.layout}; leave it out with exclude"
        )
    if _RESERVED in stored:
        raise InvalidRequestError(f"{_RESERVED!r} is no name for a tensor in a safetensors file")
    for key, value in stored.items():
        held = sum(math.prod(chunk.sizes) for chunk in value.chunks)
        if held < math.prod(value.size):
            raise IntegrityError(
                f"{key!r} can't be exported: the checkpoint has {held} of its {math.prod(value.size)} elements"
            )


def keys_text(keys: Sequence[str]) -> str:
    """``'a', 'b' and 3 more``."""
    return shorten(list(map(repr, keys)), _NAMED)
