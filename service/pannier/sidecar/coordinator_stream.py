"""The ``Attach`` stream to the coordinator: reports of this host's ranks out, status updates in.

In: changes of saves, and replicas. Out: reports, heartbeats, and the coordinator's statuses for
:class:`~pannier.sidecar.save_registry.SaveRegistry`. After a reconnect all undecided ranks are reported
again. On the event loop.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from pannier.common import observer_clock, timeouts
from pannier.common.deadline import set_within
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.liveness import TrainerLiveness
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.restore.load_reports import LoadReports, Sent
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import FAILED, RankSave, Save
from pannier.sidecar.status import is_reportable, rank_report
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError, VersionMismatchError, from_rpc_error
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_REPORTED_KEPT: Final = 256
"""Saves that were reported on a stream; above this number it forgets those that have ended."""


class Watches(Protocol):
    """Saves that clients ask about and that this sidecar doesn't hold."""

    def unknown(self) -> list[sidecar_pb2.PendingSave]:
        """Those to ask the coordinator about."""

    def apply_status(self, status: save_pb2.SaveStatus) -> None:
        """Forwards a status of the coordinator to the clients."""


@dataclass
class _StreamState:
    """What one stream has sent."""

    reported: set[str] = field(default_factory=set)
    """Keys of saves whose ranks were listed in a report."""
    followed: set[str] = field(default_factory=set)
    """Keys of saves in planning whose status the coordinator sends on this stream."""
    sent_at: float = 0.0
    trainers_at: float = 0.0
    planning_at: float = 0.0
    loads: Sent = field(default_factory=Sent)
    began: float = field(default_factory=time.monotonic)
    replicated: set[str] = field(default_factory=set)
    """Keys of saves whose ranks were listed in a report of a replica."""

    @property
    def heartbeat_due(self) -> bool:
        return time.monotonic() - self.sent_at >= timeouts.HEARTBEAT_S


class CoordinatorStream:
    """Keeps one stream open.

    Args:
        copies: the local copies that this host has for loads.
        replicas: the exchange of replicas with other hosts.
        host: the name of this host.
        sidecar_id: random id of this process, the same for all its streams.
        job: the only job that the sidecar serves; empty: any.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        saves: SaveRegistry,
        *,
        trainers: TrainerLiveness,
        watches: Watches,
        loads: LoadReports,
        copies: Callable[[], coordinator_pb2.HeldCopies],
        replicas: Replicas,
        host: str,
        sidecar_id: str,
        job: str = "",
    ) -> None:
        self._client = client
        self._saves = saves
        self._trainers = trainers
        self._watches = watches
        self._loads = loads
        self._copies = copies
        self._replicas = replicas
        self._host = host
        self._sidecar_id = sidecar_id
        self._job = job
        self._changed: dict[tuple[str, int], RankSave] = {}
        """Ranks to report, by save and rank."""
        self._statuses_requested = False
        self._urgent = asyncio.Event()
        self._leaving = False
        """The stream is ended once all ranks are reported."""
        self._left = asyncio.Event()

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the registry: reports the rank, soon or at once."""
        if rank is None or save.outcome is not None or not is_reportable(rank):
            return
        self._changed[(save.key, rank.rank)] = rank
        if urgent:
            self._urgent.set()

    def request_statuses(self) -> None:
        """Asks the coordinator at once about the saves of :class:`Watches`."""
        self._statuses_requested = True
        self._urgent.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Stays attached as long as the context lasts."""
        tasks = [
            asyncio.get_running_loop().create_task(self._stay_attached()),
            asyncio.get_running_loop().create_task(self._watch_liveness()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self, timeout_s: float) -> bool:
        """Sends the last reports and ends the stream; False when the coordinator hasn't read them in time."""
        self._leaving = True
        self._urgent.set()
        if self._client.detached_s and not self._changed:
            return True
        return await set_within(timeout_s, self._left)

    async def _stay_attached(self) -> None:
        failures = 0
        await self._client.await_socket(math.inf)
        while True:
            started = time.monotonic()
            peer, refusal = self._client.peer, ""
            try:
                self._client.refresh_channel()
                await self._attach()
                if self._left.is_set():
                    return
                problem = "it ended the stream"
            except PannierError as error:
                problem = str(error)
                refusal = problem if isinstance(error, VersionMismatchError) else ""
            except Exception as error:  # noqa: BLE001 - top of the task: it must go on
                _log.exception("the stream to the %s failed", peer)
                problem = f"{type(error).__name__}: {error}"
            if self._client.mark_detached(refusal) or failures == 0:
                # At the start the daemons come up in any order.
                level = logging.WARNING if self._client.was_seen or refusal else logging.INFO
                _log.log(level, "not attached to the %s: %s; retrying", peer, problem)
            failures = (
                0 if time.monotonic() - started > timeouts.ATTACH_LONGEST_AGAIN_S else failures + 1
            )
            longest = min(timeouts.ATTACH_LONGEST_AGAIN_S, 0.05 * 2 ** min(failures, 8))
            await asyncio.sleep(random.uniform(0.5, 1) * longest)

    async def _attach(self) -> None:
        """One ``Attach`` stream, until it breaks."""
        call = self._client.attach()
        state = _StreamState()
        tasks: list[asyncio.Task[None]] = []
        try:
            await call.write(self._first_request(state))
            state.sent_at = time.monotonic()
            loop = asyncio.get_running_loop()
            reading = loop.create_task(self._read(call))
            writing = loop.create_task(self._keep_writing(call, state))
            tasks = [reading, writing]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if writing in done:
                # The coordinator ends the stream after the last reports, which a cancellation now might lose.
                await reading
                self._left.set()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._client.peer) from error
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        async for response in call:
            # Its first response, which comes at once: it has accepted this sidecar.
            if self._client.detached_s:
                _log.info("attached to the %s", self._client.peer)
            self._client.mark_attached()
            for status in response.saves:
                self._saves.apply_status(status)
                self._watches.apply_status(status)
                self._replicas.apply_status(status)
            self._replicas.apply(response)

    async def _keep_writing(self, call: Any, state: _StreamState) -> None:
        """Sends reports and heartbeats until this sidecar leaves."""
        while True:
            busy = bool(self._changed) or bool(self._saves.undecided())
            await set_within(timeouts.PROGRESS_S if busy else timeouts.HEARTBEAT_S, self._urgent)
            self._urgent.clear()
            ranks, self._changed = list(self._changed.values()), {}
            requested, self._statuses_requested = self._statuses_requested, False
            if state.heartbeat_due:
                # Claims are repeated until they are confirmed: a draining coordinator ignores new saves.
                ranks += [rank for rank in self._claiming() if rank not in ranks]
            # What a broken stream loses is sent after the reconnect, with everything else.
            if ranks or requested or state.heartbeat_due:
                await call.write(self._request(state, ranks, requested=requested))
                state.sent_at = time.monotonic()
            if self._leaving and not self._changed:
                await call.done_writing()
                return

    def _first_request(self, state: _StreamState) -> coordinator_pb2.AttachRequest:
        """Introduces the sidecar and reports all that the coordinator may have missed."""
        self._changed = {}
        request = coordinator_pb2.AttachRequest(
            wire_version=WIRE_VERSION,
            host=self._host,
            sidecar=self._sidecar_id,
            job=self._job,
            replicas=self._replicas.offer(),
        )
        undecided = self._saves.undecided()
        self._add_reports(
            request,
            state,
            [rank for s in undecided for rank in s.ranks.values() if is_reportable(rank)],
        )
        self._add_trainers(request, state)
        request.watched.extend(self._watches.unknown())
        request.loads.extend(self._loads.reports(state.loads))
        return request

    def _request(
        self, state: _StreamState, ranks: list[RankSave], *, requested: bool
    ) -> coordinator_pb2.AttachRequest:
        now = time.monotonic()
        for known in (state.reported, state.replicated):
            if len(known) > _REPORTED_KEPT:
                known.intersection_update(save.key for save in self._saves.undecided())
        request = coordinator_pb2.AttachRequest()
        self._add_reports(request, state, ranks)
        if ranks or now - state.trainers_at >= timeouts.HEARTBEAT_S:
            # Together with their ranks: the coordinator never sees a dead trainer without its failed rank, or
            # the reverse.
            self._add_trainers(request, state)
        if requested:
            request.watched.extend(self._watches.unknown())
        if state.loads.due:
            request.loads.extend(self._loads.reports(state.loads))
        if now - state.planning_at >= timeouts.HEARTBEAT_S:
            state.planning_at = now
            request.watched.extend(self._planning(state))
            request.watched.extend(self._replicas.unknown(state.began))
        return request

    def _add_reports(
        self,
        request: coordinator_pb2.AttachRequest,
        state: _StreamState,
        ranks: list[RankSave],
    ) -> None:
        for rank in ranks:
            if rank.save.outcome is not None:
                continue
            report = rank_report(rank)
            if rank.save.key in state.reported:
                # The coordinator knows them from this stream's first report of the save.
                del report.context.ranks[:]
            state.reported.add(rank.save.key)
            request.reports.append(report)

    def _add_trainers(self, request: coordinator_pb2.AttachRequest, state: _StreamState) -> None:
        request.trainers.extend(self._trainers.report())
        request.copies.CopyFrom(self._copies())
        request.copies.replicas.extend(self._replicas.reports(state.replicated))
        state.trainers_at = time.monotonic()

    def _planning(self, state: _StreamState) -> list[sidecar_pb2.PendingSave]:
        """Saves that the coordinator knows only by their ranks' calls, to learn what they wait for."""
        asked = []
        undecided = self._saves.undecided()
        for save in undecided:
            ranks = list(save.ranks.values())
            if save.key in state.followed or any(is_reportable(rank) for rank in ranks):
                continue
            if save.coordinator_status is not None:
                state.followed.add(save.key)
            asked += [sidecar_pb2.PendingSave(context=rank.context) for rank in ranks[:1]]
        state.followed.intersection_update(save.key for save in undecided)
        return asked

    def _claiming(self) -> list[RankSave]:
        """Ranks whose claims of a cached plan aren't confirmed."""
        return [
            rank
            for save in self._saves.undecided()
            for rank in save.ranks.values()
            if rank.unconfirmed is not None and rank.phase not in FAILED
        ]

    async def _watch_liveness(self) -> None:
        """Checks for unresponsive peers: no event announces them."""
        with observer_clock.clock.watched():
            while True:
                observer_clock.clock.tick(timeouts.HEARTBEAT_S)
                await asyncio.sleep(timeouts.HEARTBEAT_S)
                self._trainers.log_unresponsive()
                self._client.check_responsive()
