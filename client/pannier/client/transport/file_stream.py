"""From staged memory to the sidecar's spool: one ``Write`` stream per data file.

In: a staged file (an address in host memory). Out: its crc32c, once the sidecar
holds all of it. Blocking code, for background threads; per message it runs a few
lines of Python and leaves copying and checksums to C code that releases the GIL.
Only the calling thread reads the staged memory: gRPC's threads get encoded messages.
"""

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import crc32c
import grpc

from pannier.client.engine import Stop, engine
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.v1 import sidecar_pb2
from pannier.wire import chunk_codec
from pannier.wire.chunk_codec import CHUNK_BYTES, Chunk
from pannier.wire.errors import PannierError, UnavailableError, from_rpc_error, unanswered

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that the sidecar holds."""


_AHEAD: Final = 2 * chunk_codec.ACKNOWLEDGE_BYTES
"""Bytes that are sent before the sidecar has acknowledged them: the next ones come while it acknowledges."""
_QUEUED: Final = 2
"""Messages of one stream that wait for gRPC's thread."""


class StagedFile(Protocol):
    """A data file in host memory (``pannier.client.staging.stager`` makes them)."""

    @property
    def name(self) -> str:
        """Without the attempt's prefix."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def address(self) -> int:
        """Of the first byte; valid as long as the object lives."""

    @property
    def keepalive(self) -> object:
        """Owner of the memory."""


class FileSource:
    """The messages of one file, and its checksum, combined from theirs.

    Used by one stream at a time.
    """

    def __init__(self, file: StagedFile) -> None:
        self._file = file
        self.size = file.size
        self._view = memoryview(
            (ctypes.c_char * file.size).from_address(file.address) if file.size else b""
        ).cast("B")
        self._crcs: list[int | None] = [None] * -(-file.size // CHUNK_BYTES)

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunks from byte ``start`` on, of up to :data:`CHUNK_BYTES`, ending at multiples of it."""
        position = start
        while position < self.size:
            end = min(self.size, (position // CHUNK_BYTES + 1) * CHUNK_BYTES)
            crc = (
                crc32c.crc32c(self._view[position:end])
                if position % CHUNK_BYTES
                else self._crc(position // CHUNK_BYTES)
            )
            yield Chunk(position, crc, self._file.address + position, end - position)
            position = end

    def crc32c(self) -> int:
        """Checksum of the whole file; reads only bytes that were not sent."""
        total = 0
        for index in range(len(self._crcs)):
            if (index + 1) * CHUNK_BYTES <= self.size:
                total = chunk_codec.combine_crc32c(total, self._crc(index), CHUNK_BYTES)
            else:
                total = crc32c.crc32c(self._view[index * CHUNK_BYTES :], total)
        return total

    def _crc(self, index: int) -> int:
        crc = self._crcs[index]
        if crc is None:
            start = index * CHUNK_BYTES
            crc = crc32c.crc32c(self._view[start : min(self.size, start + CHUNK_BYTES)])
            self._crcs[index] = crc
        return crc


class StoppedError(Exception):
    """The save ended while its bytes were being sent."""


class Sender:
    """Opens ``Write`` streams on a channel. Thread-safe."""

    def __init__(
        self,
        channel: SidecarChannel,
        peer: str,
        *,
        stall_s: float = timeouts.STREAM_STALL_S,
    ) -> None:
        self._channel = channel
        self._peer = peer
        self._stall_s = stall_s

    def stream(
        self,
        header: sidecar_pb2.FileHeader,
        source: FileSource,
        progress: Progress,
        stop: Stop,
    ) -> None:
        """Sends what the sidecar doesn't hold yet, in one stream.

        Raises:
            UnavailableError: the stream broke; a new one can resume it.
            StoppedError: ``stop`` was set.
            PannierError: the sidecar refused it.
        """
        requests = _Requests()
        stalled = threading.Event()
        chunks: Iterator[Chunk] = iter(())
        committed: int | None = None

        def start(channel: grpc.Channel) -> Any:
            write: Any = channel.stream_stream(
                "/pannier.v1.Sidecar/Write",
                request_serializer=bytes,
                response_deserializer=sidecar_pb2.WriteResponse.FromString,
            )
            return write(requests, metadata=self._channel.metadata())

        def cancel_stalled() -> None:
            stalled.set()
            call.cancel()

        with self._channel.call(start) as call:
            timer = engine().after(self._stall_s, cancel_stalled)
            stop.add(call)
            # However the call ends: `put` must not wait for a thread of gRPC that reads no more.
            if not call.add_callback(requests.end):
                requests.end()
            try:
                requests.put(chunk_codec.encode(header))
                for response in call:
                    timer.renew()
                    if committed is None:
                        chunks = source.chunks(response.committed)
                    committed = response.committed
                    progress(committed)
                    requests.put_chunks(chunks, committed + _AHEAD, timer.renew)
            except grpc.RpcError as error:
                if stop.is_set:
                    raise StoppedError from error
                if stalled.is_set():
                    raise UnavailableError(
                        f"{self._peer} acknowledged nothing for {self._stall_s:g} s: "
                        f"{unanswered(self._peer)}"
                    ) from error
                raise self._as_pannier_error(error) from error
            finally:
                timer.cancel()
                call.cancel()
                requests.end()
        if committed != source.size:
            raise UnavailableError(
                f"{self._peer} ended the stream of {header.name} at byte {committed} of "
                f"{source.size}"
            )

    def _as_pannier_error(self, error: grpc.RpcError) -> PannierError:
        known = from_rpc_error(error, peer=self._peer)
        code = getattr(error, "code", lambda: None)()
        if type(known) is PannierError and code is grpc.StatusCode.INTERNAL:
            return UnavailableError(f"the connection to {self._peer} ended within a message")
        return known


class _Requests:
    """The encoded messages of one stream on their way to gRPC's thread, which iterates over them.

    At most :data:`_QUEUED` wait, so that a slow sidecar slows the sender down. One thread puts messages;
    :meth:`end` is thread-safe.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_QUEUED)
        self._ended = False

    def __iter__(self) -> "_Requests":
        return self

    def __next__(self) -> bytes:
        message = self._messages.get()
        self._room.release()
        if message is None:
            raise StopIteration
        return message

    def put_chunks(self, chunks: Iterator[Chunk], until: int, on_put: Callable[[], object]) -> None:
        """Encodes and puts chunks up to that byte of the file, and ends after the last chunk.

        Args:
            on_put: called after each chunk: gRPC has taken an earlier one.
        """
        for chunk in chunks:
            if not self.put(chunk_codec.encode(chunk)):
                return
            on_put()
            if chunk.offset + chunk.size >= until:
                return
        self.end()

    def put(self, message: bytes) -> bool:
        """Waits for room; False after :meth:`end`, which also ends the wait."""
        self._room.acquire()
        if self._ended:
            self._room.release()
            return False
        self._messages.put(message)
        return True

    def end(self) -> None:
        """Nothing more is sent after the messages that wait."""
        self._ended = True
        self._messages.put(None)
        self._room.release()
