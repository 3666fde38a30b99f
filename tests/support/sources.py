"""Data files in a spool for tests of stores: complete, growing, or failing."""

import asyncio
import os
from pathlib import Path

import crc32c

from pannier.wire.errors import SaveAbortedError


class FileSource:
    """A :class:`pannier.storage.Source` that holds what :meth:`grow` has given it."""

    def __init__(self, path: Path, data: bytes, *, held: int | None = None) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.held = 0
        self.failed = False
        self.crc = crc32c.crc32c(data)
        self._grown = asyncio.Condition()
        self.path.write_bytes(b"")
        self._append(len(data) if held is None else held)

    def _append(self, end: int) -> None:
        with self.path.open("ab") as file:
            file.write(self.data[self.held : end])
        self.held = end

    async def grow(self, end: int) -> None:
        """All below ``end`` is there now."""
        async with self._grown:
            self._append(end)
            self._grown.notify_all()

    async def fail(self) -> None:
        """It will never be complete."""
        async with self._grown:
            self.failed = True
            self._grown.notify_all()

    async def _wait(self, end: int) -> None:
        async with self._grown:
            await self._grown.wait_for(lambda: self.held >= end or self.failed)
        if self.failed:
            raise SaveAbortedError("the save was aborted")

    async def read(self, offset: int, length: int) -> bytes:
        await self._wait(offset + length)
        return self.data[offset : offset + length]

    async def crc32c(self) -> int:
        await self._wait(self.size)
        return self.crc


def random_bytes(size: int) -> bytes:
    """Bytes that no two calls share."""
    return (
        os.urandom(min(size, 1 << 16)) * (size // (1 << 16) + 1)
        if size > 1 << 16
        else os.urandom(size)
    )
