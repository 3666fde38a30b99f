"""The HTTP listener: which requests are answered, with what, and that no client keeps it from ending."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon import http_server
from pannier.daemon.http_server import Request, Response, http_address, serve_http
from pannier.wire.errors import ConfigurationError, InvalidRequestError, UnavailableError
from support.network.status_pages import get
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S


def hello(request: Request) -> Response:
    return Response(f"hello {request.query.get('name', '')}".encode(), "text/plain")


def refuse(request: Request) -> Response:
    raise InvalidRequestError("no such save")


def busy(request: Request) -> Response:
    raise UnavailableError("later")


def bug(request: Request) -> Response:
    raise RuntimeError("a bug")


ROUTES = {"/": hello, "/refuse": refuse, "/busy": busy, "/bug": bug}


@pytest.fixture
def address() -> Iterator[str]:
    where = f"127.0.0.1:{free_port()}"
    with serve_http(where, ROUTES, setting="--metrics"):
        yield where


def test_paths_are_answered_and_errors_have_their_message(address: str) -> None:
    found = get(address, "/?name=x%20y")
    assert (found.status, found.text) == (200, "hello x y")
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert found.headers["Cache-Control"] == "no-store"
    responses = {path: get(address, path) for path in ("/refuse", "/busy", "/bug", "/other")}
    assert {path: each.status for path, each in responses.items()} == {
        "/refuse": 400,
        "/busy": 503,
        "/bug": 500,
        "/other": 404,
    }
    assert "no such save" in responses["/refuse"].text
    assert "RuntimeError: a bug" in responses["/bug"].text
    assert responses["/other"].headers["Content-Type"].startswith("text/plain")
    head = get(address, "/", method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "6")


def test_it_is_read_only(address: str) -> None:
    assert {get(address, "/", method=verb).status for verb in ("POST", "PUT", "DELETE")} == {501}


def test_on_loopback_only_who_names_this_host_is_answered(address: str) -> None:
    port = address.rpartition(":")[2]
    for name in (address, f"localhost:{port}", f"LocalHost:{port}", f"[::1]:{port}", "localhost"):
        assert get(address, "/", {"Host": name}).status == 200, name
    for name in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.nip"):
        assert get(address, "/", {"Host": name}).status == 403, name


@pytest.mark.parametrize("ipv6", [True, False])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_elsewhere_any_name_leads_here(
    host: str, ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ipv6:
        monkeypatch.setattr(http_server, "_has_ipv6", lambda: False)
    port = free_port()
    with serve_http(f"{host}:{port}", ROUTES, setting="--metrics"):
        found = get(f"127.0.0.1:{port}", "/", {"Host": "pannier-coordinator:7072"})
        assert found.status == 200


def test_connections_that_say_nothing_keep_others_out_only_up_to_a_number(address: str) -> None:
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        # Those on top of the limit are closed; the others would be, after their patience.
        idle[-1].settimeout(BOUND_S)
        assert idle[-1].recv(1) == b""
    # They have gone away.
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        try:
            assert get(address, "/").status == 200
            return
        except OSError:
            threading.Event().wait(0.1)
    pytest.fail("no client is answered any more")


def test_it_ends_while_a_client_is_being_answered() -> None:
    began, done = threading.Event(), threading.Event()

    def wait(request: Request) -> Response:
        began.set()
        done.wait(BOUND_S)
        return Response(b"", "text/plain")

    where = f"127.0.0.1:{free_port()}"
    with socket.socket() as client:
        with serve_http(where, {"/": wait}, setting="--metrics"):
            client.connect(("127.0.0.1", int(where.rpartition(":")[2])))
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert began.wait(BOUND_S)
        done.set()


def test_settings_are_checked() -> None:
    assert CoordinatorConfig(metrics="7072").metrics == "127.0.0.1:7072"
    assert CoordinatorConfig(metrics="[::1]:7072").metrics == "[::1]:7072"
    for wrong in ("unix:///x", "nowhere", "0", "70000", "٣", ":80"):
        with pytest.raises(ConfigurationError, match="--metrics"):
            http_address(wrong, setting="--metrics")
    taken = f"127.0.0.1:{free_port()}"
    with (
        serve_http(taken, ROUTES, setting="--metrics"),
        pytest.raises(ConfigurationError, match=rf"can't listen on {taken} \(--metrics\)"),
        serve_http(taken, ROUTES, setting="--metrics"),
    ):
        pass
    with serve_http(None, ROUTES, setting="--metrics"):
        pass
