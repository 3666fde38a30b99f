"""Bodies of HTTP requests that carry data files, without buffering them whole."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from typing import IO, Any, Final, cast

import aiohttp.payload
from aiohttp.abc import AbstractStreamWriter

from pannier.storage.io_threads import spool_threads

_SLICE: Final = 256 << 10


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
    """A part of a file, read as the connection accepts it.

    Args:
        file: open and unbuffered; ``offset`` and ``size`` lie within it.
        note: called with each piece and its offset before it is sent.
    """

    _value: IO[bytes]

    def __init__(
        self, file: IO[bytes], offset: int, size: int, note: Callable[[memoryview, int], None]
    ) -> None:
        super().__init__(file, size)
        self._offset = offset
        self._note = note

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        transport = getattr(writer, "transport", None)
        if transport is None or transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        at, end = self._offset, self._offset + (self.size or 0)
        # Small, so that the bytes are still in the processor's cache when they are sent. A new one for
        # each request, since a closing connection may still send from it.
        buffer = memoryview(bytearray(min(_SLICE, end - at)))
        # After drain() the buffer may be filled again. asyncio's TLS pauses at the limit, not above
        # it: a limit of 0 would never resume.
        transport.set_write_buffer_limits(high=1 if _encrypted(transport) else 0)
        while at < end:
            count = await self._read(buffer[: end - at], at)
            self._note(buffer[:count], at)
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


def _encrypted(transport: asyncio.BaseTransport) -> bool:
    return transport.get_extra_info("sslcontext") is not None


def _ends(at: int) -> OSError:
    return OSError(errno.EIO, f"the spool file ends at byte {at}")
