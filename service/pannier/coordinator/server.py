"""The coordinator's process: a gRPC server on an event loop, until SIGTERM or until it is idle.

Owns everything else in this package. It keeps nothing on disk, so it may be killed at any
time: the sidecars report again to the next coordinator.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from pannier.common import observer_clock, timeouts, tracing
from pannier.coordinator.background.earlier_attempts import EarlierAttempts
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.commit.metadata import build_checked
from pannier.coordinator.config import CoordinatorConfig
from pannier.coordinator.diagnosis import CoordinatorDiagnosis
from pannier.coordinator.liveness import HeartbeatMonitor, IncarnationWatch
from pannier.coordinator.metrics import CoordinatorMetrics
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.plan_cache import PlanCache
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save_task import SaveTasks
from pannier.coordinator.servicer import NAME, CoordinatorService, add_to_server
from pannier.coordinator.sidecar_streams import SidecarStreams
from pannier.coordinator.stores import Stores
from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.http_server import serve_http
from pannier.daemon.interceptors import ErrorInterceptor
from pannier.daemon.listeners import (
    bind_listeners,
    keep_grpc_thread,
    raise_descriptor_limit,
    server_options,
)
from pannier.daemon.loads.load_metrics import load_families, observe_seconds
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.daemon.logging import set_up_logging
from pannier.daemon.malloc import keep_freed_memory
from pannier.daemon.metrics import Metrics, SaveCounts
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_page import StatusPage, read_on_loop
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import DaemonInfo, StatusServices
from pannier.v1 import diagnosis_pb2_grpc, records_pb2
from pannier.wire.version import package_version

_log = logging.getLogger(__name__)

_THREADS: Final = 2
"""For planning and metadata, which hold the GIL for most of their time."""
_CONNECTION_CALLS: Final = 1024
"""Calls at a time on one connection, more than a sidecar forwards; others wait in the sidecar."""
_WAITING: Final = 1 << 16
"""Calls that have arrived but were not accepted yet: all ranks of a job send their plans at once."""
_WAITING_OPTIONS: Final = (
    # Above the first limit, 1000 by default, gRPC refuses some calls, above the second all.
    "grpc.server.max_pending_requests",
    "grpc.server.max_pending_requests_hard_limit",
    # Seconds, 30 by default.
    "grpc.server_max_unrequested_time_in_server",
)
_KEPT: Final = 64 << 20
_LARGE: Final = 32 << 20
"""Bytes above which glibc maps an allocation separately; glibc's maximum for this setting."""
_GARBAGE: Final = 20_000
"""Objects made between two runs of the garbage collector, 700 by default."""


def run(config: CoordinatorConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Raises ConfigurationError when it can't listen or a planner can't be imported.
    """
    set_up_logging(config.log_format, daemon="coordinator", host=config.host)
    raise_descriptor_limit()
    # Columns of a large job's plan take some MiB each: if each got fresh pages, the kernel's clearing of
    # these would cost as much as the work on the columns.
    keep_freed_memory(kept=_KEPT, large=_LARGE, arenas=1)
    # torch's modules stay for good: the collector needn't visit them while metadata is built. The
    # coordinator's own objects rarely form reference cycles.
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    with tracing.exporting("pannier-coordinator", **{"host.name": config.host}):
        asyncio.run(_run(config))
    return 0


async def _run(config: CoordinatorConfig) -> None:
    keep_grpc_thread()
    async with StopSignals() as stop, serving(config, leave=stop.request) as coordinator:
        await stop.wait()
        _log.info("stopping")
        await coordinator.drain()
        deciding = [save for save in coordinator.registry.undecided() if save.deciding]
        loop = asyncio.get_running_loop()
        waits = [
            loop.create_task(save.wait_until(lambda save=save: save.ended))  # type: ignore[misc]
            for save in deciding
        ]
        if waits:
            await asyncio.wait(waits, timeout=timeouts.DECIDING_S)


@dataclass(frozen=True)
class Coordinator:
    """A running coordinator, on its event loop."""

    registry: Registry
    status_services: StatusServices

    async def drain(self) -> None:
        """Takes no new saves, and reports that in health and status."""
        self.registry.draining = True
        await self.status_services.drain()


@asynccontextmanager
async def serving(
    config: CoordinatorConfig, leave: Callable[[], None] = lambda: None
) -> AsyncIterator[Coordinator]:
    """Serves as long as the context lasts.

    Args:
        leave: called when the coordinator has been idle for ``config.idle_exit_s``.
    """
    status_registry = StatusRegistry()
    daemon_info = DaemonInfo(config.host, loads=LoadRegistry(sees_all=True))
    planners = Planners(config.planner, on_demand=config.embedded)
    stores = Stores(allow=config.allow, storage_options=config.storage_options)
    with ThreadPoolExecutor(_THREADS, "pannier-plan") as threads:

        async def build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, build_checked, manifest, receipts)

        sweeper = Sweeper(stores, grace_s=config.grace_superseded_s)
        earlier = EarlierAttempts(
            *(stores, status_registry),
            build=build,
            host=config.host,
            is_known=lambda save: registry.find(save) is not None,
            sweeper=sweeper,
        )
        retention = Retention(stores, config.retention, host=config.host)
        cache = PlanCache()
        tasks = SaveTasks(
            *(stores, planners),
            host=config.host,
            threads=threads,
            sweeper=sweeper,
            retention=retention,
            cache=cache,
            on_newest=earlier.begin,
        )
        registry = Registry(
            status_registry, begin=tasks.begin, suspect_after_s=config.suspect_after_s
        )
        IncarnationWatch(registry)
        streams = SidecarStreams(registry, stores, daemon_info.loads)
        daemon_info.waits = streams.waits
        service = CoordinatorService(registry, stores, planners, streams, cache)
        read_state = read_on_loop(asyncio.get_running_loop())
        metrics = Metrics("coordinator", daemon_info)
        counts = SaveCounts(metrics.registry)
        metrics.add(
            CoordinatorMetrics(registry, counts, streams.attached, retention, read_state).collect
        )
        metrics.add(lambda: read_state(lambda: list(load_families(daemon_info.loads))))
        observe_seconds(daemon_info.loads, metrics.registry)
        monitor = HeartbeatMonitor(
            registry, streams.attached, suspect_after_s=config.suspect_after_s
        )
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=[
                *server_options(),
                ("grpc.max_concurrent_streams", _CONNECTION_CALLS),
                *((option, _WAITING) for option in _WAITING_OPTIONS),
            ],
        )
        add_to_server(service, server)
        diagnosis = CoordinatorDiagnosis(config, lambda: registry.draining, streams.attached)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(diagnosis, server)
        status_services = StatusServices(
            server, status_registry, daemon_info, [NAME, doctor_checks.NAME]
        )
        with (
            bind_listeners(
                server, config.address, config.listen, tls=config.tls, allow_uid=config.allow_uid
            ),
            serve_health(
                config.health,
                ready=lambda: not registry.draining,
                loop=asyncio.get_running_loop(),
            ),
            serve_http(
                config.metrics,
                StatusPage(status_registry, daemon_info, read_state).routes(metrics),
                setting="--metrics",
            ),
        ):
            await server.start()
            await status_services.serve()
            _log.info("coordinator %s serves on %s", package_version(), config.address)
            watches = [
                asyncio.get_running_loop().create_task(monitor.run()),
                asyncio.get_running_loop().create_task(streams.replica_holders.run()),
                asyncio.get_running_loop().create_task(daemon_info.loads.keep_checking()),
            ]
            if config.idle_exit_s is not None:

                def busy() -> bool:
                    return earlier.busy or bool(registry.undecided())

                idling = await_idle(busy, streams, config.idle_exit_s, leave)
                watches.append(asyncio.get_running_loop().create_task(idling))
            try:
                yield Coordinator(registry, status_services)
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await status_services.drain()
                await earlier.stop()
                await tasks.stop()
                # Streams never end by themselves; sidecars attach again to the next coordinator.
                await server.stop(grace=0.2)


async def await_idle(
    is_busy: Callable[[], bool], streams: SidecarStreams, after_s: float, leave: Callable[[], None]
) -> None:
    """Calls ``leave`` after ``after_s`` seconds without anything to finish or a connected trainer.

    Until the first trainer connects, it waits for at least ``timeouts.FIRST_TRAINER_S`` seconds. For a
    coordinator that a client started.
    """
    busy = observer_clock.now()
    while True:
        await asyncio.sleep(timeouts.CHECK_S)
        now = observer_clock.now()
        if is_busy() or _has_trainer(streams, now):
            busy = now
        idle_s = max(after_s, timeouts.FIRST_TRAINER_S) if streams.trainer_seen is None else after_s
        if now - busy >= idle_s:
            leave()
            return


def _has_trainer(streams: SidecarStreams, now: float) -> bool:
    """Whether a trainer is connected, by the last reports of the sidecars.

    The trainers of a sidecar that is attached but late (its host or this one is busy) still count.
    """
    if streams.trainer_seen is None:
        return False
    return now - streams.trainer_seen < timeouts.REPORT_COUNTS_S or any(
        peer.trainer_seen is not None
        and peer.last_seen - peer.trainer_seen < timeouts.REPORT_COUNTS_S
        for peer in streams.attached()
    )
