"""The gRPC services that every daemon has: Status, health and reflection.

In: a :class:`StatusRegistry` and a server that hasn't started. Out: the services added to it; once
the daemon takes no new saves, health is NOT_SERVING and the daemon's state is ``draining``. On the
daemon's event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pannier.common import timeouts
from pannier.common.wait_text import training_waits
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.daemon.status_registry import TERMINAL, StatusRegistry
from pannier.v1 import load_status_pb2, save_pb2, status_pb2, status_pb2_grpc
from pannier.wire.version import package_version

_STATUS: Final = "pannier.v1.Status"


@dataclass(frozen=True)
class Backlog:
    """What a sidecar still has to upload, and its spool; sizes in bytes."""

    bytes_queued: int = 0
    oldest_s: float = 0.0
    """Age of the oldest upload, seconds."""
    spool_bytes: int = 0
    """Reserved in the spool."""
    leased_bytes: int = 0
    """Reserved bytes that trainers have leased."""
    held_bytes: int = 0
    """Reserved bytes that were released, but are still mapped by stopped processes."""
    saves_bytes: int = 0
    """Reserved bytes that hold data files of saves."""
    capacity_bytes: int = 0
    """Most that the spool can hold."""
    free_bytes: int = 0
    """Bytes of the capacity that are free for saves."""
    memory_limit: int = 0
    """Of the sidecar's control group, which pays for a spool in memory; 0: none, or the spool is on a disk."""
    memory_used: int = 0
    """In use there."""
    refusals: int = 0
    """Requests for room in the spool that were refused since the start, which clients repeat."""
    local_copies: Sequence[status_pb2.LocalCopy] = ()
    """Committed checkpoints whose files are still in the spool, newest first."""
    evicted_copies: Sequence[status_pb2.EvictedCopy] = ()
    """The last local copies that were dropped before a newer one replaced them, newest first."""
    local_copies_served: int = 0
    """Bytes of local copies' files that loads have opened since the start."""
    local_copies_evicted: int = 0
    """Local copies that were dropped for lack of room since the start."""
    blocks_bytes: int = 0
    """Blocks of checkpoints in memory, for loads."""
    blocks_evicted: int = 0
    """Blocks that were evicted for lack of room since the start, read less often than announced."""
    peers_sent: int = 0
    """Bytes of blocks that other hosts have read here since the start."""
    replicas_bytes: int = 0
    """Bytes of other hosts' ranks, in the spool until their saves have ended."""
    replicas_sent: int = 0
    """Bytes of this host's ranks that were sent to other hosts' spools since the start."""
    replicas_refused: int = 0
    """Replicas that there was no room for since the start, when they were opened or later."""
    upload_limit: int = 0
    """Most bytes per second of uploads; 0: no limit."""
    upload_limited: bool = False
    """Uploads wait for the limit, or have within the last second."""
    upload_limited_s: float = 0.0
    """Seconds since the start in which uploads have waited for the limit."""


@dataclass
class DaemonInfo:
    """A daemon's own part of its status."""

    host: str
    draining: bool = False
    backlog: Callable[[], Backlog] = Backlog
    """Called on the event loop."""
    trainers: Callable[[], int] | None = None
    """Number of connected trainers, called on the event loop; None: a coordinator, which has none."""
    waits: Callable[[str], Iterable[save_pb2.TrainingWait]] = lambda job: ()
    """Calls that keep training loops waiting, of a job or ("") of all; called on the event loop."""
    loads: LoadRegistry = field(default_factory=LoadRegistry)
    """The loads that were reported to the daemon."""

    @property
    def daemon(self) -> str:
        """``sidecar`` or ``coordinator``."""
        return "coordinator" if self.trainers is None else "sidecar"

    @property
    def state(self) -> str:
        """As ListSavesResponse has it."""
        return "draining" if self.draining else "serving"


class StatusServices:
    """Status, health and reflection."""

    def __init__(
        self,
        server: grpc.aio.Server,
        status_registry: StatusRegistry,
        daemon_info: DaemonInfo,
        services: Sequence[str],
    ) -> None:
        """Adds these services to ``server``, which also serves ``services`` (full names)."""
        self._daemon_info = daemon_info
        self._services = ("", *services, _STATUS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        status_pb2_grpc.add_StatusServicer_to_server(
            _StatusServicer(status_registry, daemon_info), server
        )
        reflection.enable_server_reflection(_reflected(services), server)

    async def serve(self) -> None:
        """Sets the health of every service to SERVING, as that of the server as a whole is from the start."""
        for name in self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Sets health to NOT_SERVING and the state to draining."""
        self._daemon_info.draining = True
        await self._health.enter_graceful_shutdown()


def _reflected(services: Sequence[str]) -> tuple[str, ...]:
    return (*services, _STATUS, health.SERVICE_NAME, reflection.SERVICE_NAME)


def describe_daemon(daemon_info: DaemonInfo, job: str = "") -> status_pb2.ListSavesResponse:
    """A ListSavesResponse without saves; ``job``: the only one whose waits are wanted."""
    backlog = daemon_info.backlog()
    return status_pb2.ListSavesResponse(
        daemon_state=daemon_info.state,
        host=daemon_info.host,
        version=package_version(),
        bytes_queued=backlog.bytes_queued,
        oldest_upload_s=backlog.oldest_s,
        spool_bytes=backlog.spool_bytes,
        spool_leased_bytes=backlog.leased_bytes,
        spool_held_bytes=backlog.held_bytes,
        spool_saves_bytes=backlog.saves_bytes,
        spool_capacity_bytes=backlog.capacity_bytes,
        spool_free_bytes=backlog.free_bytes,
        trainers=None if daemon_info.trainers is None else daemon_info.trainers(),
        local_copies=backlog.local_copies,
        evicted_copies=backlog.evicted_copies,
        upload_limit=backlog.upload_limit,
        upload_limited=backlog.upload_limited,
        memory_limit=backlog.memory_limit,
        memory_used=backlog.memory_used,
        training_waits=training_waits(daemon_info.waits(job)),
        daemon=daemon_info.daemon,
    )


class _StatusServicer(status_pb2_grpc.StatusServicer):
    """Handlers run on the server's loop."""

    def __init__(self, status_registry: StatusRegistry, daemon_info: DaemonInfo) -> None:
        self._status_registry = status_registry
        self._daemon_info = daemon_info

    async def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: Any
    ) -> status_pb2.ListSavesResponse:
        """See the proto."""
        response = describe_daemon(self._daemon_info, request.job)
        response.saves.extend(
            self._status_registry.list(job=request.job, states=request.states, limit=request.limit)
        )
        if not request.states:
            response.loads.extend(
                self._daemon_info.loads.list(job=request.job, limit=request.limit)
            )
        return response

    async def GetSave(
        self, request: status_pb2.GetSaveRequest, context: Any
    ) -> status_pb2.GetSaveResponse:
        """See the proto."""
        return status_pb2.GetSaveResponse(save=self._status_registry.get(request.id))

    async def WatchSave(
        self, request: status_pb2.WatchSaveRequest, context: Any
    ) -> AsyncIterator[status_pb2.WatchSaveResponse]:
        """See the proto."""
        key = self._status_registry.find(request.id)
        sent: save_pb2.SaveStatus | None = None
        with self._status_registry.watch(key) as watch:
            while True:
                status = self._status_registry.get(key)
                if status != sent:
                    yield status_pb2.WatchSaveResponse(save=status)
                    sent = status
                if status.state in TERMINAL:
                    return
                await asyncio.sleep(timeouts.STATUS_INTERVAL_S)
                await watch.wait(timeouts.STATUS_REFRESH_S)

    async def GetLoad(
        self, request: status_pb2.GetLoadRequest, context: Any
    ) -> status_pb2.GetLoadResponse:
        """See the proto."""
        return status_pb2.GetLoadResponse(load=self._daemon_info.loads.get(request.id))

    async def WatchLoad(
        self, request: status_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[status_pb2.WatchLoadResponse]:
        """See the proto."""
        loads = self._daemon_info.loads
        key = loads.find(request.id)
        sent: load_status_pb2.LoadStatus | None = None
        with loads.watch(key) as watch:
            while True:
                status = loads.status_of(key, request.id)
                if status != sent:
                    yield status_pb2.WatchLoadResponse(load=status)
                    sent = status
                if status.state != load_status_pb2.LOAD_STATE_LOADING:
                    return
                await asyncio.sleep(timeouts.STATUS_INTERVAL_S)
                await watch.wait(timeouts.STATUS_REFRESH_S)
