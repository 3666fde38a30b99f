"""Streams on which nothing comes: each holds a thread and perhaps space, so they are cut.

In: streams that say when they begin to wait for a message. Out: the end of those that wait for too
long; an honest client that was stopped meanwhile goes on with another stream. Thread-safe.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

IDLE_S: Final = 30.0
"""A stream that sends nothing for so long is cut."""
SILENT_S: Final = 10.0
"""The same for one that hasn't even said what it is."""


class Stream:
    """One stream; its own thread alone changes ``waiting_since`` and ``patience_s``."""

    def __init__(self, cut: Callable[[], object]) -> None:
        self.cut = cut
        self.waiting_since = time.monotonic()
        """Infinity while no message is waited for."""
        self.patience_s = SILENT_S

    def busy(self) -> None:
        """A message came."""
        self.waiting_since = math.inf


class Streams:
    """All that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Stream] = set()

    def add(self, cut: Callable[[], object]) -> Stream:
        """One more; ``cut`` ends it."""
        stream = Stream(cut)
        with self._lock:
            self._open.add(stream)
        return stream

    def remove(self, stream: Stream) -> None:
        """It has ended."""
        with self._lock:
            self._open.discard(stream)

    def cut_idle(self) -> int:
        """Ends those that wait for too long; how many. To be called every second or so."""
        now = time.monotonic()
        with self._lock:
            idle = [each for each in self._open if now - each.waiting_since > each.patience_s]
        for stream in idle:
            stream.cut()
        return len(idle)
