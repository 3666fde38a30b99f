"""One sidecar: makes and connects its parts, and runs them until the last upload.

In: a checked config. Out: the services for trainers, peers and operators. One event loop owns all state;
calls of the file system that may block run in threads (:mod:`pannier.storage.io_threads`).
"""

import asyncio
import logging
import os
import time
import uuid
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import grpc

from pannier.common import timeouts
from pannier.common.daemon_record import storage_variables
from pannier.common.deadline import within
from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.interceptors import STATUS_LIMITS, AdmissionInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options, socket_path
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog, DaemonInfo, StatusServices
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.coordinator_stream import CoordinatorStream
from pannier.sidecar.diagnosis import SidecarDiagnosis
from pannier.sidecar.ingest import Ingest
from pannier.sidecar.liveness import TrainerLiveness
from pannier.sidecar.metrics import SaveMetrics, serving_http, trace_save
from pannier.sidecar.multi_job.auth import JobAuth, JobAuthInterceptor
from pannier.sidecar.multi_job.descriptor_socket import descriptor_socket
from pannier.sidecar.multi_job.job_config import JobConfig
from pannier.sidecar.multi_job.sockets import serving_job
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.replicas.held_replicas import HeldReplicas
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.load_reports import LoadReports
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.rpc import restore_servicer, servicer
from pannier.sidecar.rpc.connections import Connections, Watches, welcome
from pannier.sidecar.rpc.peer_listener import peer_fields, serving_peers
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.spool.default_spool import open_default
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.recovery import recover
from pannier.sidecar.spool.spool import Spool
from pannier.sidecar.status import StatusPublisher, backlog, save_status
from pannier.sidecar.upload.concurrency import UploadSlots
from pannier.sidecar.upload.uploader import Opener, Uploader
from pannier.storage import open_store
from pannier.storage.io_threads import reservation_threads
from pannier.storage.rate_limit import RateLimit
from pannier.storage.upload_threads import UploadThreads
from pannier.v1 import diagnosis_pb2_grpc, restore_pb2_grpc, save_pb2, sidecar_pb2

_log = logging.getLogger(__name__)

_CALLS_PER_CONNECTION: Final = 128
"""Calls at a time on one connection; more of them wait in the client."""


class Sidecar:
    """A running sidecar; an asynchronous context manager.

    Args:
        store: makes the store of a checkpoint id; default :func:`pannier.storage.open_store`.
        job: the only job that it serves, for clients that have a token of the job.
    """

    def __init__(
        self,
        config: SidecarConfig,
        store: Opener | None = None,
        *,
        job: JobConfig | None = None,
    ) -> None:
        self.config = config
        self.saves = SaveRegistry()
        self.daemon_info = DaemonInfo(
            config.host,
            backlog=self.backlog,
            trainers=lambda: self._connections.ranks_by_job().total(),
            waits=lambda job: self.trainers.waits(job),
        )
        self.auth = None if job is None else JobAuth(job)
        self._job = job
        self._loads = LoadReports(self.daemon_info.loads, job="" if job is None else job.name)
        limit = None if config.upload_limit is None else RateLimit(config.upload_limit)
        self._upload_threads = UploadThreads(config.upload_threads, limit)
        self._metrics = SaveMetrics()
        self.status_registry = StatusRegistry()
        self._open_store = store or partial(
            open_store,
            storage_options=config.storage_options,
            upload_threads=self._upload_threads,
            allow=config.allow,
        )
        self._stack = AsyncExitStack()
        self._kept: set[str] | None = None
        """Names of spool files that a restarted sidecar needs; None: not known, so that all stay."""
        self._descriptors = ""
        """Name of the socket that passes descriptors of spool files, beside our own."""
        self._peer_address = ""
        """Where other hosts reach this one; empty: nowhere."""
        self._serves = False
        self._ticking: asyncio.Task[None] | None = None
        self.spool_removed = False
        """As of the last :meth:`check_spool`."""

    async def __aenter__(self) -> "Sidecar":
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        _log.info("sidecar of host %s serves %s", self.config.host, self.config.address)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._stack.aclose()

    async def wait(self, stop: StopSignals) -> None:
        """Returns on a stop signal, after the idle time, when the spool was removed, or when the job was
        removed and its saves have ended.
        """
        ticking = self._ticking = asyncio.get_running_loop().create_task(self._keep_ticking())
        try:
            while not await stop.wait(timeouts.CHECK_S):
                if await self._may_exit():
                    await self._leave_undecided()
                    return
                if self.auth is not None and self.auth.leaving and not self.saves.undecided():
                    return
                if self.spool_removed:
                    _log.error("the spool %s was removed: exiting", self.spool.directory)
                    return
                if ticking.done():
                    ticking.result()
        finally:
            # Not awaited: a spool that doesn't answer must not keep uploads from being finished.
            ticking.cancel()

    async def _may_exit(self) -> bool:
        """Whether it has been idle for so long that it exits; before, it takes over replicas that remain."""
        if self.config.idle_exit_s is None:
            return False
        saves_s = self.saves.idle_s(self._coordinator.detached_s)
        idle_s = min(
            *(saves_s, self.replicas.idle_s(self._coordinator.detached_s)),
            *(self._connections.idle_s() or 0.0, self._loads.idle_s(), self.blocks.idle_s()),
        )
        if idle_s < self.config.idle_exit_s or await self.replicas.held.take_over_all():
            return False
        _log.info("idle for %.0f s: exiting", idle_s)
        return True

    async def _leave_undecided(self) -> None:
        """Applies outcomes that storage shows, and logs the saves that stay undecided.

        All that this host has of them is in storage.
        """
        try:
            await within(timeouts.RECEIPTS_S, self._uploads.read_outcomes())
        except asyncio.TimeoutError:
            _log.warning("storage doesn't show how saves have ended")
        for save in self.saves.undecided():
            _log.info(
                "save %s to %s is left to the job's next coordinator or `pannier recover`",
                *(save.key, save.checkpoint_id),
                extra=save.log_fields,
            )

    async def tick(self) -> None:
        """Periodic upkeep; to be called every second or so. May take a moment."""
        await self.check_spool()
        await self._mapped.tick()
        await self.local_copies.tick(self._connections.jobs())
        await self.blocks.tick()
        await self.replicas.tick()
        await reservation_threads.run(self.spool.trim, self._connections.jobs())
        await self._journal.compact()
        await reservation_threads.run(self.spool.collapse, self.saves.rests)
        if self.auth is not None:
            await reservation_threads.run(self.auth.refresh)
            if self.auth.leaving:
                await self._dismiss(f"the job was removed from --jobs on {self.config.host}")

    async def check_spool(self) -> bool:
        """Whether the spool is there. Raises PannierError when it can't be used."""
        self.spool_removed = await reservation_threads.run(self._look_at_spool)
        return not self.spool_removed

    async def drain(self, stop: StopSignals) -> None:
        """Takes no new saves and finishes uploads, until the grace period or ``stop`` ends it."""
        await self._refuse_new()
        deadline = time.monotonic() + self.config.grace_s
        with self.status_registry.watch() as watch:
            while pending := self.saves.pending():
                left = deadline - time.monotonic()
                if left <= 0 or await stop.wait(0):
                    break
                await watch.wait(min(left, timeouts.CHECK_S))
        for rank in pending:
            phase = rank.phase.name.lower()
            _log.warning("%s is left behind, %s", rank.label, phase, extra=rank.log_fields)
        await self._stream.leave(timeouts.LEAVE_S)

    async def _refuse_new(self) -> None:
        """Takes no new saves from now on, and reports that it is draining."""
        self.saves.start_draining()
        await self._status_services.drain()

    async def _dismiss(self, why: str) -> None:
        """Disconnects all trainers. Ranks that were handed over are still uploaded; the others fail with ``why``."""
        await self._refuse_new()
        for rank in self.saves.pending():
            if rank.needs_trainer:
                self.saves.fail(rank, save_pb2.FAILURE_KIND_CLIENT, f"{rank.label}: {why}")
        self._connections.dismiss()

    def backlog(self) -> Backlog:
        """The uploads that aren't finished, and the use of spool and memory."""
        return backlog(
            *(self.saves.pending(), self.spool, self._mapped, self.blocks, self.replicas),
            self._upload_threads.limit,
        )

    async def _keep_ticking(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(timeouts.CHECK_S)

    def _look_at_spool(self) -> bool:
        """In a thread: measures the spool; whether it was removed."""
        if self.spool.removed:
            return True
        self.spool.measure()
        return False

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self.config
        if config.spool is None:
            opening = partial(open_default, config.runtime_dir)
        else:
            opening = partial(Spool, config.spool)
        self.spool = await asyncio.to_thread(opening, config.spool_budget)
        stack.push_async_callback(self._close_spool)
        if problem := self.spool.too_large:
            # A spool of /dev/shm may usually have more than its container.
            _log.log(logging.INFO if config.spool is None else logging.WARNING, "%s", problem)
        storage = storage_variables(os.environ, config.storage_options)
        self._journal = await asyncio.to_thread(JournalState, self.spool.directory, storage)
        self.spool.overhead = self._journal.space
        stack.push_async_callback(self._close_journal)
        # Before recovery, which may take long: a probe then gets "alive, not ready".
        loop = asyncio.get_running_loop()
        stack.enter_context(serve_health(config.health, ready=self._is_ready, loop=loop))
        self._make_parts(stack)
        self._add_listeners()
        # Before this process attaches: the coordinator fails ranks that the first report lacks.
        for rank in await recover(
            *(self._journal, self.spool, self.saves, self._uploads),
            *(self.local_copies, self._mapped, self.replicas.held),
        ):
            self._connections.expect(rank, timeouts.RECOVERED_TRAINER_CONNECT_S)
        self._metrics.set_baseline(self.saves.undecided())
        stack.enter_context(
            serving_http(
                config.metrics,
                self._metrics,
                self.status_registry,
                self.daemon_info,
                trainers=lambda: self._connections.ranks_by_job(),
                connected=lambda: self._coordinator.connected,
            )
        )
        await stack.enter_async_context(self._coordinator.running())
        await stack.enter_async_context(self.replicas.running())
        await stack.enter_async_context(self._stream.running())
        await self._serve(stack)

    def _upload_memory(self) -> int:
        """Bytes for the buffers of uploads; beside a spool in memory at most what the memory limit spares."""
        limit = self.spool.usage.limit
        return self.config.memory if limit is None else min(self.config.memory, limit.spare)

    def _make_parts(self, stack: AsyncExitStack) -> None:
        config = self.config
        self._coordinator = CoordinatorClient(
            config.coordinator,
            config.tls,
            on_responsiveness=self.saves.refresh,
        )
        self._publisher = StatusPublisher(self.status_registry, self._coordinator)
        self.trainers = TrainerLiveness(self.saves)
        watches = Watches(self.saves, lambda: self._stream.request_statuses())
        self._mapped = MappedFiles(
            self.spool, lambda clients: self._connections.request_room(clients)
        )
        self.local_copies = LocalCopies(self._mapped, self._journal, self.saves)
        if config.embedded:
            stack.push_async_callback(self.local_copies.close)
        self.blocks = HostBlocks.of(
            config, self.local_copies, self._open_store, lambda: bool(self._descriptors)
        )
        stack.push_async_callback(self.blocks.close)
        self._uploads = Uploader(
            self.saves,
            self._mapped,
            self._journal,
            self.local_copies,
            slots=UploadSlots(self._upload_memory(), config.upload_threads),
            open_store=self._open_store,
        )
        stack.push_async_callback(self._uploads.close)
        held = HeldReplicas(
            *(self.saves, self.spool, self._mapped, self._journal, self.local_copies),
            *(self._uploads, config.host),
        )
        self.replicas = Replicas(config, self.saves, held)
        self._stream = CoordinatorStream(
            self._coordinator,
            self.saves,
            trainers=self.trainers,
            watches=watches,
            loads=self._loads,
            copies=lambda: self.local_copies.held(self._peer_address),
            replicas=self.replicas,
            host=config.host,
            sidecar_id=uuid.uuid4().hex,
            job="" if self._job is None else self._job.name,
        )
        self._connections = Connections(
            self.saves,
            host=config.host,
            welcome=self._welcome,
            render=lambda save: save_status(save, self._coordinator),
            watches=watches,
            trainers=self.trainers,
        )

    def _add_listeners(self) -> None:
        for listener in (
            # First: a failure or outcome is journalled before its spool files get another use.
            self._journal.on_change,
            self._publisher.on_change,
            self._uploads.on_change,
            self.replicas.sender.on_change,
            self._stream.on_change,
            self._metrics.on_change,
            self._connections.on_change,
            trace_save,
        ):
            self.saves.add_listener(listener)
        self.saves.add_eviction_listener(self._publisher.remove)

    async def _serve(self, stack: AsyncExitStack) -> None:
        config = self.config
        authenticating = [] if self.auth is None else [JobAuthInterceptor(self.auth)]
        server = grpc.aio.server(
            options=[
                *server_options(),
                ("grpc.http2.lookahead_bytes", servicer.LOOKAHEAD),
                ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
            ],
            interceptors=[
                ErrorInterceptor(),
                *authenticating,
                AdmissionInterceptor(
                    {
                        **servicer.LIMITS,
                        **restore_servicer.LIMITS,
                        **STATUS_LIMITS,
                        **doctor_checks.LIMITS,
                    }
                ),
            ],
        )
        self._add_services(server)
        if self.auth is not None:
            path = socket_path(config.address)
            assert path is not None
            stack.enter_context(serving_job(server, path.parent))
        else:
            stack.enter_context(
                bind_listeners(
                    server,
                    config.address,
                    config.listen,
                    tls=config.tls,
                    allow_uid=config.allow_uid,
                )
            )
        descriptors = descriptor_socket(config, self.auth, self._mapped, self._open_for_loads)
        if descriptors is not None:
            self._descriptors = await stack.enter_async_context(descriptors)
        self._peer_address = await stack.enter_async_context(
            serving_peers(config, self.blocks, self.replicas)
        )
        await server.start()
        await self._status_services.serve()
        self._serves = True

        async def end() -> None:
            self._serves = False
            self._connections.close()
            await server.stop(0.5)
            await self._servicer.close()
            if self._ticking is not None:
                await asyncio.gather(self._ticking, return_exceptions=True)

        stack.push_async_callback(end)

    def _add_services(self, server: grpc.aio.Server) -> None:
        config = self.config
        ingest = Ingest(
            self.saves,
            self.spool,
            self._uploads,
            self._journal,
            self._mapped,
            allow=config.allow,
        )
        self._servicer = servicer.SidecarServicer(
            self.saves, ingest, self._connections, self._coordinator
        )
        servicer.add_to_server(self._servicer, server)
        restore = restore_servicer.RestoreServicer(
            self.local_copies,
            self._uploads.await_clean_up,
            self.blocks,
            lambda: self._descriptors,
            loads=self._loads,
            token_first=self.auth is not None,
            peer=lambda: peer_fields(config, self._peer_address),
        )
        restore_pb2_grpc.add_RestoreServicer_to_server(restore, server)
        self.diagnosis = SidecarDiagnosis(
            config,
            spool=self.spool,
            saves=self.saves,
            coordinator=self._coordinator,
            local_copies=self.local_copies,
            descriptors=lambda: self._descriptors,
            confined=self.auth is not None,
        )
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(self.diagnosis, server)
        self._status_services = StatusServices(
            server,
            self.status_registry,
            self.daemon_info,
            [servicer.NAME, restore_servicer.NAME, doctor_checks.NAME],
        )

    async def _open_for_loads(self, token: bytes) -> list[int]:
        return self.blocks.open_memory(token) or await self.local_copies.open_descriptors(token)

    def _is_ready(self) -> bool:
        return self._serves and not self.saves.draining

    async def _close_journal(self) -> None:
        # An embedded sidecar, and that of a removed job, leave only files behind that are not in storage yet:
        # the spool may be memory.
        leaves = self.config.embedded or (self.auth is not None and self.auth.leaving)
        self._kept = await self._journal.close(keep_copies=not leaves)

    async def _close_spool(self) -> None:
        await asyncio.to_thread(self.spool.close, self._kept)

    def _welcome(self) -> sidecar_pb2.Welcome:
        return welcome(
            self.config,
            draining=self.saves.draining,
            descriptors=self._descriptors,
            token_first=self.auth is not None,
        )
