"""Copies from host memory to host memory, on as many cores as are this rank's.

In: addresses. Out: nothing, once the bytes have arrived. One core copies at
about half of what two do, and torch's own threads are the training loop's.
"""

import ctypes
import os
import threading
from collections import deque
from typing import Final

_PIECE: Final = 8 << 20
"""A copy up to this size is one thread's. Beyond, pieces are as large as the threads' balance
allows: above a threshold of its own (of glibc.cpu.x86_non_temporal_threshold) the C library writes
past the caches, which takes a quarter less time."""
_ROUNDS: Final = 4
"""Pieces of a thread, when all copies are large."""
_ALONE: Final = 8 << 20
"""Up to so many bytes a second thread costs more than it brings."""
_MOST_THREADS: Final = 4


def threads() -> int:
    """How many threads a copy may take: this process's share of the host's cores."""
    cores = len(os.sched_getaffinity(0))
    # torchrun says how many ranks stage at the same time.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


class HostCopies:
    """Copies that are gathered, then done together. Not thread-safe."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int, int]] = []
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._sources: list[object] = []
        self._bytes = 0

    def add(self, target: int, source: int, size: int, owner: object) -> None:
        """Gathers a copy of ``size`` bytes between two addresses.

        ``owner`` keeps the source alive; the target is the caller's to keep.
        """
        self._sources.append(owner)
        self._bytes += size
        self._copies.append((size, target, source))

    @property
    def bytes(self) -> int:
        """Of the gathered copies."""
        return self._bytes

    def run(self) -> None:
        """Returns when every byte is copied, or, if interrupted, when no thread copies any more."""
        count = threads() if self._bytes > _ALONE else 1
        self._cut(max(_PIECE, self._bytes // (_ROUNDS * count if count > 1 else 1)))
        helpers = [
            threading.Thread(target=self._work, name=f"pannier-copy-{index}")
            for index in range(1, count)
        ]
        started = []
        try:
            for helper in helpers:
                helper.start()
                started.append(helper)
            self._work()
        finally:
            self._pieces.clear()
            for helper in started:
                helper.join()
            self._sources.clear()
            self._bytes = 0

    def _cut(self, most: int) -> None:
        """Makes pieces of at most so many bytes, the large ones first: small ones fill the end."""
        for size, target, source in sorted(self._copies, reverse=True):
            for start in range(0, size, most):
                self._pieces.append((target + start, source + start, min(most, size - start)))
        self._copies.clear()

    def _work(self) -> None:
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                return
            # Without the GIL.
            ctypes.memmove(target, source, size)
