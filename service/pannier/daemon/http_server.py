"""A small read-only HTTP server for browsers and Prometheus, on the standard library's.

In: an address and a function per path. Out: GET and HEAD there, in a few threads of its own, while
the context lasts. It has neither TLS nor authentication, so it listens on loopback by default, and
there only answers requests whose Host header names this host: a web page elsewhere whose name
resolves to this host (DNS rebinding) reads nothing.
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
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import grpc

from pannier.common import timeouts
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError, PannierError

_log = logging.getLogger(__name__)

_CONNECTIONS: Final = 16
"""At a time; further ones are closed at once."""
_MAX_QUERY: Final = 8192
_HOST: Final = "127.0.0.1"
_UNIX: Final = "unix://"


@dataclass(frozen=True)
class Request:
    """The parts of a request that a route uses."""

    query: Mapping[str, str]
    accept: str
    """The Accept header."""


@dataclass(frozen=True)
class Response:
    """A successful response."""

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
            f"{setting}={text} is not host:port: browsers and Prometheus do not support unix sockets"
        )
    return parse_address(address, setting=setting)


@contextmanager
def serve_http(address: str | None, routes: Mapping[str, Route], *, setting: str) -> Iterator[None]:
    """Serves ``routes``, by path, at ``address``, ``host:port``; None: nowhere.

    A ``unix:///path`` is for other processes of this daemon: its socket is this user's alone.

    Raises ConfigurationError naming ``setting`` when it can't listen there.
    """
    if address is None:
        yield
        return
    try:
        unix = address.startswith(_UNIX)
        server = _UnixServer(address, routes) if unix else _Server(address, routes)
    except OSError as error:
        raise ConfigurationError(f"can't listen on {address} ({setting}): {error}") from error
    thread = threading.Thread(
        target=server.serve_forever, args=(timeouts.HTTP_STOP_S,), name="pannier-web", daemon=True
    )
    thread.start()
    if not unix:
        _log.info("metrics and status page are at http://%s", address)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    # A request in progress doesn't delay the daemon's exit.
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64
    own_names: frozenset[str] | None = None
    """Values of the Host header that are answered; None: any."""

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        host, _, port = address.rpartition(":")
        plain = host.strip("[]")
        if plain == "::" and not _has_ipv6():
            # As gRPC does where the kernel has no IPv6.
            plain = "0.0.0.0"
        found = socket.getaddrinfo(
            plain, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0][0]
        self._set_up(routes)
        where = str(found[0][4][0])
        super().__init__((where, int(port)), _Handler)
        if ipaddress.ip_address(where).is_loopback:
            self.own_names = frozenset({"localhost", "127.0.0.1", "[::1]", host})

    def _set_up(self, routes: Mapping[str, Route]) -> None:
        self.routes = routes
        self._free = threading.BoundedSemaphore(_CONNECTIONS)

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
        # Mostly a client that disconnected before the response.
        _log.debug("a request of %s ended early", client_address, exc_info=True)


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        self.path = Path(address.removeprefix(_UNIX))
        self.path.unlink(missing_ok=True)
        self._set_up(routes)
        socketserver.TCPServer.__init__(self, str(self.path), _Handler)  # type: ignore[arg-type]
        self.path.chmod(0o600)

    def server_close(self) -> None:
        super().server_close()
        self.path.unlink(missing_ok=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = timeouts.HTTP_S
    server_version = "pannier"
    sys_version = ""

    def do_GET(self) -> None:
        """Responds by path."""
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        """Responds without a body."""
        self._respond(with_body=False)

    def _respond(self, *, with_body: bool) -> None:
        target = urlsplit(self.path)
        names = self.server.own_names
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        route = self.server.routes.get(target.path)
        if names is not None and name.lower() not in names:
            self._send(
                _text(f"{host!r} is not a name of this host"), HTTPStatus.FORBIDDEN, with_body
            )
        elif route is None:
            known = ", ".join(sorted(self.server.routes))
            response = _text(f"no {target.path!r}; there are {known}")
            self._send(response, HTTPStatus.NOT_FOUND, with_body)
        elif len(target.query) > _MAX_QUERY:
            self._send(
                _text(f"the query is longer than {_MAX_QUERY} characters"),
                HTTPStatus.REQUEST_URI_TOO_LONG,
                with_body,
            )
        else:
            query = dict(parse_qsl(target.query))
            request = Request(query, self.headers.get("Accept", ""))
            self._send(*_outcome(route, request, target.path), with_body)

    def _send(self, response: Response, status: HTTPStatus, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged at debug level only."""
        _log.debug(format, *args)


def _has_ipv6() -> bool:
    """Whether the kernel supports IPv6; on many clusters it doesn't."""
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
