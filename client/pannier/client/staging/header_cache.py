"""What the memory of a data file still holds of the save before: heads, tails, zeroed gaps.

In: buffers and what was engraved in them. Out: the same again, as long as nobody else wrote
there. Whoever writes to a buffer takes its imprint away first, and leaves one when everything is
in its place; so a failure in between leaves none. Thread-safe.
"""

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from pannier.client.staging.arena import FileBuffer, MemoryMapping


@dataclass(frozen=True)
class CachedHeaders:
    """One buffer's."""

    pattern: object
    """Who engraved it, and may rely on it."""
    views: list[torch.Tensor]
    """Places of tensors, as tensors. They don't keep the memory: to be used while an arena does."""
    together: list[torch.Tensor]
    """Those of them that are filled by one call."""


_lock = threading.Lock()
_imprints: "WeakKeyDictionary[MemoryMapping, CachedHeaders]" = WeakKeyDictionary()


def take(buffer: FileBuffer) -> CachedHeaders | None:
    """The buffer's imprint, which it has no more."""
    if buffer.mapping is None:
        return None
    with _lock:
        return _imprints.pop(buffer.mapping, None)


def leave(buffer: FileBuffer, imprint: CachedHeaders) -> None:
    """Says that the buffer holds ``imprint``."""
    if buffer.mapping is not None:
        with _lock:
            _imprints[buffer.mapping] = imprint
