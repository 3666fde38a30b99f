"""The calls of one rank to its sidecar, and the files that it streams there.

In: requests of the client. Out: answers. Calls that a broken connection ended are repeated until
their deadline. Its calls are coroutines of the engine's loop; every error is a PannierError.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pannier.client.config import Settings
from pannier.client.engine import Stop, engine
from pannier.client.identity import Identity
from pannier.client.interrupts import aside
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.transport.channel import SidecarChannel
from pannier.client.transport.connection import FollowedSave, SidecarConnection
from pannier.client.transport.file_stream import FileSource, Progress, Sender, StagedFile
from pannier.client.transport.shared_memory import MappedTransport
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import sidecar_pb2
from pannier.wire import addresses, object_names

_LEAST_S: Final = 0.001
_STREAMS: Final = 2
"""Files that all saves stream at the same time. Each may hold some 20 MiB of messages in flight."""


class SidecarClient:
    """See the module. Made by :meth:`connect`."""

    def __init__(
        self,
        channel: SidecarChannel,
        who: Identity,
        *,
        restart_daemons: Callable[[], None] | None,
        transport: str = "auto",
    ) -> None:
        self._channel = channel
        self._mapped = MappedTransport(channel, transport, self._reserve, self._release)
        self._connection = SidecarConnection(
            channel,
            who,
            restart_daemons=restart_daemons,
            on_welcome=self._mapped.update_socket,
            on_room_wanted=self._mapped.release_unused,
        )
        self._patience_s = (
            timeouts.RECONNECT_S if restart_daemons is None else timeouts.EMBEDDED_RESTART_S
        )
        self._sender = Sender(channel, self.peer)
        self._streams = asyncio.Semaphore(_STREAMS)

    @classmethod
    def connect(
        cls,
        settings: Settings,
        who: Identity,
        *,
        address: str | None = None,
        restart_daemons: Callable[[], None] | None = None,
    ) -> "SidecarClient":
        """A client whose sidecar has answered.

        Args:
            settings: where the sidecar is, unless ``address`` is given.
            who: this rank in its incarnation.
            address: of an embedded sidecar.
            restart_daemons: starts the embedded daemons again when they are dead.

        Raises:
            UnavailableError: nothing answers there, within about 3 s.
            VersionMismatchError: the sidecar has another wire version.
            ConfigurationError: the socket belongs to another user, or the TLS files can't be used.
        """
        where = address or settings.sidecar
        assert where is not None
        hint = (
            f"see {addresses.log_beside(address)}"
            if address
            else "check that `pannier sidecar` runs on this host with that --address and that this "
            "user may open it (PANNIER_SIDECAR)"
        )
        channel = SidecarChannel(
            where,
            tls=settings.tls(),
            trusted_uids=settings.trusted_uids,
            token=settings.token(),
        )
        client = cls(
            channel,
            who,
            restart_daemons=restart_daemons,
            transport=settings.transport,
        )
        try:
            client._connection.open(
                timeouts.EMBEDDED_CONNECT_S if address else timeouts.CONNECT_S, hint
            )
        except BaseException:
            client.close()
            raise
        return client

    @property
    def address(self) -> str:
        """Of the sidecar."""
        return self._channel.address

    @property
    def peer(self) -> str:
        """The sidecar's name in messages."""
        return self._connection.peer

    @property
    def identity(self) -> Identity:
        """This rank in its incarnation."""
        return self._connection.identity

    @property
    def welcome(self) -> sidecar_pb2.Welcome:
        """The sidecar's last description of itself."""
        return self._connection.welcome

    def follow(self, save: FollowedSave) -> None:
        """``save`` gets its statuses until :meth:`unfollow`; a restarted sidecar is asked for its outcome. On the loop."""
        self._connection.followed[object_names.save_text(save.context.save)] = save

    def unfollow(self, save: FollowedSave) -> None:
        """The save has ended. On the loop."""
        self._connection.followed.pop(object_names.save_text(save.context.save), None)

    # Calls, on the loop.

    async def plan(
        self, request: sidecar_pb2.PlanRequest, timeout: float
    ) -> sidecar_pb2.PlanResponse:
        """Sends a local plan; returns once every rank's has arrived.

        Raises:
            SaveAbortedError: the save was aborted on all ranks, with failures by rank.
            DeadlineError: no answer for ``timeout`` seconds.
        """
        deadline, save_deadline = Deadline(timeout), _deadline(request.save_timeout_s)

        def time_left() -> float:
            request.timeout_s = seconds_left(deadline)
            request.save_timeout_s = seconds_left(save_deadline)
            return deadline.remaining() + timeouts.ANSWER_SLACK_S

        answer: sidecar_pb2.PlanResponse = await self._connection.call_repeatedly(
            "Plan", request, time_left, deadline, patience_s=self._patience_s
        )
        return answer

    async def begin(
        self, request: sidecar_pb2.BeginRequest, timeout: float = timeouts.BEGIN_S
    ) -> sidecar_pb2.BeginResponse:
        """Opens a save whose global plan torch makes."""
        deadline, save_deadline = Deadline(timeout), _deadline(request.save_timeout_s)

        def time_left() -> float:
            request.save_timeout_s = seconds_left(save_deadline)
            return deadline.remaining() + timeouts.ANSWER_SLACK_S

        answer: sidecar_pb2.BeginResponse = await self._connection.call_repeatedly(
            "Begin", request, time_left, deadline, patience_s=self._patience_s
        )
        return answer

    async def finish(
        self, request: sidecar_pb2.FinishRequest, timeout: float
    ) -> sidecar_pb2.FinishResponse:
        """Ends a save opened with :meth:`begin`; returns when it is committed."""
        deadline = Deadline(timeout)
        answer: sidecar_pb2.FinishResponse = await self._connection.call_repeatedly(
            "Finish",
            request,
            lambda: deadline.remaining() + timeouts.ANSWER_SLACK_S,
            deadline,
        )
        return answer

    async def fail(
        self, request: sidecar_pb2.FailRequest, timeout: float = timeouts.TRAINER_FAIL_S
    ) -> None:
        """Reports that this rank skips or fails a save, which aborts it on all ranks."""
        deadline = Deadline(timeout)
        await self._connection.call_repeatedly("Fail", request, deadline.remaining, deadline)

    async def hand_over(
        self,
        request: sidecar_pb2.HandOverRequest,
        timeout: float = timeouts.HAND_OVER_S,
        on_try: Callable[[], object] = lambda: None,
    ) -> None:
        """Hands over the rank's files, all sent; returns when that is journalled. ``on_try``: before each try."""
        deadline = Deadline(timeout)

        def time_left() -> float:
            on_try()
            request.save_timeout_s = seconds_left(deadline)
            return min(timeouts.CALL_S, deadline.remaining() + timeouts.ANSWER_SLACK_S)

        await self._connection.call_repeatedly(
            "HandOver", request, time_left, deadline, repeatable=True
        )

    async def send(
        self,
        context: sidecar_pb2.SaveContext,
        attempt: str,
        file: StagedFile,
        *,
        reason: str = "",
        claim: sidecar_pb2.CachedPlanClaim | None = None,
        timeout: float = timeouts.SEND_S,
        progress: Progress = lambda held: None,
    ) -> int:
        """Streams one data file, resuming where a stream broke; returns its crc32c.

        A cancelled call has ended once it raises: nothing reads the file any more.

        Args:
            reason: why it isn't mapped, human-readable.
            claim: of the save, while its plan isn't confirmed.

        Raises:
            SaveAbortedError: the save was aborted on all ranks.
            BusyError: the spool has no room.
            UnavailableError: the sidecar has been disconnected for ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        source = FileSource(file)
        header = sidecar_pb2.FileHeader(
            context=context,
            attempt=attempt,
            name=object_names.data_prefix(attempt) + file.name,
            size=file.size,
            reason=reason,
            claim=claim,
        )

        def stream(stop: Stop) -> int:
            header.save_timeout_s = seconds_left(deadline)
            self._connection.check_version()
            self._sender.stream(header, source, progress, stop)
            return source.crc32c()

        async with self._streams:
            return await self._connection.repeat(
                lambda: engine().in_stoppable_thread(stream), deadline
            )

    def arena(self, pool: ArenaPool, sizes: Sequence[int]) -> Arena:
        """An arena with a buffer of each size, bytes; in the sidecar's spool if that is possible.

        Raises:
            UnavailableError: that isn't possible, and ``PANNIER_TRANSPORT=mapped``.
            BusyError: it would exceed this process's memory limit.
            PannierError: there is no memory for it.
        """
        return aside(lambda: self._mapped.arena(pool, sizes))

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the client's."""
        self._channel.check_process()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._connection.is_closed

    def close(self, *, announce: bool = False) -> None:
        """Disconnects; running calls fail. Returns at once.

        Args:
            announce: this process continues, so that the sidecar must not treat it as dead.
        """
        self._connection.close(announce=announce)
        self._mapped.close()

    def _reserve(self, sizes: Sequence[int]) -> sidecar_pb2.ReserveResponse:
        who = self.identity
        request = sidecar_pb2.ReserveRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            sizes=sizes,
        )
        answer: sidecar_pb2.ReserveResponse = engine().call(
            lambda: self._connection.call_repeatedly(
                "Reserve",
                request,
                lambda: timeouts.CALL_S,
                Deadline(timeouts.CALL_S),
                patience_s=timeouts.RECONNECT_S,
            )
        )
        return answer

    def _release(self, files: Sequence[str]) -> None:
        who = self.identity
        request = sidecar_pb2.ReleaseRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            spool_files=files,
        )
        engine().call(lambda: self._connection.call("Release", request, timeouts.DISCONNECT_S))


def seconds_left(deadline: Deadline | None) -> float:
    """A deadline as messages carry it: seconds that remain, 0 for no deadline."""
    return 0.0 if deadline is None else max(_LEAST_S, deadline.remaining())


def _deadline(seconds: float) -> Deadline | None:
    """The deadline that a message carries; None: it carries none."""
    return Deadline(seconds) if seconds else None
