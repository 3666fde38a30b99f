"""Threads in which uploads read, checksum, encrypt and send: the part of an upload that costs cores.

Each call has a thread, as it waits for its connection most of the time; but only as many calls work at a time
as cores may be used, and they share a limit of bytes per second. The event loop keeps all state: a call gets
what it needs and returns what it found. When its caller is cancelled, the call is stopped and waited for: a
spool file is not reused while a thread reads it.
"""

import math
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Semaphore
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from pannier.storage.base import StorageError
from pannier.storage.io_threads import Threads
from pannier.storage.rate_limit import RateLimit

P = ParamSpec("P")
T = TypeVar("T")

MOST: Final = 256
"""Calls at a time, waiting ones included."""


class StoppedError(StorageError):
    """The call's caller was cancelled."""


class Turn:
    """One call's right to use a core. For the call's thread, except :meth:`stop`, which is for any thread.

    Args:
        cores: held while the call works.
        limit: of bytes per second; None: none.
    """

    def __init__(self, cores: Semaphore, limit: RateLimit | None) -> None:
        self._cores = cores
        self._limit = limit
        self._lock = Lock()
        self._stopped = False
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once the turn is stopped; -1 once it has ended."""

    def run(self, function: Callable[[], T]) -> T:
        """``function()``, with a core. Raises StoppedError."""
        try:
            with self._cores:
                self.check()
                return function()
        finally:
            self.end()

    def stop(self) -> None:
        """Makes the call raise StoppedError at its next wait or check. Idempotent."""
        self._stopped = True
        with self._lock:
            if self._stop_event >= 0:
                os.eventfd_write(self._stop_event, 1)

    def end(self) -> None:
        """The call has ended, or will never begin. Idempotent."""
        with self._lock:
            if self._stop_event >= 0:
                os.close(self._stop_event)
                self._stop_event = -1

    def check(self) -> None:
        """Raises StoppedError when the turn is stopped."""
        if self._stopped:
            raise StoppedError("the upload was cancelled")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Releases the core within this block."""
        self._cores.release()
        try:
            yield
        finally:
            self._cores.acquire()

    def wait_for(self, fd: int, events: int) -> None:
        """Returns when a descriptor is ready (``select.POLLIN``, ``POLLOUT``). Raises StoppedError.

        It has no deadline: the caller's stops the turn.
        """
        poll = select.poll()
        poll.register(fd, events)
        self._wait(poll, None)

    def take(self, count: int) -> None:
        """Returns when ``count`` bytes may be sent, by the limit. Raises StoppedError."""
        self.check()
        pause_s = 0.0 if self._limit is None else self._limit.reserve(count)
        if pause_s:
            self._wait(select.poll(), math.ceil(pause_s * 1000))

    def _wait(self, poll: "select.poll", timeout_ms: int | None) -> None:
        poll.register(self._stop_event, select.POLLIN)
        with self.waiting():
            poll.poll(timeout_ms)
        self.check()


class UploadThreads:
    """The threads of one process's uploads. Thread-safe, except :meth:`run`, which is for an event loop.

    Args:
        cores: calls that work at the same time.
        limit: of bytes per second; None: none.
    """

    def __init__(self, cores: int = 1, limit: RateLimit | None = None) -> None:
        self.limit = limit
        self._cores = Semaphore(cores)
        self._threads = Threads("uploads", patience_s=math.inf, threads=MOST)

    def request_bytes(self, most: int, unit: int) -> int:
        """Bytes of one request, a multiple of ``unit``: what the limit allows in a second, at most ``most``.

        Thus no request takes so long under the limit that it seems to have stalled.
        """
        if self.limit is None:
            return most
        return min(most, max(unit, self.limit.bytes_per_s // unit * unit))

    async def take(self, count: int) -> None:
        """Returns when ``count`` bytes may be sent, by the limit. On an event loop."""
        if self.limit is not None:
            await self.limit.take(count)

    async def run(
        self, function: Callable[Concatenate[Turn, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs ``function(turn, ...)`` in a thread. When cancelled, it returns after the call has ended."""
        turn = Turn(self._cores, self.limit)
        try:
            return await self._threads.run(
                turn.run, _bound(function, turn, *args, **kwargs), stop=turn.stop
            )
        finally:
            turn.end()


def _bound(function: Callable[..., T], *args: Any, **kwargs: Any) -> Callable[[], T]:
    def bound() -> T:
        return function(*args, **kwargs)

    return bound


default_threads = UploadThreads()
"""For stores that are opened without upload threads."""
