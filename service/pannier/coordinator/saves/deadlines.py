"""A save's deadlines, and notification of the coroutines that wait for its changes.

In: remaining times as ranks report them, and notifications of changes. Out: deadlines on the monotonic
clock, and waits that end by a change or a deadline. Event loop only; no I/O.
"""

import asyncio
import time
from collections.abc import Callable

from pannier.common import observer_clock, timeouts


class Deadlines:
    """Start and deadlines of one save."""

    def __init__(self) -> None:
        self.created_at = time.time()
        self.start = time.monotonic()
        self.first_seen = observer_clock.now()
        """The start on the clock by which heartbeats are measured."""
        self.plan = self.start + timeouts.DEFAULT_SAVE_S
        """For the plan to be agreed by this coordinator; without effect on a resumed save."""
        self.commit = self.start + timeouts.DEFAULT_SAVE_S
        self.storage_wait_s = 0.0
        """Longest wait of the plan for storage, in seconds from the last rank's plan on; 0: no limit."""
        self._recovered_at: float | None = None
        self._reported: dict[str, set[int]] = {"plan": set(), "commit": set()}
        """Ranks that have reported their deadlines."""

    def report(self, rank: int, plan_s: float, commit_s: float) -> None:
        """Records a rank's remaining seconds; 0: not known.

        The earliest deadline of all ranks counts, in whatever order they report. A rank's first
        report counts: what it repeats after a reconnect differs by delays only.
        """
        now = time.monotonic()
        self.plan = self._earliest("plan", rank, plan_s, self.plan, now)
        self.commit = self._earliest("commit", rank, commit_s, self.commit, now)

    def limit_storage_wait(self, seconds: float) -> None:
        """Records how long a rank that waits for its plan lets storage delay it; 0: without limit."""
        known = self.storage_wait_s
        self.storage_wait_s = min(known, seconds) if known and seconds else known or seconds

    def _earliest(self, what: str, rank: int, seconds: float, known: float, now: float) -> float:
        reported = self._reported[what]
        if not seconds or rank in reported:
            return known
        first = not reported
        reported.add(rank)
        return now + seconds if first else min(known, now + seconds)

    def shorten(self, commit: float) -> None:
        """Sets a deadline for the commit unless there is an earlier one."""
        self.commit = min(self.commit, commit)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the commit."""
        return max(0.0, self.commit - time.monotonic())

    def note_recovered(self) -> None:
        """Records that the state of a resumed save was read from storage."""
        if self._recovered_at is None:
            self._recovered_at = time.monotonic()

    @property
    def resumed_commit(self) -> float:
        """The deadline of a resumed save.

        The save may be durable although the deadline of its ranks has passed, which only storage shows. It
        gets ``timeouts.RESUMED_SAVE_S`` once its state was read from storage, and has no deadline before.
        """
        since = time.monotonic() if self._recovered_at is None else self._recovered_at
        return max(self.commit, since + timeouts.RESUMED_SAVE_S)


class Changes:
    """Coroutines that wait for a change of one save, and the function that is called after each change."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._waiting: set[asyncio.Event] = set()
        self.planned = asyncio.Event()
        """Set when the ranks' Plan calls are to be answered; these are many, and wait for nothing else."""

    def notify(self) -> None:
        """Wakes all that wait in :meth:`wait_until`."""
        for event in self._waiting:
            event.set()
        self._on_change()

    async def wait_until(
        self, ready: Callable[[], bool], deadline: Callable[[], float] | None = None
    ) -> bool:
        """Waits for ``ready()``, called after each change; False when ``deadline()`` comes first.

        Args:
            deadline: on the monotonic clock, called after each change; None: without end.
        """
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._waiting.add(event)
        try:
            while not ready():
                event.clear()
                # Not wait_for: before Python 3.12 it loses a cancellation that comes with a change.
                timer = None
                if deadline is not None:
                    left = deadline() - time.monotonic()
                    if left <= 0:
                        return False
                    timer = loop.call_later(left, event.set)
                try:
                    await event.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
        finally:
            self._waiting.discard(event)
        return True
