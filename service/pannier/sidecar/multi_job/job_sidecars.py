"""The sidecars of a node's jobs, as its gateway reaches them: calls, metrics, and whether they listen.

In: the supervisor's reports of which jobs there are. Out: each sidecar's answers. A sidecar is reached over a
socket that no pod can replace, with a token of the node. Runs on the gateway's event loop; methods that any
thread may call say so.
"""

import asyncio
import http.client
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from pannier.common import timeouts
from pannier.common.message_json import seconds_of
from pannier.daemon.loads.load_registry import UnknownLoadError
from pannier.daemon.status_registry import UnknownSaveError
from pannier.sidecar.multi_job.sockets import http_address, operator_address
from pannier.v1 import load_status_pb2, save_pb2, status_pb2, status_pb2_grpc
from pannier.wire.addresses import channel_options
from pannier.wire.auth_token import token_metadata
from pannier.wire.errors import from_rpc_error
from pannier.wire.tls import open_aio_channel

_Answer = TypeVar("_Answer")


class _Unix(http.client.HTTPConnection):
    """A connection to the HTTP server of a job's sidecar."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=timeouts.JOB_CALL_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class JobSidecars:
    """The jobs of the node as the supervisor reports them, and calls to their sidecars. On the loop.

    Args:
        parent: the directory with the sidecars' sockets.
        token: valid at all of them.
    """

    def __init__(self, parent: Path, token: str) -> None:
        self._parent = parent
        self._metadata = token_metadata(token)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.states: dict[str, dict[str, Any]] = {}
        """By job; any thread may read this and the other public attributes."""
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
        """The lists of the sidecars that answer, by job."""
        answers = await self.ask_all(
            lambda job: self.call(
                job, status_pb2_grpc.StatusStub, "ListSaves", request, timeouts.JOB_CALL_S
            )
        )
        return {
            job: answer
            for job, answer in answers.items()
            if isinstance(answer, status_pb2.ListSavesResponse)
        }

    async def find(self, id_: str) -> tuple[str, save_pb2.SaveStatus]:
        """The job of a save, and its status. Raises UnknownSaveError."""
        request = status_pb2.GetSaveRequest(id=id_)
        answers = await self._get("GetSave", request)
        found = [
            (seconds_of(answer.save.created_at), job, answer.save)
            for job, answer in answers.items()
            if isinstance(answer, status_pb2.GetSaveResponse)
        ]
        if not found:
            raise UnknownSaveError(f"no job of this node has a save {id_!r}")
        _, job, save = max(found, key=lambda each: each[:2])
        return job, save

    async def find_load(self, id_: str) -> tuple[str, load_status_pb2.LoadStatus]:
        """The job of a load, and its status. Raises UnknownLoadError."""
        answers = await self._get("GetLoad", status_pb2.GetLoadRequest(id=id_))
        found = [
            (seconds_of(answer.load.created_at), job, answer.load)
            for job, answer in answers.items()
            if isinstance(answer, status_pb2.GetLoadResponse)
        ]
        if not found:
            raise UnknownLoadError(f"no job of this node has a load {id_!r}")
        _, job, load = max(found, key=lambda each: each[:2])
        return job, load

    def watch(
        self, job: str, request: status_pb2.WatchSaveRequest | status_pb2.WatchLoadRequest
    ) -> Any:
        """The stream of statuses from the job's sidecar."""
        stub: Any = status_pb2_grpc.StatusStub(self._channel(job))
        is_load = isinstance(request, status_pb2.WatchLoadRequest)
        call = stub.WatchLoad if is_load else stub.WatchSave
        return call(request, metadata=self._metadata)

    async def _get(self, method: str, request: Any) -> dict[str, Any]:
        return await self.ask_all(
            lambda job: self.call(
                job, status_pb2_grpc.StatusStub, method, request, timeouts.JOB_CALL_S
            )
        )

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


def job_metrics(jobs: JobSidecars, threads: ThreadPoolExecutor) -> Iterator[Metric]:
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
