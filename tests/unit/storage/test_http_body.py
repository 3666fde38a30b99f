"""Bodies of requests move without being copied whole."""

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pannier.storage import http_body
from pannier.storage.http_body import Body, FromSpool, Part, Slices
from support.network.certificates import Authority, Files
from support.storage.sources import some_bytes

SIZE = (3 << 20) + 77


def put(
    body: Body | Part, *, respond: int = 0, pause_s: float = 0, tls: Files | None = None
) -> tuple[int, bytes]:
    """Sends ``body``; returns the status, and what arrived.

    ``respond``: answer after so many bytes, and close; 0: after all. ``pause_s``: after each read.
    """
    arrived = bytearray()

    async def handle(request: web.Request) -> web.Response:
        async for data in request.content.iter_any():
            arrived.extend(data)
            await asyncio.sleep(pause_s)
            if respond and len(arrived) >= respond:
                response = web.Response(status=403)
                response.force_close()
                return response
        return web.Response()

    async def main() -> int:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_put("/", handle)
        runner = web.AppRunner(app, lingering_time=0.2, shutdown_timeout=0.2)
        await runner.setup()
        ours = theirs = None
        if tls is not None:
            theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            theirs.load_cert_chain(tls.cert, tls.key)
            ours = ssl.create_default_context(cafile=str(tls.ca))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await web.SockSite(runner, listening, ssl_context=theirs).start()
            url = f"{'https' if tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}/"
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.put(url, data=body, ssl=ours or True) as answer,
                ):
                    return answer.status
            finally:
                await runner.cleanup()

    return asyncio.run(main()), bytes(arrived)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "spool"
    path.write_bytes(some_bytes(SIZE))
    return path


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (1, 1), (4096, 1 << 20), (77, SIZE - 77)])
def test_a_part_of_the_spool_arrives(spool: Path, start: int, size: int) -> None:
    noted = bytearray()

    def note(view: memoryview, offset: int) -> None:
        assert offset == start + len(noted)
        noted.extend(view)

    with spool.open("rb", buffering=0) as file:
        status, arrived = put(FromSpool(file, start, size, note))
    assert status == 200
    assert arrived == noted == some_bytes(SIZE)[start : start + size]


def test_a_spool_file_that_is_cut_meanwhile_ends_the_request(spool: Path) -> None:
    with spool.open("rb", buffering=0) as file:
        body = FromSpool(file, 0, SIZE, lambda view, at: None)
        os.truncate(spool, 1 << 20)
        with pytest.raises(aiohttp.ClientOSError):
            put(body)


@pytest.mark.parametrize("kind", ["spool", "memory"])
def test_a_response_before_the_end_is_read(spool: Path, kind: str) -> None:
    with spool.open("rb", buffering=0) as file:
        body = (
            FromSpool(file, 0, SIZE, lambda view, at: None)
            if kind == "spool"
            else Slices(some_bytes(SIZE))
        )
        status, _ = put(body, respond=1 << 20)
    assert status == 403


def test_pieces_of_memory_arrive_in_order() -> None:
    for views in ([b"a", b"", b"bc"], [b"head", memoryview(some_bytes(SIZE)), b"tail"]):
        assert put(Slices(*views)) == (200, b"".join(views))


def test_a_buffer_for_other_clients_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write: Callable[..., Awaitable[None]] = Slices.write

    async def noted(self: Slices, writer: object) -> None:
        written.append(self.size or 0)
        await write(self, writer)

    monkeypatch.setattr(Slices, "write", noted)
    assert put(Part(some_bytes(SIZE))) == (200, some_bytes(SIZE))
    assert written == [SIZE]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
def test_a_slow_receiver_gets_what_the_file_held(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """The buffer is filled again only after all of it was sent."""
    monkeypatch.setattr(http_body, "_SLICE", 64 << 10)
    tls = Authority(tmp_path / "ca").issue("receiver") if encrypted else None
    with spool.open("rb", buffering=0) as file:
        body = FromSpool(file, 0, SIZE, lambda view, at: None)
        assert put(body, pause_s=0.005, tls=tls) == (200, some_bytes(SIZE))
