"""What gRPC says of a connection reaches a person in Pannier's words."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.wire.errors import DeadlineError, PannierError, UnavailableError, from_rpc_error
from support.processes.stretch import BOUND_S

_ALL = "failed to connect to all addresses; last error: UNKNOWN: "


class _Call(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def error_of(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> PannierError:
    return from_rpc_error(_Call(code, details), peer="sidecar at host:1")


@pytest.mark.parametrize(
    ("details", "says"),
    [
        (_ALL + "ipv4:127.0.0.1:4: connect failed: Connection refused (111)", "nothing listens"),
        (_ALL + "unix:/x: connect failed: error: No such file or directory", "doesn't exist"),
        (_ALL + "unix:/x: connect failed: error: Permission denied", "this user may not open it"),
        ("DNS resolution failed for node-x:1: C-ares status is not ARES_SUCCESS", "host name"),
        (_ALL + "ipv4:10.0.0.1:1: No route to host (113)", "no route"),
        (
            _ALL + "ipv4:10.0.0.1:1: FD Shutdown: connection attempt timed out",
            "nothing answers at 10.0.0.1:1",
        ),
        (_ALL + "ipv4:10.0.0.1:7070: tcp handshaker shutdown", "nothing answers at 10.0.0.1:7070"),
        (
            _ALL + "ipv6:[fd00::1]:7070: tcp handshaker shutdown",
            "nothing answers at [fd00::1]:7070",
        ),
        (_ALL + "ipv4:10.0.0.1:1: Socket closed", "does only one side use TLS"),
        (_ALL + "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)", "protocol"),
        ("ping timeout", "does not answer"),
        (
            _ALL + "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL "
            "routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED",
            "isn't signed by a CA",
        ),
        (_ALL + "Ssl handshake failed: WRONG_VERSION_NUMBER: Invalid", "only one side uses TLS"),
        (_ALL + "Peer name node-1 is not in peer certificate", "for another host name"),
        ("Socket closed", "the connection broke"),
        ("recvmsg:Connection reset by peer", "the connection broke"),
        ("Connection reset by peer while mapping", "the connection broke"),
        ("GOAWAY received", "the connection broke"),
        ("something that no one has seen", "the connection failed"),
    ],
)
def test_a_connection_problem_is_described_in_our_words(details: str, says: str) -> None:
    error = error_of(details)
    assert isinstance(error, UnavailableError)
    assert str(error).startswith("sidecar at host:1 can't be reached: ")
    assert says in str(error)
    for word in ("last error", "UNKNOWN", "TSI", "ipv4", "recvmsg", "errno"):
        assert word not in str(error)


def test_time_outs_and_cancelled_calls_have_no_grpc_text() -> None:
    late = error_of("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert isinstance(late, DeadlineError)
    assert (
        str(late)
        == "sidecar at host:1 did not answer within the deadline (is it stopped, or are packets dropped?)"
    )
    cancelled = error_of("Channel closed!", grpc.StatusCode.CANCELLED)
    assert isinstance(cancelled, UnavailableError)
    assert "Channel closed" not in str(cancelled)


def test_the_text_of_grpc_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "pannier"):
        error_of("Socket closed")
    assert "Socket closed" in caplog.text


_LISTENER = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
"""


def problem_of(address: str, credentials: grpc.ChannelCredentials | None = None) -> str:
    """Why no call to the address succeeds, for people."""
    options = [("grpc.min_reconnect_backoff_ms", 300)]
    with (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    return str(from_rpc_error(failed.value, peer=f"the daemon at {address}"))


@pytest.mark.parametrize("tls", [None, grpc.ssl_channel_credentials()])
def test_a_stopped_daemon_is_named_by_its_process(
    tls: grpc.ChannelCredentials | None, tmp_path: Path
) -> None:
    path = tmp_path / "d.sock"
    daemon = subprocess.Popen([sys.executable, "-c", _LISTENER, str(path)])
    try:
        _, status = os.waitpid(daemon.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        problem = problem_of(f"unix://{path}", tls)
        assert f"its process {daemon.pid} is stopped: `kill -CONT {daemon.pid}`" in problem
        assert "TLS" not in problem
        assert "protocol" not in problem
    finally:
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()


@contextmanager
def dropped_packets() -> Iterator[str]:
    """An address whose first packets are dropped, as by a NetworkPolicy: its queue of connections is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for each in waiting:
                each.close()


@pytest.mark.parametrize("tls", [None, grpc.ssl_channel_credentials()])
def test_a_connection_that_was_never_made_is_no_failed_handshake(
    tls: grpc.ChannelCredentials | None,
) -> None:
    with dropped_packets() as address:
        problem = problem_of(address, tls)
    assert f"nothing answers at {address}" in problem
    assert "NetworkPolicy" in problem
    assert "firewall" in problem
    assert "TLS" not in problem
