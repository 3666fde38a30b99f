"""A small read-only HTTP server: what a daemon shows to browsers and to Prometheus.

In: an address and what answers each path. Out: GET and HEAD there, in a few threads of its own, as
long as the context lasts. There is no TLS and nobody is asked who they are, so it listens on
loopback unless somebody says otherwise. There, only requests that name this host are answered: a
web page elsewhere whose name was made to lead here (DNS rebinding) reads nothing.
"""

import ipaddress
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import grpc

from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError, PannierError

_log = logging.getLogger(__name__)

_CONNECTIONS: Final = 16
"""At a time; what comes on top is closed at once."""
_PATIENCE_S: Final = 10.0
"""For the next line of a request, or for an answer to be taken."""
_POLL_S: Final = 0.25
"""How long its end may take."""
_MAX_QUERY: Final = 8192
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class Request:
    """What an answer may depend on."""

    query: Mapping[str, str]
    accept: str
    """The header of that name."""


@dataclass(frozen=True)
class Response:
    """An HTTP response."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[Request], Response]
"""Called by any thread, several at a time. A PannierError becomes a response with its message."""


def http_address(text: str, *, setting: str) -> str:
    """``host:port`` of ``[HOST:]PORT``, on loopback when no host is named.

    Raises ConfigurationError naming ``setting``.
    """
    address = f"{_HOST}:{text}" if text.isascii() and text.isdecimal() else text
    if address.startswith("unix:"):
        raise ConfigurationError(
            f"{setting}={text} is no host:port: browsers and Prometheus know no unix sockets"
        )
    return parse_address(address, setting=setting)


@contextmanager
def serve_http(address: str | None, routes: Mapping[str, Route], *, setting: str) -> Iterator[None]:
    """Answers ``routes``, by path, at ``address``, ``host:port``; None: nowhere.

    Raises ConfigurationError naming ``setting`` when it can't listen there.
    """
    if address is None:
        yield
        return
    try:
        server = _Server(address, routes)
    except OSError as error:
        raise ConfigurationError(f"can't listen on {address} ({setting}): {error}") from error
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="pannier-web", daemon=True
    )
    thread.start()
    _log.info("metrics and status page are at http://%s", address)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    # Whoever is still answered doesn't keep the daemon from leaving.
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        host, _, port = address.rpartition(":")
        plain = host.strip("[]")
        if plain == "::" and not _has_ipv6():
            # As gRPC does with its own.
            plain = "0.0.0.0"
        found = socket.getaddrinfo(
            plain, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0][0]
        self.routes = routes
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        where = str(found[0][4][0])
        super().__init__((where, int(port)), _Handler)
        self.own_names: frozenset[str] | None = None
        """What a request may call this host by; None: anything."""
        if ipaddress.ip_address(where).is_loopback:
            self.own_names = frozenset({"localhost", "127.0.0.1", "[::1]", host})

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Mostly somebody who went away before the answer.
        _log.debug("a request of %s ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version = "pannier"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers by path."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """The same without a body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        target = urlsplit(self.path)
        names = self.server.own_names
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        route = self.server.routes.get(target.path)
        if names is not None and name.lower() not in names:
            self._send(_text(f"{host!r} isn't served here"), HTTPStatus.FORBIDDEN, with_body)
        elif route is None:
            known = ", ".join(sorted(self.server.routes))
            answer = _text(f"{target.path!r} isn't here; there are {known}")
            self._send(answer, HTTPStatus.NOT_FOUND, with_body)
        elif len(target.query) > _MAX_QUERY:
            self._send(_text("too long a query"), HTTPStatus.REQUEST_URI_TOO_LONG, with_body)
        else:
            query = dict(parse_qsl(target.query))
            request = Request(query, self.headers.get("Accept", ""))
            self._send(*_outcome(route, request, target.path), with_body)

    def _send(self, answer: Response, status: HTTPStatus, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Every request is no event."""
        _log.debug(format, *args)


def _has_ipv6() -> bool:
    """Whether the kernel knows IPv6 at all; clusters often don't."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _outcome(route: Route, request: Request, path: str) -> tuple[Response, HTTPStatus]:
    try:
        return route(request), HTTPStatus.OK
    except PannierError as error:
        return _text(str(error)), _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    except Exception as error:  # noqa: BLE001 - top of the request: becomes its response
        _log.exception("%s failed", path)
        return _text(f"{type(error).__name__}: {error}"), HTTPStatus.INTERNAL_SERVER_ERROR


_STATUSES: Final = {
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


def _text(message: str) -> Response:
    return Response(f"{message}\n".encode(errors="replace"), "text/plain; charset=utf-8")
