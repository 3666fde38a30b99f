"""The headers that an earlier save left in a buffer: archive heads and tails, and zeroed gaps.

In: buffers, and the headers written to them. Out: these headers again, as long as nothing else was
written to the buffer. A writer takes the headers away before it writes to a buffer, and puts them
back once all bytes are in place; so after a failure there are none. Thread-safe.
"""

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from pannier.client.staging.arena import FileBuffer, MemoryMapping


@dataclass(frozen=True)
class CachedHeaders:
    """The headers of one buffer."""

    layout: object
    """The file layout that they belong to."""
    views: list[torch.Tensor]
    """The raw bytes of each archive, as tensors. They don't keep the memory mapped: the arena does."""
    small_views: list[torch.Tensor]
    """Those of them that are filled by one call."""


_lock = threading.Lock()
_cached: "WeakKeyDictionary[MemoryMapping, CachedHeaders]" = WeakKeyDictionary()


def take(buffer: FileBuffer) -> CachedHeaders | None:
    """The buffer's headers, which are no longer cached then; None when they must be written."""
    if buffer.mapping is None:
        return None
    with _lock:
        return _cached.pop(buffer.mapping, None)


def put(buffer: FileBuffer, headers: CachedHeaders) -> None:
    """Caches the headers that the buffer holds."""
    if buffer.mapping is not None:
        with _lock:
            _cached[buffer.mapping] = headers
