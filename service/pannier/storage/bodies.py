"""Bodies of HTTP requests that carry data files, without a copy of all of them in Python.

Through TLS bytes pass the process anyway: they are read into a buffer that is used again
(:class:`Slices`). Over plain HTTP the kernel sends them from the spool (:class:`FromSpool`).
"""

import asyncio
import errno
import os
import time
from typing import IO, Any, Final, cast

import aiohttp.payload
from aiohttp.abc import AbstractStreamWriter

_SLICE: Final = 256 << 10
_SENT: Final = 1 << 20
"""Bytes from the spool after which the peer is listened to: it may refuse before the end."""


class Body(aiohttp.payload.Payload):
    """A body of known length that tells when it last moved."""

    def __init__(self, value: Any, size: int) -> None:
        super().__init__(value, content_type="application/octet-stream")
        self._size = size
        self.moved = time.monotonic()
        """When the connection last took some of it."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Not text."""
        raise TypeError("bytes of a data file")


class Slices(Body):
    """Pieces of memory, one after another, so that the transport never copies a large one whole."""

    _value: tuple[memoryview, ...]

    def __init__(self, *views: "memoryview | bytes | bytearray") -> None:
        size = sum(len(view) for view in views)
        # One packet for what fits into one.
        pieces = views if size > _SLICE else [b"".join(views)]
        super().__init__(tuple(memoryview(piece) for piece in pieces), size)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        for view in self._value:
            for at in range(0, len(view), _SLICE):
                await writer.write(view[at : at + _SLICE])
                self.moved = time.monotonic()


class Part(bytearray):
    """A buffer for a client that takes bytes and gives them to aiohttp: sent as :class:`Slices`.

    Of plain bytes aiohttp makes one packet with the headers, in fresh memory.
    """


def _slices_of(part: Part, **_: Any) -> Slices:
    return Slices(part)


# aiohttp only calls it.
aiohttp.payload.register_payload(
    cast("type[Slices]", _slices_of), Part, order=aiohttp.payload.Order.try_first
)


class FromSpool(Body):
    """A part of a file, sent by the kernel. Only over a connection that isn't encrypted.

    The content must not change before the answer is there.

    Args:
        file: open, unbuffered, with a position of its own; ``offset`` and ``size`` lie within it.
    """

    _value: IO[bytes]

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        super().__init__(file, size)
        self._offset = offset

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        loop = asyncio.get_running_loop()
        # Since aiohttp 3.12 they wait for the body's first bytes.
        getattr(writer, "send_headers", lambda: None)()
        at, end = self._offset, self._offset + (self.size or 0)
        while at < end:
            transport = getattr(writer, "transport", None)
            if transport is None or transport.is_closing():
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            sent = await loop.sendfile(
                transport, self._value, at, min(_SENT, end - at), fallback=False
            )
            if not sent:
                raise OSError(errno.EIO, f"the spool file ends at byte {at} of {end}")
            at += sent
            self.moved = time.monotonic()
            # Reading was paused meanwhile.
            await asyncio.sleep(0)
