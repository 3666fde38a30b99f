"""The clock of liveness checks: it stops while this process doesn't run.

A process that was stopped, suspended, or blocked in one thread has read nothing meanwhile: messages of its
peers wait in sockets, and their missing heartbeats are its own fault. In: ticks of the liveness checks.
Out: the time during which this process could have received messages. Thread-safe.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pannier.common import timeouts


class ObserverClock:
    """``time.monotonic()`` without the time by which ticks were late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed = 0.0
        self._due = float("inf")
        self._watchers = 0

    def tick(self, next_s: float) -> float:
        """Called by the observer, which will tick again in ``next_s`` seconds.

        Returns:
            by how many seconds this tick was late; 0 when it was on time.
        """
        with self._lock:
            now = time.monotonic()
            late = max(0.0, now - self._due)
            self._missed += late
            self._due = now + next_s + timeouts.OBSERVER_SLACK_S
            return late

    def now(self) -> float:
        """Seconds; comparable only with times of this clock."""
        with self._lock:
            now = time.monotonic()
            return now - self._missed - max(0.0, now - self._due)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The observer ticks within this block; after the last such block nothing does."""
        with self._lock:
            self._watchers += 1
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1
                if not self._watchers:
                    self._missed, self._due = 0.0, float("inf")


clock: Final = ObserverClock()
"""The clock of this process, if it is a daemon."""


def now() -> float:
    """The time of :data:`clock`."""
    return clock.now()


def call_later(delay_s: float, function: Callable[..., object], *args: Any) -> None:
    """On the running loop: ``function(*args)`` after ``delay_s`` seconds of :data:`clock`."""
    end = now() + delay_s
    loop = asyncio.get_running_loop()

    def fire() -> None:
        left = end - now()
        if left > 0.001:
            loop.call_later(left, fire)
        else:
            function(*args)

    loop.call_later(delay_s, fire)
