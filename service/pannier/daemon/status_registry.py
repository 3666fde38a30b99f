"""The saves that a daemon reports, and notifications for those that watch them.

In: per save a function that renders its status, and a notification by the save's owner at each
change. Out: statuses, rendered on request only. Thread-safe; each watch is for one waiter.
"""

import asyncio
import builtins
import itertools
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import grpc

from pannier.common.deadline import set_within
from pannier.daemon.save_summary import shown
from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError
from pannier.wire.object_names import save_text


class UnknownSaveError(PannierError):
    """No save by that name."""

    code = grpc.StatusCode.NOT_FOUND


Render = Callable[[], save_pb2.SaveStatus]
"""Makes a new message each time; called on the daemon's event loop."""

TERMINAL = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_DEFAULT_LIMIT = 100


@dataclass(frozen=True)
class _Entry:
    job: str
    checkpoint_id: str
    render: Render


class Notifier:
    """Notifies each coroutine of changes of the key, or of all keys, that it watches. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()

    def notify(self, key: str) -> None:
        """Notifies watches that the status of ``key`` changed."""
        with self._lock:
            watches = [watch for watch in self._watches if watch.key in (None, key)]
        for watch in watches:
            watch.notify()

    def watch(self, key: str | None = None) -> "Watch":
        """Notifications for one key, or for all; a context manager, for a coroutine."""
        return Watch(self, key)

    def _add(self, watch: "Watch") -> None:
        with self._lock:
            self._watches.add(watch)

    def _discard(self, watch: "Watch") -> None:
        with self._lock:
            self._watches.discard(watch)


class StatusRegistry(Notifier):
    """Saves by id (:func:`save_text`), the newest last, until their owners remove them. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, _Entry] = {}

    def put(self, save: save_pb2.SaveId, checkpoint_id: str, render: Render) -> None:
        """Adds a save, the newest from now on, and notifies watches."""
        key = save_text(save)
        with self._lock:
            self._entries[key] = _Entry(save.job, checkpoint_id, render)
        self.notify(key)

    def remove(self, key: str) -> None:
        """Removes a save, if present, and notifies watches."""
        with self._lock:
            self._entries.pop(key, None)
        self.notify(key)

    def find(self, name: str) -> str:
        """Key of a save by its id, or of the newest save to a checkpoint id or one that ends with ``/name``.

        Raises UnknownSaveError.
        """
        with self._lock:
            if name in self._entries:
                return name
            newest_first = [*reversed(self._entries.items())]
        for matches in (name.__eq__, lambda checkpoint_id: checkpoint_id.endswith(f"/{name}")):
            for key, entry in newest_first:
                if matches(entry.checkpoint_id):
                    return key
        raise UnknownSaveError(f"this daemon knows no save {name!r}; `pannier status` lists them")

    def get(self, name: str) -> save_pb2.SaveStatus:
        """Status by id, or of the newest save to a checkpoint id. Raises UnknownSaveError."""
        key = self.find(name)
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise UnknownSaveError(f"save {key} was just removed")
        return shown(entry.render())

    def newest(self, limit: int) -> "builtins.list[str]":
        """Keys of at most ``limit`` saves, newest first."""
        with self._lock:
            return builtins.list(itertools.islice(reversed(self._entries), limit))

    def list(
        self, *, job: str = "", states: Collection[int] = (), limit: int = 0
    ) -> list[save_pb2.SaveStatus]:
        """Newest first; see ListSavesRequest."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if job in ("", entry.job)]
        found: list[save_pb2.SaveStatus] = []
        for entry in reversed(entries):
            if len(found) >= (limit or _DEFAULT_LIMIT):
                break
            status = shown(entry.render())
            if not states or status.state in states:
                found.append(status)
        return found


class Watch:
    """Keeps one notification until the next wait; for one coroutine of the loop it is created on."""

    def __init__(self, notifier: Notifier, key: str | None) -> None:
        self._notifier = notifier
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._notified = asyncio.Event()

    def __enter__(self) -> "Watch":
        self._notifier._add(self)
        return self

    def __exit__(self, *details: object) -> None:
        self._notifier._discard(self)

    def notify(self) -> None:
        """Ends the current or next wait. Any thread."""
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._notified.set)

    async def wait(self, timeout_s: float) -> bool:
        """Waits for the next notification; False when none came in time."""
        if not await set_within(timeout_s, self._notified):
            return False
        self._notified.clear()
        return True
