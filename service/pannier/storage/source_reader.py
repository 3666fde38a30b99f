"""Reads of a spool file, which may still grow, for the uploads of every store. Event loop only."""

import os
from typing import IO

import crc32c

from pannier.storage.base import IntegrityError, Source
from pannier.storage.io_threads import spool_threads


class SourceReader:
    """Reads a source in order from its file, and checksums the bytes.

    The checksum is taken of the buffer that goes to the store, so that :meth:`confirm` covers the
    whole way from the sender. When the kernel sends from the :meth:`file`, only the store's
    checksum does.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file: IO[bytes] | None = None
        self._crc = 0
        self._position = 0

    async def fill(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``; waits until they have arrived.

        Bytes that are read again count once.
        """
        await self._wait_for(offset + len(view))
        await spool_threads.run(self._fill, view, offset)

    async def file(self, end: int) -> IO[bytes]:
        """The file, once all bytes below ``end`` have arrived; closed by :meth:`close`."""
        await self._wait_for(end)
        file = self._open()
        if os.fstat(file.fileno()).st_size < end:
            raise self._short(os.fstat(file.fileno()).st_size)
        return file

    async def _wait_for(self, end: int) -> None:
        if end:
            # Bytes arrive in order.
            await self._source.read(end - 1, 1)

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = open(self._source.path, "rb", buffering=0)  # noqa: SIM115
        return self._file

    def _fill(self, view: memoryview, offset: int) -> None:
        fd = self._open().fileno()
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise self._short(offset + done)
            done += count
        if offset <= self._position < offset + done:
            self._crc = crc32c.crc32c(view[self._position - offset : done], self._crc)
            self._position = offset + done

    def _short(self, found: int) -> IntegrityError:
        return IntegrityError(f"{self._source.path} ends at {found} of {self._source.size} bytes")

    async def confirm(self) -> int:
        """The source's checksum, after the last byte was read.

        Raises IntegrityError when it differs from that of the bytes that were read.
        """
        expected = await self._source.crc32c()
        if self._position != self._source.size or self._crc != expected:
            raise IntegrityError(
                f"{self._source.path}: read {self._position} of {self._source.size} bytes with "
                f"crc32c {self._crc:08x}, the sender's is {expected:08x}"
            )
        return expected

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
