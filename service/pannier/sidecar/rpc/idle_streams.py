"""Cancels ``Write`` streams on which nothing arrives: each holds a thread and perhaps spool space.

In: streams, with the time since which they wait for a message. Out: the end of those that wait for too
long; a client that was stopped meanwhile resumes with another stream. Thread-safe.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

IDLE_S: Final = 30.0
"""A stream that sends nothing for so long is cancelled."""
NO_HEADER_S: Final = 10.0
"""The same for one that hasn't sent its header."""


class Stream:
    """One stream; only its own thread changes it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel
        self.waiting_since = time.monotonic()
        """Infinity while it waits for no message."""
        self.idle_limit_s = NO_HEADER_S

    def take_header(self) -> None:
        """The header has arrived."""
        self.idle_limit_s = IDLE_S
        self.waiting_since = math.inf

    def await_message(self) -> None:
        """The stream waits for its next message."""
        self.waiting_since = time.monotonic()

    def take_message(self) -> None:
        """A message has arrived."""
        self.waiting_since = math.inf


class Streams:
    """All open streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Stream] = set()

    def add(self, cancel: Callable[[], object]) -> Stream:
        """Adds a stream; ``cancel`` ends it."""
        stream = Stream(cancel)
        with self._lock:
            self._open.add(stream)
        return stream

    def remove(self, stream: Stream) -> None:
        """Removes a stream that has ended."""
        with self._lock:
            self._open.discard(stream)

    def cancel_idle(self) -> int:
        """Cancels streams that wait for too long; returns how many. To be called every second or so."""
        now = time.monotonic()
        with self._lock:
            idle = [each for each in self._open if now - each.waiting_since > each.idle_limit_s]
        for stream in idle:
            stream.cancel()
        return len(idle)
