"""What gRPC says of a connection reaches a person in Pannier's words."""

import grpc
import pytest

from pannier.wire.errors import DeadlineError, PannierError, UnavailableError, from_rpc_error

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
        (_ALL + "ipv4:10.0.0.1:1: FD Shutdown: connection attempt timed out", "does not answer"),
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
    assert str(late) == "sidecar at host:1 did not answer within the deadline (is it stopped?)"
    cancelled = error_of("Channel closed!", grpc.StatusCode.CANCELLED)
    assert isinstance(cancelled, UnavailableError)
    assert "Channel closed" not in str(cancelled)


def test_the_text_of_grpc_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "pannier"):
        error_of("Socket closed")
    assert "Socket closed" in caplog.text
