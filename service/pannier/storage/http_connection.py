"""One HTTP/1.1 connection to a store, as upload threads use it: a request with a large body, then its answer.

In: a connected socket, then requests. Out: answers; errors as the socket raises them. All of it runs in
upload threads, one call at a time; a call holds a core unless it waits for the peer. It has no deadlines: the
caller of a call stops its turn. The sockets of :mod:`ssl` encrypt straight into the kernel's buffers, which
costs less than the event loop's transports do, and uses as many cores as there are turns.
"""

import io
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import IO, Any, Final, cast
from urllib.parse import SplitResult

from multidict import CIMultiDict

from pannier.storage.http_body import Body
from pannier.storage.upload_threads import Turn

_FIRST_READ: Final = 64 << 10


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    """Names are case-insensitive."""
    body: bytes


class HttpConnection:
    """See the module. Its owner closes it, while no call uses it.

    Args:
        sock: connected; owned by the connection from now on.
        tls: None: in plaintext.
        host: the name on the server's certificate.
    """

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None, host: str) -> None:
        self._stream = _Stream(sock)
        self._tls = tls
        self._host = host
        self._http = HTTPConnection(host)
        self._http.sock = cast(Any, self._stream)
        self.moved = time.monotonic()
        """When the peer last accepted bytes, on the monotonic clock."""
        self.reusable = False
        """Whether another request may follow."""

    def exchange(
        self, turn: Turn, method: str, url: SplitResult, headers: Mapping[str, str], body: Body
    ) -> Response:
        """Sends a request and reads the response, which may come before all of the body was sent.

        Raises:
            OSError, http.client.HTTPException: the connection failed.
            StorageError: the bytes of the body can't be read.
        """
        self.reusable = False
        with self._stream.used_in(turn):
            if self._tls is not None:
                self._stream.encrypt(self._tls, self._host)
                self._tls = None
            self._put_head(method, url, headers, body)
            whole, broken = False, None
            try:
                self._http.endheaders()
                whole = self._send(turn, body)
            except OSError as error:
                # The peer may have sent a response with the reason.
                broken = error
            try:
                response = self._http.getresponse()
                data = response.read()
            except (OSError, HTTPException) as error:
                raise broken or error from error
            self.reusable = whole and not response.will_close
            return Response(response.status, CIMultiDict(response.getheaders()), data)

    def _put_head(
        self, method: str, url: SplitResult, headers: Mapping[str, str], body: Body
    ) -> None:
        target = f"{url.path}?{url.query}" if url.query else url.path
        self._http.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        own = {"host": url.netloc, "content-length": str(body.size)}
        given = {name.lower(): value for name, value in headers.items()}
        for name, value in {**own, **given}.items():
            self._http.putheader(name, value)

    def _send(self, turn: Turn, body: Body) -> bool:
        """Sends the body; False: the peer has answered, or closed, before the end of the request."""
        for piece in body.pieces(turn):
            if not self._stream.send(piece):
                return False
            self.moved = time.monotonic()
        # Before the end of the head, if there is no body.
        return not self._stream.answered

    @property
    def ended(self) -> bool:
        """Whether the peer has closed a connection that no call uses. On the event loop."""
        return self._stream.readable

    def close(self) -> None:
        """Closes it at once."""
        self._stream.disconnect()


class _Stream:
    """A non-blocking socket, with the methods that :mod:`http.client` needs."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turn: Turn | None = None
        self._first = b""
        """First bytes of a response that arrived while the request was being sent."""
        self._input = select.poll()
        self._input.register(sock.fileno(), select.POLLIN)

    @contextmanager
    def used_in(self, turn: Turn) -> Iterator[None]:
        """Sets the turn of the call that may wait for the socket within this block."""
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None

    def encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        """Performs the TLS handshake."""
        made = tls.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = made
        while True:
            try:
                return made.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def send(self, data: "bytes | memoryview") -> bool:
        """Sends all; False: the peer has answered, or closed, before the end."""
        view = memoryview(data)
        while view:
            if self.answered or (self.readable and self._receive_first()):
                return False
            try:
                view = view[self._sock.send(view) :]
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLIN | select.POLLOUT)
        return True

    @property
    def readable(self) -> bool:
        """Whether something has arrived, or the peer has closed."""
        return bool(self._input.poll(0))

    @property
    def answered(self) -> bool:
        """Whether a response has arrived while the request was being sent, and was not read yet."""
        return bool(self._first)

    def _receive_first(self) -> bool:
        """Whether the peer has answered, or closed."""
        # The bytes that arrived may also be TLS's own, like a session ticket.
        try:
            self._first = self._sock.recv(_FIRST_READ)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        return True

    def receive(self, buffer: memoryview) -> int:
        """Fills a part of ``buffer``; 0: the peer has closed."""
        if self._first:
            count = min(len(self._first), len(buffer))
            buffer[:count], self._first = self._first[:count], self._first[count:]
            return count
        while True:
            try:
                return self._sock.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def _wait(self, events: int) -> None:
        assert self._turn is not None
        self._turn.wait_for(self._sock.fileno(), events)

    def disconnect(self) -> None:
        """Closes the socket."""
        self._sock.close()

    # For http.client.

    def sendall(self, data: bytes) -> None:
        """Sends the head of a request; a response that arrives before its end is read later."""
        self.send(data)

    def makefile(self, mode: str) -> IO[bytes]:
        """A file to read the response from."""
        return io.BufferedReader(_Received(self))

    def close(self) -> None:
        """Does nothing: the owner calls :meth:`disconnect`."""


class _Received(io.RawIOBase):
    """A response, for a buffered reader."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See :class:`io.RawIOBase`."""
        return self._stream.receive(memoryview(buffer))
