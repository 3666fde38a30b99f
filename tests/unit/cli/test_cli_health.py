"""``pannier health`` and the listener that only serves health."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon.health_server import serve_health
from pannier.sidecar import server
from pannier.sidecar.config import SidecarConfig
from pannier.wire.errors import ConfigurationError
from support.actors.loops import LoopThread
from support.processes.cli import pannier
from support.processes.daemons import short_directory
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S


class FakeDaemon:
    """A daemon's readiness, and the event loop that its liveness is about."""

    def __init__(self) -> None:
        self.ready = False
        self.loop = asyncio.new_event_loop()

    @contextmanager
    def turning(self) -> Iterator[None]:
        thread = threading.Thread(target=self.loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    made = FakeDaemon()
    with made.turning():
        yield made
    made.loop.close()


@pytest.fixture
def address(daemon: FakeDaemon) -> Iterator[str]:
    where = f"127.0.0.1:{free_port()}"
    with serve_health(where, ready=lambda: daemon.ready, loop=daemon.loop):
        yield where


def test_before_and_after_it_is_ready(daemon: FakeDaemon, address: str) -> None:
    asked = ("health", "--address", address, "--service")
    assert [pannier(*asked, name).code for name in ("", "readiness", "liveness")] == [1, 1, 0]
    daemon.ready = True
    answers = [pannier(*asked, name) for name in ("", "readiness", "liveness")]
    assert [(each.code, each.out) for each in answers] == [(0, "serving\n")] * 3
    daemon.ready = False
    not_ready = pannier(*asked, "readiness")
    assert (not_ready.code, not_ready.out) == (1, "not_serving\n")


def test_a_loop_that_hangs_is_not_alive(daemon: FakeDaemon, address: str) -> None:
    held, go = threading.Event(), threading.Event()

    def hang() -> None:
        held.set()
        go.wait(BOUND_S)

    daemon.loop.call_soon_threadsafe(hang)
    assert held.wait(BOUND_S)
    try:
        assert ask(address, "liveness", timeout=0.5) in ("NOT_SERVING", "DEADLINE_EXCEEDED")
    finally:
        go.set()
    assert ask(address, "liveness") == "SERVING"


def test_it_ends_while_a_probe_waits_for_a_loop_that_hangs(daemon: FakeDaemon) -> None:
    held, go = threading.Event(), threading.Event()

    def hang() -> None:
        held.set()
        go.wait(BOUND_S)

    address = f"127.0.0.1:{free_port()}"
    with serve_health(address, ready=lambda: True, loop=daemon.loop):
        daemon.loop.call_soon_threadsafe(hang)
        assert held.wait(BOUND_S)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(ask(address, "liveness")))
        asking.start()
        # It has come in when another is answered.
        assert ask(address, "readiness") == "SERVING"
    # Only then: the end doesn't wait for the loop.
    asking.join(BOUND_S)
    go.set()
    assert answers == ["UNAVAILABLE"] or answers == ["CANCELLED"]


def test_nothing_but_health_is_served_there(daemon: FakeDaemon, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for method in ("pannier.v1.Status/ListSaves", "grpc.health.v1.Health/Watch"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{method}")(b"", timeout=BOUND_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    unknown = pannier("health", "--address", address, "--service", "nonsense")
    assert unknown.code == 2
    assert "'nonsense'" in unknown.err


def test_no_daemon_there_and_no_such_address() -> None:
    gone = pannier("health", "--address", f"127.0.0.1:{free_port()}", "--timeout", "5")
    assert gone.code == 3
    assert pannier("health", "--address", "nowhere").code == 2


def test_it_asks_where_the_daemon_of_its_container_listens(
    daemon: FakeDaemon, address: str
) -> None:
    daemon.ready = True
    environment = {"PANNIER_HEALTH": address, "PANNIER_SIDECAR": "unix:///nowhere.sock"}
    assert pannier("health", env=environment).code == 0
    # There it is plaintext, whatever certificates the daemon has.
    secured = {f"PANNIER_TLS_{name}": "/nowhere.pem" for name in ("CERT", "KEY", "CA")}
    assert pannier("health", env={**environment, **secured}).code == 0


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"--health=unix:///x is not host:port"):
        CoordinatorConfig(health="unix:///x")
    with pytest.raises(ConfigurationError, match="--health"):
        CoordinatorConfig(health="7071")
    loop = asyncio.new_event_loop()
    taken = f"127.0.0.1:{free_port()}"
    with (
        serve_health(taken, ready=lambda: True, loop=loop),
        pytest.raises(ConfigurationError, match=rf"can't listen on {taken} \(--health\)"),
        serve_health(taken, ready=lambda: True, loop=loop),
    ):
        pass
    loop.close()


def test_a_sidecar_that_recovers_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    async def slow(*details: object) -> list[object]:
        begun.set()
        assert await asyncio.to_thread(go.wait, BOUND_S)
        return []

    monkeypatch.setattr(server, "recover", slow)
    directory = short_directory()
    address = f"127.0.0.1:{free_port()}"
    config = SidecarConfig(
        address=f"unix://{directory}/s/s.sock",
        coordinator=f"127.0.0.1:{free_port()}",
        spool=directory / "spool",
        health=address,
    )
    sidecar = server.Sidecar(config)
    with LoopThread() as loop:
        started = asyncio.run_coroutine_threadsafe(sidecar.__aenter__(), loop.loop)
        assert begun.wait(BOUND_S)
        answers = [ask(address, name) for name in ("readiness", "liveness")]
        go.set()
        started.result(BOUND_S)
        try:
            assert answers == ["NOT_SERVING", "SERVING"]
            assert ask(address, "readiness") == "SERVING"
            sidecar.saves.start_draining()
            answers = [ask(address, n) for n in ("readiness", "liveness")]
            assert answers == ["NOT_SERVING", "SERVING"]
        finally:
            loop.run(sidecar.__aexit__())
            shutil.rmtree(directory)


def ask(address: str, service: str, timeout: float = BOUND_S) -> str:
    """A status' name, or a code's."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
