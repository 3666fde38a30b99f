"""How many files of this process are streamed at the same time: as many as bring something.

In: bytes as the sidecar acknowledges them. Out: the right to stream. What the best number is
depends on cores, network and whatever else runs there, so it is tried: one more is kept when
that is clearly faster, one less when it is about as fast, for a stream also takes from training.
Thread-safe.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

MOST: Final = 4
"""Each stream may have some 20 MiB of messages under way."""
_WINDOW: Final = 256 << 20
"""Bytes by which a rate is told, while as many files as are allowed were streamed; each stream
tells of them 16 MiB at a time."""
_FASTER: Final = 1.1
_AS_FAST: Final = 0.95
_CALM: Final = 8
"""Windows after a trial that changed nothing; twice as many after each further one."""
_LONGEST_CALM: Final = 256


class Streams:
    """The streams of one session.

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
        """When the window began, later by the time without any stream."""
        self._idle_since = 0.0
        self._bytes: int | None = None
        """Since then; None: the next bytes begin it."""
        self._tried: tuple[int, float] | None = None
        """Limit and bytes per second before the trial that is under way."""
        self._step = 1
        """Of the next trial."""
        self._calm = 0
        """Windows until then."""
        self._pause = _CALM

    @property
    def limit(self) -> int:
        """How many may run at the moment."""
        return self._limit

    def take(self, timeout_s: float) -> bool:
        """Waits for the right to stream; False: for too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running < self._limit, timeout_s):
                return False
            if not self._running:
                self._begun += self._clock() - self._idle_since
            self._running += 1
        return True

    def give(self) -> None:
        """The stream is over."""
        with self._changed:
            self._running -= 1
            if not self._running:
                self._idle_since = self._clock()
            self._changed.notify()

    def moved(self, count: int) -> None:
        """``count`` more bytes of any stream have arrived."""
        with self._changed:
            now = self._clock()
            if self._running != self._limit:
                self._bytes = None
            elif self._bytes is None:
                self._begun, self._bytes = now, 0
            else:
                self._bytes += count
                if self._bytes >= _WINDOW and now > self._begun:
                    self._judge(self._bytes / (now - self._begun))
                    self._bytes = None

    def _judge(self, rate: float) -> None:
        if self._tried is None:
            self._calm -= 1
            if self._calm < 0:
                self._try(rate)
            return
        (limit, before), self._tried = self._tried, None
        if rate >= before * (_FASTER if self._limit > limit else _AS_FAST):
            # Once more in the same direction.
            self._step = self._limit - limit
            self._pause, self._calm = _CALM, 0
            return
        self._step = limit - self._limit
        self._limit = limit
        self._calm = self._pause
        self._pause = min(2 * self._pause, _LONGEST_CALM)
        self._changed.notify()

    def _try(self, rate: float) -> None:
        if not 1 <= self._limit + self._step <= self.most:
            self._step = -self._step
        if 1 <= self._limit + self._step <= self.most:
            self._tried = (self._limit, rate)
            self._limit += self._step
            self._changed.notify()
