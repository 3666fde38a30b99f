"""From a spool file that may still grow into buffers: what every store's upload reads."""

import os

import crc32c

from pannier.storage.base import IntegrityError, Source
from pannier.storage.threads import in_thread


class Feed:
    """Reads a source in order, straight from its file, and checksums what it read.

    The checksum is taken of the very buffer that goes to the store, so that
    :meth:`confirm` vouches for the way from the sender up to there.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._fd = -1
        self._crc = 0
        self._position = 0

    async def fill(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``; waits until they are there.

        Bytes read again don't count twice.
        """
        end = offset + len(view)
        if end > offset:
            # The last byte is there only when all before it are.
            await self._source.read(end - 1, 1)
        await in_thread(self._fill, view, offset)

    def _fill(self, view: memoryview, offset: int) -> None:
        if self._fd < 0:
            self._fd = os.open(self._source.path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise IntegrityError(
                    f"{self._source.path} ends at {offset + done} of {self._source.size} bytes"
                )
            done += count
        if offset <= self._position < offset + done:
            self._crc = crc32c.crc32c(view[self._position - offset : done], self._crc)
            self._position = offset + done

    async def confirm(self) -> int:
        """The source's checksum, after the last byte was read.

        Raises IntegrityError when the bytes that were read have another.
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
