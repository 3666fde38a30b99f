"""Connected trainers: status updates to them, and the failure of their ranks when they disconnect.

In: ``Connect`` streams, and the coordinator's statuses. Out: the status of each save that a client's rank
takes part in, and the failure of those that were not ingested when its process died. On the event loop.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Final

from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.daemon.status_registry import TERMINAL
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.liveness import Key, TrainerLiveness
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase, RankSave, Save
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import limits
from pannier.wire.chunk_codec import MAX_MESSAGE_BYTES
from pannier.wire.errors import InvalidRequestError, OverloadedError, check_wire_version
from pannier.wire.object_names import check_incarnation, check_job, save_text
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

_EXPIRED_S: Final = 0.001
"""Stands for a remaining time that is over; 0 means that a deadline isn't known."""
_MAX_CONNECTIONS_PER_RANK: Final = 16
"""At a time; a client has one, and a second one while it reconnects."""
_GONE: Final = "is gone: its connection ended before the rank was ingested"

Message = Save | save_pb2.SaveStatus | sidecar_pb2.RoomWanted


def welcome(
    config: SidecarConfig, *, draining: bool, descriptors: str, token_first: bool
) -> sidecar_pb2.Welcome:
    """The first message of each stream."""
    return sidecar_pb2.Welcome(
        wire_version=WIRE_VERSION,
        sidecar_version=package_version(),
        host=config.host,
        coordinator=config.coordinator,
        max_message_bytes=MAX_MESSAGE_BYTES,
        embedded=config.embedded,
        draining=draining,
        descriptors=descriptors,
        token_first=token_first,
    )


class _Connection:
    """One ``Connect`` stream."""

    def __init__(self, request: sidecar_pb2.ConnectRequest, grace_s: float) -> None:
        self.grace_s = grace_s
        self.closing = False
        """The client announced that it closes, while its process continues."""
        self.key = (request.job, request.incarnation, request.rank)
        self.client = request.client
        self.pid = request.pid
        self._notified = asyncio.Event()
        self._changed: dict[str, Save | save_pb2.SaveStatus] = {}
        self._room_requested = False
        self._urgent = False
        self._closed = False

    def mark_changed(self, save: Save, urgent: bool) -> None:
        """Queues the save's status."""
        # Further progress sets no event: :meth:`next` sends all of it after PROGRESS_S.
        if urgent or not self._changed:
            self._notified.set()
        self._changed[save.key] = save
        self._urgent |= urgent

    def push(self, status: save_pb2.SaveStatus) -> None:
        """Queues the status of a save that this sidecar doesn't hold."""
        self._changed[save_text(status.save)] = status
        self._urgent = True
        self._notified.set()

    def request_room(self) -> None:
        """Queues a request to return files that the client has leased and doesn't use."""
        self._room_requested = self._urgent = True
        self._notified.set()

    def expect_end(self) -> None:
        """Notes that the client closes: the end of its stream is no failure."""
        self.closing = True

    def close(self) -> None:
        """Ends the stream."""
        self._closed = True
        self._notified.set()

    async def next(self) -> list[Message] | None:
        """Waits for something to send; None at the end."""
        while not (self._closed or self._urgent):
            self._notified.clear()
            if not self._changed:
                await self._notified.wait()
                continue
            if not await set_within(timeouts.PROGRESS_S, self._notified):
                break
        if self._closed:
            return None
        messages: list[Message] = list(self._changed.values())
        if self._room_requested:
            messages.append(sidecar_pb2.RoomWanted())
        self._changed = {}
        self._room_requested = self._urgent = False
        return messages


class _PendingSave:
    """A save that a client asks about, with its deadline on this host's clock."""

    def __init__(self, asked: sidecar_pb2.PendingSave) -> None:
        self.context = asked.context
        self._handed_over = asked.handed_over
        timeout_s = asked.save_timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s else None

    def message(self) -> sidecar_pb2.PendingSave:
        """The save with the time that is left now."""
        pending = sidecar_pb2.PendingSave(context=self.context, handed_over=self._handed_over)
        if self._deadline is not None:
            pending.save_timeout_s = max(_EXPIRED_S, self._deadline - time.monotonic())
        return pending


class Watches:
    """Saves that clients ask about and that a restarted sidecar may not hold.

    Only the coordinator decides how a save ends: that this sidecar doesn't hold a save says nothing about it.

    Args:
        on_new: called when there is more to ask the coordinator.
    """

    def __init__(self, saves: SaveRegistry, on_new: Callable[[], None]) -> None:
        self._saves = saves
        self._on_new = on_new
        self._pending: dict[_Connection, dict[str, _PendingSave]] = {}

    def add(self, connection: _Connection, pending: Iterable[sidecar_pb2.PendingSave]) -> None:
        """Forwards the statuses of these saves to the connection."""
        by_key = {save_text(each.context.save): _PendingSave(each) for each in pending}
        if not by_key:
            return
        self._pending[connection] = by_key
        self._on_new()

    def remove(self, connection: _Connection) -> None:
        """The stream has ended."""
        self._pending.pop(connection, None)

    def unknown(self) -> list[sidecar_pb2.PendingSave]:
        """The saves to ask the coordinator about: the sidecar doesn't hold their ranks."""
        asked = [each for pending in self._pending.values() for each in pending.values()]
        return [each.message() for each in asked if not self._saves.holds(each.context)]

    def apply_status(self, status: save_pb2.SaveStatus) -> None:
        """Forwards a status of the coordinator to the clients that ask about its save."""
        key = save_text(status.save)
        found = [(to, pending[key]) for to, pending in self._pending.items() if key in pending]
        if status.state in TERMINAL:
            for connection, _ in found:
                del self._pending[connection][key]
        for connection, each in found:
            # Of a save that this sidecar holds, the client gets the status by Connections.on_change.
            if not self._saves.holds(each.context):
                connection.push(status)


class Connections:
    """All connected clients.

    Args:
        welcome: makes the first message of each stream.
        render: makes the status of a save.
    """

    def __init__(
        self,
        saves: SaveRegistry,
        *,
        host: str,
        welcome: Callable[[], sidecar_pb2.Welcome],
        render: Callable[[Save], save_pb2.SaveStatus],
        watches: Watches,
        trainers: TrainerLiveness,
    ) -> None:
        self._saves = saves
        self._host = host
        self._welcome = welcome
        self._render = render
        self._watches = watches
        self._trainers = trainers
        self._connections: dict[Key, list[_Connection]] = {}
        self._last_pids: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        """By rank whose client is not connected; a timer that fires fails the rank."""
        self._idle_since = time.monotonic()
        self._ended = False

    async def connect(
        self, request: sidecar_pb2.ConnectRequest, *, peer: str = "unix:"
    ) -> AsyncGenerator[sidecar_pb2.ConnectResponse, None]:
        """Yields the messages of one stream, until it ends.

        Args:
            peer: the client's end of the connection, in gRPC's format.

        Raises VersionMismatchError, InvalidRequestError.
        """
        self._check(request)
        connection = _Connection(
            request,
            timeouts.TRAINER_RETURN_S
            if peer.startswith("unix:")
            else timeouts.REMOTE_TRAINER_RETURN_S,
        )
        self._add(connection)
        try:
            yield sidecar_pb2.ConnectResponse(welcome=self._welcome())
            for rank in self._saves.of_rank(*connection.key):
                connection.mark_changed(rank.save, True)
            self._check_handed_over(request.pending)
            self._watches.add(connection, request.pending)
            while (messages := await connection.next()) is not None:
                for each in messages:
                    if isinstance(each, sidecar_pb2.RoomWanted):
                        yield sidecar_pb2.ConnectResponse(room=each)
                        continue
                    status = self._render(each) if isinstance(each, Save) else each
                    yield sidecar_pb2.ConnectResponse(save=status)
        finally:
            self._watches.remove(connection)
            self._remove(connection)

    def ping(self, request: sidecar_pb2.PingRequest) -> None:
        """Notes that a client is alive, or closing; ignores one that isn't connected."""
        key = (request.job, request.incarnation, request.rank)
        own = [c for c in self._connections.get(key, ()) if c.client == request.client]
        for connection in own:
            if request.closing:
                connection.expect_end()
        if own:
            self._trainers.note_ping(key, request)

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the registry: updates the clients of the save's ranks on this host."""
        connections = [
            connection
            for number in list(save.ranks)
            for connection in self._connections.get((save.id.job, save.id.incarnation, number), ())
        ]
        for connection in connections:
            connection.mark_changed(save, urgent)
        if rank is None and urgent and save.outcome is None:
            # The coordinator may have requested the full plan of a rank whose trainer wasn't needed any more.
            for each in save.ranks.values():
                if each.phase is Phase.HANDED_OVER and each.needs_trainer:
                    self._expect(each, timeouts.TRAINER_CONNECT_S, _GONE)

    def request_room(self, clients: set[str]) -> None:
        """Asks these clients to return files that they have leased and don't use."""
        for connection in self._all():
            if connection.client in clients:
                connection.request_room()

    def expect(self, rank: RankSave, within_s: float = timeouts.TRAINER_CONNECT_S) -> None:
        """Called when the rank has sent something: fails it unless its client connects in ``within_s``."""
        why = f"sent data but never connected to the sidecar within {within_s:g} s"
        self._expect(rank, within_s, why)

    def jobs(self) -> set[str]:
        """Jobs with a connected client."""
        return {job for job, _, _ in self._connections}

    def ranks_by_job(self) -> Counter[str]:
        """Connected ranks by job."""
        return Counter(job for job, _, _ in self._connections)

    def idle_s(self) -> float | None:
        """Seconds since the last client disconnected; None while there is one."""
        return None if self._connections else time.monotonic() - self._idle_since

    def dismiss(self) -> None:
        """Ends all streams; no trainer counts as dead because of that."""
        for connection in self._all():
            connection.expect_end()
            connection.close()

    def close(self) -> None:
        """Ends all streams and timers, when the sidecar stops: no rank fails because of that."""
        self._ended = True
        for key in list(self._timers):
            self._stop_timer(key)
        for connection in self._all():
            connection.close()

    def _all(self) -> list[_Connection]:
        return [each for listed in self._connections.values() for each in listed]

    def _check(self, request: sidecar_pb2.ConnectRequest) -> None:
        check_wire_version(
            f"the client (pannier {request.client_version})",
            request.wire_version,
            f"the sidecar on host {self._host}",
        )
        check_job(request.job)
        check_incarnation(request.incarnation)
        if not request.world_size > request.rank:
            raise InvalidRequestError(
                f"rank {request.rank} is not within a world of {request.world_size}"
            )
        limits.check_connect(request)

    def _check_handed_over(self, pending: Iterable[sidecar_pb2.PendingSave]) -> None:
        """Fails ranks whose hand-over was confirmed but isn't in the journal, which was damaged."""
        for each in pending:
            rank = self._saves.find(each.context) if each.handed_over else None
            # The coordinator decides about a rank that is only planned here: it looks into storage.
            if rank is not None and rank.phase is Phase.STREAMING:
                self._saves.fail(
                    rank,
                    save_pb2.FAILURE_KIND_SPOOL,
                    f"rank {rank.rank} on host {rank.host} was handed over, but the journal of "
                    "its restarted sidecar doesn't say so: it was damaged",
                )

    def _add(self, connection: _Connection) -> None:
        listed = self._connections.get(connection.key, [])
        if len(listed) >= _MAX_CONNECTIONS_PER_RANK:
            raise OverloadedError(
                f"rank {connection.key[2]} of job {connection.key[0]} is connected {len(listed)} "
                "times, which is the limit: does a process make one client after the other?"
            )
        self._connections[connection.key] = listed
        # After the next disconnect the whole grace time counts again.
        self._stop_timer(connection.key)
        # The same client again: its previous stream broke, which this end hasn't noticed yet.
        previous = [each for each in listed if each.client == connection.client]
        listed.append(connection)
        self._last_pids[connection.key] = connection.pid
        self._trainers.mark_seen(connection.key)
        for each in previous:
            each.close()

    def _remove(self, connection: _Connection) -> None:
        listed = self._connections[connection.key]
        listed.remove(connection)
        last = not listed
        if last:
            del self._connections[connection.key]
            self._idle_since = time.monotonic()
        if last and connection.closing:
            self._trainers.remove(connection.key)
        if last:
            self._fail_later(connection.key, connection.grace_s, _GONE, closed=connection.closing)

    def _expect(self, rank: RankSave, within_s: float, why: str) -> None:
        key = (rank.save.id.job, rank.save.id.incarnation, rank.rank)
        if key not in self._connections and key not in self._timers:
            self._fail_later(key, within_s, why)

    def _fail_later(self, key: Key, delay_s: float, why: str, *, closed: bool = False) -> None:
        """Fails the rank unless its client connects before; ``why`` is what its process did."""
        self._stop_timer(key)
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(delay_s, self._fail, key, why, closed)

    def _stop_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _fail(self, key: Key, why: str, closed: bool) -> None:
        """Fails the ranks of a disconnected client that still need it."""
        del self._timers[key]
        pid = self._last_pids.pop(key, 0)
        process = f"process {pid}" if pid else "process"
        if pid and not closed:
            self._trainers.mark_dead(key, f"the {process} of rank {key[2]} on host {self._host}")
        for rank in self._saves.of_rank(*key):
            self._saves.fail(
                rank,
                save_pb2.FAILURE_KIND_LOST,
                f"the {process} of rank {rank.rank} on host {rank.host} {why} "
                f"({rank.phase.name.lower()})",
            )
