"""Both kinds of server, over a real unix socket: errors, status, health, reflection, listening."""

import asyncio
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pannier.daemon.interceptors import AioErrorInterceptor, ErrorInterceptor
from pannier.daemon.listeners import listening, server_options
from pannier.daemon.signals import AioStopSignals, StopSignals
from pannier.daemon.status_registry import Board
from pannier.daemon.status_service import AioOperating, Operating, Vitals
from pannier.v1 import (
    plan_pb2,
    save_pb2,
    sidecar_pb2,
    sidecar_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire import errors
from pannier.wire.addresses import channel_options
from support.processes.daemons import short_directory

SAVE = save_pb2.SaveId(job="job", incarnation="abc", group="g12345678", number=1)
KEY = "job/abc/g12345678/1"


def failures(count: int) -> list[save_pb2.Failure]:
    return [
        save_pb2.Failure(rank=rank, host=f"node-{rank}", message="it broke " * 10)
        for rank in range(count)
    ]


class Failing(sidecar_pb2_grpc.SidecarServicer):
    """Each call fails in its own way."""

    def Plan(self, request: Any, context: Any) -> Any:
        raise errors.SaveSkippedError("rank 2 skipped", failures(3))

    def Begin(self, request: Any, context: Any) -> Any:
        raise errors.SaveAbortedError("many", failures(5000))

    def Finish(self, request: Any, context: Any) -> Any:
        raise RuntimeError("a bug")

    def Connect(self, request: Any, context: Any) -> Iterator[Any]:
        yield sidecar_pb2.ConnectResponse(welcome=sidecar_pb2.Welcome(host="here"))
        raise errors.UnavailableError("no more")


class AioFailing(sidecar_pb2_grpc.SidecarServicer):
    async def Plan(self, request: Any, context: Any) -> Any:
        return Failing().Plan(request, context)

    async def Begin(self, request: Any, context: Any) -> Any:
        return Failing().Begin(request, context)

    async def Finish(self, request: Any, context: Any) -> Any:
        return Failing().Finish(request, context)

    async def Connect(self, request: Any, context: Any) -> Any:
        for response in Failing().Connect(request, context):
            yield response


class Served:
    """A server of either kind with a board, in this process."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.board = Board()
        self.address = f"unix://{directory}/d.sock"
        self.state = save_pb2.SAVE_STATE_PLANNING
        self.vitals = Vitals("node-0")
        self._stack = ExitStack()
        self._start = self._start_aio if kind == "aio" else self._start_sync

    def _start_sync(self) -> None:
        server = grpc.server(
            ThreadPoolExecutor(8), options=server_options(), interceptors=[ErrorInterceptor()]
        )
        operating = Operating(server, self.board, self.vitals, ["pannier.v1.Sidecar"])
        sidecar_pb2_grpc.add_SidecarServicer_to_server(Failing(), server)
        self._stack.enter_context(listening(server, self.address))
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())
        self.drain = operating.drain

    def _start_aio(self) -> None:
        ready: threading.Event = threading.Event()

        async def serve() -> None:
            server = grpc.aio.server(options=server_options(), interceptors=[AioErrorInterceptor()])
            operating = AioOperating(server, self.board, self.vitals, ["pannier.v1.Sidecar"])
            sidecar_pb2_grpc.add_SidecarServicer_to_server(AioFailing(), server)
            with listening(server, self.address):
                await server.start()
                await operating.serve()
                loop = asyncio.get_running_loop()
                self.drain = lambda: asyncio.run_coroutine_threadsafe(
                    operating.drain(), loop
                ).result(5)
                async with AioStopSignals() as stop:
                    self.stop = stop
                    ready.set()
                    await stop.wait()
                await server.stop(None)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert ready.wait(10)
        self._stack.callback(thread.join)
        self._stack.callback(lambda: self.stop.request())

    def render(self) -> save_pb2.SaveStatus:
        return save_pb2.SaveStatus(save=SAVE, id=KEY, checkpoint_id="/c/step-1", state=self.state)

    def __enter__(self) -> "Served":
        self._start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    made = short_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=["sync", "aio"])
def served(request: pytest.FixtureRequest, directory: Path) -> Iterator[Served]:
    with Served(request.param, directory) as running:
        yield running


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address, options=channel_options()) as opened:
        yield opened


def call(channel: grpc.Channel, method: str, request: Any) -> errors.PannierError:
    stub = sidecar_pb2_grpc.SidecarStub(channel)
    with pytest.raises(grpc.RpcError) as raised:
        getattr(stub, method)(request, timeout=10)
    return errors.from_rpc_error(raised.value, peer="sidecar")


def test_errors_cross_with_class_and_failures(channel: grpc.Channel) -> None:
    error = call(channel, "Plan", sidecar_pb2.PlanRequest())
    assert type(error) is errors.SaveSkippedError
    assert str(error) == "rank 2 skipped"
    assert error.failures[2].host == "node-2"


def test_more_failures_than_headers_hold_still_cross(channel: grpc.Channel) -> None:
    error = call(channel, "Begin", sidecar_pb2.BeginRequest())
    assert type(error) is errors.SaveAbortedError
    assert len(error.failures) > 50


def test_a_bug_is_an_internal_error_with_its_message(channel: grpc.Channel) -> None:
    error = call(channel, "Finish", sidecar_pb2.FinishRequest())
    assert type(error) is errors.PannierError
    assert "RuntimeError: a bug" in str(error)


@pytest.mark.parametrize("end", ["send", "receive"])
@pytest.mark.parametrize("server_limit", [True, False])
def test_a_message_above_the_limit_is_told_as_such(
    directory: Path, end: str, server_limit: bool
) -> None:
    limit = [(f"grpc.max_{end}_message_length", 1000)]
    ours, theirs = ([], limit) if server_limit else (limit, [])
    servicer = sidecar_pb2_grpc.SidecarServicer()
    servicer.HandOver = lambda *_: sidecar_pb2.HandOverResponse()
    servicer.Plan = lambda *_: sidecar_pb2.PlanResponse(plan=plan_pb2.FinalPlan(plan_id="p" * 2000))
    # What the limited end does with large messages.
    answers = (end == "send") == server_limit
    method, request = (
        ("Plan", sidecar_pb2.PlanRequest())
        if answers
        else ("HandOver", sidecar_pb2.HandOverRequest(plan_id="p" * 2000))
    )
    address = f"unix://{directory}/limit.sock"
    server = grpc.server(ThreadPoolExecutor(1), options=theirs)
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address, options=ours) as channel:
            error = call(channel, method, request)
    finally:
        server.stop(None).wait()
    assert type(error) is errors.InvalidRequestError
    assert re.search(r"a message to sidecar is above its limit: .*20\d\d vs. 1000", str(error))


def test_too_many_calls_at_a_time_are_no_fault_of_the_message(directory: Path) -> None:
    began, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> sidecar_pb2.HandOverResponse:
        began.set()
        done.wait(10)
        return sidecar_pb2.HandOverResponse()

    servicer = sidecar_pb2_grpc.SidecarServicer()
    servicer.HandOver = wait
    address = f"unix://{directory}/busy.sock"
    server = grpc.server(ThreadPoolExecutor(2), maximum_concurrent_rpcs=1)
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            stub = sidecar_pb2_grpc.SidecarStub(channel)
            first = stub.HandOver.future(sidecar_pb2.HandOverRequest())
            assert began.wait(10)
            error = call(channel, "HandOver", sidecar_pb2.HandOverRequest())
            done.set()
            first.result(10)
    finally:
        done.set()
        server.stop(None).wait()
    assert type(error) is errors.UnavailableError


def test_a_stream_ends_with_its_error(channel: grpc.Channel) -> None:
    stream = sidecar_pb2_grpc.SidecarStub(channel).Connect(sidecar_pb2.ConnectRequest(), timeout=10)
    assert next(stream).welcome.host == "here"
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert type(errors.from_rpc_error(raised.value, peer="sidecar")) is errors.UnavailableError


def test_status_lists_gets_and_watches(served: Served, channel: grpc.Channel) -> None:
    stub = status_pb2_grpc.StatusStub(channel)
    served.board.put(SAVE, "/c/step-1", served.render)
    listed = stub.ListSaves(status_pb2.ListSavesRequest(job="job"), timeout=10)
    assert [save.id for save in listed.saves] == [KEY]
    assert (listed.host, listed.daemon_state) == ("node-0", "serving")
    assert not stub.ListSaves(status_pb2.ListSavesRequest(job="other"), timeout=10).saves
    aborted = status_pb2.ListSavesRequest(states=[save_pb2.SAVE_STATE_ABORTED])
    assert not stub.ListSaves(aborted, timeout=10).saves
    for name in (KEY, "/c/step-1"):
        found = stub.GetSave(status_pb2.GetSaveRequest(id=name), timeout=10)
        assert found.save.checkpoint_id == "/c/step-1"

    watched = stub.WatchSave(status_pb2.WatchSaveRequest(id="/c/step-1"), timeout=10)
    assert next(watched).save.state == save_pb2.SAVE_STATE_PLANNING
    for state in (save_pb2.SAVE_STATE_UPLOADING, save_pb2.SAVE_STATE_COMMITTED):
        served.state = state
        served.board.ring(KEY)
        assert next(watched).save.state == state
    assert list(watched) == []

    served.board.remove(KEY)
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetSave(status_pb2.GetSaveRequest(id=KEY), timeout=10)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert KEY in raised.value.details()


def test_draining_shows_in_health_and_status(served: Served, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    def health(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=10).status

    services = ("", "pannier.v1.Sidecar", "pannier.v1.Status")
    assert {health(service) for service in services} == {health_pb2.HealthCheckResponse.SERVING}
    served.drain()
    assert {health(service) for service in services} == {health_pb2.HealthCheckResponse.NOT_SERVING}
    listed = status_pb2_grpc.StatusStub(channel).ListSaves(
        status_pb2.ListSavesRequest(), timeout=10
    )
    assert listed.daemon_state == "draining"


def test_reflection_tells_every_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"pannier.v1.Sidecar", "pannier.v1.Status", "grpc.health.v1.Health"} <= set(
        database.get_services()
    )
    file = database.FindFileContainingSymbol("pannier.v1.Sidecar")
    assert file.name == "pannier/v1/sidecar.proto"


def test_socket_is_for_its_user_alone_and_gone_at_the_end(directory: Path) -> None:
    fresh = directory / "made"
    with Served("sync", fresh):
        assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
        assert stat.S_IMODE((fresh / "d.sock").stat().st_mode) == 0o600
    assert not (fresh / "d.sock").exists()


def test_a_second_daemon_is_refused_and_the_first_unharmed(
    served: Served, channel: grpc.Channel
) -> None:
    second = grpc.server(ThreadPoolExecutor(1))
    with (
        pytest.raises(errors.ConfigurationError, match="another daemon listens"),
        listening(second, served.address),
    ):
        pass
    listed = status_pb2_grpc.StatusStub(channel).ListSaves(
        status_pb2.ListSavesRequest(), timeout=10
    )
    assert listed.host == "node-0"


def test_a_dead_daemons_socket_is_removed(directory: Path) -> None:
    code = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); "
        f"s.bind('{directory}/d.sock'); s.listen(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (directory / "d.sock").is_socket()
    with Served("sync", directory) as running, grpc.insecure_channel(running.address) as channel:
        grpc.channel_ready_future(channel).result(10)


def test_what_is_no_socket_is_left_alone(directory: Path) -> None:
    (directory / "d.sock").write_text("precious")
    server = grpc.server(ThreadPoolExecutor(1))
    with (
        pytest.raises(errors.ConfigurationError, match="in the way"),
        listening(server, f"unix://{directory}/d.sock"),
    ):
        pass
    assert (directory / "d.sock").read_text() == "precious"


def test_a_directory_that_others_may_write_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    server = grpc.server(ThreadPoolExecutor(1))
    with (
        pytest.raises(errors.ConfigurationError, match="other users"),
        listening(server, f"unix://{directory}/d.sock"),
    ):
        pass


def test_a_port_in_use_is_a_configuration_error() -> None:
    first, second = (
        grpc.server(ThreadPoolExecutor(1)),
        grpc.server(ThreadPoolExecutor(1), options=server_options()),
    )
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()
    try:
        with (
            pytest.raises(errors.ConfigurationError, match=str(port)),
            listening(second, f"127.0.0.1:{port}"),
        ):
            pass
    finally:
        first.stop(None).wait()


def test_sigterm_ends_the_wait_and_the_second_one_too() -> None:
    with StopSignals() as stop:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
    assert signal.getsignal(signal.SIGTERM) is not stop._handle


def test_sigterm_ends_the_wait_on_a_loop() -> None:
    async def wait() -> bool:
        async with AioStopSignals() as stop:
            assert not await stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            return await stop.wait(5)

    assert asyncio.run(wait())
