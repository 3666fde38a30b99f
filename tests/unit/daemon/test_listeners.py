"""Where a daemon listens: whom the kernel lets in, one daemon per socket, and clean starts and ends."""

import os
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pannier.daemon.listeners import bind_listeners, server_options
from pannier.wire.errors import ConfigurationError
from support.network.other_user import OTHER_UID, may_connect, needs_root
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S

FREED = """
import asyncio, gc, threading
import grpc
from pannier.daemon.listeners import keep_grpc_thread

async def serve():
    keep_grpc_thread()
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
gc.collect()
print(threading.active_count())
"""


@contextmanager
def serving(sockets: Path, allow_uid: Collection[int] = ()) -> Iterator[Path]:
    """A server without services; gives its socket's path."""
    path = sockets / "d.sock"
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    with bind_listeners(server, f"unix://{path}", allow_uid=allow_uid):
        server.start()
        try:
            yield path
        finally:
            server.stop(None).wait()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_served(path: Path) -> bool:
    with grpc.insecure_channel(f"unix://{path}") as channel:
        grpc.channel_ready_future(channel).result(BOUND_S)
    return True


# Who may connect.


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_socket_and_directory_are_for_one_user_and_the_socket_is_removed_at_the_end(
    sockets: Path, umask: int
) -> None:
    made = sockets / "made"
    previous = os.umask(umask)
    try:
        with serving(made) as path:
            assert mode(made) == 0o700
            assert mode(path) == 0o600
            assert is_served(path)
    finally:
        os.umask(previous)
    assert not path.exists()


@needs_root
def test_another_user_is_refused_by_the_modes_of_socket_and_of_directory(sockets: Path) -> None:
    with serving(sockets) as path:
        assert may_connect(path, os.geteuid())
        assert not may_connect(path)
        # Each of the two is enough.
        sockets.chmod(0o711)
        assert not may_connect(path)
        sockets.chmod(0o700)
        path.chmod(0o666)
        assert not may_connect(path)


@needs_root
def test_allowed_users_may_connect_and_no_others(sockets: Path) -> None:
    one, two = 4711, 4712
    with serving(sockets, allow_uid=(one, two)) as path:
        assert may_connect(path, one)
        assert may_connect(path, two)
        assert not may_connect(path, two + 1)
        assert not may_connect(path)
        assert is_served(path)
    with serving(sockets, allow_uid=(two,)) as path:
        assert may_connect(path, two)
        assert not may_connect(path, one)
    # Without allowed users the access control lists are removed.
    with serving(sockets) as path:
        assert mode(sockets) == 0o700
        assert mode(path) == 0o600
        assert not may_connect(path, two)


@pytest.mark.parametrize("bits", [0o750, 0o705, 0o711, 0o755, 0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_enter_or_write_is_refused(sockets: Path, bits: int) -> None:
    sockets.chmod(bits)
    with (
        pytest.raises(ConfigurationError, match=rf"other users may .* \(mode {bits:o}\).*chmod"),
        serving(sockets),
    ):
        pass


@needs_root
def test_a_directory_of_another_user_is_refused(sockets: Path) -> None:
    os.chown(sockets, OTHER_UID, OTHER_UID)
    with (
        pytest.raises(ConfigurationError, match=f"belongs to user {OTHER_UID}"),
        serving(sockets),
    ):
        pass


# What is there already.


def test_a_second_daemon_is_refused_and_the_first_unharmed(sockets: Path) -> None:
    with serving(sockets) as path:
        with (
            pytest.raises(ConfigurationError, match="another daemon listens"),
            serving(sockets),
        ):
            pass
        assert is_served(path)


def test_a_dead_daemons_socket_is_removed(sockets: Path) -> None:
    code = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); "
        f"s.bind('{sockets}/d.sock'); s.listen(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (sockets / "d.sock").is_socket()
    with serving(sockets) as path:
        assert is_served(path)


def test_what_is_no_socket_is_left_alone(sockets: Path) -> None:
    (sockets / "d.sock").write_text("precious")
    with pytest.raises(ConfigurationError, match="is not a socket"), serving(sockets):
        pass
    assert (sockets / "d.sock").read_text() == "precious"


@pytest.mark.parametrize("setting", ["--address", "--listen"])
def test_a_port_in_use_is_an_error_that_names_its_setting(setting: str) -> None:
    first, second = (
        grpc.server(ThreadPoolExecutor(1)),
        grpc.server(ThreadPoolExecutor(1), options=server_options()),
    )
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()
    taken, free = f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"
    try:
        with (
            pytest.raises(ConfigurationError, match=rf"on {taken} \({setting}\)"),
            bind_listeners(second, *([taken] if setting == "--address" else [free, taken])),
        ):
            pass
    finally:
        first.stop(None).wait()


def test_the_end_of_the_last_server_ends_no_thread_that_the_collector_then_waits_for() -> None:
    """With Python 3.13.0 a process that ended its last server so could stand still for ever."""
    found = subprocess.run(
        [sys.executable, "-c", FREED], timeout=BOUND_S, check=True, capture_output=True, text=True
    )
    assert found.stdout == "2\n"
