"""Requests of upload threads: what arrives, and what becomes of a peer that answers early, late or not at all."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from pannier.common import timeouts
from pannier.storage import IntegrityError
from pannier.storage.http_body import Body, FromSpool, Slices
from pannier.storage.http_connection import HttpConnection, Response
from pannier.storage.http_sender import HttpSender
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import Turn, UploadThreads
from support.network.certificates import Authority, Files
from support.processes.stretch import BOUND_S
from support.storage.sources import FileSource, some_bytes

SIZE = (3 << 20) + 77


class Peer:
    """A server of this process's event loop, and a sender to it."""

    def __init__(self, tls: Files | None) -> None:
        self._tls = tls
        self.threads = UploadThreads()
        self.sender = HttpSender(self.threads, self._make_tls)
        self.url = ""
        self.arrived = bytearray()
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        """Set: what stalls goes on."""
        self.connections: set[Any] = set()
        """Of all requests so far."""
        self.respond_after: int | None = None
        """Bytes after which it answers, and closes; None: after all."""
        self.stall_after: int | None = None
        """Bytes after which it takes no more."""
        self.pause_s = 0.0
        """After each read."""

    def _make_tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._tls.ca) if self._tls else None)

    async def put(self, body: Body, **headers: str) -> Response:
        return await self.sender.send("PUT", self.url, headers, body)

    async def _handle(self, request: web.Request) -> web.Response:
        self.arrived.clear()
        self.connections.add(request.transport)
        self.begun.set()
        async for data in request.content.iter_any():
            self.arrived.extend(data)
            await asyncio.sleep(self.pause_s)
            if self.stall_after is not None and len(self.arrived) >= self.stall_after:
                await self.released.wait()
            if self.respond_after is not None and len(self.arrived) >= self.respond_after:
                refusal = web.Response(status=403, text="refused")
                refusal.force_close()
                return refusal
        return web.Response(headers={"X-Found": request.headers.get("X-Sent", "")})

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Peer"]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_put("/", self._handle)
        runner = web.AppRunner(app, lingering_time=0.2, shutdown_timeout=0.2)
        await runner.setup()
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.cert, self._tls.key)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await web.SockSite(runner, listening, ssl_context=context).start()
            scheme = "https" if context else "http"
            self.url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}/"
            try:
                yield self
            finally:
                self.released.set()
                self.sender.close()
                await runner.cleanup()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, BOUND_S))


@pytest.fixture(params=["plain", "TLS"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Files | None:
    return Authority(tmp_path / "ca").issue("store") if request.param == "TLS" else None


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return FileSource(tmp_path / "spool", some_bytes(SIZE))


async def reader_of(source: FileSource, peer: Peer) -> SourceReader:
    reader = SourceReader(source, peer.threads)
    await reader.wait_for(source.size)
    return reader


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (1, 1), (4096, 1 << 20), (77, SIZE - 77)])
def test_a_part_of_the_spool_arrives(
    source: FileSource, tls: Files | None, start: int, size: int
) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            reader = await reader_of(source, peer)
            response = await peer.put(FromSpool(reader, start, size), **{"X-Sent": "so"})
            assert (response.status, response.headers["x-found"]) == (200, "so")
            assert peer.arrived == some_bytes(SIZE)[start : start + size]
            if size == SIZE:
                assert await reader.confirm() == source.crc
            reader.close()

    run(test())


def test_the_next_request_has_the_same_connection_until_it_was_idle_for_long(
    tls: Files | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            for _ in range(3):
                assert (await peer.put(Slices(some_bytes(SIZE)))).status == 200
            assert len(peer.connections) == 1
            monkeypatch.setattr(timeouts, "STORAGE_KEPT_S", 0.0)
            assert (await peer.put(Slices(b"more"))).status == 200
            assert len(peer.connections) == 2

    run(test())


def test_a_connection_that_the_peer_has_closed_is_not_used_again(tls: Files | None) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            await peer.put(Slices(b"first"))
            (connection,) = peer.connections
            connection.close()
            ((_, ours),) = next(iter(peer.sender._idle.values()))
            await asyncio.to_thread(ours._stream._input.poll)
            assert (await peer.put(Slices(b"second"))).status == 200
            assert len(peer.connections) == 2

    run(test())


def test_a_response_before_the_end_is_read(source: FileSource, tls: Files | None) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            peer.respond_after = 1 << 20
            for body in (
                FromSpool(await reader_of(source, peer), 0, SIZE),
                Slices(some_bytes(16 << 20)),
            ):
                response = await peer.put(body)
                assert (response.status, response.body) == (403, b"refused")

    run(test())


def test_a_slow_receiver_gets_what_the_file_held(source: FileSource, tls: Files | None) -> None:
    """The buffer is filled again only after all of it was sent."""

    async def test() -> None:
        async with Peer(tls).running() as peer:
            peer.pause_s = 0.005
            await peer.put(FromSpool(await reader_of(source, peer), 0, SIZE))
            assert peer.arrived == some_bytes(SIZE)

    run(test())


def test_a_cancelled_request_ends_at_once_while_its_peer_accepts_nothing(
    tls: Files | None,
) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            peer.stall_after = 1
            # More than the buffers of both sides hold.
            sending = asyncio.create_task(peer.put(Slices(some_bytes(1 << 20) * 64)))
            await peer.begun.wait()
            began = time.monotonic()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert time.monotonic() - began < BOUND_S / 4
            # Its core is free again.
            peer.stall_after = None
            assert (await peer.put(Slices(b"next"))).status == 200

    run(test())


def test_a_peer_that_accepts_nothing_holds_no_core(tls: Files | None) -> None:
    async def test() -> None:
        async with Peer(tls).running() as stalling, Peer(tls).running() as peer:
            peer.sender = HttpSender(stalling.threads, peer._make_tls)
            stalling.stall_after = 1
            stalled = asyncio.create_task(stalling.put(Slices(some_bytes(1 << 20) * 64)))
            await stalling.begun.wait()
            assert (await peer.put(Slices(some_bytes(SIZE)))).status == 200
            stalled.cancel()
            await asyncio.gather(stalled, return_exceptions=True)

    run(test())


def test_a_stalled_peer_is_a_timeout(tls: Files | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with Peer(tls).running() as peer:
            # The connection is kept.
            assert (await peer.put(Slices(b"first"))).status == 200
            for name in ("STORAGE_CONNECT_S", "STORAGE_IDLE_S"):
                monkeypatch.setattr(timeouts, name, 0.2)
            peer.stall_after = 1
            with pytest.raises(asyncio.TimeoutError, match=r"did not answer for \d s"):
                await peer.put(Slices(some_bytes(1 << 20) * 64))

    run(test())


def test_a_spool_file_that_is_cut_meanwhile_fails_by_name(source: FileSource) -> None:
    async def test() -> None:
        async with Peer(None).running() as peer:
            reader = await reader_of(source, peer)
            os.truncate(source.path, 1 << 20)
            with pytest.raises(IntegrityError, match=rf"ends at byte {1 << 20} of {SIZE}"):
                await peer.put(FromSpool(reader, 0, SIZE))

    run(test())


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ca").issue("store")
    other = Authority(tmp_path / "other").issue("store")

    async def test() -> None:
        async with Peer(tls).running() as peer:
            peer.sender = HttpSender(
                peer.threads, lambda: ssl.create_default_context(cafile=str(other.ca))
            )
            with pytest.raises(ssl.SSLCertVerificationError):
                await peer.put(Slices(b"secret"))
            assert not peer.arrived

    run(test())


def test_a_peer_that_does_not_listen_is_an_error() -> None:
    async def test() -> None:
        peer = Peer(None)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            peer.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(ConnectionRefusedError):
            await peer.put(Slices(b"x"))

    run(test())


class Answered:
    """A body during which the rest of a response arrives."""

    size = 5

    def __init__(self, peer: socket.socket, rest: bytes) -> None:
        self._peer, self._rest = peer, rest

    def pieces(self, turn: Turn) -> Iterator[memoryview]:
        self._peer.sendall(self._rest)
        yield memoryview(b"bytes")


@pytest.mark.parametrize("text", [b"refused", b""])
def test_a_response_that_begins_before_the_head_was_sent_is_read_whole(text: bytes) -> None:
    ours, theirs = socket.socketpair()

    async def test() -> None:
        connection = HttpConnection(ours, None, "store")
        theirs.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(text))
        body: Body = Answered(theirs, text) if text else Slices()
        try:
            response = await UploadThreads().run(
                connection.exchange, "PUT", urlsplit("http://store/x"), {}, body
            )
            assert (response.status, response.body) == (403, text)
            # The request was not sent whole.
            assert not connection.reusable
        finally:
            connection.close()
            theirs.close()

    run(test())


def test_a_connection_that_is_not_made_in_time_is_a_timeout_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(self: HttpSender, place: object) -> HttpConnection:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(timeouts, "STORAGE_CONNECT_S", 0.02)
    monkeypatch.setattr(HttpSender, "_connect", connect)

    async def test() -> None:
        async with Peer(None).running() as peer:
            with pytest.raises(asyncio.TimeoutError, match="could not be connected to in time"):
                await peer.put(Slices(b"x"))

    run(test())
