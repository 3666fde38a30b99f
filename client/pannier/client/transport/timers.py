"""Deadlines without a thread each: functions that run unless they are renewed in time.

One daemon thread, started with the first alarm, belongs to one :class:`Alarms`.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from pannier.client.interrupts import Condition, aside

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 3600.0
"""Far below what a condition can wait for; then the alarms are looked through again."""


class Alarm:
    """One pending function. Thread-safe."""

    def __init__(self, alarms: "Alarms", delay_s: float, ring: Callable[[], None]) -> None:
        self._alarms = alarms
        self._delay_s = delay_s
        self._ring = ring
        self.due = time.monotonic() + delay_s

    def renew(self) -> None:
        """Starts the delay again."""
        self.due = time.monotonic() + self._delay_s

    def cancel(self) -> None:
        """The function won't run, unless it is running already; it is let go."""
        self._alarms._remove(self)
        self._ring = _nothing


class Alarms:
    """Runs alarms that are due. Their functions must be quick and may not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = Condition()
        self._pending: set[Alarm] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def set(self, delay_s: float, ring: Callable[[], None]) -> Alarm:
        """Runs ``ring`` in ``delay_s`` seconds."""
        alarm = Alarm(self, delay_s, ring)
        with self._condition:
            self._pending.add(alarm)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # Not here, where a signal handler's exception could end the start half-way.
                aside(self._thread.start)
            self._condition.notify()
        return alarm

    def close(self) -> None:
        """Forgets all alarms and ends the thread."""
        with self._condition:
            self._closed = True
            self._pending.clear()
            self._condition.notify()

    def _remove(self, alarm: Alarm) -> None:
        with self._condition:
            self._pending.discard(alarm)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                due = [alarm for alarm in self._pending if alarm.due <= now]
                self._pending.difference_update(due)
                if not due:
                    next_due = min((a.due for a in self._pending), default=None)
                    delay = None if next_due is None else min(_LONGEST_WAIT_S, next_due - now)
                    self._condition.wait(delay)
            while due:
                self._ring(due.pop())

    @staticmethod
    def _ring(alarm: Alarm) -> None:
        try:
            alarm._ring()
        except Exception:  # noqa: BLE001 - one alarm must not silence the others
            _log.exception("an alarm failed")
        finally:
            alarm._ring = _nothing


def _nothing() -> None:
    """What a spent alarm does."""
