"""Timers that share one thread: functions that run unless they are renewed or cancelled in time.

In: delays and callbacks. One daemon thread, started with the first timer, belongs to one
:class:`Timers`. Thread-safe.
"""

import logging
import threading
import time
from collections.abc import Callable

from pannier.client.interrupts import Condition, aside
from pannier.common import timeouts

_log = logging.getLogger(__name__)


class Timer:
    """One pending callback. Thread-safe."""

    def __init__(self, timers: "Timers", delay_s: float, callback: Callable[[], None]) -> None:
        self._timers = timers
        self._delay_s = delay_s
        self._callback = callback
        self.due = time.monotonic() + delay_s

    def renew(self) -> None:
        """Starts the delay again."""
        self.due = time.monotonic() + self._delay_s

    def cancel(self) -> None:
        """The callback won't run, unless it is running already; it is no longer referenced."""
        self._timers._remove(self)
        self._callback = _nothing

    def run(self) -> None:
        """Calls the callback, once. Logs what it raises."""
        try:
            self._callback()
        except Exception:  # noqa: BLE001 - the other timers must run all the same
            _log.exception("a timer's callback failed")
        finally:
            self._callback = _nothing


class Timers:
    """Runs timers that are due. Callbacks must be quick and may not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = Condition()
        self._pending: set[Timer] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` in ``delay_s`` seconds."""
        timer = Timer(self, delay_s, callback)
        with self._condition:
            self._pending.add(timer)
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # Not here, where a signal handler's exception could interrupt the start.
                aside(lambda: self._begin(thread))
            self._condition.notify()
        return timer

    def close(self) -> None:
        """Drops all timers and ends the thread."""
        with self._condition:
            self._closed = True
            self._pending.clear()
            self._condition.notify_all()

    def _begin(self, thread: threading.Thread) -> None:
        thread.start()
        # Only now: it may have failed, and the next timer tries again.
        self._thread = thread

    def _remove(self, timer: Timer) -> None:
        with self._condition:
            self._pending.discard(timer)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                due = [timer for timer in self._pending if timer.due <= now]
                self._pending.difference_update(due)
                if not due:
                    next_due = min((timer.due for timer in self._pending), default=None)
                    delay = (
                        None if next_due is None else min(timeouts.LONGEST_TIMER_S, next_due - now)
                    )
                    self._condition.wait(delay)
            while due:
                due.pop().run()


def _nothing() -> None:
    """The callback of a timer that has run or was cancelled."""
