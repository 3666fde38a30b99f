"""Limits how many blocks are sent to peers at a time, in total and to each host.

In: hosts that wait for a block. Out: futures, done when it is the host's turn, in the order of the requests.
A host that doesn't receive holds a few turns, never all. On the event loop.
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
        to_a_host: turns of one host at a time.
    """

    def __init__(self, most: int = MOST_SENT, to_a_host: int = MOST_TO_A_HOST) -> None:
        self._most = most
        self._to_a_host = to_a_host
        self._taken: Counter[str] = Counter()
        """By host."""
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Hosts of the turns that are waited for, in the order of the requests."""

    @property
    def taken(self) -> int:
        """Number of turns in use."""
        return self._taken.total()

    def take(self, host: str) -> "asyncio.Future[None]":
        """A turn, which begins when the future is done. The caller gives it back, begun or not."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = host
        self._grant()
        return turn

    def give(self, host: str, turn: "asyncio.Future[None]") -> None:
        """Gives a turn back: it has ended, or the host waits no longer."""
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
