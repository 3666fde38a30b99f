"""What operators see of a node's sidecars: status, diagnosis, health and metrics of all jobs.

In: calls, and the supervisor's reports. Out: the answers of all jobs' sidecars, merged. Each is asked
separately, by a name that no pod can replace and with a token of the node; one that doesn't answer is
left out, and named in diagnosis and metrics. Runs on an event loop in a process of its own; HTTP in
threads.
"""

import asyncio
import http.client
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from pannier.daemon import doctor_checks
from pannier.daemon.health_server import serve_health
from pannier.daemon.http_server import Request, Response, serve_http
from pannier.daemon.interceptors import ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.daemon.metrics import Metrics
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_page import json_response, page, requested_limit
from pannier.daemon.status_registry import UnknownSaveError
from pannier.daemon.status_service import Backlog, DaemonInfo, describe_daemon
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.sockets import http_address, operator_address
from pannier.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    save_pb2,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire.addresses import channel_options
from pannier.wire.auth_token import token_metadata
from pannier.wire.errors import from_rpc_error
from pannier.wire.tls import open_aio_channel

_log = logging.getLogger(__name__)

_CALLS: Final = 256
"""Of operators at a time."""
_CALL_S: Final = 3.0
"""For a job's sidecar to answer; the others' answers wait for it."""
_DIAGNOSE_S: Final = 45.0
"""On top of what storage may take."""
_SUPERVISED_S: Final = 20.0
"""The supervisor reports every second: without a report for so long it is stuck."""
_START_S: Final = 600.0
"""A job's sidecar that recovers its spool holds the node's readiness up for so long."""
_LIMIT: Final = 100
_REPORT_BYTES: Final = 1 << 20
_HTTP_THREADS: Final = 8
_STATUS: Final = "pannier.v1.Status"

_Answer = TypeVar("_Answer")


class _Unix(http.client.HTTPConnection):
    """A connection to the HTTP server of a job's sidecar."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CALL_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Jobs:
    """The jobs of the node as the supervisor reports them, and calls to their sidecars. On the loop.

    Args:
        parent: has the sidecars' sockets.
        token: valid at all of them.
    """

    def __init__(self, parent: Path, token: str) -> None:
        self._parent = parent
        self._metadata = token_metadata(token)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.states: dict[str, dict[str, Any]] = {}
        """By name; any thread may read it, as the others."""
        self.problems: list[str] = []
        self.draining = False
        self.reported_at = time.monotonic()

    async def apply(self, report: Mapping[str, Any]) -> None:
        """Takes a report of the supervisor."""
        self.states, self.problems = report["jobs"], report["problems"]
        self.draining, self.reported_at = report["draining"], time.monotonic()
        for name in self._channels.keys() - self.states.keys():
            await self._channels.pop(name).close()

    async def call(self, job: str, stub: Any, method: str, request: Any, timeout_s: float) -> Any:
        """One answer of the job's sidecar. Raises PannierError."""
        call = getattr(stub(self._channel(job)), method)
        try:
            return await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=f"the sidecar of job {job}") from error

    async def ask_all(
        self, ask: Callable[[str], Awaitable[_Answer]]
    ) -> dict[str, _Answer | BaseException]:
        """The answers of all jobs' sidecars, or errors, by job."""
        names = list(self.states)
        answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
        return dict(zip(names, answers, strict=True))

    async def list_saves(
        self, request: status_pb2.ListSavesRequest
    ) -> dict[str, status_pb2.ListSavesResponse]:
        """The lists of those that answer."""
        answers = await self.ask_all(
            lambda job: self.call(job, status_pb2_grpc.StatusStub, "ListSaves", request, _CALL_S)
        )
        return {
            job: answer
            for job, answer in answers.items()
            if isinstance(answer, status_pb2.ListSavesResponse)
        }

    async def find(self, id_: str) -> tuple[str, save_pb2.SaveStatus]:
        """The job of a save, and its status. Raises UnknownSaveError."""
        request = status_pb2.GetSaveRequest(id=id_)
        answers = await self.ask_all(
            lambda job: self.call(job, status_pb2_grpc.StatusStub, "GetSave", request, _CALL_S)
        )
        found = [
            (answer.save.created_at, job, answer.save)
            for job, answer in answers.items()
            if isinstance(answer, status_pb2.GetSaveResponse)
        ]
        if not found:
            raise UnknownSaveError(f"no job of this node has a save {id_!r}")
        _, job, save = max(found, key=lambda each: each[:2])
        return job, save

    def watch(self, job: str, request: status_pb2.WatchSaveRequest) -> Any:
        """The stream of the job's sidecar."""
        stub: Any = status_pb2_grpc.StatusStub(self._channel(job))
        return stub.WatchSave(request, metadata=self._metadata)

    def is_serving(self, job: str) -> bool:
        """Whether its sidecar listens. Any thread."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(operator_address(self._parent, job).removeprefix("unix://"))
            except OSError:
                return False
            return True

    def fetch_metrics(self, job: str) -> str:
        """Its sidecar's metrics as text; empty when it doesn't answer. Any thread."""
        connection = _Unix(http_address(self._parent, job).removeprefix("unix://"))
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def _channel(self, job: str) -> grpc.aio.Channel:
        if job not in self._channels:
            address = operator_address(self._parent, job)
            self._channels[job] = open_aio_channel(address, channel_options(), None)
        return self._channels[job]


class StatusGateway(status_pb2_grpc.StatusServicer):
    """``pannier.v1.Status`` of all jobs."""

    def __init__(self, jobs: Jobs, config: SidecarConfig) -> None:
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
            backlog=lambda: _sum(answers, self._config.spool),
        )
        merged = describe_daemon(info)
        saves = [save for answer in answers for save in answer.saves]
        saves.sort(key=lambda save: save.created_at, reverse=True)
        merged.saves.extend(saves[: request.limit or _LIMIT])
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
    )


class DiagnosisGateway(diagnosis_pb2_grpc.DiagnosisServicer):
    """``pannier.v1.Diagnosis`` of the node: the checks of each job, with its name."""

    def __init__(self, jobs: Jobs, config: SidecarConfig) -> None:
        self._jobs = jobs
        self._config = config

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """See the proto."""
        # Without the root: all jobs but one would refuse it.
        plain = diagnosis_pb2.DiagnoseRequest(timeout_s=request.timeout_s)
        timeout_s = _CALL_S + (request.timeout_s or _DIAGNOSE_S)
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


def job_metrics(jobs: Jobs, threads: ThreadPoolExecutor) -> Iterator[Metric]:
    """The metrics of all jobs' sidecars, each with its job as ``training_job``. Any thread."""
    states = dict(jobs.states)
    texts = dict(zip(states, threads.map(jobs.fetch_metrics, states), strict=True))
    up = GaugeMetricFamily(
        "pannier_job_up",
        "1 while the sidecar of a job of this node answers, else 0.",
        labels=["training_job"],
    )
    starts = CounterMetricFamily(
        "pannier_job_starts",
        "Starts of the sidecar of a job of this node; more than one: it has crashed, or has other settings.",
        labels=["training_job"],
    )
    merged: dict[str, Metric] = {}
    for job, text in texts.items():
        up.add_metric([job], int(bool(text)))
        starts.add_metric([job], states[job]["starts"])
        for family in text_string_to_metric_families(text):
            known = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {"training_job": job, **sample.labels}
                known.samples.append(sample._replace(labels=labels))
    yield up
    yield starts
    yield from merged.values()


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

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * _CALL_S)


def run(config: SidecarConfig, parent: Path, token: str, reports: socket.socket) -> int:
    """Serves operators until SIGTERM; returns the exit status.

    Args:
        parent: the parent of the jobs' directories.
        token: valid at all jobs' sockets.
        reports: a datagram of the supervisor is the state of all jobs, as JSON.

    Raises ConfigurationError when it can't listen.
    """
    return asyncio.run(_serve(config, Jobs(parent, token), reports))


async def _serve(config: SidecarConfig, jobs: Jobs, reports: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    reports.setblocking(False)
    # Which jobs there are, before anything is served.
    await jobs.apply(json.loads(await loop.sock_recv(reports, _REPORT_BYTES)))
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
    # The figures of this process are no job's.
    metrics = Metrics("sidecar", DaemonInfo(config.host), own=False)
    async with StopSignals() as stop:
        with (
            ThreadPoolExecutor(_HTTP_THREADS, "pannier-metrics") as threads,
            serve_health(
                config.health,
                ready=lambda: ready.latched,
                loop=loop,
                alive=lambda: time.monotonic() - jobs.reported_at < _SUPERVISED_S,
            ),
            bind_listeners(server, config.address, allow_uid=config.allow_uid),
        ):
            metrics.add(lambda: job_metrics(jobs, threads))
            routes = {
                "/": page,
                "/status.json": pages.list,
                "/save.json": pages.save,
                "/metrics": metrics.respond,
            }
            with serve_http(config.metrics, routes, setting="--metrics"):
                await server.start()
                await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
                following = loop.create_task(_follow(jobs, reports, ready, checks, services))
                await stop.wait()
                following.cancel()
                await server.stop(grace=0.2)
    return 0


class _Readiness:
    """Whether each job that was there at the start is served, or was refused."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._since = time.monotonic()
        self._begun = False
        self.latched = False

    def update(self) -> None:
        """Looks again."""
        late = time.monotonic() - self._since > _START_S
        self._begun = self._begun or all(
            late or state["problem"] or self._jobs.is_serving(job)
            for job, state in self._jobs.states.items()
        )
        self.latched = self._begun and not self._jobs.draining


async def _follow(
    jobs: Jobs,
    reports: socket.socket,
    ready: _Readiness,
    checks: Any,
    services: Iterable[str],
) -> None:
    """Applies the supervisor's reports, and sets the health of the services."""
    loop = asyncio.get_running_loop()
    serving, known = health_pb2.HealthCheckResponse.SERVING, None
    while True:
        ready.update()
        if known != ready.latched:
            known = ready.latched
            for name in ("", *services):
                answer = serving if known else health_pb2.HealthCheckResponse.NOT_SERVING
                await checks.set(name, answer)
        if not known and not jobs.draining:
            with_timeout = asyncio.wait_for(loop.sock_recv(reports, _REPORT_BYTES), 0.1)
            try:
                report = await with_timeout
            except asyncio.TimeoutError:
                continue
        else:
            report = await loop.sock_recv(reports, _REPORT_BYTES)
        if not report:
            return  # The supervisor is dead, and this process is killed.
        await jobs.apply(json.loads(report))
