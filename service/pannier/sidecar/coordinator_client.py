"""The sidecar's line to the coordinator: calls of its ranks, their progress, and verdicts back.

On the event loop, except for :meth:`Link.changed` and :meth:`Link.call_from_thread`.
It outlives restarts of the coordinator: calls are made again until their
deadline, and after a reconnect all undecided ranks are reported again.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.common import observer_clock
from pannier.common.retry import RetryPolicy
from pannier.sidecar.coordinator_address import Whereabouts
from pannier.sidecar.liveness import Trainers
from pannier.sidecar.progress_report import report_of, tellable
from pannier.sidecar.rpc.watches import Watches
from pannier.sidecar.save_state import Phase, RankSave, Save, Saves
from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    sidecar_pb2,
)
from pannier.wire.errors import DeadlineError, PannierError, UnavailableError, from_rpc_error
from pannier.wire.tls import Tls
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
PROGRESS_S: Final = 0.2
"""Reports of progress alone are gathered for so long."""
SUSPECT_S: Final = 5.0
"""A coordinator that was silent for so long is named as waited for."""
SLACK_S: Final = 2.5
"""Left to the coordinator to answer a deadline of its own, with the names it waited for."""
_TOLD_KEPT: Final = 256
"""Saves of a stream after which those that have ended are forgotten."""
_PING_S: Final = 3.0
_LONGEST_BACKOFF_S: Final = 2.0


class Link:
    """One sidecar's attachment to its coordinator.

    Args:
        address, host: the coordinator's, and the name of ours.
        tls: for a coordinator on TCP; None: plaintext.
        life: random id of this life of the sidecar, the same for all its links.
        successor: see :class:`Whereabouts`.
    """

    def __init__(
        self,
        saves: Saves,
        *,
        address: str,
        host: str,
        loop: asyncio.AbstractEventLoop,
        life: str,
        tls: Tls | None = None,
        successor: Path | None = None,
    ) -> None:
        self._where = Whereabouts(address, tls, successor)
        self._attached = False
        self.watches = Watches(saves, self._ask)
        """What clients ask after; passed on to the coordinator."""
        self.trainers = Trainers(saves)
        """The trainers on this host; the coordinator is told of them."""
        self._saves = saves
        self._host = host
        self._loop = loop
        self._channels: list[grpc.aio.Channel] = []
        """The last one is used; those before had TLS files that were replaced, or are elsewhere."""
        self._sidecar = life
        self._heard: float | None = None
        self._told_trainers = 0.0
        self._suspect = False
        self._lock = threading.Lock()
        self._dirty: dict[tuple[str, int], RankSave] = {}
        self._told: set[str] = set()
        """Keys of the saves that the current stream has told of."""
        self._followed: set[str] = set()
        """Keys of planning saves of which the current stream brings the status."""
        self._asked_planning = 0.0
        self._asking = False
        self._sending = False
        self._bell = asyncio.Event()
        self._idle = asyncio.Event()

    @property
    def peer(self) -> str:
        """The coordinator, for people. Any thread."""
        return f"coordinator at {self._where.address}"

    @property
    def connected(self) -> bool:
        """Attached, and heard a moment ago. Any thread."""
        heard = self._heard
        return self._attached and heard is not None and observer_clock.now() - heard < SUSPECT_S

    @property
    def description(self) -> str:
        """The coordinator and when it was last seen, for people. Any thread."""
        if self._heard is None:
            return f"{self.peer} (not seen yet)"
        return f"{self.peer} (last seen {observer_clock.now() - self._heard:.0f} s ago)"

    # Any thread.

    def changed(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of :class:`Saves`: the rank is reported, soon or at once."""
        if rank is None or save.verdict is not None or not tellable(rank):
            return
        with self._lock:
            self._dirty[(save.key, rank.rank)] = rank
        if urgent:
            self._loop.call_soon_threadsafe(self._bell.set)

    def _ask(self) -> None:
        """Listener of the watches: the coordinator is asked at once."""
        with self._lock:
            self._asking = True
        self._loop.call_soon_threadsafe(self._bell.set)

    def call_from_thread(
        self,
        method: str,
        request: Any,
        timeout_s: float,
        *,
        timed: bool = False,
        on_start: Callable[[Callable[[], Any]], Any] = lambda cancel: None,
    ) -> Any:
        """Calls the coordinator from a thread that may block; see :meth:`call`.

        Args:
            on_start: gets a function that cancels the call, which then raises
                UnavailableError.
        """
        future = asyncio.run_coroutine_threadsafe(
            self.call(method, request, timeout_s, timed=timed), self._loop
        )
        on_start(future.cancel)
        try:
            return future.result()
        except futures.CancelledError as error:
            raise UnavailableError(f"the call of {method} was given up") from error

    # On the loop.

    async def call(
        self, method: str, request: Any, timeout_s: float, *, timed: bool = False
    ) -> Any:
        """Calls ``method`` of the coordinator, again while it can't be reached.

        Args:
            timed: the request carries its remaining time, as ``timeout_s``.

        Raises DeadlineError naming the coordinator, or what it raised.
        """
        end = time.monotonic() + timeout_s
        stub = getattr(self._stub, method)

        async def once() -> Any:
            left = max(0.05, end - time.monotonic())
            if timed:
                request.timeout_s = left
            try:
                response = await stub(request, timeout=left + (SLACK_S if timed else 0))
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, peer=self.peer) from error
            self._heard = observer_clock.now()
            return response

        policy = RetryPolicy(
            retriable=lambda error: isinstance(error, UnavailableError),
            first_s=0.1,
            longest_s=_LONGEST_BACKOFF_S,
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
        """What the coordinator finds, asked once. Raises PannierError: it can't be reached."""
        stub: Any = diagnosis_pb2_grpc.DiagnosisStub(self._channels[-1])
        try:
            response: diagnosis_pb2.DiagnoseResponse = await stub.Diagnose(
                request, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self.peer) from error
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens the channel and stays attached as long as the context lasts."""
        self._open()
        tasks = [
            self._loop.create_task(self._stay_attached()),
            self._loop.create_task(self._keep_asking()),
            self._loop.create_task(self._keep_watch()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for channel in self._channels:
                await channel.close()

    def _open(self) -> None:
        channel = self._where.open()
        self._channels.append(channel)
        self._stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until everything there is to report was sent; False when it wasn't in time."""
        self._bell.set()
        deadline = time.monotonic() + timeout_s
        while self._dirty or self._sending:
            self._idle.clear()
            left = deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._idle.wait(), max(0.0, left))
            except asyncio.TimeoutError:
                return False
        return True

    async def _stay_attached(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            if self._where.moved():
                # Not closed yet: calls may still wait for an answer on it.
                self._open()
            try:
                await self._attach()
                problem = "it ended the stream"
            except PannierError as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001 - top of the task: the link must live on
                _log.exception("the link to the %s failed", self.peer)
                problem = f"{type(error).__name__}: {error}"
            if self._attached or failures == 0:
                # At the start they come up in any order.
                level = logging.INFO if self._heard is None else logging.WARNING
                _log.log(level, "not attached to the %s: %s; trying again", self.peer, problem)
            self._attached = False
            failures = 0 if time.monotonic() - started > _LONGEST_BACKOFF_S else failures + 1
            longest = min(_LONGEST_BACKOFF_S, 0.05 * 2 ** min(failures, 8))
            await asyncio.sleep(random.uniform(0.5, 1) * longest)

    async def _attach(self) -> None:
        """One ``Attach`` stream, until it breaks."""
        call = self._stub.Attach()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._write(call, self._everything(), first=True)
            self._attached = True
            self._where.found()
            self._sending = False
            self._note_heard()
            _log.info("attached to the %s", self.peer)
            tasks = [
                self._loop.create_task(self._read(call)),
                self._loop.create_task(self._keep_writing(call)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self.peer) from error
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        async for response in call:
            self._note_heard()
            for status in response.saves:
                self._saves.heard(status)
                self.watches.heard(status)

    async def _keep_writing(self, call: Any) -> None:
        while True:
            busy = bool(self._dirty) or bool(self._saves.undecided())
            pause = PROGRESS_S if busy else HEARTBEAT_S
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._bell.wait(), pause)
            self._bell.clear()
            with self._lock:
                ranks, self._dirty = list(self._dirty.values()), {}
                asking, self._asking = self._asking, False
                self._sending = True
            if time.monotonic() - self._written >= HEARTBEAT_S:
                # Said until it is answered: a coordinator that drains takes in nothing new.
                ranks += [rank for rank in self._proposing() if rank not in ranks]
            # What a broken stream swallows is sent after the reconnect, with everything else.
            if ranks or asking or time.monotonic() - self._written >= HEARTBEAT_S:
                await self._write(call, ranks, asking=asking)
            self._sending = False
            self._idle.set()

    async def _write(
        self, call: Any, ranks: list[RankSave], *, first: bool = False, asking: bool = False
    ) -> None:
        if first:
            self._told = set()
        elif len(self._told) > _TOLD_KEPT:
            self._told.intersection_update(save.key for save in self._saves.undecided())
        request = coordinator_pb2.AttachRequest()
        for rank in ranks:
            if rank.save.verdict is None:
                report = report_of(rank)
                if rank.save.key in self._told:
                    # The coordinator knows them from this stream's first report of the save.
                    del report.context.ranks[:]
                self._told.add(rank.save.key)
                request.reports.append(report)
        if ranks or first or time.monotonic() - self._told_trainers >= HEARTBEAT_S:
            # With the ranks that they left behind, so that nobody sees one without the other.
            request.trainers.extend(self.trainers.report())
            self._told_trainers = time.monotonic()
        if first or asking:
            request.watched.extend(self.watches.unknown())
        if first:
            self._followed = set()
        elif time.monotonic() - self._asked_planning >= HEARTBEAT_S:
            self._asked_planning = time.monotonic()
            request.watched.extend(self._planning())
        if first:
            request.wire_version = WIRE_VERSION
            request.host = self._host
            request.sidecar = self._sidecar
        await call.write(request)
        self._written = time.monotonic()

    def _everything(self) -> list[RankSave]:
        with self._lock:
            self._dirty = {}
        undecided = self._saves.undecided()
        return [rank for save in undecided for rank in list(save.ranks.values()) if tellable(rank)]

    def _planning(self) -> list[sidecar_pb2.PendingSave]:
        """Saves that the coordinator knows by their ranks' calls alone, to hear what they wait for."""
        asked = []
        for save in self._saves.undecided():
            ranks = list(save.ranks.values())
            if save.key in self._followed or any(tellable(rank) for rank in ranks):
                continue
            if save.coordinator is not None:
                self._followed.add(save.key)
            asked += [sidecar_pb2.PendingSave(context=rank.context) for rank in ranks[:1]]
        self._followed.intersection_update(save.key for save in self._saves.undecided())
        return asked

    def _proposing(self) -> list[RankSave]:
        return [
            rank
            for save in self._saves.undecided()
            for rank in list(save.ranks.values())
            if rank.phase is Phase.PLANNING and tellable(rank)
        ]

    async def _keep_asking(self) -> None:
        """Asks for the coordinator's health, to know when it was last seen."""
        while True:
            try:
                await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_PING_S)
                self._note_heard()
            except grpc.aio.AioRpcError as error:
                # Its silence shows in `description`, a broken connection in the stream.
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._note_heard()
            await asyncio.sleep(HEARTBEAT_S)

    async def _keep_watch(self) -> None:
        """Says who has gone silent: silence has no event of its own."""
        with observer_clock.clock.watched():
            while True:
                observer_clock.clock.tick(HEARTBEAT_S)
                await asyncio.sleep(HEARTBEAT_S)
                self._look()

    def _look(self) -> None:
        self.trainers.look()
        silent = self._heard is not None and observer_clock.now() - self._heard > SUSPECT_S
        if silent and not self._suspect:
            _log.warning(
                "the %s is silent: its saves wait, until their deadlines", self.description
            )
        elif self._suspect and not silent:
            _log.info("the %s is heard again", self.peer)
        changed, self._suspect = silent is not self._suspect, silent
        if changed:
            # Clients are told whom their saves wait for, also where nothing else happens.
            for save in self._saves.undecided():
                for rank in list(save.ranks.values()):
                    self._saves.progressed(rank)

    def _note_heard(self) -> None:
        self._heard = observer_clock.now()
