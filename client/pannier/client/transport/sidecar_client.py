"""The conversation of one rank with its sidecar, over one line.

In: requests of the client. Out: answers, and the status of saves as the sidecar
pushes it. A session is made for one incarnation and outlives restarts of the
sidecar: it connects again, and calls that a broken connection ended are made
again until their deadline. Thread-safe; every error is a PannierError.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from pannier.client.config import Settings
from pannier.client.identity import Identity
from pannier.client.interrupts import aside, shielded
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.staging.host_copy import threads
from pannier.client.timers import Timer, Timers
from pannier.client.transport.channel import InterruptedCallError, SidecarChannel
from pannier.client.transport.file_stream import (
    FileSource,
    Progress,
    Sender,
    StagedFile,
    Stop,
)
from pannier.client.transport.heartbeat import Heartbeat
from pannier.client.transport.retry import Retry
from pannier.client.transport.shared_memory import MappedTransport
from pannier.client.transport.stream_slots import MOST, Streams
from pannier.common.deadline import Deadline
from pannier.v1 import save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import addresses, errors, object_names
from pannier.wire.errors import (
    DeadlineError,
    PannierError,
    UnavailableError,
    VersionMismatchError,
)
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

CONNECT_S: Final = 3.0
"""Until a sidecar that doesn't answer counts as unreachable."""
EMBEDDED_S: Final = 15.0
"""The same for daemons that may just be starting, on a machine that is busy with that."""
RECONNECT_S: Final = 10.0
"""How long a call of the trainer's own thread waits for a sidecar that went away."""
RESTART_S: Final = 40.0
"""The same for embedded daemons, which are started again."""
_ANSWER_S: Final = 30.0
"""One try of a call that waits for nobody but the sidecar."""
_SLACK_S: Final = 5.0
"""Left to the daemon to answer a deadline of its own, with the names it waited for."""
_GOODBYE_S: Final = 1.0
_LEAST_S: Final = 0.001

StatusListener = Callable[[save_pb2.SaveStatus], None]
SilenceListener = Callable[[str], None]
"""Called with the sidecar's name and when it was last seen; "" once it is heard again."""


@dataclass
class _Watched:
    """A save whose end is waited for."""

    context: sidecar_pb2.SaveContext
    listener: StatusListener
    silence: SilenceListener
    deadline: Deadline | None = None
    handed_over: bool = False

    def pending(self) -> sidecar_pb2.PendingSave:
        """What a sidecar that may not know the save is told of it."""
        pending = sidecar_pb2.PendingSave(context=self.context, handed_over=self.handed_over)
        pending.save_timeout_s = _left(self.deadline)
        return pending


class SidecarClient:
    """See the module. Made by :meth:`connect`."""

    def __init__(
        self,
        line: SidecarChannel,
        who: Identity,
        *,
        hint: str,
        revive: Callable[[], None] | None,
        transport: str = "auto",
    ) -> None:
        self.address = line.address
        self.peer = f"sidecar at {line.address}"
        self.identity = who
        self._revive = revive
        # Daemons that are started again need time to.
        self._patience_s = RECONNECT_S if revive is None else RESTART_S
        self._line = line
        self._timers = Timers("pannier-timers")
        self._sender = Sender(self._line, self._timers, self.peer)
        self._streams = Streams(max(2, min(MOST, threads())))
        self._borrowing = MappedTransport(line, transport, self._reserve, self._release)
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._welcome: sidecar_pb2.Welcome | None = None
        self._problem: PannierError | None = None
        self._connected = threading.Event()
        self._answered = threading.Event()
        """The sidecar took us, or said why it doesn't."""
        self._closed = threading.Event()
        self._repeat = shielded(
            Retry(
                f"{self.peer} can't be reached: {hint}",
                connected=self._connected,
                closed=self._closed,
                at_exit_s=RECONNECT_S,
            ).__call__
        )
        self._heartbeat = Heartbeat(
            self.peer, self._ping, connected=self._connected.is_set, tell=self._tell_silence
        )

    @classmethod
    def connect(
        cls,
        settings: Settings,
        who: Identity,
        *,
        address: str | None = None,
        revive: Callable[[], None] | None = None,
    ) -> "SidecarClient":
        """A session whose sidecar has answered.

        Args:
            settings: where the sidecar is (``address`` goes first).
            who: this rank in its incarnation.
            address: of an embedded sidecar.
            revive: starts the embedded daemons again when they are gone.

        Raises:
            UnavailableError: nothing answers there, within about 3 s.
            VersionMismatchError: it speaks another wire version.
            ConfigurationError: it is another user's, or the TLS files can't be used.
        """
        where = address or settings.sidecar
        assert where is not None
        hint = (
            f"see {addresses.log_beside(address)}"
            if address
            else "check that `pannier sidecar` runs on this host with that --address and that this "
            "user may open it (PANNIER_SIDECAR)"
        )
        trusted = settings.trusted_uids
        line = SidecarChannel(
            where, tls=settings.tls(), trusted_uids=trusted, token=settings.token()
        )
        session = cls(line, who, hint=hint, revive=revive, transport=settings.transport)
        listening = threading.Thread(target=session._listen, name="pannier-connect", daemon=True)
        listening.start()
        answered = session._answered.wait(EMBEDDED_S if address else CONNECT_S)
        problem = session._problem
        if not session._connected.is_set():
            session.close()
            if answered and problem is not None:
                raise problem
            why = f" ({problem})" if problem else ""
            raise UnavailableError(f"no {session.peer} answers; {hint}{why}")
        session._heartbeat.start()
        return session

    @property
    def welcome(self) -> sidecar_pb2.Welcome:
        """What the sidecar last said of itself."""
        assert self._welcome is not None
        return self._welcome

    # Calls.

    def plan(self, request: sidecar_pb2.PlanRequest, timeout: float) -> sidecar_pb2.PlanResponse:
        """Hands a local plan in; returns when every rank of the group has.

        Raises:
            SaveAbortedError: the save ended on all ranks, with failures by rank.
            DeadlineError: nobody answered for ``timeout`` seconds.
        """
        deadline, save_deadline = Deadline(timeout), _deadline(request.save_timeout_s)

        def once() -> sidecar_pb2.PlanResponse:
            request.timeout_s, request.save_timeout_s = _left(deadline), _left(save_deadline)
            answer: sidecar_pb2.PlanResponse = self._unary(
                "Plan", request, deadline.remaining() + _SLACK_S
            )
            return answer

        return self._repeat(once, deadline, patience_s=self._patience_s)

    def begin(
        self, request: sidecar_pb2.BeginRequest, timeout: float = 60.0
    ) -> sidecar_pb2.BeginResponse:
        """Opens a save whose global plan torch makes."""
        deadline, save_deadline = Deadline(timeout), _deadline(request.save_timeout_s)

        def once() -> sidecar_pb2.BeginResponse:
            request.save_timeout_s = _left(save_deadline)
            answer: sidecar_pb2.BeginResponse = self._unary(
                "Begin", request, deadline.remaining() + _SLACK_S
            )
            return answer

        return self._repeat(once, deadline, self._patience_s)

    def finish(
        self, request: sidecar_pb2.FinishRequest, timeout: float
    ) -> sidecar_pb2.FinishResponse:
        """Ends a save opened with :meth:`begin`; returns when it is committed."""
        deadline = Deadline(timeout)
        answer: sidecar_pb2.FinishResponse = self._repeat(
            lambda: self._unary("Finish", request, deadline.remaining() + _SLACK_S), deadline
        )
        return answer

    def fail(self, request: sidecar_pb2.FailRequest, timeout: float = 5.0) -> None:
        """Says that this rank skips or gives up a save."""
        deadline = Deadline(timeout)
        self._repeat(lambda: self._unary("Fail", request, deadline.remaining()), deadline)

    def hand_over(self, request: sidecar_pb2.HandOverRequest, timeout: float = 300.0) -> None:
        """All files of the rank are sent; returns when it is ingested."""
        deadline = Deadline(timeout)

        def once() -> None:
            request.save_timeout_s = _left(deadline)
            seconds = min(_ANSWER_S, deadline.remaining() + _SLACK_S)
            self._unary("HandOver", request, seconds, again=True)

        self._repeat(once, deadline)
        with self._lock:
            watched = self._watched.get(object_names.save_text(request.context.save))
            if watched is not None:
                watched.handed_over = True

    def send(
        self,
        context: sidecar_pb2.SaveContext,
        attempt: str,
        file: StagedFile,
        *,
        reason: str = "",
        timeout: float = 3600.0,
        progress: Progress = lambda held: None,
        stop: Stop | None = None,
    ) -> int:
        """Streams one data file, going on where a broken stream ended; returns its crc32c.

        ``reason``: why it isn't mapped, for people.

        Raises:
            SaveAbortedError: the save ended on all ranks.
            BusyError: the spool has no room.
            UnavailableError: the sidecar is gone and ``timeout`` seconds have passed.
            StoppedError: ``stop`` was set.
        """
        deadline = Deadline(timeout)
        source = FileSource(file)
        header = sidecar_pb2.FileHeader(
            context=context, attempt=attempt, name=file.name, size=file.size, reason=reason
        )
        until = stop or Stop()
        held: int | None = None

        def advanced(committed: int) -> None:
            nonlocal held
            if held is not None and committed > held:
                self._streams.moved(committed - held)
            held = committed
            progress(committed)

        if not self._streams.take(timeout):
            raise DeadlineError(f"{file.name} waited {timeout:.0f} s for earlier files to be sent")

        def once() -> None:
            header.save_timeout_s = _left(deadline)
            self._sender.stream(header, source, advanced, until)

        try:
            self._repeat(once, deadline)
        finally:
            self._streams.give()
        return source.crc32c()

    @property
    def most_streams(self) -> int:
        """More calls of :meth:`send` at a time than this only wait for each other."""
        return self._streams.most

    # Memory to stage into.

    def arena(self, pool: ArenaPool, sizes: Sequence[int]) -> Arena:
        """An arena with a region of each size, bytes, in the sidecar's spool if that is possible.

        Raises:
            UnavailableError: it isn't, and ``PANNIER_TRANSPORT=mapped``.
            PannierError: there is no memory for it.
        """
        return aside(lambda: self._borrowing.arena(pool, sizes))

    # Status of saves.

    def watch(
        self,
        context: sidecar_pb2.SaveContext,
        listener: StatusListener,
        silence: SilenceListener = lambda text: None,
        deadline: Deadline | None = None,
    ) -> None:
        """Calls ``listener`` with every status of a save, on a thread of the session.

        Both must be quick and may not raise. They are forgotten by :meth:`unwatch`; until then a
        sidecar that was restarted is asked how the save ended.

        Args:
            deadline: of the save; None: not known.
        """
        watched = _Watched(context, listener, silence, deadline)
        with self._lock:
            self._watched[object_names.save_text(context.save)] = watched

    def unwatch(self, save: save_pb2.SaveId) -> None:
        """Forgets the listener of ``save``."""
        with self._lock:
            self._watched.pop(object_names.save_text(save), None)

    def timer(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` on a thread of this client unless it is cancelled in time."""
        return self._timers.start(delay_s, callback)

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the session's."""
        self._line.check_process()

    def close(self, *, goodbye: bool = False) -> None:
        """Ends the session; calls that still run fail. Returns at once.

        Args:
            goodbye: the process goes on without it, so that the sidecar mustn't take it for gone.
        """
        self._closed.set()
        self._borrowing.close()
        self._heartbeat.close()
        self._timers.close()
        if goodbye and self._connected.is_set():
            try:
                threading.Thread(target=self._leave, name="pannier-goodbye", daemon=True).start()
                return
            except RuntimeError:  # the interpreter is ending: the process is gone soon
                _log.debug("no goodbye to the %s", self.peer)
        self._line.close()

    def _ping(self, timeout: float, *, closing: bool = False) -> None:
        who = self.identity
        request = sidecar_pb2.PingRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            closing=closing,
        )
        self._unary("Ping", request, timeout)

    def _reserve(self, sizes: Sequence[int]) -> sidecar_pb2.ReserveResponse:
        who = self.identity
        request = sidecar_pb2.ReserveRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            sizes=sizes,
        )
        answer: sidecar_pb2.ReserveResponse = self._repeat(
            lambda: self._unary("Reserve", request, _ANSWER_S), Deadline(_ANSWER_S), RECONNECT_S
        )
        return answer

    def _release(self, slabs: Sequence[str]) -> None:
        who = self.identity
        request = sidecar_pb2.ReleaseRequest(
            job=who.job, incarnation=who.incarnation, rank=who.rank, client=who.client, slabs=slabs
        )
        try:
            self._unary("Release", request, _GOODBYE_S)
        except InterruptedCallError as error:
            raise UnavailableError("a fork came in between") from error

    def _leave(self) -> None:
        try:
            self._ping(_GOODBYE_S, closing=True)
        except (PannierError, InterruptedCallError) as error:
            _log.debug("no goodbye to the %s: %s", self.peer, error)
        finally:
            self._line.close()

    def _tell_silence(self, text: str) -> None:
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            each.silence(text)

    @shielded
    def _unary(self, method: str, request: Any, timeout: float, *, again: bool = False) -> Any:
        """One call. ``again``: after ``timeout`` seconds of silence it may be made again."""
        deadline = Deadline(timeout)

        def start(channel: grpc.Channel) -> Any:
            call = getattr(sidecar_pb2_grpc.SidecarStub(channel), method)
            # A future: one that is cancellable around a fork.
            return call.future(request, timeout=timeout, metadata=self._line.metadata())

        if isinstance(self._problem, VersionMismatchError):
            raise self._problem
        with self._line.call(start) as call:
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                if self._line.was_interrupted(call):
                    raise InterruptedCallError from error
                raise UnavailableError("the client is closed") from error
            except grpc.RpcError as error:
                if self._line.was_interrupted(call):
                    raise InterruptedCallError from error
                if self._closed.is_set():
                    raise UnavailableError("the client is closed") from error
                if again and deadline.passed:
                    raise UnavailableError(
                        f"{self.peer} did not answer within {timeout:g} s: is it stopped?"
                    ) from error
                raise errors.from_rpc_error(error, peer=self.peer) from error

    def _listen(self) -> None:
        """Keeps the ``Connect`` stream open; the session's own thread."""
        failures = 0
        while not self._closed.is_set():
            try:
                self._connect_once()
                failures = 0
            except InterruptedCallError:
                failures = 0
                continue
            except PannierError as error:
                if self._connected.is_set() and not self._closed.is_set():
                    _log.warning("lost the %s: %s; connecting again", self.peer, error)
                    failures = 0
                self._problem = error
                if not isinstance(error, UnavailableError):
                    self._answered.set()
                failures += 1
            except Exception as error:  # noqa: BLE001 - saves must go on hearing of their end
                _log.exception("the conversation with the %s broke", self.peer)
                self._problem = PannierError(f"{type(error).__name__}: {error}")
                failures += 1
            finally:
                self._connected.clear()
            if failures >= 3 and self._revive is not None and not self._closed.is_set():
                try:
                    self._revive()
                except PannierError as error:
                    self._problem = error
                    _log.warning("could not start the embedded daemons again: %s", error)
            self._closed.wait(min(1.0, 0.05 * 2 ** min(failures, 5)))

    def _connect_once(self) -> None:
        who = self.identity
        self._line.renew()
        with self._lock:
            pending = [each.pending() for each in self._watched.values()]
        request = sidecar_pb2.ConnectRequest(
            wire_version=WIRE_VERSION,
            client_version=package_version(),
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            world_size=who.world_size,
            host=who.host,
            pid=os.getpid(),
            client=who.client,
            pending=pending,
        )
        with self._line.call(
            lambda channel: sidecar_pb2_grpc.SidecarStub(channel).Connect(
                request, metadata=self._line.metadata()
            )
        ) as call:
            # A daemon that accepts connections and says nothing must not hold us up.
            silence = self._timers.start(CONNECT_S, call.cancel)
            try:
                for response in call:
                    silence.cancel()
                    self._receive(response)
            except grpc.RpcError as error:
                if self._line.was_interrupted(call):
                    raise InterruptedCallError from error
                raise errors.from_rpc_error(error, peer=self.peer) from error
            finally:
                silence.cancel()

    def _receive(self, response: sidecar_pb2.ConnectResponse) -> None:
        self._heartbeat.heard()
        if response.HasField("welcome"):
            welcome = response.welcome
            if welcome.wire_version != WIRE_VERSION:
                raise VersionMismatchError(
                    f"this client is pannier {package_version()} with wire version {WIRE_VERSION}, "
                    f"the {self.peer} is {welcome.sidecar_version} with wire version "
                    f"{welcome.wire_version}: install the same version on both sides"
                )
            self._welcome = welcome
            self._borrowing.welcomed(welcome)
            self._problem = None
            self._connected.set()
            self._answered.set()
        elif response.HasField("save"):
            with self._lock:
                watched = self._watched.get(object_names.save_text(response.save.save))
            if watched is not None:
                watched.listener(response.save)
        elif response.HasField("room"):
            self._borrowing.room_wanted()


def _deadline(seconds: float) -> Deadline | None:
    """The deadline that a message tells of; None: it tells of none."""
    return Deadline(seconds) if seconds else None


def _left(deadline: Deadline | None) -> float:
    """What a message tells of a deadline: seconds that remain, 0 for none."""
    return 0.0 if deadline is None else max(_LEAST_S, deadline.remaining())
