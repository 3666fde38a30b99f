"""How many saves may be staged but not ingested, and the arenas they hold.

In: requests of ``async_save``. Out: slots, each with an arena. Thread-safe.
"""

import enum
import threading
from collections.abc import Callable
from typing import Final

from pannier.client.arena import Arena, ArenaPool
from pannier.wire.errors import BusyError, DeadlineError, SaveSkippedError

_abandoned: Final[list[Arena]] = []
"""Arenas that a thread of gRPC may still read: never freed, never used again."""


class Fate(enum.Enum):
    """Who may still read an arena that is given back."""

    UNUSED = enum.auto()
    """Nobody: it is used again."""
    READ_BY_SIDECAR = enum.auto()
    """The sidecar, which holds its files: this process lets go of them."""
    READ_HERE = enum.auto()
    """A thread of gRPC in this process: the memory is lost."""


class Slot:
    """The right to hold an arena."""

    def __init__(self, slots: "Slots") -> None:
        self._slots = slots
        self._arena: Arena | None = None

    def hold(self, arena: Arena) -> Arena:
        """Takes over an arena that was acquired from the slots' pool."""
        self._arena = arena
        return arena

    def settle(self) -> None:
        """What is in the arena is ingested: it is kept only for the sidecar, which may have it alone."""
        self._slots._settle(self)

    def free(self, fate: Fate = Fate.UNUSED) -> None:
        """Gives the slot back; ``fate`` is that of its arena."""
        arena, self._arena = self._arena, None
        if arena is not None:
            if fate is Fate.READ_HERE:
                _abandoned.append(arena)
            else:
                self._slots.pool.release(arena, reuse=fate is Fate.UNUSED)
        self._slots._give_back(self)


class Slots:
    """All slots of a client: ``limit`` of them.

    Args:
        holders: says who holds them, for people.
    """

    def __init__(self, limit: int, holders: Callable[[], str] = lambda: "") -> None:
        self._limit = limit
        self._holders = holders
        self.pool = ArenaPool(limit)
        """Where the arenas come from."""
        self._taken: set[Slot] = set()
        self._settled: set[Slot] = set()
        """Those of them whose saves are ingested."""
        self._changed = threading.Condition()

    def take(self, on_busy: str, timeout_s: float) -> Slot:
        """A slot; when there is none, ``on_busy`` decides.

        Raises:
            SaveSkippedError: ``"skip"``.
            BusyError: ``"raise"``.
            DeadlineError: ``"wait"``, and none was given back in ``timeout_s`` seconds.
        """
        slot = Slot(self)
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
                if not self._changed.wait_for(lambda: len(self._taken) < self._limit, timeout_s):
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
            if not self._changed.wait_for(lambda: self._taken <= self._settled, timeout_s):
                return False
        self.pool.close()
        return True

    def _settle(self, slot: Slot) -> None:
        with self._changed:
            self._settled.add(slot)
            self._changed.notify_all()

    def _give_back(self, slot: Slot) -> None:
        with self._changed:
            self._taken.discard(slot)
            self._settled.discard(slot)
            self._changed.notify_all()
