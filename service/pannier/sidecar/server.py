"""One sidecar: its parts put together, from the start to the last upload.

In: a checked config. Out: what trainers and operators are served. It is alone in its process, or one
of several there, each for a job (:mod:`pannier.sidecar.multi_job.host`). The gRPC server has its threads, uploads
and the coordinator's link an event loop in one of their own.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, TypeVar

import grpc

from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.interceptors import STATUS_LIMITS, AdmissionInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options, socket_path
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog, DaemonInfo, StatusServices
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.coordinator_client import Link
from pannier.sidecar.diagnosis import SidecarDiagnosis
from pannier.sidecar.http_status import told
from pannier.sidecar.ingest import Receiving
from pannier.sidecar.multi_job.auth import Guard, GuardInterceptor
from pannier.sidecar.multi_job.job_config import Job
from pannier.sidecar.multi_job.sockets import serving_job
from pannier.sidecar.process_resources import Shared
from pannier.sidecar.rpc import servicer
from pannier.sidecar.rpc.connections import RESTORED_S, Sessions
from pannier.sidecar.save_state import BEFORE_INGESTION, RankSave, Save, Saves
from pannier.sidecar.spool.fd_server import passing
from pannier.sidecar.spool.journal_state import Ledger
from pannier.sidecar.spool.mapped_files import Lending
from pannier.sidecar.spool.recovery import restore
from pannier.sidecar.spool.spool import Spool
from pannier.sidecar.status import backlog, save_status
from pannier.sidecar.trace_spans import trace
from pannier.sidecar.upload.uploader import Opener, Uploads
from pannier.storage import open_store
from pannier.v1 import diagnosis_pb2_grpc, save_pb2, sidecar_pb2
from pannier.wire.chunk_codec import MAX_MESSAGE_BYTES
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

_CALLS: Final = 4096
"""Threads for calls, more than the limits of all methods together, so that none takes another's."""
_CALLS_OF_ONE: Final = 128
"""Calls at a time on one connection; a client's others wait in the client."""
_TICK_S: Final = 1.0
_FLUSH_S: Final = 1.0

T = TypeVar("T")


class Sidecar:
    """A running sidecar; a context manager.

    Args:
        store: makes the store of a checkpoint id; default :func:`pannier.storage.open_store`.
        job: it serves this one alone, and whoever shows a token of the job's.
        shared: what it has in common with those of other jobs; None: it is alone.
    """

    def __init__(
        self,
        config: SidecarConfig,
        store: Opener | None = None,
        *,
        job: Job | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.config = config
        self.saves = Saves()
        self.daemon_info = DaemonInfo(config.host, backlog=self.backlog)
        self.guard = None if job is None else Guard(job)
        self._alone = shared is None
        self._shared = shared or Shared(config)
        self.status_registry = self._shared.status_registry if self._alone else StatusRegistry()
        self._status_registries = {self.status_registry, self._shared.status_registry}
        self._published: set[str] = set()
        """Keys of saves that are on the boards."""
        self._open_store = store or self._default_store
        self._stack = ExitStack()
        self._kept: set[str] = set()
        """Names of spool files that the next life needs."""
        self._descriptors = ""
        """Name of the socket that passes those of lent files, beside our own."""
        self._serves = False

    def __enter__(self) -> "Sidecar":
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        _log.info("sidecar of host %s serves %s", self.config.host, self.config.address)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def wait(self, stop: StopSignals) -> None:
        """Returns when it is asked to stop, was idle for long enough, or lost its spool."""
        while not stop.wait(_TICK_S):
            idle = self._idle_s()
            if self.config.idle_exit_s is not None and idle >= self.config.idle_exit_s:
                _log.info("idle for %.0f s: leaving", idle)
                return
            if self.spool.gone:
                _log.error("the spool %s was removed: leaving", self.config.spool)
                return
            self.tick()

    def tick(self) -> None:
        """Looks after what nobody asks for; to be called every second or so. May take a moment."""
        self._lending.tick()
        self.spool.trim(self._sessions.jobs())
        self._ledger.tidy()
        self._servicer.open_streams.cut_idle()

    def drain(self, stop: StopSignals) -> None:
        """Takes no new saves and finishes uploads, until the grace period or ``stop`` ends it."""
        drain([self], stop, self.config.grace_s, self.status_registry)

    def refuse_new(self) -> None:
        """Takes no new saves from now on, and says so."""
        self.saves.draining = True
        self._status_services.drain()

    def dismiss(self, why: str) -> None:
        """Nobody is heard any more; what is ingested goes on, and of the rest ``why`` is the failure."""
        self.refuse_new()
        if self.guard is not None:
            self.guard.close()
        for rank in self.saves.pending():
            if rank.phase in BEFORE_INGESTION:
                self.saves.fail(rank, save_pb2.FAILURE_KIND_CLIENT, f"{rank.label}: {why}")
        self._sessions.dismiss()

    def flush(self) -> None:
        """The coordinator is told what there is to tell, if it listens."""
        self._on_loop(self._link.flush(_FLUSH_S))

    def backlog(self) -> Backlog:
        """What waits here for storage."""
        return backlog(self.saves.pending(), self.spool, self._lending)

    def ask_for_room(self) -> None:
        """Asks the trainers to give back what they have borrowed and don't use."""
        self._lending.ask_for_room()

    @property
    def attached(self) -> bool:
        """Whether the coordinator was heard a moment ago."""
        return self._link.connected

    def trainers(self) -> Counter[str]:
        """Connected ranks by job."""
        return self._sessions.trainers()

    def _start(self, stack: ExitStack) -> None:
        config, shared = self.config, self._shared
        self.spool = Spool(config.spool, config.spool_budget, shared.commons)
        stack.callback(lambda: self.spool.close(self._kept))
        self._ledger = Ledger(config.spool)
        self.spool.overhead = self._ledger.space
        stack.callback(self._close_ledger)
        if self._alone:
            stack.enter_context(shared.running())
        self._loop = shared.loop
        # Before recovery, which may take long: a probe then hears "alive, not ready".
        stack.enter_context(serve_health(config.health, ready=self._is_ready, loop=self._loop))
        self._link = Link(
            self.saves,
            address=config.coordinator,
            host=config.host,
            loop=self._loop,
            life=shared.life,
            tls=config.tls,
            successor=config.successor,
        )
        self._lending = Lending(self.spool, lambda clients: self._sessions.want_room(clients))
        self._uploads = Uploads(
            self.saves,
            self._lending,
            self._ledger,
            slots=shared.slots,
            open_store=self._open_store,
            loop=self._loop,
        )
        stack.callback(lambda: self._on_loop(self._uploads.close()))
        self._sessions = Sessions(
            self.saves,
            host=config.host,
            welcome=self._welcome,
            render=lambda save: save_status(save, self._link),
            watches=self._link.watches,
            trainers=self._link.trainers,
            loop=self._loop,
        )
        # The first: what has failed or ended is recorded before its space is given away.
        self.saves.listen(self._ledger.changed)
        for listener in (self._publish, self._uploads.changed, self._link.changed):
            self.saves.listen(listener)
        self.saves.listen(shared.tally.changed)
        self.saves.listen(self._sessions.changed)
        self.saves.listen(trace)
        self.saves.listen_forgotten(self._forget)
        if not self._alone:
            stack.callback(self._forget_all)
        # Before the coordinator hears of us: it takes what isn't reported then for lost.
        for rank in restore(self._ledger, self.spool, self.saves, self._uploads, self._loop):
            self._sessions.expect(rank, RESTORED_S)
        shared.tally.begin(self.saves.undecided())
        if self._alone:
            stack.enter_context(told(config.metrics, shared, self.daemon_info, lambda: [self]))
        attached = self._link.running()
        self._on_loop(attached.__aenter__())
        stack.callback(lambda: self._on_loop(attached.__aexit__(None, None, None)))
        self._serve(stack)

    def _serve(self, stack: ExitStack) -> None:
        config = self.config
        threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="pannier-call")
        guarded = [] if self.guard is None else [GuardInterceptor(self.guard)]
        server = grpc.server(
            threads,
            options=[
                *server_options(),
                ("grpc.http2.lookahead_bytes", servicer.LOOKAHEAD),
                ("grpc.max_concurrent_streams", _CALLS_OF_ONE),
            ],
            interceptors=[
                *guarded,
                AdmissionInterceptor({**servicer.LIMITS, **STATUS_LIMITS, **doctor_checks.LIMITS}),
                ErrorInterceptor(),
            ],
            maximum_concurrent_rpcs=_CALLS,
        )
        receiving = Receiving(
            self.saves,
            self.spool,
            self._uploads,
            self._ledger,
            self._lending,
            allow=config.allow,
            loop=self._loop,
        )
        self._servicer = servicer.SidecarServicer(self.saves, receiving, self._sessions, self._link)
        servicer.add_to_server(self._servicer, server)
        self.diagnosis = SidecarDiagnosis(
            config,
            spool=self.spool,
            saves=self.saves,
            link=self._link,
            descriptors=lambda: self._descriptors,
            confined=self.guard is not None,
            loop=self._loop,
        )
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(self.diagnosis, server)
        self._status_services = StatusServices(
            server, self.status_registry, self.daemon_info, [servicer.NAME, doctor_checks.NAME]
        )
        path = socket_path(config.address)
        passed: AbstractContextManager[str] | None = None
        if self.guard is not None:
            assert path is not None
            stack.enter_context(serving_job(server, path.parent))
            passed = passing(path, self._lending, knows=self.guard.knows)
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
            if path is not None:
                passed = passing(path, self._lending, allow_uid=config.allow_uid)
        if passed is not None:
            self._descriptors = stack.enter_context(passed)
        server.start()
        self._serves = True

        def end() -> None:
            self._serves = False
            self._sessions.close()
            server.stop(0.5).wait()
            threads.shutdown()

        stack.callback(end)

    def _is_ready(self) -> bool:
        return self._serves and not self.saves.draining

    def _close_ledger(self) -> None:
        self._kept = self._ledger.close()

    def _welcome(self) -> sidecar_pb2.Welcome:
        return sidecar_pb2.Welcome(
            wire_version=WIRE_VERSION,
            sidecar_version=package_version(),
            host=self.config.host,
            coordinator=self.config.coordinator,
            max_message_bytes=MAX_MESSAGE_BYTES,
            embedded=self.config.embedded,
            draining=self.saves.draining,
            descriptors=self._descriptors,
            token_first=self.guard is not None,
        )

    def _publish(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the saves: updates the status registries."""
        if rank is None:
            self._published.add(save.key)
            for status_registry in self._status_registries:
                status_registry.put(
                    save.id, save.checkpoint_id, lambda: save_status(save, self._link)
                )
        else:
            for status_registry in self._status_registries:
                status_registry.notify(save.key)

    def _forget(self, save: Save) -> None:
        self._published.discard(save.key)
        for status_registry in self._status_registries:
            status_registry.remove(save.key)

    def _forget_all(self) -> None:
        self._shared.tally.drop(self.saves.undecided())
        for key in self._published:
            self._shared.status_registry.remove(key)

    def _default_store(self, checkpoint_id: str) -> Any:
        return open_store(checkpoint_id, storage_options=self.config.storage_options)

    def _idle_s(self) -> float:
        """Seconds without a client or an undecided save; 0 when there is one."""
        return min(self.saves.idle_s() or 0.0, self._sessions.idle_s() or 0.0)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def drain(
    sidecars: Sequence[Sidecar], stop: StopSignals, grace_s: float, status_registry: StatusRegistry
) -> None:
    """None of them takes new saves; they finish uploads, until ``grace_s`` is over or ``stop`` ends it.

    Args:
        status_registry: all of their saves.
    """
    for each in sidecars:
        each.refuse_new()
    deadline = time.monotonic() + grace_s
    with status_registry.watch() as watch:
        while pending := [rank for each in sidecars for rank in each.saves.pending()]:
            left = deadline - time.monotonic()
            if left <= 0 or stop.wait(0):
                break
            watch.wait(min(left, _TICK_S))
    for rank in pending:
        phase = rank.phase.name.lower()
        _log.warning("%s is left behind, %s", rank.label, phase, extra=rank.about)
    for each in sidecars:
        each.flush()
