"""The connection of one rank to its sidecar: keeps it open, reopens it, and dispatches what arrives.

In: the ``Connect`` stream. Out: the sidecar's welcome, the status of followed saves, and unary calls,
which are repeated while it can't be reached. A connection is made for one incarnation and outlives restarts of
the sidecar. Owned by a sidecar client. It lives on the engine's loop, and a worker thread reads the stream; the
methods for other threads are marked. Callbacks run on the worker thread, must be quick and may not raise.

Its heartbeat pings every other second, since a stopped sidecar keeps its connection, and gRPC's own keepalive doesn't
detect that on a unix socket (grpcio 1.85). It fails no save: only deadlines do.
"""

import asyncio
import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from pannier.client import console, exit_hooks
from pannier.client.engine import engine
from pannier.client.identity import Identity
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.common.deadline import Deadline, set_within
from pannier.common.observer_clock import ObserverClock
from pannier.common.retry import RetryPolicy
from pannier.v1 import save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import errors, object_names
from pannier.wire.errors import (
    DeadlineError,
    PannierError,
    UnavailableError,
    VersionMismatchError,
    check_wire_version,
    stopped,
)
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FollowedSave(Protocol):
    """A save whose status the connection follows; see :class:`pannier.client.saves.save.Save`."""

    @property
    def context(self) -> sidecar_pb2.SaveContext:
        """Of the save."""

    def on_status(self, update: save_pb2.SaveStatus) -> None:
        """The sidecar's view of the save."""

    def on_unresponsive(self, problem: str) -> None:
        """The sidecar doesn't respond; empty: it does again."""

    def pending(self) -> sidecar_pb2.PendingSave:
        """The message by which a restarted sidecar learns of it."""


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
        self.followed: dict[str, FollowedSave] = {}
        """By id, the saves whose status is followed; of the loop."""
        self.is_closed = False
        self._engine = engine()
        self._channel = channel
        self._restart_daemons = restart_daemons
        self._on_welcome = on_welcome
        self._on_room_wanted = on_room_wanted
        self._welcome: sidecar_pb2.Welcome | None = None
        self._problem: PannierError | None = None
        # Of the loop.
        self._connected = asyncio.Event()
        """Set while the sidecar is reachable."""
        self._answered = asyncio.Event()
        """The sidecar accepted the connection, or refused it with a reason."""
        self._closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._heartbeat = Heartbeat(
            self.peer,
            self._ping,
            connected=self._connected.is_set,
            notify=self._report_unresponsive,
        )

    @property
    def welcome(self) -> sidecar_pb2.Welcome:
        """The sidecar's last description of itself."""
        assert self._welcome is not None
        return self._welcome

    # Any thread.

    def open(self, timeout_s: float, hint: str) -> None:
        """Connects, and keeps the connection open until :meth:`close`, also after an error.

        Raises:
            UnavailableError: nothing answers within ``timeout_s`` seconds; with ``hint``.
            VersionMismatchError: the sidecar has another wire version.
            ConfigurationError: the socket belongs to another user, or the TLS files can't be used.
        """
        self._engine.call(lambda: self._open(timeout_s, hint))

    def check_version(self) -> None:
        """Raises VersionMismatchError if the sidecar is of another version: it could misunderstand any call."""
        if isinstance(self._problem, VersionMismatchError):
            raise self._problem

    def close(self, *, announce: bool = False) -> None:
        """Ends the connection; running calls fail. Returns at once.

        Args:
            announce: this process continues, so that the sidecar must not treat it as dead.
        """
        self.is_closed = True
        if not announce:
            self._channel.close()
        self._engine.start(lambda: self._close(announce))

    # On the loop.

    async def call_repeatedly(
        self,
        method: str,
        request: Any,
        time_left: Callable[[], float],
        deadline: Deadline,
        *,
        patience_s: float = math.inf,
        repeatable: bool = False,
    ) -> Any:
        """A unary call, repeated while the sidecar can't be reached, until ``deadline``.

        Args:
            time_left: updates the request's own time-outs before each try; returns its time-out, seconds.
            patience_s: seconds after which an unreachable sidecar is no longer called.
            repeatable: a time-out raises UnavailableError, and so is another try.
        """

        async def once() -> Any:
            seconds = time_left()
            return await self.call(method, request, seconds, repeatable=repeatable)

        return await self.repeat(once, deadline, patience_s)

    async def repeat(
        self, function: Callable[[], Awaitable[T]], deadline: Deadline, patience_s: float = math.inf
    ) -> T:
        """``function()``, repeated as above."""
        return await self._policy(deadline, patience_s).run(function, sleep=self._await_connection)

    async def _open(self, timeout_s: float, hint: str) -> None:
        self._tasks.append(asyncio.create_task(self._stay_connected()))
        await set_within(timeout_s, self._answered)
        problem = self._problem
        if not self._connected.is_set():
            if self._answered.is_set() and problem is not None:
                raise problem
            raise UnavailableError(f"{problem or f'no {self.peer} answers'}; {hint}")
        self._tasks.append(asyncio.create_task(self._heartbeat.run()))

    async def call(
        self, method: str, request: Any, timeout: float, *, repeatable: bool = False
    ) -> Any:
        """One unary call. ``repeatable``: a time-out raises UnavailableError, to be retried.

        Raises:
            PannierError: the sidecar's error, or UnavailableError.
        """
        deadline = Deadline(timeout)

        def start(channel: grpc.Channel) -> Any:
            stub_method = getattr(sidecar_pb2_grpc.SidecarStub(channel), method)
            metadata = self._channel.metadata()
            return stub_method.future(request, timeout=timeout, metadata=metadata)

        self.check_version()
        with self._channel.call(start) as call:
            ended = asyncio.Event()
            call.add_done_callback(lambda _: self._engine.post(ended.set))
            try:
                await ended.wait()
                return call.result()
            except asyncio.CancelledError:
                call.cancel()
                raise
            except grpc.FutureCancelledError as error:
                raise UnavailableError("the client is closed") from error
            except grpc.RpcError as error:
                if self.is_closed:
                    raise UnavailableError("the client is closed") from error
                if repeatable and deadline.passed:
                    raise UnavailableError(
                        f"{self.peer} did not answer within {timeout:g} s: "
                        f"{errors.unanswered(self.peer)}"
                    ) from error
                raise errors.from_rpc_error(error, peer=self.peer) from error

    def _policy(self, deadline: Deadline, patience_s: float) -> RetryPolicy:
        patience = Deadline(min(patience_s, deadline.remaining()))
        at_exit: Deadline | None = None

        def stop() -> bool:
            nonlocal at_exit
            if at_exit is None and exit_hooks.is_ending():
                # The interpreter waits for the save before it exits.
                at_exit = Deadline(timeouts.RECONNECT_S)
            return patience.passed or self.is_closed or (at_exit is not None and at_exit.passed)

        return RetryPolicy(
            retriable=lambda error: isinstance(error, UnavailableError),
            first_s=timeouts.CALL_AGAIN_S,
            longest_s=timeouts.CALL_LONGEST_AGAIN_S,
            stop=stop,
        )

    async def _await_connection(self, seconds: float) -> None:
        """Waits at most ``seconds`` for a connection that is known to be lost."""
        # Connected, or the disconnect isn't noticed yet: the whole pause.
        await set_within(seconds, self._closed if self._connected.is_set() else self._connected)

    async def _ping(self, timeout: float, *, closing: bool = False) -> None:
        who = self.identity
        request = sidecar_pb2.PingRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            closing=closing,
            waiting=console.training_wait(),
        )
        await self.call("Ping", request, timeout)

    async def _close(self, announce: bool) -> None:
        self._closed.set()
        for task in self._tasks:
            task.cancel()
        if not announce:
            return  # The channel is closed already.
        try:
            if self._connected.is_set():
                await self._ping(timeouts.DISCONNECT_S, closing=True)
        except PannierError as error:
            _log.debug(
                "the end of the connection was not announced to the %s: %s", self.peer, error
            )
        finally:
            self._channel.close()

    async def _stay_connected(self) -> None:
        """Keeps the ``Connect`` stream open."""
        failures = 0
        while True:
            try:
                pending = [save.pending() for save in self.followed.values()]
                await self._engine.in_thread(partial(self._receive_all, pending))
                failures = 0
            except PannierError as error:
                if self._connected.is_set() and not self.is_closed:
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
                self._connected.clear()
            if failures >= 3 and self._restart_daemons is not None:
                try:
                    await self._engine.in_thread(self._restart_daemons)
                except Exception as error:  # noqa: BLE001 - as above
                    if not isinstance(error, PannierError):
                        error = PannierError(f"{type(error).__name__}: {error}")
                    self._problem = error
                    _log.warning("could not start the embedded daemons again: %s", error)
            pause_s = timeouts.CONNECT_AGAIN_S * 2 ** min(failures, 5)
            await asyncio.sleep(min(timeouts.CONNECT_LONGEST_AGAIN_S, pause_s))

    def _deliver(self, status: save_pb2.SaveStatus) -> None:
        save = self.followed.get(object_names.save_text(status.save))
        if save is not None:
            save.on_status(status)

    def _report_unresponsive(self, problem: str) -> None:
        for save in self.followed.values():
            save.on_unresponsive(problem)

    def _mark_connected(self) -> None:
        self._connected.set()
        self._answered.set()

    # In a worker thread.

    def _receive_all(self, pending: list[sidecar_pb2.PendingSave]) -> None:
        """Receives until the stream ends."""
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
            pending=pending,
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

            first = self._engine.after(timeouts.CONNECT_S, give_up)
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
            self._engine.post(self._deliver, response.save)
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
        self._engine.post(self._mark_connected)


_log = logging.getLogger(__name__)


class Heartbeat:
    """Pings as long as :meth:`run` runs.

    Args:
        peer: name of the sidecar, for messages.
        ping: makes one ping, with a time-out in seconds; raises a PannierError.
        connected: whether the sidecar has accepted the connection, so that pings may be answered.
        notify: gets what saves wait for, ``""`` when the sidecar answers again.
    """

    def __init__(
        self,
        peer: str,
        ping: Callable[[float], Awaitable[None]],
        *,
        connected: Callable[[], bool],
        notify: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._ping = ping
        self._connected = connected
        self._notify = notify
        # Trainers hold the GIL for seconds at times: that time must not count against the sidecar.
        self._clock = ObserverClock()
        self._last_seen = self._clock.now()
        self._missed = 0
        self._unresponsive = False
        self._state = ""
        """That its process is stopped, looked up once: each look opens a connection that it doesn't accept."""

    def mark_seen(self) -> None:
        """The sidecar sent something. Any thread."""
        self._last_seen = self._clock.now()

    async def run(self) -> None:
        """Pings until it is cancelled."""
        pause = timeouts.PING_S
        self._clock.tick(pause)
        while True:
            await asyncio.sleep(pause)
            pause = await self._beat()
            self._clock.tick(pause)

    async def _beat(self) -> float:
        """One ping and its evaluation; returns the pause until the next."""
        late_s = self._clock.tick(timeouts.PING_TIMEOUT_S)
        answered = await self._is_answered()
        late_s += self._clock.tick(0.0)
        if answered:
            self._missed = 0
        elif not late_s:
            # Else the answer may have come and been discarded while this thread could not run.
            self._missed += 1
        await self._report()
        return timeouts.PING_S if answered else timeouts.PING_AGAIN_S

    async def _is_answered(self) -> bool:
        if not self._connected():
            return False
        try:
            await self._ping(timeouts.PING_TIMEOUT_S)
        except (DeadlineError, UnavailableError):
            return False
        except PannierError:
            pass  # an error is an answer, too
        self.mark_seen()
        return True

    async def _report(self) -> None:
        unseen_s = self._clock.now() - self._last_seen
        # One missed answer proves nothing: this trainer itself may have been stopped.
        unresponsive = self._missed > 1 and unseen_s > timeouts.UNRESPONSIVE_S
        if unresponsive:
            if not self._unresponsive:
                self._state = await engine().in_thread(lambda: stopped(self._peer))
            seen = f"last seen {unseen_s:.0f} s ago"
            state = self._state if self._connected() else "not connected"
            self._notify(f"the {self._peer} ({seen}{state and '; '}{state})")
        if unresponsive and not self._unresponsive and self._connected():
            # A lost connection has been logged already.
            _log.warning(
                "the %s does not respond, last seen %.0f s ago%s: its saves wait, until their deadlines",
                *(self._peer, unseen_s, self._state and f"; {self._state}"),
            )
        elif self._unresponsive and not unresponsive:
            _log.info("the %s responds again", self._peer)
            self._notify("")
        self._unresponsive = unresponsive
