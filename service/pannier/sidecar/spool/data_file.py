"""A data file on its way through the spool: filled by one stream, read by one upload.

In: chunks, from the threads of ``Write`` streams. Out: bytes for the upload, on
the event loop, as soon as they are there. Per chunk it does one checksum and
one ``pwrite``, both without the GIL.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import crc32c

from pannier.sidecar.spool.spool import Slab
from pannier.wire import chunk_codec
from pannier.wire.chunk_codec import ReceivedChunk
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, UnavailableError

MAX_CHUNK: Final = 4 << 20
"""Bytes of one message's payload."""


class DataFile:
    """One data file of one rank. Thread-safe.

    Args:
        slab: None: the content is in storage, or was given up, in a former life.
        stamp: of the slab, where a trainer has staged the content itself; empty: it is streamed.
        label: names file, save, rank and host in errors.
        loop: where the upload reads.
    """

    def __init__(
        self,
        name: str,
        size: int,
        slab: Slab | None,
        *,
        label: str,
        loop: asyncio.AbstractEventLoop,
        stamp: bytes = b"",
    ) -> None:
        self.name = name
        self.size = size
        self.stamp = stamp
        self.label = label
        self.held = 0
        """All bytes below this offset are in the spool."""
        self.crc = 0
        """crc32c of those."""
        self.uploaded = 0
        """Bytes that the store holds so far."""
        self.durable = False
        self.since = time.monotonic()
        """When it was opened, in this life of the sidecar."""
        self.stored: float | None = None
        """When it was durable; None: it isn't, or was before this life of the sidecar."""
        self._loop = loop
        self._lock = threading.Lock()
        self._writer: object | None = None
        self._cancel_writer: Callable[[], object] = lambda: None
        self._slab: Slab | None = slab
        self._released = False
        self._wanted = size + 1
        """The upload waits for this many bytes; more than there are: it doesn't."""
        self._arrived = asyncio.Event()

    @property
    def slab(self) -> Slab:
        """Where its bytes lie. Raises UnavailableError after :meth:`release`."""
        slab = self._slab
        if slab is None:
            raise self._over()
        return slab

    @property
    def complete(self) -> bool:
        """Sealed: it isn't written again."""
        return self.held == self.size

    def mark(self) -> tuple[int, int]:
        """``held`` and ``crc``, of the same moment."""
        with self._lock:
            return self.held, self.crc

    def restore(self, held: int, crc: int) -> None:
        """What a former life of the sidecar had put there, and we have found; before any use."""
        self.held, self.crc = held, crc

    def begin(self, writer: object, cancel: Callable[[], object]) -> int:
        """``writer`` is the stream that fills the file from now on; returns where to go on.

        An earlier stream, whose end may not have been noticed yet, is cut by its
        ``cancel``. Raises UnavailableError after :meth:`release`.
        """
        with self._lock:
            if self._released:
                raise self._over()
            if self._slab is None:
                # In storage since a former life: there is nothing to write.
                return self.held
            previous, self._cancel_writer = self._cancel_writer, cancel
            self._writer = writer
            held = self.held
        previous()
        return held

    def end(self, writer: object) -> None:
        """``writer`` is over."""
        with self._lock:
            if self._writer is writer:
                self._writer = None
                self._cancel_writer = lambda: None

    def append(self, writer: object, chunk: ReceivedChunk) -> int:
        """Puts the next chunk into the spool; returns how many bytes it holds.

        Raises:
            UnavailableError: another stream goes on with this file.
            InvalidRequestError, IntegrityError: the chunk is not what was announced.
            PannierError: the save is over, or the spool failed.
        """
        data = chunk.data
        length = len(data)
        with self._lock:
            if self._writer is not writer:
                if self._slab is None:
                    raise self._over()
                raise UnavailableError(f"another stream goes on with {self.label}")
            end = chunk.offset + length
            if chunk.offset != self.held or end > self.size or not 0 < length <= MAX_CHUNK:
                raise self._misplaced(chunk.offset, length)
            crc = crc32c.crc32c(data)
            if crc != chunk.crc32c:
                raise IntegrityError(
                    f"{self.label}: bytes {chunk.offset} to {end} arrived with crc32c {crc:08x}, "
                    f"the sender's is {chunk.crc32c:08x}"
                )
            self._write(data, chunk.offset)
            self.crc = (
                chunk_codec.combine_crc32c(self.crc, crc, length)
                if length == _USUAL
                else crc32c.crc32c(data, self.crc)
            )
            self.held = end
        if end >= self._wanted:
            self._loop.call_soon_threadsafe(self._wake)
        return end

    def absorb(self) -> None:
        """Takes what lies in the slab for the content: reads all of it, for its checksum.

        Goes on from what is held. Uploads follow as it advances.

        Raises:
            IntegrityError: the trainer has staged something else there.
            UnavailableError: the save is over, or a stream fills the file instead.
            PannierError: the slab can't be read, or is shorter than the file.
        """
        reader = object()
        held = self.begin(reader, lambda: None)
        if held < self.size:
            self.check_stamp()
        buffer = memoryview(bytearray(min(_READ_BYTES, max(1, self.size))))
        try:
            while held < self.size:
                piece = buffer[: min(len(buffer), self.size - held)]
                # Never through a mapping: whoever may still write or cut the file harms only it.
                count = self._read(piece, held)
                with self._lock:
                    if self._writer is not reader:
                        raise self._over()
                    self.crc = crc32c.crc32c(piece[:count], self.crc)
                    self.held = held = held + count
                if held >= self._wanted:
                    self._loop.call_soon_threadsafe(self._wake)
            self.check_stamp()
        finally:
            self.end(reader)

    def check_stamp(self) -> None:
        """What was read of a mapped file is of this save, if this raises nothing afterwards.

        The trainer writes another stamp before it stages something else there.

        Raises:
            IntegrityError: the stamp has changed.
            UnavailableError: the save is over.
            PannierError: the slab can't be read.
        """
        if not self.stamp:
            return
        slab = self.slab
        try:
            found = slab.read_stamp()
        except OSError as error:
            raise self._unreadable(slab, error) from error
        if len(found) < len(self.stamp):
            raise self._cut(slab, os.fstat(slab.fd).st_size)
        if found != self.stamp:
            raise IntegrityError(
                f"{self.label}: the trainer has staged another save into the spool file "
                f"{slab.path} (its stamp is {found.hex()}, {self.stamp.hex()} was handed over)"
            )

    def release(self) -> Slab | None:
        """The content isn't wanted any more: cuts the stream, and gives the slab out of hand.

        When it returns no stream writes into the slab; an upload must have ended
        before. None when it was released already. Blocks while a chunk is written.
        """
        with self._lock:
            slab, self._slab = self._slab, None
            self._released = True
            self._writer = None
            cancel, self._cancel_writer = self._cancel_writer, lambda: None
        cancel()
        self._loop.call_soon_threadsafe(self._wake)
        return slab

    def _over(self) -> UnavailableError:
        # Not final for the caller: it asks again, and hears how the save ended.
        return UnavailableError(f"{self.label} isn't wanted any more")

    def _write(self, data: memoryview, offset: int) -> None:
        slab = self.slab
        try:
            done = os.pwrite(slab.fd, data, offset)
            while done < len(data):
                done += os.pwrite(slab.fd, data[done:], offset + done)
        except OSError as error:
            raise PannierError(
                f"{self.label}: the spool file {slab.path} can't be written: {error}"
            ) from error

    def _read(self, target: memoryview, offset: int) -> int:
        slab = self.slab
        try:
            count = os.preadv(slab.fd, [target], offset)
        except OSError as error:
            raise self._unreadable(slab, error) from error
        if not count:
            raise self._cut(slab, offset)
        return count

    def _unreadable(self, slab: Slab, error: OSError) -> PannierError:
        return PannierError(f"{self.label}: the spool file {slab.path} can't be read: {error}")

    def _cut(self, slab: Slab, end: int) -> PannierError:
        return PannierError(
            f"{self.label}: the spool file {slab.path} ends at byte {end} of {self.size}: the "
            "trainer has cut it"
        )

    def _misplaced(self, offset: int, length: int) -> InvalidRequestError:
        if not 0 < length <= MAX_CHUNK:
            problem = f"a chunk has {length} bytes, but 1 to {MAX_CHUNK} are allowed"
        elif offset != self.held:
            problem = f"a chunk starts at byte {offset}, but {self.held} bytes are here"
        else:
            problem = f"a chunk ends at byte {offset + length}, beyond the {self.size} announced"
        return InvalidRequestError(f"{self.label}: {problem}")

    # On the loop.

    async def wait_for(self, count: int) -> None:
        """Returns when the first ``count`` bytes are in the spool.

        Raises UnavailableError after :meth:`release`.
        """
        while self.held < count and self._slab is not None:
            arrived = self._arrived
            self._wanted = min(self._wanted, count)
            # Looked at again after that: a chunk that comes in between rings.
            if self.held < count:
                await arrived.wait()
        if self._slab is None:
            raise self._over()

    def _wake(self) -> None:
        # Those who still lack bytes say so again.
        self._wanted = self.size + 1
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()


_READ_BYTES: Final = 1 << 20
_USUAL: Final = 1 << 20
"""Length of all chunks but the last, from our own clients."""


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
        """Of the spool file; it may be longer. Good for this process, even if it is removed."""
        return Path(f"/proc/self/fd/{self._file.slab.fd}")

    async def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; waits until they are there."""
        await self._file.wait_for(offset + length)
        slab = self._file.slab
        data = os.pread(slab.fd, length, offset)
        if len(data) != length:
            raise IntegrityError(
                f"{self._file.label}: the spool file {slab.path} ends at byte "
                f"{os.fstat(slab.fd).st_size} of {self.size}: it was cut"
            )
        return data

    async def crc32c(self) -> int:
        """Checksum of the whole file; waits until it is complete."""
        await self._file.wait_for(self._file.size)
        return self._file.crc
