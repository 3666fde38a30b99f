"""One sidecar process for all jobs of a host: each job has a separate :class:`Sidecar` in it.

In: ``--jobs``. Out: for each job its sockets, spool, journal and coordinator stream, so that no job can name
anything of another; they share an event loop, upload slots and the budget of the spool. The operators'
socket shows all jobs. Jobs may be added, removed or changed while others are served; what was
ingested of a removed job is still uploaded. On the event loop.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
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
from pannier.sidecar.metrics import serving_http
from pannier.sidecar.multi_job.diagnosis import MultiJobDiagnosis
from pannier.sidecar.multi_job.job_config import JobConfig, JobDirectory
from pannier.sidecar.multi_job.sockets import (
    job_address,
    jobs_directory,
    make_directory,
    make_parent,
)
from pannier.sidecar.server import ProcessResources, Sidecar, drain
from pannier.sidecar.upload.uploader import Opener
from pannier.v1 import diagnosis_pb2_grpc
from pannier.wire.errors import ConfigurationError, PannierError

_log = logging.getLogger(__name__)

_TICK_S: Final = 1.0


@dataclass
class _ServedJob:
    """A job and its sidecar."""

    config: JobConfig
    sidecar: Sidecar
    leaving: bool = False
    """Its trainers are disconnected: it ends when all that was ingested is in storage."""

    def change_tokens(self, config: JobConfig) -> None:
        """Accepts the tokens of ``config`` from now on."""
        assert self.sidecar.auth is not None
        self.sidecar.auth.replace_tokens(config.digests)
        self.config = config

    async def leave(self, why: str) -> None:
        """Disconnects the trainers; what was ingested is still uploaded."""
        self.leaving = True
        await self.sidecar.dismiss(why)


class MultiJobSidecar:
    """A running sidecar of several jobs; an asynchronous context manager.

    Args:
        store: as for :class:`Sidecar`.
    """

    def __init__(self, config: SidecarConfig, store: Opener | None = None) -> None:
        self.config = config
        self.process = ProcessResources(config)
        self.daemon_info = DaemonInfo(config.host, backlog=self._backlog)
        self._store = store
        self._served: dict[str, _ServedJob] = {}
        self._problems: dict[str, str] = {}
        """Why a job isn't served, by its name."""
        self._stack = AsyncExitStack()
        self._serves = False

    async def __aenter__(self) -> "MultiJobSidecar":
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        _log.info(
            "sidecar of host %s serves %d jobs below %s",
            *(self.config.host, len(self._served), self._parent),
        )
        return self

    async def __aexit__(self, *details: object) -> None:
        self._serves = False
        await self._stack.aclose()

    @property
    def sidecars(self) -> Mapping[str, Sidecar]:
        """The sidecars of all jobs, leaving ones included."""
        return {name: served.sidecar for name, served in list(self._served.items())}

    @property
    def problems(self) -> list[str]:
        """Why jobs aren't served, or not as they should be."""
        return [*self._jobs.problems.values(), *list(self._problems.values())]

    async def wait(self, stop: StopSignals) -> None:
        """Returns when it is asked to stop."""
        while not await stop.wait(_TICK_S):
            await self.tick()

    async def tick(self) -> None:
        """Applies changes of --jobs, and does each job's periodic upkeep; every second or so."""
        await self._apply_jobs()
        room_requested = self.process.budget.take_request()
        for name, served in list(self._served.items()):
            try:
                await self._maintain(name, served, room_requested)
            except Exception as error:  # noqa: BLE001 - one job's error isn't the others'
                self._fail(name, error)
            else:
                self._problems.pop(name, None)

    async def drain(self, stop: StopSignals) -> None:
        """Takes no new saves and finishes uploads, until the grace period or ``stop`` ends it."""
        await self._status_services.drain()
        sidecars = list(self.sidecars.values())
        await drain(sidecars, stop, self.config.grace_s, self.process.status_registry)

    async def _maintain(self, name: str, served: _ServedJob, room_requested: bool) -> None:
        await served.sidecar.tick()
        if room_requested:
            served.sidecar.request_room()
        if served.leaving and not served.sidecar.saves.pending():
            await served.sidecar.flush()
            await self._end(name)
            with suppress(OSError):  # not empty: it stays
                (self.config.spool / name).rmdir()
            _log.info("job %s is no longer served: nothing of it is left to upload", name)

    def _fail(self, name: str, error: Exception) -> None:
        """Reports that a job isn't served as configured; the next tick retries it."""
        problem = f"job {name} is not served: {error}"
        if self._problems.get(name) != problem:
            known = isinstance(error, (PannierError, OSError))
            _log.error("%s", problem, exc_info=None if known else error)
        self._problems[name] = problem

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self.config
        assert config.jobs is not None
        self._jobs = JobDirectory(config.jobs)
        self._parent = jobs_directory(config.address)
        try:
            make_private_directory(config.spool)
        except OSError as error:
            raise ConfigurationError(f"the spool {config.spool} can't be used: {error}") from error
        # Before recovery, which may take long: a probe then gets "alive, not ready".
        stack.enter_context(
            serve_health(config.health, ready=self._is_ready, loop=asyncio.get_running_loop())
        )
        # Its lock covers the jobs' sockets, too: two sidecars never serve one directory.
        server = self._bind(stack)
        make_parent(self._parent)
        stack.push_async_callback(self._end_all)
        await self._apply_jobs()
        self._report_unserved()
        stack.enter_context(
            serving_http(
                config.metrics,
                self.process.metrics,
                self.process.status_registry,
                self.daemon_info,
                lambda: list(self.sidecars.values()),
            )
        )
        # Health covers all jobs.
        await server.start()
        await self._status_services.serve()
        self._serves = True

    def _bind(self, stack: AsyncExitStack) -> grpc.aio.Server:
        """The server for operators, on a socket that is theirs alone; trainers have their jobs'."""
        config = self.config
        server = grpc.aio.server(
            options=server_options(),
            interceptors=[
                AdmissionInterceptor({**STATUS_LIMITS, **doctor_checks.LIMITS}),
                ErrorInterceptor(),
            ],
        )
        diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(
            MultiJobDiagnosis(
                config,
                daemon_info=self.daemon_info,
                sidecars=lambda: self.sidecars,
                problems=lambda: self.problems,
            ),
            server,
        )
        self._status_services = StatusServices(
            server, self.process.status_registry, self.daemon_info, [doctor_checks.NAME]
        )
        stack.enter_context(bind_listeners(server, config.address, allow_uid=config.allow_uid))
        stack.push_async_callback(server.stop, 0.5)
        return server

    async def _apply_jobs(self) -> None:
        wanted = self._jobs.read()
        for name, served in list(self._served.items()):
            job = wanted.get(name)
            if job is None:
                if not served.leaving:
                    _log.info("job %s was removed from --jobs: its uploads will be finished", name)
                    await served.leave(f"the job was removed from --jobs on {self.config.host}")
            elif served.leaving or await _is_lost(served) or not job.same_but_tokens(served.config):
                # It is started again below, and recovers from its journal.
                _log.info("job %s is restarted", name)
                await self._end(name)
            elif job != served.config:
                served.change_tokens(job)
                _log.info("job %s has other tokens", name)
        for name, job in wanted.items():
            if name not in self._served:
                await self._begin(job)
        self._problems = {name: why for name, why in self._problems.items() if name in wanted}
        self.process.slots.share(len(self._served) > 1)

    def _report_unserved(self) -> None:
        """Warns of files in the spool that belong to no job, so that they are never uploaded."""
        found = {path.name for path in self.config.spool.iterdir()}
        if unserved := sorted(found - self._served.keys()):
            more = f" and {len(unserved) - 4} more" if len(unserved) > 4 else ""
            _log.warning(
                "%s in the spool %s belongs to no job that is served and stays as it is: serve the job "
                "again, and what was handed over is uploaded; or remove it",
                *(", ".join(unserved[:4]) + more, self.config.spool),
            )

    async def _begin(self, job: JobConfig) -> None:
        config = self.config
        try:
            coordinator = job.coordinator or config.coordinator
            if not coordinator:
                raise ConfigurationError('it has no "coordinator", and --coordinator is not set')
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
            sidecar = Sidecar(own, self._store, job=job, process=self.process)
            await sidecar.__aenter__()
        except Exception as error:  # noqa: BLE001 - one job's error isn't the others'
            self._fail(job.name, error)
            return
        self._problems.pop(job.name, None)
        self._served[job.name] = _ServedJob(job, sidecar)

    async def _end(self, name: str) -> None:
        served = self._served.pop(name)
        try:
            await served.sidecar.__aexit__()
        except Exception:  # noqa: BLE001 - one job's error isn't the others'
            _log.exception("ending job %s failed", name)

    async def _end_all(self) -> None:
        for name in list(self._served):
            await self._end(name)

    def _is_ready(self) -> bool:
        return self._serves and not self.daemon_info.draining

    def _backlog(self) -> Backlog:
        capacity, free = self.process.budget.room(self.config.spool)
        each = [sidecar.backlog() for sidecar in self.sidecars.values()]
        return Backlog(
            bytes_queued=sum(one.bytes_queued for one in each),
            oldest_s=max((one.oldest_s for one in each), default=0.0),
            spool_bytes=sum(one.spool_bytes for one in each),
            leased_bytes=sum(one.leased_bytes for one in each),
            held_bytes=sum(one.held_bytes for one in each),
            saves_bytes=sum(one.saves_bytes for one in each),
            capacity_bytes=capacity,
            free_bytes=free,
        )


async def _is_lost(served: _ServedJob) -> bool:
    """Whether the spool was removed under the job, or can't be used any more."""
    try:
        return not await served.sidecar.check_spool()
    except PannierError:
        return True
