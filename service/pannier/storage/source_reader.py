"""Reads of a spool file, which may still grow, for the uploads of every store.

On the event loop, but for :meth:`SourceReader.read`.
"""

import os
from typing import IO, Final

from pannier.storage.base import IntegrityError, Source
from pannier.storage.io_threads import spool_threads
from pannier.wire.chunk_codec import RunningChecksums

_PIECE: Final = 256 << 10
"""Bytes that are read before their checksum is taken: then they are in the processor's cache."""


class SourceReader:
    """Reads a source in order from its file, and takes the checksums of the bytes.

    They are taken of the buffers that go to the store, so that :meth:`confirm` covers the whole way from
    the sender, or, where that has sent no checksum, from here on.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file: IO[bytes] | None = None
        self._taken = RunningChecksums()

    async def fill(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``; waits until they have arrived.

        Bytes that are read again count once.
        """
        await self.wait_for(offset + len(view))
        await spool_threads.run(self.read, view, offset)

    async def wait_for(self, end: int) -> None:
        """Returns when all bytes below ``end`` have arrived."""
        await self._source.wait_for(end)

    def read(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``, which have arrived. Blocking; one call at a time."""
        fd = self._open().fileno()
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            done = 0
            while done < len(piece):
                count = os.preadv(fd, [piece[done:]], offset + start + done)
                if count == 0:
                    raise self._short(offset + start + done)
                done += count
            self.note(piece, offset + start)

    async def file(self, end: int) -> IO[bytes]:
        """The file, once all bytes below ``end`` have arrived; closed by :meth:`close`.

        Pass what is read of it to :meth:`note`.
        """
        await self._source.wait_for(end)
        file = self._open()
        if os.fstat(file.fileno()).st_size < end:
            raise self._short(os.fstat(file.fileno()).st_size)
        return file

    def note(self, view: memoryview, offset: int) -> None:
        """These bytes, from ``offset`` on, go to the store. Bytes that are sent again count once."""
        known = self._taken.size - offset
        if 0 <= known < len(view):
            self._taken.add(view[known:])

    async def confirm(self) -> int:
        """The crc32c of the source, after its last byte was read.

        Raises IntegrityError when the sender's is another one.
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
        buffer = memoryview(bytearray(_PIECE))
        while self._taken.size < self._source.size:
            left = self._source.size - self._taken.size
            await self.fill(buffer[:left], self._taken.size)
        return await self.confirm()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = open(self._source.path, "rb", buffering=0)  # noqa: SIM115
        return self._file

    def _short(self, found: int) -> IntegrityError:
        return IntegrityError(f"{self._source.path} ends at byte {found} of {self._source.size}")
