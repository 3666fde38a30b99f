"""How many files of this process are streamed at the same time, adapted to the throughput.

In: bytes as the sidecar acknowledges them. Out: permission to stream. The best number depends on
cores, network and other load, so it is found by trial: one more is kept when that is clearly
faster, one less when it is about as fast, because every stream also takes CPU from training.
Thread-safe.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

MOST: Final = 4
"""Each stream may hold some 20 MiB of messages in flight."""
_WINDOW: Final = 256 << 20
"""Bytes per measurement of the throughput, at the full number of streams; each stream reports
them 16 MiB at a time."""
_FASTER: Final = 1.1
_AS_FAST: Final = 0.95
_PAUSE: Final = 8
"""Windows between trials after one that changed nothing; doubled after each further one."""
_LONGEST_PAUSE: Final = 256


class StreamLimit:
    """The streams of one sidecar client.

    Args:
        most: at the same time; at least 1.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._changed = threading.Condition()
        self._limit = min(2, most)
        self._running = 0
        self._begun = 0.0
        """Start of the window, moved by the time without any stream."""
        self._idle_since = 0.0
        self._bytes: int | None = None
        """In the window; None: the next bytes begin one."""
        self._trial: tuple[int, float] | None = None
        """Limit and bytes per second before the trial that is under way."""
        self._step = 1
        """Change of the limit in the next trial."""
        self._windows_left = 0
        """Until the next trial."""
        self._pause = _PAUSE

    @property
    def limit(self) -> int:
        """How many may run at the moment."""
        return self._limit

    def acquire(self, timeout_s: float) -> bool:
        """Waits for permission to stream; False after ``timeout_s`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running < self._limit, timeout_s):
                return False
            if not self._running:
                self._begun += self._clock() - self._idle_since
            self._running += 1
        return True

    def release(self) -> None:
        """The stream has ended."""
        with self._changed:
            self._running -= 1
            if not self._running:
                self._idle_since = self._clock()
            self._changed.notify()

    def add_bytes(self, count: int) -> None:
        """The sidecar acknowledged ``count`` more bytes of any stream."""
        with self._changed:
            now = self._clock()
            if self._running != self._limit:
                self._bytes = None
            elif self._bytes is None:
                self._begun, self._bytes = now, 0
            else:
                self._bytes += count
                if self._bytes >= _WINDOW and now > self._begun:
                    self._evaluate(self._bytes / (now - self._begun))
                    self._bytes = None

    def _evaluate(self, rate: float) -> None:
        if self._trial is None:
            self._windows_left -= 1
            if self._windows_left < 0:
                self._start_trial(rate)
            return
        (limit, before), self._trial = self._trial, None
        if rate >= before * (_FASTER if self._limit > limit else _AS_FAST):
            # Kept: next trial in the same direction.
            self._step = self._limit - limit
            self._pause, self._windows_left = _PAUSE, 0
            return
        self._step = limit - self._limit
        self._limit = limit
        self._windows_left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._changed.notify()

    def _start_trial(self, rate: float) -> None:
        if not 1 <= self._limit + self._step <= self.most:
            self._step = -self._step
        if 1 <= self._limit + self._step <= self.most:
            self._trial = (self._limit, rate)
            self._limit += self._step
            self._changed.notify()
