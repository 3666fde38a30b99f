"""Sends requests with large bodies in upload threads, over connections that are kept for later requests.

In: requests as a store's client would make them, authorized. Out: responses. On the event loop, which looks
names up and connects; an upload thread does the rest (:mod:`pannier.storage.http_connection`).
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import SplitResult, urlsplit

import aiohappyeyeballs

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.storage.http_body import Body
from pannier.storage.http_connection import HttpConnection, Response
from pannier.storage.io_threads import setup_threads
from pannier.storage.upload_threads import UploadThreads

SLOWEST_BYTES_PER_S: Final = 128 << 10
"""A request with a slower body is cancelled and tried again."""
_NEXT_ADDRESS_S: Final = 0.25
"""Seconds after which the next address of a name is tried, too (RFC 8305)."""

_Place = tuple[str, str, int]
"""Scheme, host and port."""


class HttpSender:
    """The connections of one client to its stores.

    Args:
        make_tls: makes the context of its connections; called in a thread, once.
    """

    def __init__(self, threads: UploadThreads, make_tls: Callable[[], ssl.SSLContext]) -> None:
        self._threads = threads
        self._make_tls = make_tls
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[_Place, list[tuple[float, HttpConnection]]] = {}
        """Connections without a request, each with the time since when."""
        self._closed = False

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: Body) -> Response:
        """Sends one request, without retries.

        Raises:
            asyncio.TimeoutError: the peer has stalled, or is too slow; its text continues "the peer ...".
            OSError, http.client.HTTPException: the connection failed.
            StorageError: the bytes of the body can't be read.
        """
        parts = urlsplit(url)
        place = parts.scheme, parts.hostname or "", parts.port or _port(parts)
        connection = self._kept(place)
        if connection is None:
            try:
                connection = await within(timeouts.STORAGE_CONNECT_S, self._connect(place))
            except asyncio.TimeoutError as error:
                text = str(error) or "could not be connected to in time"
                raise asyncio.TimeoutError(text) from error
        began = connection.moved = time.monotonic()
        stalled_s = timeouts.STORAGE_CONNECT_S + timeouts.STORAGE_IDLE_S
        size = body.size or 0
        try:
            response = await within(
                stalled_s + size / SLOWEST_BYTES_PER_S,
                self._threads.run(connection.exchange, method, parts, headers, body),
                sooner=lambda: connection.moved + stalled_s,
            )
        except asyncio.TimeoutError:
            connection.close()
            now = time.monotonic()
            problem = f"did not answer for {now - connection.moved:.0f} s"
            if now - connection.moved < stalled_s:
                problem = f"has taken {now - began:.0f} s for less than {size} bytes"
            raise asyncio.TimeoutError(problem) from None
        except BaseException:
            connection.close()
            raise
        self._keep(place, connection)
        return response

    def close(self) -> None:
        """Closes the connections that nothing uses, and the others after their requests."""
        self._closed = True
        for kept in self._idle.values():
            for _, connection in kept:
                connection.close()
        self._idle.clear()

    def _kept(self, place: _Place) -> HttpConnection | None:
        kept = self._idle.get(place, [])
        while kept:
            # The most recently used one first.
            since, connection = kept.pop()
            if time.monotonic() - since < timeouts.STORAGE_KEPT_S and not connection.ended:
                return connection
            connection.close()
        return None

    def _keep(self, place: _Place, connection: HttpConnection) -> None:
        if self._closed or not connection.reusable:
            connection.close()
        else:
            self._idle.setdefault(place, []).append((time.monotonic(), connection))

    async def _connect(self, place: _Place) -> HttpConnection:
        scheme, host, port = place
        if scheme == "https" and self._tls is None:
            self._tls = await setup_threads.run(self._make_tls)
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return HttpConnection(sock, self._tls if scheme == "https" else None, host)


def _port(url: SplitResult) -> int:
    return 443 if url.scheme == "https" else 80
