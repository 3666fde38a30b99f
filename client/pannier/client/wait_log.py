"""Long waits in the user's own thread, in the log: what waits, how long, and for what.

In: a call, and a function that says what it waits for now. Out: a warning after 5 s, and more and
more rarely after that. One thread for all, started with the first wait. Thread-safe.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pannier.client.timers import Timers

_log = logging.getLogger(__name__)

FIRST_S: Final = 5.0
"""Until the first warning."""
_FACTOR: Final = 4.0
"""The next one comes when the wait is so many times as long."""

_timers = Timers("pannier-wait-log")


class Wait:
    """One wait under way.

    Args:
        call: what the user has called, with its target.
        reason: what it waits for now; empty: not known.
    """

    def __init__(self, call: str, reason: Callable[[], str]) -> None:
        self.call = call
        self.reason = reason
        self._began = time.monotonic()
        self._over = False
        # A call that was interrupted before it could end its wait doesn't log for ever.
        self._warn_if_alive = _weakly(self._warn)
        self._timer = _timers.start(FIRST_S, self._warn_if_alive)

    def end(self) -> None:
        """Nothing is logged any more."""
        self._over = True
        self._timer.cancel()

    def _warn(self) -> None:
        seconds = time.monotonic() - self._began
        _log.warning(
            "%s has waited %.0f s: for %s", self.call, seconds, self.reason() or "an answer"
        )
        self._timer = _timers.start((_FACTOR - 1) * seconds, self._warn_if_alive)
        if self._over:
            self._timer.cancel()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method as long as something else refers to its object."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


@contextmanager
def logged(call: str, reason: Callable[[], str]) -> Iterator[Wait]:
    """Logs the wait in this block; its reason may be replaced on the way."""
    wait = Wait(call, reason)
    try:
        yield wait
    finally:
        wait.end()


def _forget() -> None:
    # The thread is the parent's.
    global _timers
    _timers = Timers("pannier-wait-log")


os.register_at_fork(after_in_child=_forget)
