"""A data file on its way through the spool: written by one stream, read by one upload.

In: chunks of ``Write`` streams, or content that a trainer has staged into the spool file. Out: bytes for
the upload, as soon as they are there. On the event loop; per chunk of a stream one call in a thread computes
a checksum and makes one ``pwrite``, both without the GIL. What a trainer has staged is read by its upload
alone.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import crc32c

from pannier.sidecar.spool.spool import SpoolFile
from pannier.storage.io_threads import ingest_threads
from pannier.wire.chunk_codec import Checksums, ReceivedChunk
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, UnavailableError

MAX_CHUNK: Final = 4 << 20
"""Bytes of one message's payload."""


@dataclass
class UploadProgress:
    """How much of the file the store holds."""

    uploaded: int = 0
    """Bytes."""
    durable: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    """When the file was opened, or restored from the journal."""
    stored_at: float | None = None
    """When it became durable; None: it isn't, or an earlier sidecar process stored it."""

    def advance(self, uploaded: int) -> None:
        """The store holds this many bytes; fewer than before when the upload starts over."""
        self.uploaded = uploaded

    def restore_durable(self, size: int) -> None:
        """The journal says that the store holds the whole file."""
        self.uploaded, self.durable = size, True

    def complete(self, size: int) -> None:
        """The store holds the whole file, confirmed and recorded."""
        self.restore_durable(size)
        self.stored_at = time.monotonic()


@dataclass(frozen=True)
class _Writer:
    """The stream that fills the file."""

    key: object
    cancel: Callable[[], object]


class DataFile:
    """One data file of one rank.

    Args:
        spool_file: None: an earlier sidecar process stored the content, or gave it up.
        stamp: of the spool file, where a trainer has staged the content itself; empty: it is streamed.
        label: names file, save, rank and host in errors.
    """

    def __init__(
        self,
        name: str,
        size: int,
        spool_file: SpoolFile | None,
        *,
        label: str,
        stamp: bytes = b"",
    ) -> None:
        self.name = name
        self.size = size
        self.stamp = stamp
        self.label = label
        self.held = 0
        """All bytes below this offset are in the spool."""
        self.checksums = Checksums()
        """Checksums of the held bytes; of staged content, known once it was read for the store."""
        self.upload = UploadProgress()
        """Changed by the upload."""
        self._writing = asyncio.Lock()
        """Held while a thread uses the spool file for the writer."""
        self._writer: _Writer | None = None
        self._spool_file: SpoolFile | None = spool_file
        self._released = False
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when more bytes are there or the file is released."""

    @property
    def spool_file(self) -> SpoolFile:
        """Where its bytes lie. Raises UnavailableError after :meth:`release`."""
        spool_file = self._spool_file
        if spool_file is None:
            raise self._released_error()
        return spool_file

    @property
    def is_checked(self) -> bool:
        """Whether its checksums are known."""
        return self.checksums.size == self.size

    @property
    def complete(self) -> bool:
        """Whether all bytes are in the spool: the file isn't written again."""
        return self.held == self.size

    def restore(self, checksums: Checksums) -> None:
        """Sets the bytes that the journal records and that were verified; before any use."""
        self.checksums, self.held = checksums, checksums.size

    def restore_staged(self) -> None:
        """Marks all bytes as present, with unknown checksums."""
        self.held = self.size

    def confirm(self, found: Checksums) -> None:
        """Takes the checksums of the whole file, as read for the store.

        Raises IntegrityError: the bytes that had arrived have others.
        """
        if not self.is_checked:
            self.checksums = found
        elif (found.size, found.whole) != (self.size, self.checksums.whole):
            raise IntegrityError(
                f"{self.label}: read {found.size} of {self.size} bytes with crc32c {found.whole:08x}, the "
                f"sender's is {self.checksums.whole:08x}"
            )

    async def begin(self, writer: object, cancel: Callable[[], object]) -> int:
        """``writer`` is the stream that fills the file from now on; returns the offset to resume at.

        Cancels an earlier stream, whose end may not have been noticed yet. Raises
        UnavailableError after :meth:`release`.
        """
        if self._released:
            raise self._released_error()
        if self._spool_file is None:
            # Stored by an earlier process: there is nothing to write.
            return self.held
        previous, self._writer = self._writer, _Writer(writer, cancel)
        if previous is not None:
            previous.cancel()
        async with self._writing:
            return self.held

    def end(self, writer: object) -> None:
        """``writer`` has ended."""
        if self._is_writer(writer):
            self._writer = None

    async def append(self, writer: object, chunk: ReceivedChunk) -> int:
        """Puts the next chunk into the spool; returns how many bytes it holds.

        Raises:
            UnavailableError: another stream fills this file now.
            InvalidRequestError, IntegrityError: the chunk is not what was announced.
            PannierError: the save has ended, or the spool failed.
        """
        length = len(chunk.data)
        async with self._writing:
            self._check_writer(writer)
            end = chunk.offset + length
            if chunk.offset != self.held or end > self.size or not 0 < length <= MAX_CHUNK:
                raise self._misplaced(chunk.offset, length)
            spool_file = self.spool_file
            checksums = await ingest_threads.run(self._store, spool_file, chunk, self.checksums)
            self._check_writer(writer)
            self._advance(checksums)
        return end

    async def take_staged(self) -> None:
        """Takes what a trainer has staged into the spool file, unread: its upload computes the checksums.

        Raises:
            IntegrityError: the trainer has staged another save there.
            UnavailableError: the save has ended, or a stream fills the file instead.
            PannierError: the spool file can't be read, or is shorter than the data file.
        """
        reader = object()
        if await self.begin(reader, lambda: None) == self.size:
            return
        try:
            await self.check_stamp()
            self._check_writer(reader)
            self.restore_staged()
            self._notify()
        finally:
            self.end(reader)

    async def check_stamp(self) -> None:
        """Raises unless all that was read so far of a mapped file belongs to this save.

        The trainer writes another stamp before it stages something else there.

        Raises:
            IntegrityError: the stamp has changed.
            UnavailableError: the save has ended.
            PannierError: the spool file can't be read.
        """
        if not self.stamp:
            return
        spool_file = self.spool_file
        try:
            found, end = await ingest_threads.run(_stamp_and_size, spool_file)
        except OSError as error:
            raise self._unreadable(spool_file, error) from error
        if len(found) < len(self.stamp):
            raise self._truncated(spool_file, end)
        if found != self.stamp:
            raise IntegrityError(
                f"{self.label}: the trainer has staged another save into the spool file "
                f"{spool_file.path} (its stamp is {found.hex()}, {self.stamp.hex()} was handed over)"
            )

    async def release(self) -> SpoolFile | None:
        """Drops the content: cancels the stream and returns the spool file, now the caller's.

        When it returns, no stream writes into the spool file; the upload must have ended
        before. None when it was released already. Waits for a chunk that is being written.
        """
        spool_file, self._spool_file = self._spool_file, None
        self._released = True
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.cancel()
        self._notify()
        async with self._writing:
            return spool_file

    async def wait_for(self, count: int) -> int:
        """Waits until the first ``count`` bytes are in the spool; returns how many are by then.

        Raises UnavailableError after :meth:`release`.
        """
        while self.held < count and self._spool_file is not None:
            await self._changed.wait()
        if self._spool_file is None:
            raise self._released_error()
        return self.held

    def _advance(self, checksums: Checksums) -> None:
        self.restore(checksums)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_writer(self, writer: object) -> bool:
        return self._writer is not None and self._writer.key is writer

    def _check_writer(self, writer: object) -> None:
        if self._is_writer(writer):
            return
        if self._spool_file is None:
            raise self._released_error()
        raise UnavailableError(f"another stream fills {self.label} now")

    # In threads.

    def _store(self, spool_file: SpoolFile, chunk: ReceivedChunk, before: Checksums) -> Checksums:
        """Verifies and writes a chunk; returns the checksums of all bytes up to its end."""
        data = chunk.data
        length = len(data)
        crc = crc32c.crc32c(data)
        if crc != chunk.crc32c:
            raise IntegrityError(
                f"{self.label}: bytes {chunk.offset} to {chunk.offset + length} arrived with crc32c "
                f"{crc:08x}, the sender's is {chunk.crc32c:08x}"
            )
        try:
            done = os.pwrite(spool_file.fd, data, chunk.offset)
            while done < length:
                done += os.pwrite(spool_file.fd, data[done:], chunk.offset + done)
        except OSError as error:
            raise PannierError(
                f"{self.label}: the spool file {spool_file.path} can't be written: {error}"
            ) from error
        return before.followed_by(data, crc)

    # Errors.

    def _released_error(self) -> UnavailableError:
        # Not final for the caller: its retry gets the save's outcome.
        return UnavailableError(
            f"{self.label}: its save has ended or failed, and its spool file was freed"
        )

    def _unreadable(self, spool_file: SpoolFile, error: OSError) -> PannierError:
        return PannierError(
            f"{self.label}: the spool file {spool_file.path} can't be read: {error}"
        )

    def _truncated(self, spool_file: SpoolFile, end: int) -> PannierError:
        return PannierError(
            f"{self.label}: the spool file {spool_file.path} ends at byte {end} of {self.size}: the "
            "trainer has truncated it"
        )

    def _misplaced(self, offset: int, length: int) -> InvalidRequestError:
        if not 0 < length <= MAX_CHUNK:
            problem = f"a chunk has {length} bytes, but 1 to {MAX_CHUNK} are allowed"
        elif offset != self.held:
            problem = f"a chunk starts at byte {offset}, but {self.held} bytes are here"
        else:
            problem = f"a chunk ends at byte {offset + length}, beyond the {self.size} announced"
        return InvalidRequestError(f"{self.label}: {problem}")


class SpoolSource:
    """A data file as a store's upload reads it (:class:`pannier.storage.base.Source`)."""

    def __init__(self, file: DataFile) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Final size in bytes."""
        return self._file.size

    @property
    def path(self) -> Path:
        """Path of the spool file, which may be longer; valid in this process, even after its removal."""
        return Path(f"/proc/self/fd/{self._file.spool_file.fd}")

    async def wait_for(self, end: int) -> int:
        """See :class:`~pannier.storage.base.Source`."""
        return await self._file.wait_for(end)

    def confirm(self, found: Checksums) -> None:
        """See :class:`~pannier.storage.base.Source`."""
        self._file.confirm(found)


def _stamp_and_size(spool_file: SpoolFile) -> tuple[bytes, int]:
    return spool_file.read_stamp(), os.fstat(spool_file.fd).st_size
