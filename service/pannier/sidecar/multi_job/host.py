"""One sidecar for all jobs of a host: each job has a sidecar of its own in this process.

In: ``--jobs``. Out: for each job its sockets, spool, journal and line to a coordinator, so that nothing
of one can be named by another; in common they have an event loop, places for uploads and the room of
the spool. Operators' own socket shows all jobs. A job may come, go or change while others are served:
what was ingested of one that went is still brought to storage. Used by one thread.
"""

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import grpc

from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.interceptors import STATUS_LIMITS, AdmissionInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, make_private_directory, server_options
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_service import Backlog, DaemonInfo, StatusServices
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.http_status import told
from pannier.sidecar.multi_job.diagnosis import NodeDiagnosis
from pannier.sidecar.multi_job.job_config import Job, Jobs
from pannier.sidecar.multi_job.sockets import (
    job_address,
    jobs_directory,
    make_directory,
    make_parent,
)
from pannier.sidecar.process_resources import Shared
from pannier.sidecar.server import Sidecar, drain
from pannier.sidecar.upload.uploader import Opener
from pannier.v1 import diagnosis_pb2_grpc
from pannier.wire.errors import ConfigurationError, PannierError
from pannier.wire.failures import shorten

_log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_CALLS: Final = 256
"""Threads for calls of operators: more than the limits of their methods together."""


@dataclass
class _Part:
    """One job, as it is served."""

    job: Job
    sidecar: Sidecar
    leaving: bool = False
    """Nobody is heard any more: it ends when all that was ingested is in storage."""


class Node:
    """A running sidecar of several jobs; a context manager.

    Args:
        store: as for :class:`Sidecar`.
    """

    def __init__(self, config: SidecarConfig, store: Opener | None = None) -> None:
        self.config = config
        self.shared = Shared(config)
        self.daemon_info = DaemonInfo(config.host, backlog=self._backlog)
        self._store = store
        self._parts: dict[str, _Part] = {}
        self._problems: dict[str, str] = {}
        """Why a job isn't served, by its name."""
        self._stack = ExitStack()
        self._serves = False

    def __enter__(self) -> "Node":
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        _log.info(
            "sidecar of host %s serves %d jobs below %s",
            *(self.config.host, len(self._parts), self._parent),
        )
        return self

    def __exit__(self, *details: object) -> None:
        self._serves = False
        self._stack.close()

    @property
    def sidecars(self) -> Mapping[str, Sidecar]:
        """Of the jobs that are served now, and of those that leave. Any thread."""
        return {name: part.sidecar for name, part in list(self._parts.items())}

    @property
    def problems(self) -> list[str]:
        """Why jobs aren't served, or not as they should be. Any thread."""
        return [*self._jobs.problems.values(), *list(self._problems.values())]

    def wait(self, stop: StopSignals) -> None:
        """Returns when it is asked to stop."""
        while not stop.wait(_TICK_S):
            self.tick()

    def tick(self) -> None:
        """Looks for jobs that came, went or changed, and after each; every second or so."""
        self._look()
        room_wanted = self.shared.commons.take_wanted()
        for name, part in list(self._parts.items()):
            try:
                self._tend(name, part, room_wanted)
            except Exception as error:  # noqa: BLE001 - one job's trouble isn't the others'
                self._fail(name, error)
            else:
                self._problems.pop(name, None)

    def drain(self, stop: StopSignals) -> None:
        """Takes no new saves and finishes uploads, until the grace period or ``stop`` ends it."""
        self._status_services.drain()
        sidecars = list(self.sidecars.values())
        drain(sidecars, stop, self.config.grace_s, self.shared.status_registry)

    def _tend(self, name: str, part: _Part, room_wanted: bool) -> None:
        part.sidecar.tick()
        if room_wanted:
            part.sidecar.ask_for_room()
        if part.leaving and not part.sidecar.saves.pending():
            part.sidecar.flush()
            self._end(name)
            with suppress(OSError):  # not ours, or not empty: it stays
                (self.config.spool / name).rmdir()
            _log.info("job %s is no longer served: nothing of it is left to upload", name)

    def _fail(self, name: str, error: Exception) -> None:
        """The job isn't served as it should be; it is tried again with the next look."""
        problem = f"job {name} is not served: {error}"
        if self._problems.get(name) != problem:
            known = isinstance(error, (PannierError, OSError))
            _log.error("%s", problem, exc_info=None if known else error)
        self._problems[name] = problem

    def _start(self, stack: ExitStack) -> None:
        config = self.config
        assert config.jobs is not None
        self._jobs = Jobs(config.jobs)
        self._parent = jobs_directory(config.address)
        try:
            make_private_directory(config.spool)
        except OSError as error:
            raise ConfigurationError(f"the spool {config.spool} can't be used: {error}") from error
        stack.enter_context(self.shared.running())
        # Before recovery, which may take long: a probe then hears "alive, not ready".
        stack.enter_context(
            serve_health(config.health, ready=self._is_ready, loop=self.shared.loop)
        )
        # Its lock is the jobs' too: two sidecars never serve one directory.
        server = self._bind(stack)
        make_parent(self._parent)
        stack.callback(self._end_all)
        self._look()
        self._tell_of_strays()
        stack.enter_context(
            told(
                config.metrics, self.shared, self.daemon_info, lambda: list(self.sidecars.values())
            )
        )
        # Whoever asks for its health hears of all jobs.
        server.start()
        self._serves = True

    def _bind(self, stack: ExitStack) -> grpc.Server:
        """The server for operators, on a socket that is theirs alone; trainers have their jobs'."""
        config = self.config
        threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="pannier-call")
        server = grpc.server(
            threads,
            options=server_options(),
            interceptors=[
                AdmissionInterceptor({**STATUS_LIMITS, **doctor_checks.LIMITS}),
                ErrorInterceptor(),
            ],
            maximum_concurrent_rpcs=_CALLS,
        )
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(
            NodeDiagnosis(
                config,
                daemon_info=self.daemon_info,
                sidecars=lambda: self.sidecars,
                problems=lambda: self.problems,
                loop=self.shared.loop,
            ),
            server,
        )
        self._status_services = StatusServices(
            server, self.shared.status_registry, self.daemon_info, [doctor_checks.NAME]
        )
        stack.enter_context(bind_listeners(server, config.address, allow_uid=config.allow_uid))

        def end() -> None:
            server.stop(0.5).wait()
            threads.shutdown()

        stack.callback(end)
        return server

    def _look(self) -> None:
        wanted = self._jobs.look()
        for name, part in list(self._parts.items()):
            job = wanted.get(name)
            if job is None:
                if not part.leaving:
                    _log.info("job %s is gone from --jobs: its uploads are finished", name)
                    part.leaving = True
                    part.sidecar.dismiss(f"the job was taken from --jobs on {self.config.host}")
            elif part.leaving or _is_lost(part) or not job.same_but_tokens(part.job):
                # Its journal says how far it is: it goes on with what is new.
                _log.info("job %s is served anew", name)
                self._end(name)
            elif job != part.job:
                assert part.sidecar.guard is not None
                part.sidecar.guard.take(job.digests)
                part.job = job
                _log.info("job %s has other tokens", name)
        for name, job in wanted.items():
            if name not in self._parts:
                self._begin(job)
        self._problems = {name: why for name, why in self._problems.items() if name in wanted}
        self.shared.slots.shared = len(self._parts) > 1

    def _tell_of_strays(self) -> None:
        """What lies in the spool and belongs to none of the jobs: nobody takes it up."""
        found = {path.name for path in self.config.spool.iterdir()}
        if strays := sorted(found - self._parts.keys()):
            _log.warning(
                "%s in the spool %s belongs to no job that is served and stays as it is: serve the job "
                "again, and what was handed over is uploaded; or remove it",
                *(shorten(strays, 4), self.config.spool),
            )

    def _begin(self, job: Job) -> None:
        config = self.config
        try:
            coordinator = job.coordinator or config.coordinator
            if not coordinator:
                raise ConfigurationError(
                    'it has no "coordinator", and the sidecar was told none by --coordinator'
                )
            make_directory(self._parent, job.name)
            own = dataclasses.replace(
                config,
                jobs=None,
                address=job_address(self._parent, job.name),
                coordinator=coordinator,
                spool=config.spool / job.name,
                spool_budget=job.spool_budget,
                allow=job.allow,
                allow_uid=(),
                health=None,
                metrics=None,
            )
            sidecar = Sidecar(own, self._store, job=job, shared=self.shared)
            sidecar.__enter__()
        except Exception as error:  # noqa: BLE001 - the others are served all the same
            self._fail(job.name, error)
            return
        self._problems.pop(job.name, None)
        self._parts[job.name] = _Part(job, sidecar)

    def _end(self, name: str) -> None:
        part = self._parts.pop(name)
        try:
            part.sidecar.__exit__()
        except Exception:  # noqa: BLE001 - what is left of it is told; the others go on
            _log.exception("job %s has not ended as it should", name)

    def _end_all(self) -> None:
        for name in list(self._parts):
            self._end(name)

    def _is_ready(self) -> bool:
        return self._serves and not self.daemon_info.draining

    def _backlog(self) -> Backlog:
        capacity, free = self.shared.commons.room(self.config.spool)
        each = [sidecar.backlog() for sidecar in self.sidecars.values()]
        return Backlog(
            bytes_queued=sum(one.bytes_queued for one in each),
            oldest_s=max((one.oldest_s for one in each), default=0.0),
            spool_bytes=sum(one.spool_bytes for one in each),
            lent_bytes=sum(one.lent_bytes for one in each),
            held_bytes=sum(one.held_bytes for one in each),
            saves_bytes=sum(one.saves_bytes for one in each),
            capacity_bytes=capacity,
            free_bytes=free,
        )


def _is_lost(part: _Part) -> bool:
    """Whether the spool was removed under the job, or can't be used any more."""
    try:
        return part.sidecar.spool.gone
    except PannierError:
        return True
