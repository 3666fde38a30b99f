"""The sidecar's calls of the coordinator.

In: requests of this host's ranks. Out: the coordinator's responses, retried across its restarts until
their deadline; whether it is attached and responsive. On the event loop. The stream of reports is in
:mod:`pannier.sidecar.coordinator_stream`.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.common import observer_clock, timeouts
from pannier.common.retry import RetryPolicy
from pannier.daemon.listeners import socket_path
from pannier.v1 import coordinator_pb2_grpc, diagnosis_pb2, diagnosis_pb2_grpc
from pannier.wire.addresses import channel_options, keepalive_options
from pannier.wire.errors import DeadlineError, UnavailableError, from_rpc_error
from pannier.wire.tls import Tls, open_aio_channel

_log = logging.getLogger(__name__)


class CoordinatorClient:
    """The coordinator of this sidecar.

    Args:
        tls: for a coordinator on TCP; None: plaintext.
        on_responsiveness: called when the coordinator becomes unresponsive, or responsive again.
    """

    def __init__(
        self,
        address: str,
        tls: Tls | None,
        *,
        on_responsiveness: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._on_responsiveness = on_responsiveness
        self._channels: list[grpc.aio.Channel] = []
        """New calls use the last one; calls may still wait on channels with earlier certificates."""
        self._stub: Any = None
        self._health: Any = None
        self._started = time.monotonic()
        self._detached_since: float | None = self._started
        """None: attached."""
        self._refusal = ""
        self._last_seen: float | None = None
        self._unresponsive = False

    @property
    def peer(self) -> str:
        """The coordinator, human-readable."""
        return f"coordinator at {self._address}"

    @property
    def connected(self) -> bool:
        """Attached and responsive."""
        last_seen = self._last_seen
        return (
            self._detached_since is None
            and last_seen is not None
            and observer_clock.now() - last_seen < timeouts.UNRESPONSIVE_S
        )

    @property
    def description(self) -> str:
        """The coordinator and when it was last seen, or why it refuses this sidecar, human-readable."""
        if self._refusal:
            return f"{self.peer} (it refuses this sidecar: {self._refusal})"
        if self._last_seen is None:
            return f"{self.peer} (not seen yet)"
        return f"{self.peer} (last seen {observer_clock.now() - self._last_seen:.0f} s ago)"

    @property
    def detached_s(self) -> float:
        """Seconds since it was attached; 0: it is."""
        return 0.0 if self._detached_since is None else time.monotonic() - self._detached_since

    @property
    def was_seen(self) -> bool:
        """Whether it has ever answered."""
        return self._last_seen is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens the channel, and pings as long as the context lasts."""
        self._open()
        ping = asyncio.get_running_loop().create_task(self._keep_pinging())
        try:
            yield
        finally:
            ping.cancel()
            await asyncio.gather(ping, return_exceptions=True)
            for channel in self._channels:
                await channel.close()

    def refresh_channel(self) -> None:
        """Opens another channel if certificates have changed; before each attach."""
        if self._tls is not None and self._tls.changed():
            self._open()

    async def await_socket(self, end: float) -> None:
        """Returns when the socket of a coordinator on this host is there, at the latest at ``end``, monotonic.

        At the start the daemons come up in any order, and a channel that can't connect pauses before its next try.
        """
        path = socket_path(self._address)
        end = min(end, self._started + timeouts.DAEMONS_START_S)
        # No event announces it. Not Path.exists, which raises where this user may not look.
        while path is not None and not os.path.exists(path) and time.monotonic() < end:  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(timeouts.DAEMONS_START_POLL_S)

    def attach(self) -> Any:
        """A new ``Attach`` stream."""
        return self._stub.Attach()

    def mark_attached(self) -> None:
        """The coordinator has accepted the stream of reports."""
        self._detached_since, self._refusal = None, ""
        self.mark_seen()

    def mark_detached(self, refusal: str = "") -> bool:
        """The stream of reports ended; returns whether it was open, or this refusal is another.

        Args:
            refusal: why the coordinator takes no stream of this sidecar; empty: it didn't say so.
        """
        changed = self._detached_since is None or refusal not in ("", self._refusal)
        self._refusal = refusal
        if self._detached_since is None:
            self._detached_since = time.monotonic()
        return changed

    def mark_seen(self) -> None:
        """The coordinator sent something."""
        self._last_seen = observer_clock.now()

    async def call(
        self, method: str, request: Any, timeout_s: float, *, timed: bool = False
    ) -> Any:
        """Calls ``method`` of the coordinator, and retries while it can't be reached.

        Args:
            timed: the request carries its remaining time, as ``timeout_s``.

        Raises DeadlineError naming the coordinator, or the coordinator's own error.
        """
        end = time.monotonic() + timeout_s

        async def once() -> Any:
            left = max(0.05, end - time.monotonic())
            if timed:
                request.timeout_s = left
            try:
                # Of the newest channel, which has the newest certificate.
                response = await getattr(self._stub, method)(
                    request, timeout=left + (timeouts.COORDINATOR_SLACK_S if timed else 0)
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, peer=self.peer) from error
            self.mark_seen()
            return response

        await self.await_socket(end)
        policy = RetryPolicy(
            retriable=lambda error: isinstance(error, UnavailableError),
            first_s=0.1,
            longest_s=timeouts.ATTACH_LONGEST_AGAIN_S,
            end=end,
        )
        try:
            return await policy.run(once)
        except UnavailableError as error:
            raise DeadlineError(
                f"the {self.description} could not be reached for {timeout_s:.0f} s to {method}: "
                f"{error}"
            ) from error

    async def diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, timeout_s: float
    ) -> diagnosis_pb2.DiagnoseResponse:
        """The coordinator's own diagnosis, without retries. Raises PannierError: it can't be reached."""
        stub: Any = diagnosis_pb2_grpc.DiagnosisStub(self._channels[-1])
        try:
            response: diagnosis_pb2.DiagnoseResponse = await stub.Diagnose(
                request, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self.peer) from error
        return response

    def check_responsive(self) -> None:
        """Logs when the coordinator becomes unresponsive, or responsive again; every second or so."""
        unresponsive = (
            self._last_seen is not None
            and observer_clock.now() - self._last_seen > timeouts.UNRESPONSIVE_S
        )
        if unresponsive is self._unresponsive:
            return
        self._unresponsive = unresponsive
        if unresponsive:
            _log.warning(
                "the %s is unresponsive: its saves wait, until their deadlines", self.description
            )
        else:
            _log.info("the %s is responsive again", self.peer)
        self._on_responsiveness()

    def _open(self) -> None:
        options = [*channel_options(), *keepalive_options()]
        channel = open_aio_channel(self._address, options, self._tls)
        self._channels.append(channel)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def _keep_pinging(self) -> None:
        await self.await_socket(math.inf)
        while True:
            try:
                await self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=timeouts.TRANSPORT_PING_TIMEOUT_S
                )
                self.mark_seen()
            except grpc.aio.AioRpcError as error:
                # `description` shows when it was last seen; a broken connection ends the stream.
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self.mark_seen()
            await asyncio.sleep(timeouts.TRANSPORT_PING_S)
