"""How a daemon's memory allocator deals with messages of a MiB and more.

By itself glibc gives the memory of such a message back to the system when it is freed, and takes
fresh pages for the next one: clearing those costs more than the copy into them. Some free memory
is kept instead, in few arenas, so that what is kept stays small.
"""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_KEPT: Final = 16 << 20
"""Free bytes at an arena's end that aren't given back."""
_LARGE: Final = 8 << 20
"""What is larger has pages of its own, as the few global plans have."""
_ARENAS: Final = 4


def keep_freed_memory(*, kept: int = _KEPT, large: int = _LARGE, arenas: int = _ARENAS) -> None:
    """To be called before threads are started. Does nothing where the C library isn't glibc.

    Args:
        kept: free bytes at an arena's end that aren't given back.
        large: bytes of what has pages of its own.
        arenas: at most.
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
