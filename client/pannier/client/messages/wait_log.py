"""Logs long waits in the caller's thread: which call, how long, and what it waits for.

In: a call, and a function that returns what it waits for. Out: a warning after 2 s (on ranks other
than 0 after 8 s), repeated at growing intervals. One thread for all, started with the first wait. Thread-safe.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pannier.client.process_group import process_rank
from pannier.client.timers import Timers
from pannier.common import timeouts

_log = logging.getLogger(__name__)

_FACTOR: Final = 4.0
"""Growth of the interval between warnings."""

_timers = Timers("pannier-wait-log")


class Wait:
    """One wait in progress.

    Args:
        call: the user's call, with its target.
        reason: returns what it waits for; empty: not known; None: it waits for nothing now.
    """

    def __init__(self, call: str, reason: Callable[[], str | None]) -> None:
        self.call = call
        self.reason = reason
        self._began = time.monotonic()
        self._over = False
        # Weakly, so that an interrupted call, which never ends its wait, doesn't log for ever.
        self._warn_if_alive = _weakly(self._warn)
        self._patience_s = (
            timeouts.WAIT_WARNING_OTHERS_S if process_rank() else timeouts.WAIT_WARNING_S
        )
        self._timer = _timers.start(self._patience_s, self._warn_if_alive)

    def end(self) -> None:
        """Stops logging."""
        self._over = True
        self._timer.cancel()

    def _warn(self) -> None:
        now, reason = time.monotonic(), self.reason()
        pause_s = self._patience_s
        if reason is None:
            self._began = now
        else:
            seconds = now - self._began
            _log.warning("%s has waited %.0f s: for %s", self.call, seconds, reason or "an answer")
            pause_s = (_FACTOR - 1) * seconds
        self._timer = _timers.start(pause_s, self._warn_if_alive)
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
def logged(call: str, reason: Callable[[], str | None]) -> Iterator[Wait]:
    """Logs the wait in this block, which may replace its reason."""
    wait = Wait(call, reason)
    try:
        yield wait
    finally:
        wait.end()


def _reset_in_child() -> None:
    # The timers' thread exists only in the parent.
    global _timers
    _timers = Timers("pannier-wait-log")


os.register_at_fork(after_in_child=_reset_in_child)
