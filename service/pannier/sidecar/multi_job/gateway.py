"""What operators see of a node's sidecars: status, diagnosis, health and metrics of all jobs.

In: calls, and the supervisor's reports. Out: the answers of all jobs' sidecars, merged. A sidecar that
doesn't answer is left out, and named in diagnosis and metrics. Runs on an event loop in a process of its own;
HTTP in threads.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pannier.common import timeouts
from pannier.common.message_json import seconds_of
from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.http_server import Request, Response, serve_http
from pannier.daemon.interceptors import ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.daemon.metrics import Metrics
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_page import json_response, page, requested_limit
from pannier.daemon.status_service import Backlog, DaemonInfo, describe_daemon
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.job_sidecars import JobSidecars, job_metrics
from pannier.sidecar.multi_job.reports import read_report
from pannier.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire.errors import from_rpc_error

_CALLS: Final = 256
"""Calls of operators at a time."""
_LIMIT: Final = 100
_HTTP_THREADS: Final = 8
"""Fetch the metrics of as many jobs at a time."""
_STATUS: Final = "pannier.v1.Status"


class StatusGateway(status_pb2_grpc.StatusServicer):
    """``pannier.v1.Status`` of all jobs."""

    def __init__(self, jobs: JobSidecars, config: SidecarConfig) -> None:
        self._jobs = jobs
        self._config = config

    async def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: Any
    ) -> status_pb2.ListSavesResponse:
        """See the proto."""
        answers = (await self._jobs.list_saves(request)).values()
        info = DaemonInfo(
            self._config.host,
            draining=self._jobs.draining,
            backlog=lambda: _sum(answers, self._config.jobs_spool),
            trainers=lambda: sum(answer.trainers for answer in answers),
            waits=lambda _: (wait for answer in answers for wait in answer.training_waits),
        )
        merged = describe_daemon(info)
        saves = [save for answer in answers for save in answer.saves]
        saves.sort(key=lambda save: seconds_of(save.created_at), reverse=True)
        merged.saves.extend(saves[: request.limit or _LIMIT])
        loads = [load for answer in answers for load in answer.loads]
        loads.sort(key=lambda load: seconds_of(load.created_at), reverse=True)
        merged.loads.extend(loads[: request.limit or _LIMIT])
        return merged

    async def GetSave(
        self, request: status_pb2.GetSaveRequest, context: Any
    ) -> status_pb2.GetSaveResponse:
        """See the proto."""
        _, save = await self._jobs.find(request.id)
        return status_pb2.GetSaveResponse(save=save)

    async def WatchSave(
        self, request: status_pb2.WatchSaveRequest, context: Any
    ) -> AsyncIterator[status_pb2.WatchSaveResponse]:
        """See the proto."""
        job, save = await self._jobs.find(request.id)
        try:
            async for response in self._jobs.watch(job, status_pb2.WatchSaveRequest(id=save.id)):
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=f"the sidecar of job {job}") from error

    async def GetLoad(
        self, request: status_pb2.GetLoadRequest, context: Any
    ) -> status_pb2.GetLoadResponse:
        """See the proto."""
        _, load = await self._jobs.find_load(request.id)
        return status_pb2.GetLoadResponse(load=load)

    async def WatchLoad(
        self, request: status_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[status_pb2.WatchLoadResponse]:
        """See the proto."""
        job, load = await self._jobs.find_load(request.id)
        try:
            async for response in self._jobs.watch(job, status_pb2.WatchLoadRequest(id=load.id)):
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=f"the sidecar of job {job}") from error


def _sum(answers: Iterable[status_pb2.ListSavesResponse], spool: Path) -> Backlog:
    """What waits on the node; the jobs' spools may share a file system, which counts once."""
    each = list(answers)
    space = os.statvfs(spool)
    reserved = sum(answer.spool_bytes for answer in each)
    used = sum(answer.spool_saves_bytes + answer.spool_held_bytes for answer in each)
    capacity = (space.f_blocks - space.f_bfree + space.f_bavail) * space.f_frsize
    free = space.f_bavail * space.f_frsize + max(0, reserved - used)
    return Backlog(
        bytes_queued=sum(answer.bytes_queued for answer in each),
        oldest_s=max((answer.oldest_upload_s for answer in each), default=0.0),
        spool_bytes=reserved,
        leased_bytes=sum(answer.spool_leased_bytes for answer in each),
        held_bytes=sum(answer.spool_held_bytes for answer in each),
        saves_bytes=sum(answer.spool_saves_bytes for answer in each),
        capacity_bytes=min(capacity, sum(answer.spool_capacity_bytes for answer in each)),
        free_bytes=min(free, sum(answer.spool_free_bytes for answer in each)),
        local_copies=[copy for answer in each for copy in answer.local_copies],
        evicted_copies=[copy for answer in each for copy in answer.evicted_copies],
        upload_limit=sum(answer.upload_limit for answer in each),
        upload_limited=any(answer.upload_limited for answer in each),
        # They are in one control group.
        memory_limit=max((answer.memory_limit for answer in each), default=0),
        memory_used=max((answer.memory_used for answer in each), default=0),
    )


class DiagnosisGateway(diagnosis_pb2_grpc.DiagnosisServicer):
    """``pannier.v1.Diagnosis`` of the node: the checks of each job, with its name."""

    def __init__(self, jobs: JobSidecars, config: SidecarConfig) -> None:
        self._jobs = jobs
        self._config = config

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        # Without the root: all jobs but one would refuse it.
        plain = diagnosis_pb2.DiagnoseRequest(timeout_s=request.timeout_s)
        timeout_s = (request.timeout_s or timeouts.DOCTOR_S) + timeouts.DOCTOR_GATEWAY_S
        own: diagnosis_pb2.DiagnoseResponse
        own, theirs = await asyncio.gather(
            doctor_checks.diagnose(
                request,
                daemon="sidecar",
                host=self._config.host,
                own_checks=lambda: [
                    doctor_checks.check_state(draining=self._jobs.draining),
                    self._check_jobs(),
                ],
                allow=[root for job in self._jobs.states.values() for root in job["allow"]],
                storage_options=self._config.storage_options,
            ),
            self._jobs.ask_all(
                lambda job: self._jobs.call(
                    job, diagnosis_pb2_grpc.DiagnosisStub, "Diagnose", plain, timeout_s
                )
            ),
        )
        for job, answer in theirs.items():
            if not isinstance(answer, diagnosis_pb2.DiagnoseResponse):
                hint = "its saves wait: see its log, and whether its spool's file system responds"
                own.checks.append(doctor_checks.failed("sidecar", f"job {job}: {answer}", hint))
                continue
            for check in (*answer.checks, *answer.coordinator.checks):
                check.found = f"job {job}: {check.found}"
                own.checks.append(check)
        return own

    def _check_jobs(self) -> diagnosis_pb2.Check:
        names = ", ".join(self._jobs.states) or "none"
        found = f"{names}; below {self._config.jobs}, as user {os.geteuid()}"
        if self._jobs.problems:
            problems = "; ".join(self._jobs.problems)
            return doctor_checks.failed("jobs", problems, f"served are {found}")
        return doctor_checks.ok("jobs", found)


class _Pages:
    """The status page of all jobs. Called by any thread."""

    def __init__(self, status: StatusGateway, loop: asyncio.AbstractEventLoop) -> None:
        self._status = status
        self._loop = loop

    def list(self, request: Request) -> Response:
        """``/status.json``: without ranks."""
        asked = status_pb2.ListSavesRequest(limit=requested_limit(request))
        answer = self._on_loop(self._status.ListSaves(asked, None))
        for save in answer.saves:
            del save.ranks[:]
        return json_response(answer)

    def save(self, request: Request) -> Response:
        """``/save.json?id=``."""
        asked = status_pb2.GetSaveRequest(id=request.query.get("id", ""))
        return json_response(self._on_loop(self._status.GetSave(asked, None)))

    def load(self, request: Request) -> Response:
        """``/load.json?id=``."""
        asked = status_pb2.GetLoadRequest(id=request.query.get("id", ""))
        return json_response(self._on_loop(self._status.GetLoad(asked, None)))

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * timeouts.JOB_CALL_S)


def run(config: SidecarConfig, parent: Path, token: str, reports: socket.socket) -> int:
    """Serves operators until SIGTERM; returns the exit status.

    Args:
        parent: the parent of the jobs' directories.
        token: valid at all jobs' sockets.
        reports: over which the supervisor's reports come; see :mod:`pannier.sidecar.multi_job.reports`.

    Raises ConfigurationError when it can't listen, and the error of a report that can't be applied: it must
    not serve the last state for ever.
    """
    return asyncio.run(_run(config, JobSidecars(parent, token), reports))


async def _run(config: SidecarConfig, jobs: JobSidecars, reports: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=reports)
    with closing(writer):
        # Which jobs there are, before anything is served.
        await jobs.apply(await read_report(reader))
        return await _serve(config, jobs, reader)


async def _serve(config: SidecarConfig, jobs: JobSidecars, reports: asyncio.StreamReader) -> int:
    loop = asyncio.get_running_loop()
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()],
        options=server_options(),
        maximum_concurrent_rpcs=_CALLS,
    )
    status = StatusGateway(jobs, config)
    status_pb2_grpc.add_StatusServicer_to_server(status, server)
    diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(DiagnosisGateway(jobs, config), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    services = (_STATUS, doctor_checks.NAME)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    ready = _Readiness(jobs)
    pages = _Pages(status, loop)
    # Without this process's own figures, which are no job's.
    metrics = Metrics("sidecar", DaemonInfo(config.host), own=False)
    async with StopSignals() as stop:
        with (
            ThreadPoolExecutor(_HTTP_THREADS, "pannier-metrics") as threads,
            serve_health(
                config.health,
                ready=lambda: ready.latched,
                loop=loop,
                alive=lambda: time.monotonic() - jobs.reported_at < timeouts.SUPERVISOR_REPORT_S,
            ),
            bind_listeners(server, config.address, allow_uid=config.allow_uid),
        ):
            metrics.add(lambda: job_metrics(jobs, threads))
            routes = {
                "/": page,
                "/status.json": pages.list,
                "/save.json": pages.save,
                "/load.json": pages.load,
                "/metrics": metrics.respond,
            }
            with serve_http(config.metrics, routes, setting="--metrics"):
                await server.start()
                await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
                following = loop.create_task(_follow(jobs, reports, ready, checks, services))
                following.add_done_callback(lambda _: stop.request())
                await stop.wait()
                following.cancel()
                await server.stop(grace=0.2)
                await asyncio.wait({following})
    if not following.cancelled():
        following.result()
    return 0


class _Readiness:
    """Whether each job that was there at the start is served, or was refused."""

    def __init__(self, jobs: JobSidecars) -> None:
        self._jobs = jobs
        self._since = time.monotonic()
        self._begun = False
        self.latched = False

    def update(self) -> None:
        """Checks again."""
        late = time.monotonic() - self._since > timeouts.JOB_START_S
        self._begun = self._begun or all(
            late or state["problem"] or self._jobs.is_serving(job)
            for job, state in self._jobs.states.items()
        )
        self.latched = self._begun and not self._jobs.draining


async def _follow(
    jobs: JobSidecars,
    reports: asyncio.StreamReader,
    ready: _Readiness,
    checks: Any,
    services: Iterable[str],
) -> None:
    """Applies the supervisor's reports, and sets the health of the services.

    Returns when the supervisor is dead, and this process is killed.
    """
    loop = asyncio.get_running_loop()
    serving, known = health_pb2.HealthCheckResponse.SERVING, None
    reading = loop.create_task(read_report(reports))
    try:
        while True:
            ready.update()
            if known != ready.latched:
                known = ready.latched
                for name in ("", *services):
                    answer = serving if known else health_pb2.HealthCheckResponse.NOT_SERVING
                    await checks.set(name, answer)
            await asyncio.wait({reading}, timeout=None if known or jobs.draining else 0.1)
            if reading.done():
                await jobs.apply(reading.result())
                reading = loop.create_task(read_report(reports))
    except EOFError:
        return
    finally:
        reading.cancel()
