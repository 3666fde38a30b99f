"""Whether the sidecar responds: one ping every other second, and reports when none is answered.

In: a coroutine function that pings. Out: a warning in the log, and a report that saves wait for the sidecar. A
stopped sidecar keeps its connection, and gRPC's own keepalive doesn't detect that on a unix socket
(grpcio 1.85). Fails no save: only deadlines do. On the engine's loop. Owned by a connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pannier.client.engine import engine
from pannier.common import timeouts
from pannier.common.observer_clock import ObserverClock
from pannier.wire.errors import DeadlineError, PannierError, UnavailableError, stopped

_log = logging.getLogger(__name__)


class Heartbeat:
    """Pings as long as :meth:`run` runs.

    Args:
        peer: name of the sidecar, for messages.
        ping: makes one ping, with a time-out in seconds; raises a PannierError.
        connected: whether the sidecar has accepted the connection, so that pings may be answered.
        notify: gets what saves wait for, ``""`` when the sidecar answers again.
    """

    def __init__(
        self,
        peer: str,
        ping: Callable[[float], Awaitable[None]],
        *,
        connected: Callable[[], bool],
        notify: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._ping = ping
        self._connected = connected
        self._notify = notify
        # Trainers hold the GIL for seconds at times: that time must not count against the sidecar.
        self._clock = ObserverClock()
        self._last_seen = self._clock.now()
        self._missed = 0
        self._unresponsive = False
        self._state = ""
        """That its process is stopped, looked up once: each look opens a connection that it doesn't accept."""

    def mark_seen(self) -> None:
        """The sidecar sent something. Any thread."""
        self._last_seen = self._clock.now()

    async def run(self) -> None:
        """Pings until it is cancelled."""
        pause = timeouts.PING_S
        self._clock.tick(pause)
        while True:
            await asyncio.sleep(pause)
            pause = await self._beat()
            self._clock.tick(pause)

    async def _beat(self) -> float:
        """One ping and its evaluation; returns the pause until the next."""
        late_s = self._clock.tick(timeouts.PING_TIMEOUT_S)
        answered = await self._is_answered()
        late_s += self._clock.tick(0.0)
        if answered:
            self._missed = 0
        elif not late_s:
            # Else the answer may have come and been discarded while this thread could not run.
            self._missed += 1
        await self._report()
        return timeouts.PING_S if answered else timeouts.PING_AGAIN_S

    async def _is_answered(self) -> bool:
        if not self._connected():
            return False
        try:
            await self._ping(timeouts.PING_TIMEOUT_S)
        except (DeadlineError, UnavailableError):
            return False
        except PannierError:
            pass  # an error is an answer, too
        self.mark_seen()
        return True

    async def _report(self) -> None:
        unseen_s = self._clock.now() - self._last_seen
        # One missed answer proves nothing: this trainer itself may have been stopped.
        unresponsive = self._missed > 1 and unseen_s > timeouts.UNRESPONSIVE_S
        if unresponsive:
            if not self._unresponsive:
                self._state = await engine().in_thread(lambda: stopped(self._peer))
            seen = f"last seen {unseen_s:.0f} s ago"
            state = self._state if self._connected() else "not connected"
            self._notify(f"the {self._peer} ({seen}{state and '; '}{state})")
        if unresponsive and not self._unresponsive and self._connected():
            # A lost connection has been logged already.
            _log.warning(
                "the %s does not respond, last seen %.0f s ago%s: its saves wait, until their deadlines",
                *(self._peer, unseen_s, self._state and f"; {self._state}"),
            )
        elif self._unresponsive and not unresponsive:
            _log.info("the %s responds again", self._peer)
            self._notify("")
        self._unresponsive = unresponsive
