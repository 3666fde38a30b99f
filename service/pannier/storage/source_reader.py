"""Reads of a spool file, which may still grow, for the uploads of every store.

On the event loop, except :meth:`SourceReader.read`, which runs in a thread of the caller's, and methods that
take a :class:`~pannier.storage.upload_threads.Turn`, which run in upload threads; one call at a time.
"""

import errno
import os
from collections.abc import Iterator
from typing import Final

from pannier.storage.base import IntegrityError, Source, StorageError
from pannier.storage.upload_threads import Turn, UploadThreads
from pannier.wire.chunk_codec import RunningChecksums

PIECE: Final = 256 << 10
"""Bytes that are read, then checksummed, then sent, so that they stay in the processor's cache."""


class SourceReader:
    """Reads a source in order from its file, within the limit of uploads, and computes the bytes' checksums.

    The checksums are of the buffers that go to the store, so that :meth:`confirm` covers the whole way from
    the sender or, if the sender has sent no checksum, from here on.
    """

    def __init__(self, source: Source, threads: UploadThreads) -> None:
        self._source = source
        self._threads = threads
        self._fd = -1
        self._flags = os.RWF_NOWAIT
        self._taken = RunningChecksums()

    async def wait_for(self, end: int) -> int:
        """Waits until all bytes below ``end`` have arrived; returns how many have arrived by then."""
        arrived = await self._source.wait_for(end)
        if self._fd < 0:
            self._fd = os.open(self._source.path, os.O_RDONLY | os.O_CLOEXEC)
        return arrived

    async def fill(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``; waits until they have arrived.

        The checksums count bytes that are read again once.
        """
        await self.wait_for(offset + len(view))
        await self._threads.run(self._fill, view, offset)

    async def take(self, count: int) -> None:
        """Returns when ``count`` bytes may be uploaded, by the limit; for :meth:`read`."""
        await self._threads.take(count)

    def read(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``, which have arrived. Blocking; in the caller's thread.

        Raises:
            StorageError: the file can't be read.
        """
        self._fill(None, view, offset)

    def pieces(self, turn: Turn, offset: int, size: int) -> Iterator[memoryview]:
        """The bytes from ``offset`` on, after :meth:`wait_for`, all in one small buffer. In an upload thread.

        Raises:
            StorageError: the file can't be read.
        """
        buffer = memoryview(bytearray(min(PIECE, size)))
        for at in range(offset, offset + size, PIECE):
            piece = buffer[: offset + size - at]
            self._read(turn, piece, at)
            yield piece

    def crc32c(self, start: int, end: int) -> int:
        """The crc32c of bytes that were read; ``start`` and ``end`` are where blocks begin or end.

        Blocks have :data:`~pannier.wire.chunk_codec.BLOCK_BYTES`.
        """
        return self._taken.of(start, end)

    async def confirm(self) -> int:
        """The crc32c of the source, after its last byte was read.

        Raises IntegrityError when the sender's checksum differs.
        """
        if self._taken.size != self._source.size:
            raise IntegrityError(
                f"{self._source.path}: read {self._taken.size} of {self._source.size} bytes"
            )
        found = self._taken.result()
        self._source.confirm(found)
        return found.whole

    async def finish(self) -> int:
        """As :meth:`confirm`; reads what wasn't read yet."""
        buffer = memoryview(bytearray(PIECE))
        while self._taken.size < self._source.size:
            left = self._source.size - self._taken.size
            await self.fill(buffer[:left], self._taken.size)
        return await self.confirm()

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill(self, turn: Turn | None, view: memoryview, offset: int) -> None:
        for start in range(0, len(view), PIECE):
            self._read(turn, view[start : start + PIECE], offset + start)

    def _read(self, turn: Turn | None, view: memoryview, offset: int) -> None:
        """Reads bytes that are about to be sent, and adds them to the checksums."""
        if turn is not None:
            turn.take(len(view))
        try:
            done = 0
            while done < len(view):
                count = self._read_some(turn, view[done:], offset + done)
                if count == 0:
                    raise IntegrityError(
                        f"{self._source.path} ends at byte {offset + done} of {self._source.size}"
                    )
                done += count
        except OSError as error:
            raise StorageError(f"{self._source.path} can't be read: {error}") from error
        # Bytes that were sent before count once.
        known = self._taken.size - offset
        if 0 <= known < len(view):
            self._taken.add(view[known:])

    def _read_some(self, turn: Turn | None, view: memoryview, offset: int) -> int:
        if turn is None:
            return os.preadv(self._fd, [view], offset)
        try:
            return os.preadv(self._fd, [view], offset, self._flags)
        except BlockingIOError:
            # Other calls may use the core while this one waits for the disk.
            with turn.waiting():
                return os.preadv(self._fd, [view], offset)
        except OSError as error:
            # The file is in memory, or on a file system without RWF_NOWAIT.
            if not self._flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._flags = 0
            return os.preadv(self._fd, [view], offset)
