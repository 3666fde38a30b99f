"""Settings of glibc's allocator for a daemon with messages of a MiB and more.

By default glibc returns the memory of such a message to the system when it is freed, and maps fresh pages
for the next one: clearing those costs more than the copy into them. With these settings it keeps some free
memory, in few arenas, so that the kept memory stays small.
"""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_KEPT: Final = 16 << 20
"""Free bytes at an arena's end that aren't returned to the system."""
_LARGE: Final = 8 << 20
"""Larger allocations are mapped separately, like the few global plans."""
_ARENAS: Final = 4


def keep_freed_memory(*, kept: int = _KEPT, large: int = _LARGE, arenas: int = _ARENAS) -> None:
    """Call it before threads are started. Without effect on other C libraries.

    Args:
        kept: free bytes at an arena's end that aren't returned to the system.
        large: bytes above which an allocation is mapped separately.
        arenas: most arenas.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in (
        (_M_TRIM_THRESHOLD, kept),
        (_M_MMAP_THRESHOLD, large),
        (_M_ARENA_MAX, arenas),
    ):
        mallopt(option, value)
