"""Reads from storage on another host: a slow request is made a second time, and closing ends all waits.

In: a range of a file. Out: its bytes, in separate memory, read by a separate thread. A request that takes
several times as long as others of its size is made a second time, since it may hang; the first good answer
counts. Storage may take long to answer or to time out: closing fails all waits at once, and what storage
still sends is dropped. Thread-safe; for one load of one rank.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from statistics import median
from typing import Final

from pannier.common import timeouts
from pannier.wire.errors import StorageError

_THREADS: Final = 64
"""Requests at a time; each of the load's own threads waits for two at most."""
_KNOWN: Final = 64
"""Durations of requests of similar sizes from which the median is taken."""
_ENOUGH: Final = 5
"""With fewer durations no median is taken."""
_LONG: Final = 4
"""A request that takes so many times the median is made a second time."""

ReadStorage = Callable[[str, int, int], bytes | memoryview]
"""Reads bytes of a file: its name, an offset and the number of bytes. Raises StorageError."""
Check = Callable[[bytes | memoryview], None]
"""Raises PannierError: the bytes are not those that were saved."""


class _Wanted(Future[bytes | memoryview]):
    """A read whose bytes have not arrived yet."""

    def __init__(self, name: str, offset: int, size: int, check: Check) -> None:
        super().__init__()
        self.range: Final = (name, offset, size)
        self.check: Final = check
        self.requests = 0
        """Number of requests under way."""


class StoredReads:
    """See the module.

    Args:
        read: asks storage; may still run after :meth:`close`.
        url: the checkpoint's directory, for messages.
        hedged: called when a request is made a second time.
    """

    def __init__(
        self, read: ReadStorage, url: str, hedged: Callable[[], None] = lambda: None
    ) -> None:
        self._read = read
        self._url = url
        self._hedged = hedged
        self._lock = threading.Lock()
        self._wanted: set[_Wanted] = set()
        """Reads without an answer yet."""
        self._durations: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KNOWN))
        """Of requests, by the bits of their size."""
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-stored")

    def read_into(
        self, name: str, offset: int, target: memoryview, check: Check = lambda _: None
    ) -> None:
        """Fills ``target``; leaves it as it is, and raises StorageError, once this is closed."""
        wanted = self.start(name, offset, len(target), check)
        if not wait([wanted], self._long_s(len(target))).done:
            with self._lock:
                again = wanted in self._wanted and self._request(wanted)
            if again:
                self._hedged()
        target[:] = wanted.result()

    def start(
        self, name: str, offset: int, size: int, check: Check = lambda _: None
    ) -> "Future[bytes | memoryview]":
        """The bytes, later; or what storage or ``check`` raises, or StorageError once this is closed."""
        wanted = _Wanted(name, offset, size, check)
        with self._lock:
            if self._closed:
                wanted.set_exception(self._ended(name))
            elif self._request(wanted):
                self._wanted.add(wanted)
            else:
                wanted.set_exception(
                    StorageError(f"{self._url}/{name} can't be read: this process is ending")
                )
        return wanted

    def close(self) -> None:
        """Ends all reads with an error, and refuses further ones. Returns at once."""
        with self._lock:
            self._closed = True
            wanted, self._wanted = self._wanted, set()
        for each in wanted:
            each.set_exception(self._ended(each.range[0]))
        # Without cancel_futures, which wakes no thread that waits for them: queued reads end by themselves.
        self._pool.shutdown(wait=False)

    def _request(self, wanted: _Wanted) -> bool:
        """Makes a request; False: the interpreter is ending and starts no threads. The lock is held."""
        try:
            self._pool.submit(self._run, wanted)
        except RuntimeError:
            return False
        wanted.requests += 1
        return True

    def _long_s(self, size: int) -> float:
        """Seconds after which a request of a size is made again."""
        with self._lock:
            known = list(self._durations[size.bit_length()])
        if len(known) < _ENOUGH:
            return timeouts.STORED_FIRST_STALL_S
        return max(timeouts.STORED_STALL_S, _LONG * median(known))

    def _run(self, wanted: _Wanted) -> None:
        if self._closed or wanted.done():
            return
        name, offset, size = wanted.range
        content: bytes | memoryview = b""
        failure: BaseException | None = None
        began = time.monotonic()
        try:
            content = self._read(name, offset, size)
            wanted.check(content)
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are awaited
            failure = error
        with self._lock:
            wanted.requests -= 1
            if failure is None:
                self._durations[size.bit_length()].append(time.monotonic() - began)
            if wanted not in self._wanted or (failure is not None and wanted.requests):
                return
            self._wanted.discard(wanted)
        if failure is not None:
            wanted.set_exception(failure)
        else:
            wanted.set_result(content)

    def _ended(self, name: str) -> StorageError:
        return StorageError(f"reading {self._url}/{name} was cancelled: the load has ended")
