"""How many saves may be staged but not ingested, and the arenas they hold.

In: requests of ``async_save``. Out: slots, each with an arena. Thread-safe.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Final

from pannier.client.interrupts import Condition
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.common.deadline import Deadline
from pannier.wire.errors import BusyError, DeadlineError, SaveSkippedError

_LOST_SLOT_S: Final = 1.0
"""How often slots are counted again while one is waited for."""
_abandoned: Final[list[Arena]] = []
"""Arenas that a thread here may still read: never freed, never used again."""


class ArenaUse(enum.IntEnum):
    """Who may still read an arena that is given back; of two the higher one counts."""

    UNUSED = enum.auto()
    """Nothing: it is used again."""
    READ_BY_SIDECAR = enum.auto()
    """The sidecar, which holds its files: this process unmaps them, and stages elsewhere."""
    READ_LOCALLY = enum.auto()
    """A thread in this process: the memory is lost."""


class InFlightSave:
    """The right to hold an arena, and the only place that decides what becomes of its memory.

    Two may read an arena that is sent: the threads that send it, until :meth:`sent`, and the
    sidecar, where its files were handed over, until :meth:`ended`. They come in either order; the
    arena is given back after the last one, and the worse of their fates counts. Thread-safe.
    """

    def __init__(self, slots: "InFlightSaves") -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._sent: ArenaUse | None = None
        self._ended: ArenaUse | None = None
        self._handed_over = False
        self._begun = False
        self._freed = False

    def hold(self, arena: Arena) -> Arena:
        """Takes over an arena that was acquired from the slots' pool."""
        with self._lock:
            self._arena = arena
            freed = self._freed
        if freed:
            # Its save was interrupted while the arena was acquired: nothing was sent from it.
            self._give_back(ArenaUse.UNUSED)
        return arena

    def begin_sending(self) -> bool:
        """A thread is about to send the arena and will call :meth:`sent`; False after :meth:`free`."""
        with self._lock:
            self._begun = not self._freed
            return self._begun

    def sent(self, fate: ArenaUse, *, handed_over: bool) -> None:
        """The threads that send the arena have ended.

        Args:
            fate: UNUSED, or READ_LOCALLY if one of them may still read it.
            handed_over: the sidecar may have been given its files: the arena is kept until
                :meth:`ended`, though the save no longer counts as one that is staged.
        """
        with self._lock:
            self._sent = fate
            self._handed_over = handed_over
        self._decide()

    def ended(self, fate: ArenaUse) -> None:
        """The save has ended for this process.

        Args:
            fate: UNUSED when the sidecar reported its end: it reads nothing more that counts.
                READ_BY_SIDECAR when it did not.
        """
        with self._lock:
            self._ended = fate
        self._decide()

    def free(self) -> None:
        """Gives the slot back, unless a thread has begun to send its arena and will do that."""
        with self._lock:
            if self._begun or self._freed:
                return
            self._freed = True
        self._give_back(ArenaUse.UNUSED)

    def _decide(self) -> None:
        with self._lock:
            if self._sent is None or self._freed:
                return
            kept = self._handed_over and self._ended is None
            self._freed = not kept
            fate = self._sent
            if self._handed_over and self._ended is not None:
                fate = max(fate, self._ended)
        if kept:
            self._slots._settle(self)
        else:
            self._give_back(fate)

    def _give_back(self, fate: ArenaUse) -> None:
        with self._lock:
            arena, self._arena = self._arena, None
        if arena is not None and fate is ArenaUse.READ_LOCALLY:
            _abandoned.append(arena)
        elif arena is not None:
            self._slots.pool.release(arena, reuse=fate is ArenaUse.UNUSED)
        self._slots._give_back(self)


class InFlightSaves:
    """All slots of a client: ``limit`` of them.

    Args:
        holders: says who holds them, for people.
    """

    def __init__(self, limit: int, holders: Callable[[], str] = lambda: "") -> None:
        self._limit = limit
        self._holders = holders
        self.pool = ArenaPool(limit)
        """Where the arenas come from."""
        # A call that was interrupted between two bytecodes may lose its slot without freeing it.
        self._taken: weakref.WeakSet[InFlightSave] = weakref.WeakSet()
        self._settled: weakref.WeakSet[InFlightSave] = weakref.WeakSet()
        """Those of them whose saves are ingested."""
        self._changed = Condition()

    def admit(self, on_busy: str, timeout_s: float) -> InFlightSave:
        """A slot; when there is none, ``on_busy`` decides.

        Raises:
            SaveSkippedError: ``"skip"``.
            BusyError: ``"raise"``.
            DeadlineError: ``"wait"``, and none was given back in ``timeout_s`` seconds.
        """
        slot = InFlightSave(self)
        with self._changed:
            if len(self._taken) >= self._limit:
                what = (
                    f"{len(self._taken)} saves of this process hold their staging memory "
                    f"(PANNIER_MAX_IN_FLIGHT): {self._holders()}"
                )
                if on_busy == "skip":
                    raise SaveSkippedError(f"the save was skipped: {what}")
                if on_busy == "raise":
                    raise BusyError(f"{what}: save less often, or use on_busy='wait' or 'skip'")
                if not self._await(lambda: len(self._taken) < self._limit, timeout_s):
                    raise DeadlineError(f"after {timeout_s:.1f} s still {what}")
            self._taken.add(slot)
        return slot

    @property
    def idle(self) -> int:
        """How many slots are not taken now."""
        with self._changed:
            return self._limit - len(self._taken)

    def close(self, timeout_s: float | None = None) -> bool:
        """Waits until all that is staged is ingested, then frees the arenas; False: not in time.

        Args:
            timeout_s: None: without end, for each save has a deadline of its own.
        """
        with self._changed:
            if not self._await(lambda: self._taken <= self._settled, timeout_s):
                return False
        self.pool.close()
        return True

    def _await(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits for ``ready()``; False: not in time. A lost slot notifies no waiter."""
        deadline = Deadline(float("inf") if timeout_s is None else timeout_s)
        while not self._changed.wait_for(ready, min(_LOST_SLOT_S, deadline.remaining())):
            if deadline.passed:
                return False
        return True

    def _settle(self, slot: InFlightSave) -> None:
        with self._changed:
            self._settled.add(slot)
            self._changed.notify_all()

    def _give_back(self, slot: InFlightSave) -> None:
        with self._changed:
            self._taken.discard(slot)
            self._settled.discard(slot)
            self._changed.notify_all()
