"""Users on a daemon's unix socket: its own is let in, another is cut, whatever the socket's mode says."""

import asyncio
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from pannier.client.transport.channel import SidecarChannel
from pannier.daemon.listeners import listening, server_options
from pannier.daemon.peer_users import AioPeerInterceptor, PeerInterceptor, Peers
from pannier.daemon.settings import Access
from pannier.daemon.signals import AioStopSignals
from pannier.v1 import status_pb2, status_pb2_grpc
from pannier.wire.errors import ConfigurationError
from support.network.other_user import NOBODY, call, needs_root, speak
from support.processes.daemons import short_directory

LIST = "/pannier.v1.Status/ListSaves"
REQUEST = status_pb2.ListSavesRequest()


class Counting(status_pb2_grpc.StatusServicer):
    def __init__(self) -> None:
        self.calls = 0

    def ListSaves(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return status_pb2.ListSavesResponse(host="here")

    def WatchSave(self, request: Any, context: Any) -> Any:
        self.calls += 1
        yield status_pb2.WatchSaveResponse()


class AioCounting(Counting):
    async def ListSaves(self, request: Any, context: Any) -> Any:
        return super().ListSaves(request, context)

    async def WatchSave(self, request: Any, context: Any) -> Any:
        for response in super().WatchSave(request, context):
            yield response


class Guarded:
    """A server of either kind whose socket has been opened to everybody by hand."""

    def __init__(self, kind: str, directory: Path, *, guests: tuple[int, ...] = ()) -> None:
        self.path = directory / "d.sock"
        self.access = Access(address=f"unix://{self.path}", allow_uid=guests)
        peers = self.access.peers()
        assert peers is not None
        self.peers = peers
        self.servicer = AioCounting() if kind == "aio" else Counting()
        self._stack = ExitStack()
        self._start = self._start_aio if kind == "aio" else self._start_sync

    def _start_sync(self) -> None:
        server = grpc.server(
            ThreadPoolExecutor(8),
            options=server_options(),
            interceptors=[PeerInterceptor(self.peers)],
        )
        status_pb2_grpc.add_StatusServicer_to_server(self.servicer, server)
        address, guests = self.access.address, self.access.allow_uid
        self._stack.enter_context(listening(server, address, guests=guests))
        self._stack.enter_context(self.peers.watching())
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())

    def _start_aio(self) -> None:
        ready = threading.Event()

        async def serve() -> None:
            server = grpc.aio.server(
                options=server_options(), interceptors=[AioPeerInterceptor(self.peers)]
            )
            status_pb2_grpc.add_StatusServicer_to_server(self.servicer, server)
            address, guests = self.access.address, self.access.allow_uid
            with listening(server, address, guests=guests), self.peers.watching():
                await server.start()
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

    def open_to_all(self) -> None:
        """As somebody who doesn't know better."""
        self.path.parent.chmod(0o711)
        self.path.chmod(0o666)

    def __enter__(self) -> "Guarded":
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
def guarded(request: pytest.FixtureRequest, directory: Path) -> Iterator[Guarded]:
    with Guarded(request.param, directory) as running:
        yield running


def ask(guarded: Guarded, times: int = 1) -> None:
    with grpc.insecure_channel(guarded.access.address) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        for _ in range(times):
            assert stub.ListSaves(REQUEST, timeout=10).host == "here"
        assert len(list(stub.WatchSave(status_pb2.WatchSaveRequest(), timeout=10))) == 1


def test_its_own_user_is_let_in(guarded: Guarded) -> None:
    ask(guarded)
    assert guarded.servicer.calls == 2
    assert not guarded.peers.wary


@needs_root
def test_the_modes_keep_others_out(guarded: Guarded) -> None:
    assert speak(str(guarded.path), call(LIST)) == b"denied"
    guarded.path.parent.chmod(0o711)
    assert speak(str(guarded.path), call(LIST)) == b"denied"
    assert not guarded.peers.wary


@needs_root
def test_another_user_is_cut_though_the_socket_is_open_to_all(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.open_to_all()
    with caplog.at_level(logging.WARNING, "pannier.daemon.peer_users"):
        heard = speak(str(guarded.path), call(LIST), count=3)
    assert guarded.servicer.calls == 0
    assert b"here" not in heard
    assert f"user {NOBODY} (process " in caplog.text
    ask(guarded)


@needs_root
def test_a_call_whose_caller_hangs_up_at_once_does_not_get_through(guarded: Guarded) -> None:
    guarded.open_to_all()
    speak(str(guarded.path), call(LIST))
    for wait in (0.0002, 0.0005, 0.001):
        speak(str(guarded.path), call(LIST), count=100, wait=wait)
    assert guarded.servicer.calls == 0


@needs_root
def test_its_own_user_is_served_while_another_knocks(guarded: Guarded) -> None:
    guarded.open_to_all()
    done = threading.Event()

    def knock() -> None:
        while not done.is_set():
            speak(str(guarded.path), call(LIST), count=50, wait=0.002)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        ask(guarded, times=10)
    finally:
        done.set()
        thread.join()
    assert guarded.servicer.calls == 11


@needs_root
def test_another_user_who_says_nothing_is_cut_soon(guarded: Guarded) -> None:
    guarded.open_to_all()
    began = time.monotonic()
    # Returns when the daemon hangs up.
    speak(str(guarded.path), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert time.monotonic() - began < 5


@needs_root
def test_a_guest_is_let_in_and_nobody_else(directory: Path) -> None:
    guest = 4711
    with Guarded("sync", directory, guests=(guest,)) as guarded:
        speak(str(guarded.path), call(LIST), user=guest, wait=0.5)
        assert guarded.servicer.calls == 1
        assert speak(str(guarded.path), call(LIST), user=guest + 1) == b"denied"
        assert speak(str(guarded.path), call(LIST)) == b"denied"
        assert guarded.servicer.calls == 1
        ask(guarded)
    # Without guests it is as before again.
    with Guarded("sync", directory) as guarded:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(guarded.path.stat().st_mode) == 0o600
        assert speak(str(guarded.path), call(LIST), user=guest) == b"denied"


def test_a_look_costs_little(directory: Path) -> None:
    peers = Peers(directory / "d.sock", {os.geteuid()})
    pairs = [socket.socketpair() for _ in range(200)]
    try:
        peers.strangers()
        began = time.perf_counter()
        for _ in range(20):
            peers.strangers()
        # 400 sockets; a sidecar has some tens. It runs once per call, never per message.
        assert (time.perf_counter() - began) / 20 < 0.02
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


# The socket's place.


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o711, 0o755, 0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    server = grpc.server(ThreadPoolExecutor(1))
    with (
        pytest.raises(ConfigurationError, match=rf"other users may .* \(mode {mode:o}\).*chmod"),
        listening(server, f"unix://{directory}/d.sock"),
    ):
        pass


@needs_root
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    os.chown(directory, NOBODY, NOBODY)
    server = grpc.server(ThreadPoolExecutor(1))
    with (
        pytest.raises(ConfigurationError, match=f"belongs to user {NOBODY}"),
        listening(server, f"unix://{directory}/d.sock"),
    ):
        pass


# The other way round: an impostor's socket.


@needs_root
def test_a_client_refuses_a_socket_of_another_user(directory: Path) -> None:
    path = directory / "d.sock"
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(path))
        impostor.listen()
        os.chown(path, 4711, 4711)
        for line in (
            SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 0}),
            SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 4712}),
        ):
            with (
                pytest.raises(ConfigurationError, match=r"belongs to user 4711.*PANNIER_ALLOW_UID"),
                line.call(lambda channel: pytest.fail("called")),
            ):
                pass
            with pytest.raises(ConfigurationError, match="belongs to user 4711"):
                line.renew()
        impostor.setblocking(False)
        with pytest.raises(BlockingIOError):
            impostor.accept()
        trusting = SidecarChannel(f"unix://{path}", trusted_uids={os.geteuid(), 0, 4711})
        trusting.renew()


def test_an_unreachable_path_is_not_an_impostors(directory: Path) -> None:
    SidecarChannel(f"unix://{directory}/none.sock", trusted_uids={os.geteuid(), 0}).renew()
