"""Links between processes that can be cut: TCP proxies on 127.0.0.1.

A cut link refuses: connections are reset and new ones too. A stalled one swallows everything
until it is mended, then delivers it, as a network does whose packets got lost. A slow one
delays each piece.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

from support.processes.stretch import BOUND_S

_PIECE = 1 << 18


class Link:
    """One proxy. Changed from any thread."""

    def __init__(self, name: str, host: str, port: int, links: "Links") -> None:
        self.name = name
        self.port = 0
        """Where it listens."""
        self._upstream = (host, port)
        self._links = links
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._delay_s = 0.0
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Resets all connections, and new ones until :meth:`mend`."""
        self._links.call(self._cut())

    def stall(self) -> None:
        """Nothing comes through until :meth:`mend`."""
        self._links.call(self._stall())

    def slow(self, delay_s: float) -> None:
        """Each piece takes so long."""
        self._links.call(self._slow(delay_s))

    def lead_to(self, host: str, port: int) -> None:
        """New connections go elsewhere; those that stand are reset."""
        self._links.call(self._lead_to(host, port))

    def mend(self) -> None:
        self._links.call(self._mend())

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_PIECE)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset_all()

    async def _cut(self) -> None:
        self._refusing = True
        self._reset_all()

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _slow(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def _lead_to(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._reset_all()

    async def _mend(self) -> None:
        self._refusing, self._delay_s = False, 0.0
        self._flowing.set()

    def _reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        self._open.add(writer)
        try:
            theirs, ours = await asyncio.open_connection(*self._upstream, limit=_PIECE)
        except OSError:
            self._open.discard(writer)
            _reset(writer)
            return
        if writer not in self._open:
            # Cut meanwhile.
            _reset(ours)
            return
        self._open.add(ours)
        try:
            await asyncio.gather(self._pump(reader, ours), self._pump(theirs, writer))
        except (OSError, asyncio.CancelledError):
            # The latter from the end of all links: asyncio prints what its callbacks raise.
            pass
        finally:
            for each in (writer, ours):
                self._open.discard(each)
                _reset(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        await self._flowing.wait()
        with suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    if own is not None:
        with suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class Links:
    """All links of one run; a thread and an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._links: list[Link] = []

    def __enter__(self) -> "Links":
        self._thread.start()
        return self

    def add(self, name: str, host: str, port: int) -> Link:
        """A link to there, open."""
        link = Link(name, host, port, self)
        self.call(link.listen())
        self._links.append(link)
        return link

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(BOUND_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in self._links:
            self.call(link.close())

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND_S)
        self._loop.close()
