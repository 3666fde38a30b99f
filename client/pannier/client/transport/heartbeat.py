"""Whether the sidecar lives: a ping every other second, and what to say when none is answered.

In: a function that pings. Out: a warning in the log, and whom the session's saves wait for. A
stopped sidecar keeps its connection, and gRPC's own keepalive doesn't see that on a unix socket
(grpcio 1.85). Nothing is given up here: that is for the deadlines. One sleeping thread.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from pannier.client.transport.channel import InterruptedCallError
from pannier.common.observer_clock import ObserverClock
from pannier.wire.errors import DeadlineError, PannierError, UnavailableError

_log = logging.getLogger(__name__)

EVERY_S: Final = 2.0
TIMEOUT_S: Final = 2.0
"""Of one ping."""
AGAIN_S: Final = 0.5
"""Until the next one when it was not answered."""
SUSPECT_S: Final = 5.0
"""Silence after which the sidecar is named as what saves wait for."""


class Heartbeat:
    """Pings until it is closed.

    Args:
        peer: who is pinged, for people.
        ping: one ping, within so many seconds; raises a PannierError or InterruptedCallError.
        connected: whether the sidecar has taken us, so that pings may be answered.
        tell: gets whom saves wait for, ``""`` when the sidecar answers again.
    """

    def __init__(
        self,
        peer: str,
        ping: Callable[[float], None],
        *,
        connected: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._ping = ping
        self._connected = connected
        self._tell = tell
        self._closed = threading.Event()
        # Trainers keep the interpreter to themselves at times: their own pauses are no silence.
        self._clock = ObserverClock()
        self._heard = self._clock.now()
        self._missed = 0
        self._suspect = False

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="pannier-ping", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, soon."""
        self._closed.set()

    def heard(self) -> None:
        """The sidecar said something. Any thread."""
        self._heard = self._clock.now()

    def _run(self) -> None:
        pause = EVERY_S
        self._clock.tick(pause)
        while not self._closed.wait(pause):
            pause = self._beat()
            self._clock.tick(pause)

    def _beat(self) -> float:
        """One ping, and what follows from it; returns the pause until the next."""
        late_s = self._clock.tick(TIMEOUT_S)
        answered = self._answered()
        late_s += self._clock.tick(0.0)
        if answered:
            self._missed = 0
        elif not late_s:
            # Else the answer may have come and gone while this thread could not run.
            self._missed += 1
        if not self._closed.is_set():
            self._look()
        return EVERY_S if answered else AGAIN_S

    def _answered(self) -> bool:
        if not self._connected():
            return False
        try:
            self._ping(TIMEOUT_S)
        except (DeadlineError, UnavailableError):
            return False
        except (PannierError, InterruptedCallError):
            pass  # an answer all the same, or our own fork's doing
        self.heard()
        return True

    def _look(self) -> None:
        silent_s = self._clock.now() - self._heard
        # One alone is missed by a trainer that was stopped itself.
        suspect = self._missed > 1 and silent_s > SUSPECT_S
        if suspect:
            reach = "" if self._connected() else "not connected, "
            self._tell(f"the {self._peer} ({reach}last seen {silent_s:.0f} s ago)")
        if suspect and not self._suspect and self._connected():
            # That a connection was lost is said already.
            _log.warning(
                "the %s is silent, last seen %.0f s ago: its saves wait, until their deadlines",
                *(self._peer, silent_s),
            )
        elif self._suspect and not suspect:
            _log.info("the %s is heard again", self._peer)
            self._tell("")
        self._suspect = suspect
