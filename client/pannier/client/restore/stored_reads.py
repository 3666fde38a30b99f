"""Reads of storage that a load needn't wait for until they end.

In: a range of a file. Out: its bytes, in memory of their own, from a thread of their own. Storage may take
its time to answer, or to give up: when these reads are closed, all who wait for one get an error at
once, and what storage still sends is dropped. Thread-safe; for one load of one rank.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from pannier.wire.errors import StorageError

_THREADS: Final = 64
"""Reads at a time; each of the load's own threads waits for one at most."""

ReadStorage = Callable[[str, int, memoryview], None]
"""Fills memory with a file's bytes from an offset on. Raises StorageError."""
Check = Callable[[memoryview], None]
"""Raises PannierError: the bytes are not those that were saved."""


class StoredReads:
    """See the module.

    Args:
        read: fills memory from storage; may still run after :meth:`close`.
        url: the checkpoint's directory, for messages.
    """

    def __init__(self, read: ReadStorage, url: str) -> None:
        self._read = read
        self._url = url
        self._lock = threading.Lock()
        self._wanted: set[Future[memoryview]] = set()
        """Without an answer yet."""
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-stored")

    def read_into(
        self, name: str, offset: int, target: memoryview, check: Check = lambda _: None
    ) -> None:
        """Fills ``target``; leaves it as it is, and raises StorageError, once this is closed."""
        target[:] = self.start(name, offset, len(target), check).result()

    def start(
        self, name: str, offset: int, size: int, check: Check = lambda _: None
    ) -> "Future[memoryview]":
        """The bytes, later; or what storage or ``check`` raises, or StorageError once this is closed."""
        wanted: Future[memoryview] = Future()
        with self._lock:
            if self._closed:
                wanted.set_exception(self._ended(name))
                return wanted
            try:
                self._pool.submit(self._run, wanted, name, offset, size, check)
            except RuntimeError as error:  # the interpreter is ending and starts no threads
                wanted.set_exception(StorageError(f"{self._url}/{name} can't be read: {error}"))
                return wanted
            self._wanted.add(wanted)
        return wanted

    def close(self) -> None:
        """Ends all reads with an error, and refuses further ones. Returns at once."""
        with self._lock:
            self._closed = True
            wanted, self._wanted = self._wanted, set()
        for each in wanted:
            each.set_exception(self._ended("its files"))
        # Not cancel_futures, which wakes no thread that waits: what is queued ends by itself.
        self._pool.shutdown(wait=False)

    def _run(
        self, wanted: "Future[memoryview]", name: str, offset: int, size: int, check: Check
    ) -> None:
        if self._closed:
            return
        memory = np.empty(size, np.uint8).data
        failure: BaseException | None = None
        try:
            self._read(name, offset, memory)
            check(memory)
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are awaited
            failure = error
        with self._lock:
            if wanted not in self._wanted:
                return
            self._wanted.discard(wanted)
        if failure is not None:
            wanted.set_exception(failure)
        else:
            wanted.set_result(memory)

    def _ended(self, name: str) -> StorageError:
        return StorageError(f"{self._url}: {name} isn't read any more: the load has ended")
