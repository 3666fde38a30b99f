"""Threads for the stores' blocking calls, and the buffers that these fill.

Each place (a directory of checkpoints, the spool, connection set-up) has a separate small pool of threads,
so that hanging calls to one place don't block the others. A call that doesn't return is abandoned: its
thread is replaced, up to a limit, and keeps its resources until it ends. The threads are daemon threads: a
process exits without hanging ones. The pools belong to the process, as does a pool of aligned buffers, which
are reused because touching fresh pages costs more than the copy.
"""

import asyncio
import math
import mmap
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Lock, Thread
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

from pannier.common import timeouts
from pannier.storage.base import StorageError

T = TypeVar("T")

BUFFER = 8 << 20
"""Bytes of one buffer: a multiple of 256 KiB, as GCS's chunks, and of any disk's block."""
_KEPT = 8
_THREADS: Final = 8
"""Threads of one place."""
MOST_HUNG: Final = 16
"""When so many calls to one place hang, further calls fail at once."""


class HungError(StorageError):
    """A blocking call has not returned in time and was abandoned."""


class _Call(Generic[T]):
    """One call. Changed with its pool's lock held."""

    def __init__(
        self,
        function: Callable[[], T],
        name: str,
        undo: Callable[[T], object] | None = None,
        *,
        closing: bool,
    ) -> None:
        self.function = function
        self.name = name
        self.closing = closing
        """The call releases a resource, so it is run in any case."""
        self.future: Future[T] = Future()
        self._undo = undo
        self.begun = self.ended = False
        self.unwanted = False
        """Its caller doesn't wait for it any more: the result is undone."""

    def undo(self, result: T) -> None:
        if self._undo is not None:
            self._undo(result)


class Threads:
    """Runs the blocking calls to one place. Thread-safe, except :meth:`run`, which is for an event loop.

    Args:
        place: for errors.
        patience_s: seconds that a cancelled caller waits for a running call before it abandons the call;
            infinite: never.
        threads: most calls at a time; with 1, calls run in the order of their submission.
    """

    def __init__(
        self, place: str, *, patience_s: float = timeouts.HUNG_CALL_S, threads: int = _THREADS
    ) -> None:
        self.place = place
        self._patience_s = patience_s
        self._most = threads
        self._changed = Condition()
        self._queue: deque[_Call[Any]] = deque()
        self._threads = self._idle = 0
        self._hung: set[_Call[Any]] = set()
        _pools.add(self)

    @property
    def hung(self) -> int:
        """Abandoned calls that have not returned."""
        return len(self._hung)

    async def run(
        self,
        function: Callable[..., T],
        *args: Any,
        until: float = math.inf,
        undo: Callable[[T], object] | None = None,
        stop: Callable[[], object] | None = None,
        closing: bool = False,
    ) -> T:
        """Runs ``function(*args)`` in a thread.

        When cancelled, it returns after the call has ended, so that the caller can release its
        resources: at once if the call has not begun, after some seconds if it hangs.

        Args:
            until: time.monotonic() at which the call is abandoned.
            undo: called in any thread with the result of a call whose caller was cancelled.
            stop: called when the caller is cancelled, so that a call that waits ends at once.
            closing: accepted even when too many calls hang, and run even if its caller was cancelled.

        Raises:
            HungError: it did not return by ``until``, or too many other calls hang.
        """
        began = time.monotonic()
        call = _Call(lambda: function(*args), _name(function, *args), undo, closing=closing)
        self._submit(call)
        waiter = asyncio.wrap_future(call.future)
        try:
            if until == math.inf:
                # Much faster than asyncio.wait, which matters for calls as short as a chunk's.
                return await asyncio.shield(waiter)
            await asyncio.wait({waiter}, timeout=max(0.0, until - began))
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            await self._end(call, waiter)
            raise
        if not waiter.done() and self._give_up(call):
            raise HungError(
                f"{self.place}: {call.name} has not returned for {time.monotonic() - began:.0f} s: "
                "does the file system mounted there respond?"
            )
        return await waiter

    def submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Runs ``function(*args)`` in a thread, also when its caller no longer waits. Any thread."""
        call = _Call(lambda: function(*args), _name(function, *args), closing=True)
        self._submit(call)
        return call.future

    def _submit(self, call: _Call[Any]) -> None:
        with self._changed:
            if len(self._hung) >= MOST_HUNG and not call.closing:
                raise HungError(
                    f"{len(self._hung)} calls to {self.place} hang: does the file system mounted "
                    "there respond? It is used again once they return"
                )
            self._queue.append(call)
            try:
                self._provide()
            except RuntimeError as error:
                # A running thread takes the call when it has nothing else to do.
                if not self._threads:
                    self._queue.remove(call)
                    raise self._no_thread(error) from error

    def _no_thread(self, error: RuntimeError) -> StorageError:
        return StorageError(
            f"no thread for {self.place} can be started: {error}; does the limit of the "
            "container, or of the user (ulimit -u), allow for more threads?"
        )

    def _provide(self) -> None:
        """Wakes or starts a thread for the first call in the queue; with the lock held."""
        if self._idle >= len(self._queue):
            self._changed.notify()
        elif self._threads < self._most:
            Thread(target=self._work, name=f"pannier-storage {self.place}", daemon=True).start()
            self._threads += 1

    async def _end(self, call: _Call[Any], waiter: "asyncio.Future[Any]") -> None:
        """After the caller's cancellation: withdraws the call, waits for its end, or abandons it."""
        with self._changed:
            if not call.begun:
                self._withdraw(call)
                return
            call.unwanted = not call.ended
        end = time.monotonic() + self._patience_s
        while not waiter.done() and (left := end - time.monotonic()) > 0:
            try:
                await asyncio.wait({waiter}, timeout=None if left == math.inf else left)
            except asyncio.CancelledError:
                continue
        if not waiter.done() and self._give_up(call):
            return
        await asyncio.wait({waiter})
        if not call.unwanted and waiter.exception() is None:
            call.undo(waiter.result())
        waiter.exception()  # Retrieved: the cancellation is raised instead.

    def _withdraw(self, call: _Call[Any]) -> None:
        """Takes a call that has not begun out of the queue, unless it is ``closing``; with the lock held."""
        if not call.closing:
            self._queue.remove(call)

    def _give_up(self, call: _Call[Any]) -> bool:
        """Withdraws or abandons a call; False when it has just ended."""
        with self._changed:
            if call.ended:
                return False
            if not call.begun:
                self._withdraw(call)
                return True
            call.unwanted = True
            self._hung.add(call)
            # A new thread may replace the call's thread.
            self._threads -= 1
            if self._queue:
                try:
                    self._provide()
                except RuntimeError as error:
                    if not self._threads:
                        self._refuse(error)
            return True

    def _refuse(self, error: RuntimeError) -> None:
        """Fails the calls in the queue, which no thread is left to run; with the lock held."""
        while self._queue:
            call = self._queue.popleft()
            call.begun = call.ended = True
            call.future.set_exception(self._no_thread(error))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._idle += 1
                    notified = self._changed.wait(timeouts.IO_THREAD_IDLE_S)
                    self._idle -= 1
                    if not notified and not self._queue:
                        self._threads -= 1
                        return
                call = self._queue.popleft()
                call.begun = True
            self._run(call)
            with self._changed:
                if call in self._hung:
                    self._hung.discard(call)
                    return
            # The call may refer to large objects.
            del call

    def _run(self, call: _Call[Any]) -> None:
        try:
            result, error = call.function(), None
        except BaseException as raised:  # noqa: BLE001 - raised in the caller
            result, error = None, raised
        with self._changed:
            call.ended = True
            abandoned = call in self._hung
        if call.unwanted and error is None:
            call.undo(result)
        if abandoned:
            # The caller's event loop may be closed.
            return
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)


def _name(*parts: Any) -> str:
    """Name of the innermost function."""
    names = [getattr(each, "__name__", "a call") for each in parts if callable(each)]
    return names[-1].strip("_")


class Guarded:
    """A resource of calls in threads: closed after the last of them has returned.

    Thus an abandoned call never uses a descriptor that has been reused for another file. Thread-safe.
    """

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        self._lock = Lock()
        self._users = 0
        self._closing = False

    def use(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)``. Raises StorageError after :meth:`close`."""
        with self._lock:
            if self._closing:
                raise StorageError(f"{function.__name__} was called after its file was closed")
            self._users += 1
        try:
            return function(*args)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> bool:
        """Closes it now (True), or when the last call has returned (False)."""
        with self._lock:
            self._closing = True
            busy = self._users > 0
        if not busy:
            self._close()
        return not busy


_pools: "WeakSet[Threads]" = WeakSet()
_by_place: "WeakValueDictionary[str, Threads]" = WeakValueDictionary()
_lock = Lock()

setup_threads = Threads("the set-up of connections to storage")
"""For credentials, tokens and clients."""
spool_threads = Threads("the spool", patience_s=math.inf)
"""For reads of replicas and local copies: a spool file is not reused while a thread reads it."""
ingest_threads = Threads("the spool", patience_s=math.inf)
"""For the chunks of streams, and for the checksums of mapped files."""
reservation_threads = Threads("the spool", patience_s=math.inf)
"""For the spool's directory and space: reserving many GiB takes seconds, for which no chunk should wait."""


def threads_of(place: str) -> Threads:
    """The pool of a place, shared by name."""
    with _lock:
        found = _by_place.get(place)
        if found is None:
            found = _by_place[place] = Threads(place)
        return found


def abandoned() -> int:
    """Abandoned calls of this process that have not returned."""
    with _lock:
        return sum(pool.hung for pool in list(_pools))


class Buffers:
    """Page-aligned buffers of :data:`BUFFER` bytes. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = Lock()

    def take(self) -> mmap.mmap:
        """A buffer with any content. Never waits: the number of uploads limits the buffers."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return mmap.mmap(-1, BUFFER)

    def give(self, buffer: mmap.mmap) -> None:
        """Returns a buffer without references to it.

        After an error, drop it instead: a closing connection may still send from it.
        """
        with self._lock:
            if len(self._free) < _KEPT:
                self._free.append(buffer)


buffers = Buffers()
