"""One rank's data files on their way to the spool of another host: a call of ``Replicate``.

In: an ingested rank, whose spool files stay as they are while this stream has their locks. Out: the replica,
or an error. Resumes at the offsets that the other host reports; a mapped file that a trainer stages another
save into is never sent. On the event loop; files are read in threads.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import crc32c
import grpc

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.mapped_files import close_all, open_for_reading
from pannier.storage.io_threads import spool_threads
from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.chunk_codec import REPLICA_CHUNK_BYTES
from pannier.wire.errors import (
    DeadlineError,
    IntegrityError,
    PannierError,
    UnavailableError,
    from_rpc_error,
)
from pannier.wire.file_layout import STAMP_BYTES

_EOF: Final = grpc.aio.EOF


class RestagedError(IntegrityError):
    """A trainer stages another save into a file that is being sent.

    The save that was in the file needs no replica any more.
    """


@dataclass(frozen=True)
class _OpenFile:
    """A data file, read by a descriptor whose lock keeps the spool file from other data files."""

    index: int
    file: DataFile
    descriptor: int
    stamp_offset: int

    def read(self, offset: int) -> tuple[bytes, int]:
        """The chunk at an offset, and its crc32c; blocking. Raises RestagedError, IntegrityError."""
        length = min(REPLICA_CHUNK_BYTES, self.file.size - offset)
        data = os.pread(self.descriptor, length, offset)
        if len(data) != length:
            raise IntegrityError(f"{self.file.label}: its spool file was truncated")
        # Read after the bytes: a trainer changes the stamp before it stages anything.
        stamp = self.file.stamp
        if stamp and os.pread(self.descriptor, STAMP_BYTES, self.stamp_offset) != stamp:
            raise RestagedError(f"{self.file.label}: a trainer stages another save there")
        return data, crc32c.crc32c(data)


class ReplicaStream:
    """One call.

    Args:
        start: its first message.
        peer: the other host and its address, human-readable.
        take: returns when so many bytes may be sent.
        progress: called with the bytes that the other host has confirmed.
    """

    def __init__(
        self,
        rank: RankSave,
        start: restore_pb2.ReplicaStart,
        *,
        peer: str,
        take: Callable[[int], Any],
        progress: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._start = start
        self._peer = peer
        self._take = take
        self._progress = progress
        self._confirmed = 0
        self._complete = False
        self.sent = 0
        """Bytes."""

    async def run(self, stub: Any) -> None:
        """Returns when the other host has all of the rank.

        Raises PannierError; UnavailableError and DeadlineError: it may work later.
        """
        call = stub.Replicate()
        reader: asyncio.Task[None] | None = None
        try:
            await self._within(call.write(restore_pb2.ReplicateRequest(start=self._start)))
            held = self._note(await self._within(call.read()))
            reader = asyncio.get_running_loop().create_task(self._read(call))
            await self._send(call, held, reader)
            await self._await_end(reader)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._peer) from error
        finally:
            call.cancel()
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _send(self, call: Any, held: list[int], reader: "asyncio.Task[None]") -> None:
        try:
            async with _opened(self._rank, held) as files:
                for each in files:
                    offset = held[each.index]
                    while offset < each.file.size and not reader.done():
                        data, crc = await spool_threads.run(each.read, offset)
                        await self._take(len(data))
                        chunk = restore_pb2.ReplicaChunk(
                            file=each.index, offset=offset, data=data, crc32c=crc
                        )
                        await self._within(call.write(restore_pb2.ReplicateRequest(chunk=chunk)))
                        self.sent += len(data)
                        offset += len(data)
            if not reader.done():
                await self._within(call.done_writing())
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            # The call has ended: the reader gets the error that ended it.
            await asyncio.wait({reader}, timeout=timeouts.REPLICA_STALL_S)
            if not reader.done() or reader.exception() is None:
                raise UnavailableError(f"the {self._peer} has ended the stream") from None

    async def _read(self, call: Any) -> None:
        while not self._complete:
            self._note(await call.read())

    async def _await_end(self, reader: "asyncio.Task[None]") -> None:
        confirmed = -1
        while not reader.done():
            if self._confirmed == confirmed:
                raise self._stalled()
            confirmed = self._confirmed
            await asyncio.wait({reader}, timeout=timeouts.REPLICA_STALL_S)
        reader.result()

    def _note(self, response: Any) -> list[int]:
        """Takes a response; returns how much of each file the other host has."""
        if response is _EOF:
            raise UnavailableError(f"the {self._peer} has ended the stream")
        sizes = [file.size for file in self._start.receipt.files]
        held = list(response.held)
        if len(held) != len(sizes) or any(h > size for h, size in zip(held, sizes, strict=True)):
            raise PannierError(
                f"the {self._peer} confirms {held[:4]} of files of {sizes[:4]} bytes"
            )
        self._confirmed, self._complete = sum(held), response.complete
        self._progress(self._confirmed)
        return held

    async def _within(self, work: Any) -> Any:
        try:
            return await within(timeouts.REPLICA_STALL_S, work)
        except asyncio.TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> DeadlineError:
        return DeadlineError(
            f"the {self._peer} has taken nothing for {timeouts.REPLICA_STALL_S:.0f} s (is it stopped?)"
        )


@asynccontextmanager
async def _opened(rank: RankSave, held: list[int]) -> AsyncIterator[list[_OpenFile]]:
    """Opens the files that the other host lacks, in the order in which they are sent: first those that
    storage lacks, too, the ones that are uploaded last before the others. Raises PannierError: a file isn't
    here any more."""
    assert rank.receipt is not None
    names = [file.name for file in rank.receipt.files]
    missing = [
        (index, rank.files[name])
        for index, name in enumerate(names)
        if held[index] < rank.files[name].size
    ]
    missing.sort(key=lambda each: (each[1].upload.durable, -each[0]))
    try:
        spool_files = [file.spool_file for _, file in missing]
    except UnavailableError as error:
        raise PannierError(f"not all of its files are in the spool any more: {error}") from error
    try:
        descriptors = await spool_threads.run(open_for_reading, spool_files, undo=close_all)
    except OSError as error:
        raise UnavailableError(f"{rank.label}: its spool files can't be opened: {error}") from error
    try:
        yield [
            _OpenFile(index, file, descriptor, spool_file.stageable)
            for (index, file), spool_file, descriptor in zip(
                missing, spool_files, descriptors, strict=True
            )
        ]
    finally:
        close_all(descriptors)


def first_message(
    rank: RankSave, receipt: records_pb2.Receipt, left_s: float, host: str, version: int
) -> restore_pb2.ReplicaStart:
    """``start`` of the stream of a rank.

    Args:
        left_s: seconds until its save's deadline; 0: not known.
    """
    return restore_pb2.ReplicaStart(
        context=rank.context,
        receipt=receipt,
        created_at=rank.save.created_at,
        save_timeout_s=left_s,
        host=host,
        wire_version=version,
    )
