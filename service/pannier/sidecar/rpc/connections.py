"""Which trainers are connected, what they are told, and what happens when one is gone.

In: ``Connect`` streams, each in a thread of the gRPC server. Out: the status of
the saves a client's rank takes part in, and the failure of those that were not
ingested when its process went away. Thread-safe.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from pannier.sidecar.liveness import Key, Trainers
from pannier.sidecar.rpc.watches import Watches
from pannier.sidecar.save_state import Phase, RankSave, Save, Saves
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import limits
from pannier.wire.errors import InvalidRequestError, OverloadedError, VersionMismatchError
from pannier.wire.object_names import check_save_id, save_text
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

GRACE_S: Final = 1.5
"""A client whose stream broke is gone when it hasn't connected again by then."""
REMOTE_GRACE_S: Final = 10.0
"""The same for a client on TCP: of a link that was cut for a moment nothing else is seen."""
STRANGER_S: Final = 5.0
"""A rank that hands something in before its client connects is gone when it doesn't by then."""
RESTORED_S: Final = 10.0
"""The same for a rank that a former life of this sidecar had begun to take."""
_PROGRESS_S: Final = 0.2
"""Shortest time between two messages to a client that tell of progress alone."""

_MOST: Final = 16
"""Connections of one rank at a time; a client has one, and a second one while it connects again."""

Render = Callable[[Save], save_pb2.SaveStatus]


class _Session:
    """One ``Connect`` stream."""

    def __init__(self, request: sidecar_pb2.ConnectRequest, grace_s: float) -> None:
        self.grace_s = grace_s
        self.closing = False
        """The client said goodbye: its process goes on without it."""
        self.key = (request.job, request.incarnation, request.rank)
        self.client = request.client
        self.pid = request.pid
        self._condition = threading.Condition()
        self._changed: dict[str, Save | save_pb2.SaveStatus] = {}
        self._room = False
        """Others want room in the spool, which the client hasn't been told."""
        self._urgent = False
        self._closed = False

    def mark(self, save: Save, urgent: bool) -> None:
        with self._condition:
            first = not self._changed
            self._changed[save.key] = save
            self._urgent |= urgent
            # More progress wakes nobody: it goes with the next tick.
            if first or urgent:
                self._condition.notify()

    def tell(self, status: save_pb2.SaveStatus) -> None:
        """Of a save that this sidecar knows nothing of."""
        with self._condition:
            self._changed[save_text(status.save)] = status
            self._urgent = True
            self._condition.notify()

    def want_room(self) -> None:
        with self._condition:
            self._room = self._urgent = True
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()

    def next(self) -> list[Save | save_pb2.SaveStatus | sidecar_pb2.RoomWanted] | None:
        """Waits for changes; None at the end."""
        with self._condition:
            while not (self._closed or self._urgent):
                ticked = not self._condition.wait(_PROGRESS_S if self._changed else None)
                if ticked and self._changed:
                    break
            if self._closed:
                return None
            changed: list[Save | save_pb2.SaveStatus | sidecar_pb2.RoomWanted]
            changed = list(self._changed.values())
            if self._room:
                changed.append(sidecar_pb2.RoomWanted())
            self._changed = {}
            self._room = self._urgent = False
            return changed


class Sessions:
    """All connected clients.

    Args:
        welcome: makes the first message of each stream.
        render: makes the status of a save.
        watches: gets what clients wait for.
        trainers: gets who was heard, and who is gone.
        loop: runs the timers.
    """

    def __init__(
        self,
        saves: Saves,
        *,
        host: str,
        welcome: Callable[[], sidecar_pb2.Welcome],
        render: Render,
        watches: Watches,
        trainers: Trainers,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._saves = saves
        self._host = host
        self._welcome = welcome
        self._render = render
        self._watches = watches
        self._trainers = trainers
        self._loop = loop
        self._lock = threading.Lock()
        self._sessions: dict[Key, list[_Session]] = {}
        self._last_pids: dict[Key, int] = {}
        self._idle_since = time.monotonic()
        self._ended = False

    def connect(
        self,
        request: sidecar_pb2.ConnectRequest,
        on_end: Callable[[Callable[[], None]], bool],
        *,
        peer: str = "unix:",
    ) -> Iterator[sidecar_pb2.ConnectResponse]:
        """The messages of one stream, until it ends.

        Args:
            on_end: takes a function to call when the stream ends; False: it has.
            peer: as gRPC names the client's end of the connection.

        Raises VersionMismatchError, InvalidRequestError.
        """
        self._check(request)
        session = _Session(request, GRACE_S if peer.startswith("unix:") else REMOTE_GRACE_S)
        self._add(session)
        try:
            if not on_end(session.close):
                return
            yield sidecar_pb2.ConnectResponse(welcome=self._welcome())
            for rank in self._saves.of_rank(*session.key):
                session.mark(rank.save, True)
            self._check_handed_over(request.pending)
            self._watches.add(session, request.pending, session.tell)
            while (changed := session.next()) is not None:
                for each in changed:
                    if isinstance(each, sidecar_pb2.RoomWanted):
                        yield sidecar_pb2.ConnectResponse(room=each)
                        continue
                    status = self._render(each) if isinstance(each, Save) else each
                    yield sidecar_pb2.ConnectResponse(save=status)
        finally:
            self._watches.remove(session)
            self._remove(session)

    def ping(self, request: sidecar_pb2.PingRequest) -> None:
        """A client lives, or says goodbye; of one that isn't connected nothing is noted."""
        key = (request.job, request.incarnation, request.rank)
        with self._lock:
            own = [s for s in self._sessions.get(key, ()) if s.client == request.client]
            for session in own:
                session.closing |= request.closing
        if own:
            self._trainers.heard(key)

    def changed(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of :class:`Saves`: the clients of its ranks on this host are told."""
        with self._lock:
            sessions = [
                session
                for number in list(save.ranks)
                for session in self._sessions.get((save.id.job, save.id.incarnation, number), ())
            ]
        for session in sessions:
            session.mark(save, urgent)

    def want_room(self, clients: set[str]) -> None:
        """Tells these clients that others need what they have borrowed and don't use."""
        with self._lock:
            sessions = [
                session
                for listed in self._sessions.values()
                for session in listed
                if session.client in clients
            ]
        for session in sessions:
            session.want_room()

    def expect(self, rank: RankSave, within_s: float = STRANGER_S) -> None:
        """The rank handed something in: its client must be connected, or be so soon."""
        key = (rank.save.id.job, rank.save.id.incarnation, rank.rank)
        with self._lock:
            if key in self._sessions:
                return
        self._check_later(key, within_s)

    def jobs(self) -> set[str]:
        """Jobs with a connected client."""
        with self._lock:
            return {job for job, _, _ in self._sessions}

    def trainers(self) -> Counter[str]:
        """Connected ranks by job."""
        with self._lock:
            return Counter(job for job, _, _ in self._sessions)

    def idle_s(self) -> float | None:
        """Seconds since the last client left; None while there is one."""
        with self._lock:
            return None if self._sessions else time.monotonic() - self._idle_since

    def dismiss(self) -> None:
        """Ends all streams: no trainer is heard here any more, and none is taken for gone."""
        with self._lock:
            sessions = [each for listed in self._sessions.values() for each in listed]
        for session in sessions:
            session.closing = True
            session.close()

    def close(self) -> None:
        """Ends all streams; nobody is taken for gone because of that."""
        with self._lock:
            self._ended = True
            sessions = [each for listed in self._sessions.values() for each in listed]
        for session in sessions:
            session.close()

    def _check(self, request: sidecar_pb2.ConnectRequest) -> None:
        if request.wire_version != WIRE_VERSION:
            raise VersionMismatchError(
                f"the client is pannier {request.client_version} with wire version "
                f"{request.wire_version}, the sidecar on host {self._host} is {package_version()} "
                f"with wire version {WIRE_VERSION}: install the same version on both sides, and "
                "restart the one that is older"
            )
        check_save_id(
            save_pb2.SaveId(job=request.job, incarnation=request.incarnation, group="g", number=1)
        )
        if not request.world_size > request.rank:
            raise InvalidRequestError(
                f"rank {request.rank} is not within a world of {request.world_size}"
            )
        limits.check_connect(request)

    def _check_handed_over(self, pending: Iterable[sidecar_pb2.PendingSave]) -> None:
        """A former life confirmed what this one knows nothing of: its journal was damaged."""
        for each in pending:
            rank = self._saves.find(each.context) if each.handed_over else None
            # One that is only planned here is judged by the coordinator, which looks into storage.
            if rank is not None and rank.phase is Phase.STREAMING:
                self._saves.fail(
                    rank,
                    save_pb2.FAILURE_KIND_SPOOL,
                    f"rank {rank.rank} on host {rank.host} was handed over, but the journal of "
                    "its restarted sidecar doesn't say so: it was damaged",
                )

    def _add(self, session: _Session) -> None:
        with self._lock:
            listed = self._sessions.get(session.key, [])
            if len(listed) >= _MOST:
                raise OverloadedError(
                    f"rank {session.key[2]} of job {session.key[0]} is connected {len(listed)} "
                    "times, which is the limit: does a process make one client after the other?"
                )
            self._sessions[session.key] = listed
            # The same client again: its former stream broke, though we haven't noticed yet.
            former = [each for each in listed if each.client == session.client]
            listed.append(session)
            self._last_pids[session.key] = session.pid
            self._trainers.heard(session.key)
        for each in former:
            each.close()

    def _remove(self, session: _Session) -> None:
        with self._lock:
            listed = self._sessions[session.key]
            listed.remove(session)
            gone = not listed
            if gone:
                del self._sessions[session.key]
                self._idle_since = time.monotonic()
        if gone and session.closing:
            self._trainers.left(session.key)
        if gone:
            self._check_later(session.key, session.grace_s, closed=session.closing)

    def _check_later(self, key: Key, delay_s: float, *, closed: bool = False) -> None:
        self._loop.call_soon_threadsafe(
            self._loop.call_later, delay_s, self._fail_if_gone, key, closed
        )

    def _fail_if_gone(self, key: Key, closed: bool) -> None:
        """On the loop: the saves of a client that isn't there, and that need it, fail."""
        with self._lock:
            if key in self._sessions or self._ended:
                return
            pid = self._last_pids.pop(key, 0)
        process = f"process {pid}" if pid else "process"
        if pid and not closed:
            self._trainers.gone(key, f"the {process} of rank {key[2]} on host {self._host}")
        for rank in self._saves.of_rank(*key):
            self._saves.fail(
                rank,
                save_pb2.FAILURE_KIND_LOST,
                f"the {process} of rank {rank.rank} on host {rank.host} is gone: its connection "
                f"ended before the rank was ingested ({rank.phase.name.lower()})",
            )
