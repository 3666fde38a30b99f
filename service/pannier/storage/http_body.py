"""Bodies of HTTP requests that carry data files, without buffering them whole."""

import asyncio
import errno
import ipaddress
import os
import time
from typing import IO, Any, Final, cast

import aiohttp.payload
from aiohttp.abc import AbstractStreamWriter

from pannier.storage.io_threads import spool_threads

_SLICE: Final = 256 << 10
_SENT: Final = 1 << 20
"""Bytes after which the peer's answer is read: it may refuse before the end."""


class Body(aiohttp.payload.Payload):
    """A body of known length that records when it last made progress."""

    def __init__(self, value: Any, size: int) -> None:
        super().__init__(value, content_type="application/octet-stream")
        self._size = size
        self.moved = time.monotonic()
        """When the connection last accepted bytes."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Not text."""
        raise TypeError("bytes of a data file")


class Slices(Body):
    """Pieces of memory in order, so that the transport never copies a large one whole."""

    _value: tuple[memoryview, ...]

    def __init__(self, *views: "memoryview | bytes | bytearray") -> None:
        size = sum(len(view) for view in views)
        # One packet if they fit into one.
        pieces = views if size > _SLICE else [b"".join(views)]
        super().__init__(tuple(memoryview(piece) for piece in pieces), size)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        for view in self._value:
            for at in range(0, len(view), _SLICE):
                await writer.write(view[at : at + _SLICE])
                self.moved = time.monotonic()


class Part(bytearray):
    """A buffer for a client that passes bytes to aiohttp: sent as :class:`Slices`.

    aiohttp copies plain bytes into one packet with the headers.
    """


def _slices_of(part: Part, **_: Any) -> Slices:
    return Slices(part)


# aiohttp only calls it.
aiohttp.payload.register_payload(
    cast("type[Slices]", _slices_of), Part, order=aiohttp.payload.Order.try_first
)


class FromSpool(Body):
    """A part of a file, read as the connection accepts it, or sent by the kernel.

    The receiver's checksum must confirm the received bytes.

    Args:
        file: open and unbuffered, with a separate position; ``offset`` and ``size`` lie within it.
    """

    _value: IO[bytes]

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        super().__init__(file, size)
        self._offset = offset

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        transport = getattr(writer, "transport", None)
        if transport is None or transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        at, end = self._offset, self._offset + (self.size or 0)
        if _by_kernel(transport):
            await self._send(writer, transport, at, end)
        else:
            await self._copy(writer, transport, at, end)

    async def _copy(
        self, writer: AbstractStreamWriter, transport: asyncio.WriteTransport, at: int, end: int
    ) -> None:
        # Small, so that the bytes are still in the processor's cache when they are sent. A new one for
        # each request, since a closing connection may still send from it.
        buffer = memoryview(bytearray(min(_SLICE, end - at)))
        # After drain() the buffer may be filled again. asyncio's TLS pauses at the limit, not above
        # it: a limit of 0 would never resume.
        transport.set_write_buffer_limits(high=1 if _encrypted(transport) else 0)
        while at < end:
            count = await self._read(buffer[: end - at], at)
            await writer.write(buffer[:count])
            await writer.drain()
            at += count
            self.moved = time.monotonic()

    async def _read(self, view: memoryview, at: int) -> int:
        fd = self._value.fileno()
        try:
            # The event loop must not wait for the disk.
            count = os.preadv(fd, [view], at, os.RWF_NOWAIT)
        except BlockingIOError:
            count = await spool_threads.run(os.preadv, fd, [view], at)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # In memory, or a file system without RWF_NOWAIT.
            count = os.preadv(fd, [view], at)
        if not count:
            raise _ends(at)
        return count

    async def _send(
        self, writer: AbstractStreamWriter, transport: asyncio.WriteTransport, at: int, end: int
    ) -> None:
        loop = asyncio.get_running_loop()
        # Since aiohttp 3.12 headers wait for the body's first bytes.
        getattr(writer, "send_headers", lambda: None)()
        while at < end:
            sent = await loop.sendfile(
                transport, self._value, at, min(_SENT, end - at), fallback=False
            )
            if not sent:
                raise _ends(at)
            at += sent
            self.moved = time.monotonic()
            # sendfile() paused reading: lets the loop read an early answer.
            await asyncio.sleep(0)


def _by_kernel(transport: asyncio.BaseTransport) -> bool:
    """Whether the kernel sends from the file, which it can do without TLS only.

    For a receiver on this host, reading from single pages would cost more than it saves.
    """
    peer = transport.get_extra_info("peername")
    if _encrypted(transport) or not isinstance(peer, tuple):
        return False
    return not ipaddress.ip_address(peer[0].partition("%")[0]).is_loopback


def _encrypted(transport: asyncio.BaseTransport) -> bool:
    return transport.get_extra_info("sslcontext") is not None


def _ends(at: int) -> OSError:
    return OSError(errno.EIO, f"the spool file ends at byte {at}")
