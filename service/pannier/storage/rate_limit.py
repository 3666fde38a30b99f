"""A limit of bytes per second that all senders of one kind share.

In: how many bytes are about to be sent. Out: how long their sender waits first, so that the limit holds over
each second or so; and whether senders currently wait for the limit. Thread-safe.
"""

import asyncio
import time
from threading import Lock
from typing import Final

_BURST_S: Final = 0.1
"""Seconds of unused limit that may be made up for."""
_RECENT_S: Final = 1.0
"""Seconds after the last wait for which :attr:`RateLimit.limits` stays true."""


class RateLimit:
    """See the module.

    Args:
        bytes_per_s: the limit.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = Lock()
        self._due = 0.0
        """When the next bytes may be sent, on the monotonic clock."""
        self._waits_end = 0.0
        """When the last wait ends, on the same clock."""
        self._waited_s = 0.0

    def reserve(self, count: int, share: float = 1.0) -> float:
        """Seconds after which ``count`` bytes may be sent; they are counted now.

        Args:
            share: part of the limit that may be used now.
        """
        now = time.monotonic()
        with self._lock:
            due = max(self._due, now - _BURST_S)
            self._due = due + count / (self.bytes_per_s * share)
            if due <= now:
                return 0.0
            self._waited_s += max(0.0, due - max(now, self._waits_end))
            self._waits_end = max(due, self._waits_end)
        return due - now

    async def take(self, count: int, share: float = 1.0) -> None:
        """Returns when ``count`` bytes may be sent; as :meth:`reserve`, for an event loop."""
        pause_s = self.reserve(count, share)
        if pause_s:
            await asyncio.sleep(pause_s)

    @property
    def limits(self) -> bool:
        """Whether a sender waits for it, or has within the last second."""
        return time.monotonic() < self._waits_end + _RECENT_S

    @property
    def waited_s(self) -> float:
        """Seconds since the start in which at least one sender has waited for it."""
        with self._lock:
            # Of a wait that hasn't ended, only the time that has passed counts.
            return self._waited_s - max(0.0, self._waits_end - time.monotonic())
