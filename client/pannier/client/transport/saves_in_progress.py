"""The saves of this process that have not ended, and the errors and costs of those that have.

In: save tasks. Out: waits for their ends, and what is still in progress, human-readable. Owned by a
save factory. Thread-safe: tasks end on threads of their sidecar clients.
"""

import collections
import sys
import threading
from collections.abc import Callable

from pannier.client.handle import CommitCallbacks, SaveStatus, UnretrievedErrors
from pannier.client.interrupts import Condition, in_callback
from pannier.client.transport.save_status import StatusFollower
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common.deadline import Deadline
from pannier.common.save_interval import RECENT, SaveCost
from pannier.common.units import size_text
from pannier.wire.errors import DeadlineError, InvalidRequestError


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


class SavesInProgress:
    """See the module.

    Args:
        on_ended: called after each end.
    """

    def __init__(self, on_ended: Callable[[], None]) -> None:
        self.errors = UnretrievedErrors()
        self.costs = SaveCosts()
        self._callbacks = CommitCallbacks(self.errors)
        self._on_ended = on_ended
        self._changed = Condition()
        self._tasks: dict[StatusFollower, SaveTask] = {}
        self._held: dict[object, tuple[SidecarClient, int]] = {}
        """With the threads that need them."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __str__(self) -> str:
        with self._changed:
            return "; ".join(str(status.handle.status()) for status in self._tasks)

    def unsent(self) -> str:
        """Describes the saves that are not handed over, with the bytes left; empty: there are none."""
        with self._changed:
            unsent = [status.handle.status() for status, t in self._tasks.items() if not t.is_sent]
        left = sum(status.bytes - status.bytes_ingested for status in unsent)
        return _left(unsent, left, "to be handed over")

    def uncommitted(self) -> str:
        """Describes the saves that are not committed, with the bytes not yet in storage; empty: none."""
        with self._changed:
            saves = [status.handle.status() for status in self._tasks]
        return _left(saves, _not_uploaded(saves), "to be committed")

    def uncommitted_size(self) -> str:
        """The bytes that are not yet in storage of saves that are not committed; empty: there are none."""
        with self._changed:
            saves = [status.handle.status() for status in self._tasks]
        return f"{size_text(_not_uploaded(saves))} of {_count(saves)}" if saves else ""

    def names(self) -> list[str]:
        """The last parts of the checkpoint ids of the saves that are not committed: ``step-30``."""
        with self._changed:
            ids = [status.handle.status().checkpoint_id for status in self._tasks]
        return [each.rpartition("/")[2] for each in ids]

    def add(self, task: SaveTask) -> None:
        """A save has begun."""
        task.status.resolver.use_callbacks(self._callbacks)
        with self._changed:
            # Its status is followed since before this call.
            if not task.status.handle.done():
                self._tasks[task.status] = task

    def end(self, status: StatusFollower) -> None:
        """The save with this status has ended."""
        self.errors.add(status.resolver.outcome)
        with self._changed:
            self._tasks.pop(status, None)
            self._changed.notify_all()
        self._on_ended()

    def hold(self, user: object, sidecar: SidecarClient) -> None:
        """``user``, on this thread, needs the sidecar's client until :meth:`let_go`."""
        with self._changed:
            self._held[user] = sidecar, threading.get_ident()

    def let_go(self, user: object) -> None:
        """The user needs it no longer. Idempotent."""
        with self._changed:
            if self._held.pop(user, None) is None:
                return
            self._changed.notify_all()
        self._on_ended()

    def wait_for_users(self, timeout: float | None) -> bool:
        """Waits until no user of :meth:`hold` is left on other threads; False after ``timeout`` seconds."""
        own = {threading.get_ident()}
        with self._changed:
            return self._changed.wait_for(
                lambda: {thread for _, thread in self._held.values()} <= own, timeout
            )

    def wait(self, timeout: float | None, given: float | None = None) -> None:
        """Waits until every save has ended, and every commit callback has returned.

        Raises:
            DeadlineError: not within ``timeout`` seconds; names ``given`` as the time-out.
            InvalidRequestError: this thread is needed to end the saves.
        """
        check_may_wait("a wait for all saves")
        deadline = None if timeout is None else Deadline(timeout)
        seconds = timeout if given is None else given
        with self._changed:
            # Even without a time-out the wait ends: each save ends soon after its own deadline.
            if not self._changed.wait_for(lambda: not self._tasks, timeout):
                raise DeadlineError(f"timed out after {seconds:g} s; still in progress: {self}")
        if not self._callbacks.wait(None if deadline is None else deadline.remaining()):
            raise DeadlineError(f"after {seconds:g} s a commit callback has not returned")

    def need(self, sidecar: SidecarClient) -> bool:
        """Whether a save in progress, or a user of :meth:`hold`, uses this client."""
        with self._changed:
            used = [task.sidecar for task in self._tasks.values()]
            used += [held for held, _ in self._held.values()]
        return any(each is sidecar for each in used)

    def drop_interrupted(self) -> None:
        """Drops the tasks of interrupted calls at the interpreter's end; detached tasks continue."""
        with self._changed:
            self._tasks = {s: task for s, task in self._tasks.items() if task.is_detached}

    def abandon(self, reason: str = "", *, unsent_only: bool = False) -> bool:
        """Drops all saves, or those that the sidecar doesn't have yet; returns whether there were any.

        With a ``reason``, names each on stderr: the log may have no reader.
        """
        with self._changed:
            dropped = [s for s, t in self._tasks.items() if not (unsent_only and t.is_sent)]
            for status in dropped:
                del self._tasks[status]
        for status in dropped if reason else ():
            sys.stderr.write(
                f"pannier: the process ends before {status.handle.status()} has ended: its wait "
                f"was interrupted; {reason}\n"
            )
        return bool(dropped)


def check_may_wait(what: str) -> None:
    """Raises InvalidRequestError in a callback that keeps a thread from ending saves."""
    if in_callback():
        raise InvalidRequestError(
            f"{what} in a function given to add_done_callback: it runs on a thread that all saves "
            "need; use add_commit_callback, whose functions have threads of their own"
        )


def _left(saves: list[SaveStatus], left: int, aim: str) -> str:
    if not saves:
        return ""
    return f"{_count(saves)} {aim}, {size_text(max(0, left))} left: {'; '.join(map(str, saves))}"


def _count(saves: list[SaveStatus]) -> str:
    return f"{len(saves)} save{'s' if len(saves) > 1 else ''}"


def _not_uploaded(saves: list[SaveStatus]) -> int:
    return max(0, sum(status.bytes - status.bytes_uploaded for status in saves))
