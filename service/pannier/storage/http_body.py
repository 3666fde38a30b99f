"""Bodies of HTTP requests that carry data files, without buffering them whole."""

import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import aiohttp.payload
from aiohttp.abc import AbstractStreamWriter

from pannier.storage.source_reader import PIECE, SourceReader
from pannier.storage.upload_threads import Turn


class Body(Protocol):
    """A body that upload threads send (:mod:`pannier.storage.http_connection`)."""

    @property
    def size(self) -> int | None:
        """Bytes; not None here, which only aiohttp's type allows."""

    def pieces(self, turn: Turn) -> Iterator[memoryview]:
        """All bytes, in order; a piece is valid until the next one is requested. In an upload thread."""


class FromSpool:
    """A part of a spool file, read as the connection accepts it.

    Args:
        reader: its bytes below ``offset + size`` have arrived.
    """

    def __init__(self, reader: SourceReader, offset: int, size: int) -> None:
        self._reader = reader
        self._offset = offset
        self.size = size

    def pieces(self, turn: Turn) -> Iterator[memoryview]:
        """See :class:`Body`."""
        return self._reader.pieces(turn, self._offset, self.size)

    async def loaded(self) -> "Slices":
        """The bytes in memory, for a client that sends them on the event loop."""
        buffer = bytearray(self.size)
        await self._reader.fill(memoryview(buffer), self._offset)
        return Slices(buffer)


class Slices(aiohttp.payload.Payload):
    """Pieces of memory in order, so that the transport never copies a large one whole.

    A body for upload threads and for aiohttp. Records when it last made progress.
    """

    _value: tuple[memoryview, ...]

    def __init__(self, *views: "memoryview | bytes | bytearray") -> None:
        size = sum(len(view) for view in views)
        # Small ones are joined, to be sent in one packet.
        pieces = views if size > PIECE else [b"".join(views)]
        super().__init__(
            tuple(memoryview(piece) for piece in pieces), content_type="application/octet-stream"
        )
        self._size = size
        self.moved = time.monotonic()
        """When aiohttp's connection last accepted bytes."""

    def pieces(self, turn: Turn | None = None) -> Iterator[memoryview]:
        """See :class:`Body`."""
        for view in self._value:
            for at in range(0, len(view), PIECE):
                yield view[at : at + PIECE]

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes all; may be called again by aiohttp on a new connection."""
        for piece in self.pieces():
            await writer.write(piece)
            self.moved = time.monotonic()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Not text."""
        raise TypeError("bytes of a data file")


class Part(bytearray):
    """A buffer for a client that passes bytes to aiohttp: sent as :class:`Slices`.

    aiohttp copies plain bytes into one packet with the headers.
    """


def _slices_of(part: Part, **_: Any) -> Slices:
    return Slices(part)


# aiohttp only calls the registered type, so a function will do.
aiohttp.payload.register_payload(
    cast("type[Slices]", _slices_of), Part, order=aiohttp.payload.Order.try_first
)
