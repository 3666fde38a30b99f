"""Bodies that lie in memory move through aiohttp without being copied whole."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from pannier.storage.http_body import Part, Slices
from support.storage.sources import some_bytes

SIZE = (3 << 20) + 77


def put(body: Slices | Part, *, respond: int = 0) -> tuple[int, bytes]:
    """Sends ``body``; returns the status, and what arrived.

    ``respond``: answer after so many bytes, and close; 0: after all.
    """
    arrived = bytearray()

    async def handle(request: web.Request) -> web.Response:
        async for data in request.content.iter_any():
            arrived.extend(data)
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
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await web.SockSite(runner, listening).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.put(url, data=body) as answer,
                ):
                    return answer.status
            finally:
                await runner.cleanup()

    return asyncio.run(main()), bytes(arrived)


def test_a_response_before_the_end_is_read() -> None:
    status, _ = put(Slices(some_bytes(SIZE)), respond=1 << 20)
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
