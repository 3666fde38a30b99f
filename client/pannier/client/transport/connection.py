"""The connection of one rank to its sidecar: keeps it open, reopens it, and dispatches what arrives.

In: the ``Connect`` stream. Out: the sidecar's welcome, the status of followed saves, and single
unary calls. A connection is made for one incarnation and outlives restarts of the sidecar. Owned
by a sidecar client. Thread-safe; callbacks run on threads of the connection, must be quick and may
not raise.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from pannier.client.identity import Identity
from pannier.client.interrupts import shielded
from pannier.client.messages import wait_log
from pannier.client.timers import Timers
from pannier.client.transport.channel import SidecarChannel
from pannier.client.transport.heartbeat import Heartbeat
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import errors, object_names
from pannier.wire.errors import (
    PannierError,
    UnavailableError,
    VersionMismatchError,
    check_wire_version,
)
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

_LEAST_S: Final = 0.001

OnStatus = Callable[[save_pb2.SaveStatus], None]
OnUnresponsive = Callable[[str], None]
"""Called with the sidecar's name and when it was last seen; "" once it answers again."""


@dataclass
class _FollowedSave:
    context: sidecar_pb2.SaveContext
    on_status: OnStatus
    on_unresponsive: OnUnresponsive
    deadline: Deadline | None
    handed_over: bool = False

    def pending(self) -> sidecar_pb2.PendingSave:
        """The message by which a restarted sidecar, which may not know the save, learns of it."""
        pending = sidecar_pb2.PendingSave(context=self.context, handed_over=self.handed_over)
        pending.save_timeout_s = seconds_left(self.deadline)
        return pending


class FollowedSaves:
    """The saves whose status the client follows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[str, _FollowedSave] = {}

    def follow(
        self,
        context: sidecar_pb2.SaveContext,
        on_status: OnStatus,
        on_unresponsive: OnUnresponsive = lambda text: None,
        deadline: Deadline | None = None,
    ) -> None:
        """Calls ``on_status`` with every status of a save until :meth:`unfollow`.

        Until then a restarted sidecar is asked for the save's outcome.

        Args:
            deadline: of the save; None: not known.
        """
        followed = _FollowedSave(context, on_status, on_unresponsive, deadline)
        with self._lock:
            self._saves[object_names.save_text(context.save)] = followed

    def unfollow(self, save: save_pb2.SaveId) -> None:
        """Drops the callbacks of ``save``."""
        with self._lock:
            self._saves.pop(object_names.save_text(save), None)

    def mark_handed_over(self, save: save_pb2.SaveId) -> None:
        """The sidecar has this rank's part of ``save``, and its plan is confirmed."""
        with self._lock:
            followed = self._saves.get(object_names.save_text(save))
            if followed is not None:
                followed.handed_over = True

    def pending(self) -> list[sidecar_pb2.PendingSave]:
        """All of them, for a sidecar that may not know them."""
        with self._lock:
            return [followed.pending() for followed in self._saves.values()]

    def deliver(self, status: save_pb2.SaveStatus) -> None:
        """Calls the save's ``on_status``."""
        with self._lock:
            followed = self._saves.get(object_names.save_text(status.save))
        if followed is not None:
            followed.on_status(status)

    def report_unresponsive(self, text: str) -> None:
        """Calls every ``on_unresponsive``."""
        with self._lock:
            followed = list(self._saves.values())
        for each in followed:
            each.on_unresponsive(text)

    def __len__(self) -> int:
        return len(self._saves)


class SidecarConnection:
    """See the module.

    Args:
        channel: to the sidecar.
        who: this rank in its incarnation.
        restart_daemons: starts embedded daemons again when they are dead; None: not embedded.
        on_welcome: gets each welcome: the sidecar may have restarted.
        on_room_wanted: other clients need room in the spool.
    """

    def __init__(
        self,
        channel: SidecarChannel,
        who: Identity,
        *,
        restart_daemons: Callable[[], None] | None,
        on_welcome: Callable[[sidecar_pb2.Welcome], None],
        on_room_wanted: Callable[[], None],
    ) -> None:
        self.peer = f"sidecar at {channel.address}"
        self.identity = who
        self.timers = Timers("pannier-timers")
        self.followed = FollowedSaves()
        self.connected = threading.Event()
        """Set while the sidecar is reachable."""
        self.closed = threading.Event()
        self._channel = channel
        self._restart_daemons = restart_daemons
        self._on_welcome = on_welcome
        self._on_room_wanted = on_room_wanted
        self._welcome: sidecar_pb2.Welcome | None = None
        self._problem: PannierError | None = None
        self._answered = threading.Event()
        """The sidecar accepted the connection, or refused it with a reason."""
        self._heartbeat = Heartbeat(
            self.peer,
            self._ping,
            connected=self.connected.is_set,
            notify=self.followed.report_unresponsive,
        )

    @property
    def welcome(self) -> sidecar_pb2.Welcome:
        """The sidecar's last description of itself."""
        assert self._welcome is not None
        return self._welcome

    def open(self, timeout_s: float, hint: str) -> None:
        """Connects, and keeps the connection open until :meth:`close`, also after an error.

        Raises:
            UnavailableError: nothing answers within ``timeout_s`` seconds; with ``hint``.
            VersionMismatchError: the sidecar has another wire version.
            ConfigurationError: the socket belongs to another user, or the TLS files can't be used.
        """
        threading.Thread(target=self._run, name="pannier-connect", daemon=True).start()
        answered = self._answered.wait(timeout_s)
        problem = self._problem
        if not self.connected.is_set():
            if answered and problem is not None:
                raise problem
            raise UnavailableError(f"{problem or f'no {self.peer} answers'}; {hint}")
        self._heartbeat.start()

    def check_version(self) -> None:
        """Raises VersionMismatchError if the sidecar is of another version: it could misunderstand any call."""
        if isinstance(self._problem, VersionMismatchError):
            raise self._problem

    def close(self, *, announce: bool = False) -> None:
        """Ends the connection; running calls fail. Returns at once.

        Args:
            announce: this process continues, so that the sidecar must not treat it as dead.
        """
        self.closed.set()
        self._heartbeat.close()
        self.timers.close()
        if announce and self.connected.is_set():
            try:
                threading.Thread(
                    target=self._announce_close, name="pannier-disconnect", daemon=True
                ).start()
                return
            except RuntimeError:  # the interpreter is ending: the process will be dead soon
                _log.debug("the end of the connection was not announced to the %s", self.peer)
        self._channel.close()

    @shielded
    def call(self, method: str, request: Any, timeout: float, *, repeatable: bool = False) -> Any:
        """One unary call. ``repeatable``: a time-out raises UnavailableError, to be retried.

        Raises:
            PannierError: the sidecar's error, or UnavailableError.
        """
        deadline = Deadline(timeout)

        def start(channel: grpc.Channel) -> Any:
            stub_method = getattr(sidecar_pb2_grpc.SidecarStub(channel), method)
            # A future: one that can be cancelled.
            metadata = self._channel.metadata()
            return stub_method.future(request, timeout=timeout, metadata=metadata)

        self.check_version()
        with self._channel.call(start) as call:
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise UnavailableError("the client is closed") from error
            except grpc.RpcError as error:
                if self.closed.is_set():
                    raise UnavailableError("the client is closed") from error
                if repeatable and deadline.passed:
                    raise UnavailableError(
                        f"{self.peer} did not answer within {timeout:g} s: "
                        f"{errors.unanswered(self.peer)}"
                    ) from error
                raise errors.from_rpc_error(error, peer=self.peer) from error

    def _ping(self, timeout: float, *, closing: bool = False) -> None:
        who = self.identity
        request = sidecar_pb2.PingRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            closing=closing,
            waiting=wait_log.training_wait(),
        )
        self.call("Ping", request, timeout)

    def _announce_close(self) -> None:
        try:
            self._ping(timeouts.DISCONNECT_S, closing=True)
        except PannierError as error:
            _log.debug(
                "the end of the connection was not announced to the %s: %s", self.peer, error
            )
        finally:
            self._channel.close()

    def _run(self) -> None:
        """Keeps the ``Connect`` stream open; the connection's own thread."""
        failures = 0
        while not self.closed.is_set():
            try:
                self._receive_all()
                failures = 0
            except PannierError as error:
                if self.connected.is_set() and not self.closed.is_set():
                    _log.warning("lost the %s: %s; connecting again", self.peer, error)
                    failures = 0
                self._problem = error
                if not isinstance(error, UnavailableError):
                    self._answered.set()
                failures += 1
            except Exception as error:  # noqa: BLE001 - saves must still learn their outcome
                _log.exception("the connection to the %s failed", self.peer)
                self._problem = PannierError(f"{type(error).__name__}: {error}")
                failures += 1
            finally:
                self.connected.clear()
            if failures >= 3 and self._restart_daemons is not None and not self.closed.is_set():
                try:
                    self._restart_daemons()
                except Exception as error:  # noqa: BLE001 - as above
                    if not isinstance(error, PannierError):
                        error = PannierError(f"{type(error).__name__}: {error}")
                    self._problem = error
                    _log.warning("could not start the embedded daemons again: %s", error)
            pause_s = timeouts.CONNECT_AGAIN_S * 2 ** min(failures, 5)
            self.closed.wait(min(timeouts.CONNECT_LONGEST_AGAIN_S, pause_s))

    def _receive_all(self) -> None:
        who = self.identity
        self._channel.renew()
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
            pending=self.followed.pending(),
        )
        with self._channel.call(
            lambda channel: sidecar_pb2_grpc.SidecarStub(channel).Connect(
                request, metadata=self._channel.metadata()
            )
        ) as call:
            # The kernel accepts connections for a stopped daemon, which never answers them.
            unanswered = threading.Event()

            def give_up() -> None:
                unanswered.set()
                call.cancel()

            first = self.timers.start(timeouts.CONNECT_S, give_up)
            try:
                for response in call:
                    first.cancel()
                    self._receive(response)
            except grpc.RpcError as error:
                if unanswered.is_set():
                    raise UnavailableError(
                        f"{self.peer} did not answer within {timeouts.CONNECT_S:g} s: "
                        f"{errors.unanswered(self.peer)}"
                    ) from error
                raise errors.from_rpc_error(error, peer=self.peer) from error
            finally:
                first.cancel()

    def _receive(self, response: sidecar_pb2.ConnectResponse) -> None:
        self._heartbeat.mark_seen()
        if response.HasField("welcome"):
            self._accept(response.welcome)
        elif response.HasField("save"):
            self.followed.deliver(response.save)
        elif response.HasField("room"):
            self._on_room_wanted()

    def _accept(self, welcome: sidecar_pb2.Welcome) -> None:
        check_wire_version(
            f"the {self.peer} (pannier {welcome.sidecar_version})",
            welcome.wire_version,
            "this client",
        )
        self._welcome = welcome
        self._on_welcome(welcome)
        self._problem = None
        self.connected.set()
        self._answered.set()


def seconds_left(deadline: Deadline | None) -> float:
    """A deadline as messages carry it: seconds that remain, 0 for no deadline."""
    return 0.0 if deadline is None else max(_LEAST_S, deadline.remaining())
