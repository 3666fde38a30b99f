"""Data files in a spool for tests of stores: complete, growing, or failing."""

import asyncio
import random
from pathlib import Path

import crc32c

from pannier.wire.chunk_codec import Checksums
from pannier.wire.errors import IntegrityError, SaveAbortedError


class FileSource:
    """A :class:`pannier.storage.Source` that :meth:`grow` extends."""

    def __init__(self, path: Path, data: bytes, *, held: int | None = None) -> None:
        self.path = path
        self.size = len(data)
        self.crc = crc32c.crc32c(data)
        self._data = data
        self._held = 0
        self._failed = False
        self._grown = asyncio.Condition()
        self.path.write_bytes(b"")
        self._append(len(data) if held is None else held)

    def _append(self, end: int) -> None:
        with self.path.open("ab") as file:
            file.write(self._data[self._held : end])
        self._held = end

    async def grow(self, end: int) -> None:
        """Adds all bytes below ``end``."""
        async with self._grown:
            self._append(end)
            self._grown.notify_all()

    async def fail(self) -> None:
        """Its save is aborted: it will never be complete."""
        async with self._grown:
            self._failed = True
            self._grown.notify_all()

    async def wait_for(self, end: int) -> int:
        async with self._grown:
            await self._grown.wait_for(lambda: self._held >= end or self._failed)
        if self._failed:
            raise SaveAbortedError("the save was aborted")
        return self._held

    def confirm(self, found: Checksums) -> None:
        if (found.size, found.whole) != (self.size, self.crc):
            raise IntegrityError(f"{self.path} has crc32c {found.whole:08x}, not {self.crc:08x}")


def some_bytes(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that don't repeat; the same for the same seed."""
    return random.Random(seed).randbytes(size)
