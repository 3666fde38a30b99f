"""Turns of peers to be sent a block: so many blocks at a time are on the way to other hosts.

In: hosts that wait to receive. Out: futures, done when it is their turn, in the order of the requests. A host
that doesn't receive has a few turns, not all. On the event loop.
"""

import asyncio
from collections import Counter
from typing import Final

MOST_SENT: Final = 12
"""Blocks that are sent at a time: gRPC holds most of each one's bytes until the peer has received them."""
MOST_TO_A_HOST: Final = 4


class SendTurns:
    """See the module.

    Args:
        most: turns at a time.
        to_a_host: of those, the most of one host.
    """

    def __init__(self, most: int = MOST_SENT, to_a_host: int = MOST_TO_A_HOST) -> None:
        self._most = most
        self._to_a_host = to_a_host
        self._taken: Counter[str] = Counter()
        """By host."""
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Hosts, in order."""

    @property
    def taken(self) -> int:
        """Turns now."""
        return self._taken.total()

    def take(self, host: str) -> "asyncio.Future[None]":
        """A turn, which begins when the future is done. To be given back in any case."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = host
        self._grant()
        return turn

    def give(self, host: str, turn: "asyncio.Future[None]") -> None:
        """The host's turn has ended, or the host waits no longer."""
        if self._waiting.pop(turn, None) is None:
            self._taken -= Counter([host])
        self._grant()

    def _grant(self) -> None:
        for turn, host in list(self._waiting.items()):
            if self.taken >= self._most:
                return
            if self._taken[host] < self._to_a_host:
                del self._waiting[turn]
                self._taken[host] += 1
                turn.set_result(None)
