"""The saves of this process that have not ended, the staging memory that they share, and errors and costs of the others.

In: saves. Out: their admission (``max_in_flight``), waits for their ends, and what is still in progress,
human-readable. Owned by a client; belongs to the engine's loop. The methods for other threads are marked.
"""

import asyncio
import collections
import enum
import math
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from pannier.client import console
from pannier.client.engine import engine
from pannier.client.handle import CommitCallbacks, Resolver, SaveStatus, UnretrievedErrors
from pannier.client.interrupts import in_callback
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.common.deadline import Deadline, set_within
from pannier.common.save_interval import RECENT, SaveCost
from pannier.common.units import size_text
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import BusyError, DeadlineError, InvalidRequestError, SaveSkippedError

if TYPE_CHECKING:
    from pannier.client.saves.save import Save


class ArenaUse(enum.Enum):
    """What may still read an arena that is given back."""

    UNUSED = enum.auto()
    """Nothing: the memory is used again."""
    LOCAL_COPY = enum.auto()
    """Loads, in the sidecar's spool: the memory is used again when the pool has no other."""
    READ_BY_SIDECAR = enum.auto()
    """The sidecar, which has its files: this process unmaps them and doesn't use them again."""


class SaveCosts:
    """What the last committed saves of each group of ranks took. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], collections.deque[SaveCost]] = {}

    def add(self, ranks: tuple[int, ...], cost: SaveCost) -> None:
        """A save of the group of ``ranks`` is committed."""
        with self._lock:
            self._groups.setdefault(ranks, collections.deque(maxlen=RECENT)).append(cost)

    def recent(self) -> list[SaveCost]:
        """The costs of the largest group's saves; empty: no save is committed."""
        with self._lock:
            return list(self._groups[max(self._groups, key=len)]) if self._groups else []


class Saves:
    """See the module.

    Args:
        limit: how many saves may hold staging memory.
        on_ended: called in a worker thread after each end.
    """

    def __init__(self, limit: int, on_ended: Callable[[], object] = lambda: None) -> None:
        self.pool = ArenaPool(limit)
        """Their staging memory."""
        self.errors = UnretrievedErrors()
        self.costs = SaveCosts()
        self._limit = limit
        self._on_ended = on_ended
        self._callbacks = CommitCallbacks(self.errors)
        self._running: dict[Save, None] = {}
        """Those whose handle has no outcome."""
        self._open: dict[Save, None] = {}
        """Those that have something to do in this process; some may not count."""
        self._holding: dict[Save, None] = {}
        """Those in flight, which hold staging memory or are about to."""
        self._users: dict[object, tuple[SidecarClient, int]] = {}
        """Who needs a sidecar's client, with the thread."""
        self._change = asyncio.Event()

    # Of the loop.

    async def admit(self, save: "Save") -> None:
        """Admits another save to those in flight; at the limit, its ``on_busy`` decides.

        Raises:
            SaveSkippedError: ``"skip"``.
            BusyError: ``"raise"``.
            DeadlineError: ``"wait"``, and no save gave its memory back before the deadline.
        """
        if len(self._holding) >= self._limit:
            on_busy, timeout_s = save.options.on_busy, save.options.deadline.remaining()
            what = (
                f"{len(self._holding)} saves of this process hold their staging memory "
                f"(PANNIER_MAX_IN_FLIGHT): {self}"
            )
            if on_busy == "skip":
                raise SaveSkippedError(f"the save was skipped: {what}")
            if on_busy == "raise":
                raise BusyError(f"{what}: save less often, or use on_busy='wait' or 'skip'")
            if not await self.until(
                lambda: len(self._holding) < self._limit or save.is_dropped, timeout_s
            ):
                raise DeadlineError(
                    f"no staging memory became free within {round(timeout_s, 1):g} s: "
                    f"{len(self._holding)} saves hold it (PANNIER_MAX_IN_FLIGHT): {self}; "
                    "save less often or raise it"
                )
        self._holding[save] = None

    async def acquire(self, save: "Save", acquire: Callable[[], Arena]) -> Arena:
        """An arena for an admitted save, by ``acquire``; ``on_busy`` decides while earlier saves have the room.

        Raises:
            SaveSkippedError, DeadlineError: see :meth:`admit`.
            BusyError: ``"raise"``, or no other save has an arena, so that waiting wouldn't help.
        """
        on_busy, deadline = save.options.on_busy, save.options.deadline
        timeout_s = deadline.remaining()
        # This process unmaps unused files of other sizes when the sidecar asks for room.
        again = Deadline(min(timeout_s, 4 * timeouts.BUSY_AGAIN_S))
        while True:
            before = [each for each in self._holding if each is not save and each.arena is not None]
            try:
                return await engine().in_thread(acquire)
            except BusyError as error:
                if before and on_busy == "skip":
                    raise SaveSkippedError(f"the save was skipped: {error}") from error
                if (before and on_busy == "raise") or (again.passed and not before):
                    raise
                if deadline.passed:
                    raise DeadlineError(
                        f"no staging memory became free within {round(timeout_s, 1):g} s: "
                        f"{self}: {error}"
                    ) from error
                await self.until(
                    lambda: any(each.arena is None for each in before),  # noqa: B023
                    min(timeouts.BUSY_AGAIN_S, deadline.remaining()),
                )

    def add(self, save: "Save", resolver: Resolver) -> None:
        """The save has a handle."""
        self._open[save] = None
        if save.options.counts:
            resolver.use_callbacks(self._callbacks)
            self._running[save] = None

    async def give_back(self, save: "Save", use: ArenaUse) -> None:
        """The save, which nothing stages any more, needs its staging memory no longer. Idempotent."""
        arena, save.arena = save.arena, None
        if arena is not None:
            release = partial(
                self.pool.release,
                arena,
                reuse=use is not ArenaUse.READ_BY_SIDECAR,
                copy_of=save.context.save.group if use is ArenaUse.LOCAL_COPY else "",
            )
            # It unmaps what is no longer used, and tells the sidecar.
            await engine().in_thread(release)
        self.release(save)

    def release(self, save: "Save") -> None:
        """The save has given its staging memory back."""
        if save in self._holding:
            del self._holding[save]
            self.changed()

    def end(self, save: "Save") -> None:
        """The save's handle has its outcome."""
        self._running.pop(save, None)
        self.changed()
        self._call_on_ended()

    def finish(self, save: "Save") -> None:
        """The save has nothing to do any more in this process."""
        self._open.pop(save, None)
        self.changed()

    async def until_ended(self, save: "Save") -> None:
        """Waits until the save has given back what it held."""
        await self.until(lambda: save not in self._open, None)

    def changed(self) -> None:
        """Some wait may have ended."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits for ``ready()``, which :meth:`changed` may have made true; False: timed out."""
        deadline = Deadline(math.inf if timeout_s is None else timeout_s)
        while not ready():
            if not await set_within(deadline.remaining(), self._change) and deadline.passed:
                return ready()
        return True

    # Any thread.

    def __len__(self) -> int:
        return len(self._running)

    def __str__(self) -> str:
        return "; ".join(str(status) for status in _statuses(self._running))

    def unsent(self) -> str:
        """Describes the saves that are not handed over, with the bytes left; empty: there are none."""
        unsent = _statuses(save for save in list(self._running) if not save.is_sent)
        left = sum(status.bytes - status.bytes_ingested for status in unsent)
        return _left(unsent, left, "to be handed over")

    def uncommitted(self) -> str:
        """Describes the saves that are not committed, with the bytes not yet in storage; empty: none."""
        saves = _statuses(self._running)
        return _left(saves, _not_uploaded(saves), "to be committed")

    def uncommitted_size(self) -> str:
        """The bytes that are not yet in storage of saves that are not committed; empty: there are none."""
        saves = _statuses(self._running)
        return f"{size_text(_not_uploaded(saves))} of {_count(saves)}" if saves else ""

    def names(self) -> list[str]:
        """The last parts of the checkpoint ids of the saves that are not committed: ``step-30``."""
        return [each.checkpoint_id.rpartition("/")[2] for each in _statuses(self._running)]

    @property
    def idle(self) -> int:
        """How many saves could be admitted now."""
        return self._limit - len(self._holding)

    def log_committed(self, context: sidecar_pb2.SaveContext, size: int, cost: SaveCost) -> None:
        """Logs a committed save of ``size`` bytes and remembers what it took."""
        self.costs.add(tuple(context.ranks), cost)
        console.log_committed(context, size, cost.durable_s, cost.stalled_s)

    def need(self, sidecar: SidecarClient) -> bool:
        """Whether a save in progress, or a user of :meth:`hold`, uses this client."""
        used = [save.sidecar for save in list(self._running)]
        used += [held for held, _ in list(self._users.values())]
        return any(each is sidecar for each in used)

    def hold(self, user: object, sidecar: SidecarClient) -> None:
        """``user``, on this thread, needs the sidecar's client until :meth:`let_go`."""
        engine().post(self._users.__setitem__, user, (sidecar, threading.get_ident()))

    def let_go(self, user: object) -> None:
        """The user needs it no longer. Idempotent."""

        def remove() -> None:
            if self._users.pop(user, None) is not None:
                self.changed()
                self._call_on_ended()

        engine().post(remove)

    def wait_for_users(self, timeout: float | None) -> bool:
        """Waits until no user of :meth:`hold` is left on other threads; False after ``timeout`` seconds."""
        own = {threading.get_ident()}
        return self._wait(lambda: {thread for _, thread in self._users.values()} <= own, timeout)

    def wait(self, timeout: float | None, given: float | None = None) -> None:
        """Waits until every save has ended, and every commit callback has returned.

        Raises:
            DeadlineError: not within ``timeout`` seconds; names ``given`` as the time-out.
            InvalidRequestError: this thread is needed to end the saves.
        """
        check_may_wait("a wait for all saves")
        deadline = None if timeout is None else Deadline(timeout)
        seconds = timeout if given is None else given
        # Even without a time-out the wait ends: each save ends soon after its own deadline.
        if not self._wait(lambda: not self._running, timeout):
            raise DeadlineError(f"timed out after {seconds:g} s; still in progress: {self}")
        if not self._callbacks.wait(None if deadline is None else deadline.remaining()):
            raise DeadlineError(f"after {seconds:g} s a commit callback has not returned")

    def wait_until_sent(self, timeout: float | None) -> bool:
        """Waits until no save needs this process any more; False after ``timeout`` seconds.

        Those that are still being staged, by threads of the program's, are waited for, too.
        """
        return self._wait(lambda: all(save.is_sent for save in self._open), timeout)

    def wait_until_detached_are_sent(self) -> None:
        """The same, but for saves whose calls have not ended: no call of an ending interpreter will."""
        self._wait(lambda: all(each.is_sent for each in self._open if each.is_detached), None)

    def drop_interrupted(self) -> None:
        """Drops the saves of interrupted calls at the interpreter's end; the others continue."""
        engine().call(self._drop_interrupted)

    def abandon(self, reason: str = "", *, unsent_only: bool = False) -> bool:
        """Drops all saves, or those that the sidecar doesn't have yet; returns whether there were any.

        With a ``reason``, names each on stderr: the log may have no reader.
        """
        dropped = [save for save in list(self._running) if not (unsent_only and save.is_sent)]
        for save in dropped:
            self._running.pop(save, None)
            if reason:
                sys.stderr.write(
                    f"pannier: the process ends before {save.handle.status()} has ended: its wait "
                    f"was interrupted; {reason}\n"
                )
        return bool(dropped)

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        return engine().call(lambda: self.until(ready, timeout))

    async def _drop_interrupted(self) -> None:
        self._running = {save: None for save in self._running if save.is_detached}

    def _call_on_ended(self) -> None:
        working = engine()
        working.start(lambda: working.in_thread(self._on_ended))


def check_may_wait(what: str) -> None:
    """Raises InvalidRequestError in a callback that keeps a thread from ending saves."""
    if in_callback():
        raise InvalidRequestError(
            f"{what} in a function given to add_done_callback: it runs on a thread that all saves "
            "need; use add_commit_callback, whose functions have threads of their own"
        )


def _statuses(saves: "Iterable[Save]") -> list[SaveStatus]:
    return [save.handle.status() for save in list(saves)]


def _left(saves: list[SaveStatus], left: int, aim: str) -> str:
    if not saves:
        return ""
    return f"{_count(saves)} {aim}, {size_text(max(0, left))} left: {'; '.join(map(str, saves))}"


def _count(saves: list[SaveStatus]) -> str:
    return f"{len(saves)} save{'s' if len(saves) > 1 else ''}"


def _not_uploaded(saves: list[SaveStatus]) -> int:
    return max(0, sum(status.bytes - status.bytes_uploaded for status in saves))
