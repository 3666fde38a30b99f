"""One sidecar process: its parts put together, from the start to the last upload.

In: a checked config. Out: an exit status. The main thread waits for signals;
the gRPC server has its threads, uploads and the coordinator's link an event
loop in one of their own.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

import grpc

from pannier.daemon import diagnosing
from pannier.daemon.admitting import STATUS_LIMITS, AdmissionInterceptor
from pannier.daemon.allocating import keep_freed_memory
from pannier.daemon.board import Board
from pannier.daemon.failing import ErrorInterceptor
from pannier.daemon.listening import (
    listening,
    raise_descriptor_limit,
    server_options,
    socket_path,
)
from pannier.daemon.logs import set_up_logging
from pannier.daemon.metrics import Metrics
from pannier.daemon.operating import Backlog, Operating, Vitals
from pannier.daemon.pages import Pages
from pannier.daemon.peers import PeerInterceptor
from pannier.daemon.probed import probed
from pannier.daemon.stopping import StopSignals
from pannier.daemon.web import serving_web
from pannier.sidecar import service
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.diagnosis import SidecarDiagnosis
from pannier.sidecar.ledger import Ledger
from pannier.sidecar.lending import Lending
from pannier.sidecar.link import Link
from pannier.sidecar.passing import passing
from pannier.sidecar.receiving import Receiving
from pannier.sidecar.restoring import restore
from pannier.sidecar.saves import RankSave, Save, Saves
from pannier.sidecar.sessions import RESTORED_S, Sessions
from pannier.sidecar.spool import Spool
from pannier.sidecar.status import backlog, save_status
from pannier.sidecar.tally import Tally
from pannier.sidecar.traced import trace
from pannier.sidecar.uploads import Opener, Uploads
from pannier.storage import open_store
from pannier.v1 import diagnosis_pb2_grpc, sidecar_pb2
from pannier.wire import tracing
from pannier.wire.chunks import MAX_MESSAGE_BYTES
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

_CALLS: Final = 4096
"""Threads for calls, more than the limits of all methods together, so that none takes another's."""
_CALLS_OF_ONE: Final = 128
"""Calls at a time on one connection; a client's others wait in the client."""
_TICK_S: Final = 1.0
_FLUSH_S: Final = 1.0

T = TypeVar("T")


def run(config: SidecarConfig) -> int:
    """Runs a sidecar until SIGTERM, SIGINT or idleness; returns the exit status.

    That is 1 when it needs to be started again: its spool was removed.

    Raises ConfigurationError when it can't start.
    """
    set_up_logging(config.log_format, daemon="sidecar", host=config.host)
    raise_descriptor_limit()
    # Before there are threads: each keeps the one it was started with.
    os.nice(config.nice)
    keep_freed_memory()
    tracing.set_up("pannier-sidecar", **{"host.name": config.host})
    with StopSignals() as stop, Sidecar(config) as sidecar:
        sidecar.wait(stop)
        sidecar.drain(stop)
        return 1 if sidecar.spool.gone else 0


class Sidecar:
    """A running sidecar; a context manager.

    Args:
        store: makes the store of a checkpoint id; default :func:`pannier.storage.open_store`.
    """

    def __init__(self, config: SidecarConfig, store: Opener | None = None) -> None:
        self.config = config
        self.board = Board()
        self.saves = Saves()
        self.vitals = Vitals(config.host, backlog=self._backlog)
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
            self._lending.tick()
            self.spool.trim(self._sessions.jobs())
            self._ledger.tidy()
            self._servicer.open_streams.cut_idle()

    def drain(self, stop: StopSignals) -> None:
        """Takes no new saves and finishes uploads, until the grace period or ``stop`` ends it."""
        self.saves.draining = True
        self._operating.drain()
        deadline = self._loop.time() + self.config.grace_s
        with self.board.watch() as watch:
            while pending := self.saves.pending():
                left = deadline - self._loop.time()
                if left <= 0 or stop.wait(0):
                    break
                watch.wait(min(left, _TICK_S))
        for rank in pending:
            phase = rank.phase.name.lower()
            _log.warning("%s is left behind, %s", rank.label, phase, extra=rank.about)
        self._on_loop(self._link.flush(_FLUSH_S))

    def _start(self, stack: ExitStack) -> None:
        config = self.config
        self.spool = Spool(config.spool, config.spool_budget)
        stack.callback(lambda: self.spool.close(self._kept))
        self._ledger = Ledger(config.spool)
        self.spool.overhead = self._ledger.space
        stack.callback(self._close_ledger)
        self._loop = stack.enter_context(_event_loop())
        # Before recovery, which may take long: a probe then hears "alive, not ready".
        stack.enter_context(probed(config.health, ready=self._is_ready, loop=self._loop))
        self._link = Link(
            self.saves,
            address=config.coordinator,
            host=config.host,
            loop=self._loop,
            tls=config.tls,
        )
        self._lending = Lending(self.spool, lambda clients: self._sessions.want_room(clients))
        self._uploads = Uploads(
            self.saves,
            self._lending,
            self._ledger,
            memory=config.memory,
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
        tally = Tally()
        for listener in (self._publish, self._uploads.changed, self._link.changed, tally.changed):
            self.saves.listen(listener)
        self.saves.listen(self._sessions.changed)
        self.saves.listen(trace)
        self.saves.listen_forgotten(lambda save: self.board.remove(save.key))
        # Before the coordinator hears of us: it takes what isn't reported then for lost.
        for rank in restore(self._ledger, self.spool, self.saves, self._uploads, self._loop):
            self._sessions.expect(rank, RESTORED_S)
        tally.begin()
        metrics = Metrics("sidecar", self.vitals)
        metrics.add(
            lambda: tally.collect(
                self._backlog(), self._sessions.trainers(), attached=self._link.connected
            )
        )
        pages = Pages(self.board, self.vitals)
        stack.enter_context(serving_web(config.metrics, pages.routes(metrics), setting="--metrics"))
        attached = self._link.running()
        self._on_loop(attached.__aenter__())
        stack.callback(lambda: self._on_loop(attached.__aexit__(None, None, None)))
        self._serve(stack)

    def _serve(self, stack: ExitStack) -> None:
        config = self.config
        threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="pannier-call")
        peers = config.peers()
        watched = [] if peers is None else [PeerInterceptor(peers)]
        server = grpc.server(
            threads,
            options=[
                *server_options(),
                ("grpc.http2.lookahead_bytes", service.LOOKAHEAD),
                ("grpc.max_concurrent_streams", _CALLS_OF_ONE),
            ],
            interceptors=[
                *watched,
                AdmissionInterceptor({**service.LIMITS, **STATUS_LIMITS, **diagnosing.LIMITS}),
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
        self._servicer = service.SidecarServicer(self.saves, receiving, self._sessions, self._link)
        service.add_to_server(self._servicer, server)
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(
            SidecarDiagnosis(
                config,
                spool=self.spool,
                saves=self.saves,
                link=self._link,
                descriptors=lambda: self._descriptors,
                loop=self._loop,
            ),
            server,
        )
        self._operating = Operating(
            server, self.board, self.vitals, [service.NAME, diagnosing.NAME]
        )
        stack.enter_context(
            listening(
                server,
                config.address,
                config.listen,
                tls=config.tls,
                guests=config.allow_uid,
            )
        )
        if peers is not None:
            stack.enter_context(peers.watching())
        path = socket_path(config.address)
        if path is not None:
            self._descriptors = stack.enter_context(
                passing(path, self._lending, guests=config.allow_uid)
            )
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
        )

    def _backlog(self) -> Backlog:
        return backlog(self.saves.pending(), self.spool, self._lending)

    def _publish(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the saves: keeps the board."""
        if rank is None:
            self.board.put(save.id, save.checkpoint_id, lambda: save_status(save, self._link))
        else:
            self.board.ring(save.key)

    def _default_store(self, checkpoint_id: str) -> Any:
        return open_store(checkpoint_id, storage_options=self.config.storage_options)

    def _idle_s(self) -> float:
        """Seconds without a client or an undecided save; 0 when there is one."""
        return min(self.saves.idle_s() or 0.0, self._sessions.idle_s() or 0.0)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pannier-loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
