"""Blocking calls of the stores, off the event loop, and the buffers that they fill.

Owned by the process: one small pool of threads, one pool of aligned buffers that
are used again, since touching fresh pages costs more than the copy itself.
"""

import asyncio
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

BUFFER = 8 << 20
"""Bytes of one buffer: a multiple of 256 KiB, as GCS's chunks, and of any disk's block."""
_KEPT = 8
_THREADS = 8

_executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-storage")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs ``function`` in a thread and waits for its end even when cancelled.

    So what it uses (buffers, descriptors) can be given up afterwards.
    """
    call = asyncio.get_running_loop().run_in_executor(_executor, lambda: function(*args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({call})
        if not call.cancelled():
            call.exception()  # Retrieved: the cancellation is what counts.
        raise


class Buffers:
    """Page-aligned buffers of :data:`BUFFER` bytes. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = Lock()

    def take(self) -> mmap.mmap:
        """A buffer with any content; never waits: who uploads bounds how many are out."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return mmap.mmap(-1, BUFFER)

    def give(self, buffer: mmap.mmap) -> None:
        """Takes a buffer back that nobody refers to any more.

        After an error, drop it instead: a connection that is going down may still
        send from it.
        """
        with self._lock:
            if len(self._free) < _KEPT:
                self._free.append(buffer)


buffers = Buffers()
