"""A limit of bytes per second.

In: how many bytes are about to be sent. Out: a pause, so long that the limit holds over each second or so. On the
event loop.
"""

import asyncio
import time
from typing import Final

_BURST_S: Final = 0.1
"""What wasn't used for so long may be made up for."""


class RateLimit:
    """See the module.

    Args:
        bytes_per_s: the limit.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._due = 0.0
        """When the next bytes may be sent, on the monotonic clock."""

    async def take(self, count: int, share: float = 1.0) -> None:
        """Returns when ``count`` bytes may be sent.

        Args:
            share: part of the limit that may be used now.
        """
        now = time.monotonic()
        due = max(self._due, now - _BURST_S)
        self._due = due + count / (self._bytes_per_s * share)
        if due > now:
            await asyncio.sleep(due - now)
