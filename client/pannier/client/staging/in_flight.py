"""How many saves may be staged but not ingested (``max_in_flight``), and the arenas they hold.

In: calls of ``async_save``. Out: an :class:`InFlightSave` for each, which holds its arena and decides
how it is given back. Owned by the client; thread-safe.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from functools import partial

from pannier.client.interrupts import Condition, aside
from pannier.client.staging.arena import Arena
from pannier.client.staging.arena_pool import ArenaPool
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.wire.errors import BusyError, DeadlineError, SaveSkippedError


class ArenaUse(enum.IntEnum):
    """What may still read an arena that is given back; of two the higher one counts."""

    UNUSED = enum.auto()
    """Nothing: the memory is used again."""
    LOCAL_COPY = enum.auto()
    """Loads, in the sidecar's spool: the memory is used again when the pool has no other."""
    READ_BY_SIDECAR = enum.auto()
    """The sidecar, which has its files: this process unmaps them and doesn't use them again."""


class InFlightSave:
    """One save in flight, and the only owner of its arena. Thread-safe.

    The threads that send the arena read it until :meth:`sent`; the sidecar, if it was handed the
    arena's files, until :meth:`ended`. Either may be called first. The arena is given back after the
    last one.
    """

    def __init__(self, saves: "InFlightSaves") -> None:
        self._saves = saves
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._use: ArenaUse | None = None
        """By the sidecar; None: the save has not ended."""
        self._group = ""
        self._handed_over = False
        self._sending = False
        self._sent = False
        self._freed = False

    @property
    def holds_arena(self) -> bool:
        """Whether it has an arena, which it will give back."""
        return self._arena is not None

    def hold(self, arena: Arena) -> Arena:
        """Takes ownership of an arena that was acquired from :attr:`InFlightSaves.pool`."""
        with self._lock:
            self._arena = arena
            freed = self._freed
        if freed:
            # The save was interrupted while the arena was acquired: nothing was sent from it.
            self._give_back(ArenaUse.UNUSED)
        return arena

    def begin_sending(self) -> bool:
        """A thread is about to send the arena and will call :meth:`sent`; False after :meth:`free`."""
        with self._lock:
            self._sending = not self._freed
            return self._sending

    def sent(self, *, handed_over: bool) -> None:
        """The threads that send the arena have ended.

        Args:
            handed_over: the sidecar may have been given its files: the arena is kept until
                :meth:`ended`, though the save no longer counts as staged and not ingested.
        """
        with self._lock:
            self._sent = True
            self._handed_over = handed_over
        self._settle()

    def ended(self, use: ArenaUse, group: str = "") -> None:
        """The save has ended for this process.

        Args:
            use: LOCAL_COPY when it was committed, UNUSED when the sidecar reported another end,
                READ_BY_SIDECAR when it reported none.
            group: that it belongs to.
        """
        with self._lock:
            self._use = use
            self._group = group
        self._settle()

    def free(self) -> None:
        """Gives the arena back, unless a thread sends it and will call :meth:`sent`."""
        with self._lock:
            if self._sending or self._freed:
                return
            self._freed = True
        self._give_back(ArenaUse.UNUSED)

    def _settle(self) -> None:
        with self._lock:
            if not self._sent or self._freed:
                return
            use = self._use if self._handed_over else ArenaUse.UNUSED
            self._freed = use is not None
        if use is None:
            self._saves.mark_ingested(self)
        else:
            self._give_back(use)

    def _give_back(self, use: ArenaUse) -> None:
        with self._lock:
            arena, self._arena = self._arena, None
        if arena is not None:
            self._saves.pool.release(
                arena,
                reuse=use <= ArenaUse.LOCAL_COPY,
                copy_of=self._group if use is ArenaUse.LOCAL_COPY else "",
            )
        self._saves.discard(self)


class InFlightSaves:
    """The saves in flight of a client, at most ``limit``. Thread-safe.

    Args:
        describe: human-readable description of the saves that hold arenas.
    """

    def __init__(self, limit: int, describe: Callable[[], str] = lambda: "") -> None:
        self._limit = limit
        self._describe = describe
        self.pool = ArenaPool(limit)
        """Their arenas come from here."""
        # Weak: a call that is interrupted between two bytecodes may lose its save without freeing it.
        self._saves: weakref.WeakSet[InFlightSave] = weakref.WeakSet()
        self._ingested: weakref.WeakSet[InFlightSave] = weakref.WeakSet()
        """Saves that hold an arena although they are ingested."""
        self._changed = Condition()

    def admit(self, on_busy: str, timeout_s: float) -> InFlightSave:
        """Admits another save; at the limit, ``on_busy`` decides.

        Raises:
            SaveSkippedError: ``"skip"``.
            BusyError: ``"raise"``.
            DeadlineError: ``"wait"``, and no save gave its arena back within ``timeout_s`` seconds.
        """
        save = InFlightSave(self)
        with self._changed:
            if len(self._saves) >= self._limit:
                what = (
                    f"{len(self._saves)} saves of this process hold their staging memory "
                    f"(PANNIER_MAX_IN_FLIGHT): {self._describe()}"
                )
                if on_busy == "skip":
                    raise SaveSkippedError(f"the save was skipped: {what}")
                if on_busy == "raise":
                    raise BusyError(f"{what}: save less often, or use on_busy='wait' or 'skip'")
                if not self._await(lambda: len(self._saves) < self._limit, timeout_s):
                    raise DeadlineError(
                        f"no staging memory became free within {round(timeout_s, 1):g} s: "
                        f"{len(self._saves)} saves hold it (PANNIER_MAX_IN_FLIGHT): {self._describe()}; "
                        "save less often or raise it"
                    )
            self._saves.add(save)
        return save

    def stage(
        self, save: InFlightSave, acquire: Callable[[], Arena], on_busy: str, timeout_s: float
    ) -> Arena:
        """An arena for an admitted save, from ``acquire``; ``on_busy`` decides while earlier saves have the room.

        Raises:
            SaveSkippedError, DeadlineError: see :meth:`admit`.
            BusyError: ``"raise"``, or no other save has an arena, so that waiting wouldn't help.
        """
        deadline = Deadline(timeout_s)
        # This process unmaps unused files of other sizes when the sidecar asks for room.
        again = Deadline(min(timeout_s, 4 * timeouts.BUSY_AGAIN_S))
        while True:
            before = self._holding(save)
            try:
                return aside(lambda: save.hold(acquire()))
            except BusyError as error:
                if before and on_busy == "skip":
                    raise SaveSkippedError(f"the save was skipped: {error}") from error
                if (before and on_busy == "raise") or (again.passed and not before):
                    raise
                if deadline.passed:
                    raise DeadlineError(
                        f"no staging memory became free within {round(timeout_s, 1):g} s: "
                        f"{self._describe()}: {error}"
                    ) from error
                with self._changed:
                    self._changed.wait_for(
                        partial(self._has_returned, before),
                        min(timeouts.BUSY_AGAIN_S, deadline.remaining()),
                    )

    def _has_returned(self, before: "set[InFlightSave]") -> bool:
        """Whether one of these saves has given its arena back."""
        return not all(each.holds_arena for each in before)

    def _holding(self, but: InFlightSave) -> "set[InFlightSave]":
        """The other saves that have an arena."""
        with self._changed:
            return {each for each in self._saves if each is not but and each.holds_arena}

    @property
    def idle(self) -> int:
        """How many saves could be admitted now."""
        with self._changed:
            return self._limit - len(self._saves)

    def close(self, timeout_s: float | None = None) -> bool:
        """Waits until all staged saves are ingested, then frees the arenas; False: timed out.

        Args:
            timeout_s: None: no limit, since each save has its own deadline.
        """
        with self._changed:
            if not self._await(lambda: self._saves <= self._ingested, timeout_s):
                return False
        self.pool.close()
        return True

    def _await(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits for ``ready()``; False: timed out. The caller holds the lock."""
        deadline = Deadline(float("inf") if timeout_s is None else timeout_s)
        while not self._changed.wait_for(
            ready, min(timeouts.IN_FLIGHT_RECOUNT_S, deadline.remaining())
        ):
            if deadline.passed:
                return False
        return True

    def mark_ingested(self, save: InFlightSave) -> None:
        """The save is ingested, but keeps its arena."""
        with self._changed:
            self._ingested.add(save)
            self._changed.notify_all()

    def discard(self, save: InFlightSave) -> None:
        """The save has given its arena back."""
        with self._changed:
            self._saves.discard(save)
            self._ingested.discard(save)
            self._changed.notify_all()
