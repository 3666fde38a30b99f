"""Blocks that this host's sidecar fetches for its ranks, each once.

In: the blocks of the rank's plan. Out: their bytes, copied from the sidecar's memory and checked on
the way. The memory is read through its descriptor, never mapped: if another process truncated the file,
that would be fatal. Each block is released once it is copied. One call of ``Restore.Fetch``, owned by the
load; one thread for its responses. Thread-safe.
"""

import logging
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from typing import Any, Final

import crc32c
import grpc

from pannier.client.fork_hooks import close_in_child
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import BUCKET
from pannier.client.restore.local_file import read_at
from pannier.client.restore.restore_plan import BlockTable, LoadName, SharedBlock
from pannier.client.restore.shared_blocks import FetchedBlock
from pannier.client.transport.channel import SidecarChannel
from pannier.client.transport.shared_memory import (
    connect_descriptors,
    fetch_descriptors,
    socket_beside,
)
from pannier.common import timeouts
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.errors import IntegrityError, PannierError, UnavailableError, from_rpc_error
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_PIECE: Final = 256 << 10
"""Bytes that are read before their checksum is taken: then they are in the processor's cache."""
_FILES: Final = 256
"""Files in one message: a file of 64 GiB has checksums of 32 KiB."""


class FetchedBlocks:
    """See the module. Opened with the first request.

    Args:
        channel: to the sidecar; closed with this.
        table: the blocks.
        load: whose they are.
        progress: counts the sidecar's retries, second requests and wrong blocks.
    """

    def __init__(
        self, channel: SidecarChannel, table: BlockTable, load: LoadName, progress: LoadProgress
    ) -> None:
        self._channel = channel
        self._table = table
        self._load = load
        self._progress = progress
        self._lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, tuple[SharedBlock, Future[FetchedBlock]]] = {}
        self._outbox: queue.SimpleQueue[restore_pb2.FetchRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._memory: _Memory | None = None
        self._messages = 0
        self._error: PannierError | None = None
        """Why no more blocks arrive."""

    def has(self, name: str) -> bool:
        """Whether blocks of this file are shared."""
        return name in self._table.names

    def find(self, name: str, block: int) -> SharedBlock | None:
        """A block of a file; None: it isn't shared."""
        return self._table.blocks.get((name, block))

    def first_source(self, name: str, block: int) -> str:
        """The source that is asked first for a block of a shared file."""
        return self._table.first_source(name, block)

    def message_count(self) -> int:
        """Number of messages that have arrived."""
        return self._messages

    def request(self, name: str, block: int) -> "Future[FetchedBlock]":
        """The block, later; UnavailableError: it doesn't come through the sidecar."""
        found = self._table.blocks[name, block]
        wanted: Future[FetchedBlock] = Future()
        with self._lock:
            if self._error is not None:
                wanted.set_exception(self._error)
                return wanted
            number = next(self._ids)
            self._pending[number] = found, wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pannier-fetch", daemon=True)
                self._thread.start()
        source = found.source
        self._outbox.put(
            restore_pb2.FetchRequest(
                block=restore_pb2.BlockRequest(
                    id=number,
                    file=found.file,
                    block=found.number,
                    holders=source.holders,
                    owner=source.owner,
                    readers=source.readers,
                    owner_readers=source.owner_readers,
                )
            )
        )
        return wanted

    def close(self) -> None:
        """Ends the stream, which releases all blocks, and the memory."""
        self._fail(UnavailableError("the load has ended"))
        if self._thread is not None:
            self._thread.join(timeouts.FETCH_CLOSE_S)
        self._channel.close()
        with self._lock:
            self._memory = None

    def done(self, number: int) -> None:
        """The block with this id was copied, or isn't needed."""
        self._outbox.put(restore_pb2.FetchRequest(done=number))

    def _run(self) -> None:
        try:
            self._receive()
            self._fail(UnavailableError(f"the sidecar at {self._channel.address} ended the stream"))
        except PannierError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the blocks are read from storage
            _log.debug("the stream of fetched blocks broke", exc_info=True)
            self._fail(UnavailableError(f"{type(error).__name__}: {error}"))

    def _receive(self) -> None:
        def start(connection: grpc.Channel) -> Any:
            stub: Any = restore_pb2_grpc.RestoreStub(connection)
            return stub.Fetch(self._requests(), metadata=self._channel.metadata())

        with self._channel.call(start) as call:
            try:
                for response in call:
                    self._messages += 1
                    kind = response.WhichOneof("response")
                    if kind == "memory":
                        self._keep(self._open_memory(response.memory))
                    elif kind == "block":
                        self._answer(response.block)
            except grpc.RpcError as error:
                where = f"sidecar at {self._channel.address}"
                raise from_rpc_error(error, peer=where) from error
            finally:
                call.cancel()

    def _requests(self) -> Iterator[restore_pb2.FetchRequest]:
        files = self._table.files
        yield restore_pb2.FetchRequest(
            start=restore_pb2.FetchStart(
                load=self._load.load,
                checkpoint_id=self._load.checkpoint_id,
                attempt=self._load.attempt,
                rank=self._load.rank,
                hosts=[
                    restore_pb2.FetchHost(host=each.name, peer_address=each.address)
                    for each in self._table.hosts
                ],
                own=self._table.own,
                files=restore_pb2.FetchFiles(files=files[:_FILES]),
                wire_version=WIRE_VERSION,
            )
        )
        for at in range(_FILES, len(files), _FILES):
            more = restore_pb2.FetchFiles(files=files[at : at + _FILES])
            yield restore_pb2.FetchRequest(files=more)
        yield from iter(self._outbox.get, None)

    def _open_memory(self, memory: restore_pb2.FetchMemory) -> "_Memory":
        path = socket_beside(self._channel.address, memory.descriptors)
        digest = self._channel.digest() if memory.token_first else b""
        try:
            with connect_descriptors(path, digest) as connection:
                (fd,) = fetch_descriptors(connection, memory.token, 1)
        except OSError as error:
            raise UnavailableError(f"the sidecar did not pass its memory: {error}") from error
        return _Memory(fd)

    def _keep(self, memory: "_Memory") -> None:
        with self._lock:
            if self._error is None:
                self._memory = memory

    def _answer(self, block: restore_pb2.FetchedBlock) -> None:
        with self._lock:
            memory = self._memory
            shared, wanted = self._pending.pop(block.id, (None, None))
        if shared is None or wanted is None:
            return
        self._progress.add_fetched(
            retries=block.failed, hedges=block.hedged, rejected=block.rejected
        )
        if block.error:
            wanted.set_exception(UnavailableError(block.error))
        elif memory is None:
            wanted.set_exception(UnavailableError("the sidecar passed no memory"))
        else:
            own = self._table.hosts[self._table.own or 0].name
            source = own if block.kept else block.source or BUCKET
            wanted.set_result(_FetchedBlock(self, memory, shared, block, source))

    def _fail(self, error: PannierError) -> None:
        with self._lock:
            self._error = self._error or error
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        for _, wanted in pending.values():
            wanted.set_exception(error)


class _FetchedBlock:
    """One block in the sidecar's memory, until it is copied or released."""

    def __init__(
        self,
        stream: FetchedBlocks,
        memory: "_Memory",
        shared: SharedBlock,
        block: restore_pb2.FetchedBlock,
        source: str,
    ) -> None:
        self._stream = stream
        self._memory = memory
        self._shared = shared
        self._block = block
        self._source = source

    def copy(self, memory: memoryview) -> str:
        """See :class:`~pannier.client.restore.shared_blocks.FetchedBlock`."""
        try:
            return self._copy(memory)
        finally:
            self.release()

    def release(self) -> None:
        """See :class:`~pannier.client.restore.shared_blocks.FetchedBlock`."""
        self._stream.done(self._block.id)

    def _copy(self, memory: memoryview) -> str:
        if self._block.size != len(memory):
            raise IntegrityError(
                f"block {self._shared.number} came from {self._source} with {self._block.size} bytes, "
                f"it has {len(memory)}"
            )
        crc = self._memory.copy(self._block.offset, memory)
        expected = self._block.crc32c if self._shared.crc32c is None else self._shared.crc32c
        if crc != expected:
            raise IntegrityError(
                f"block {self._shared.number} came from {self._source} with crc32c {crc:08x}, saved "
                f"was {expected:08x}"
            )
        return self._source


class _Memory:
    """The sidecar's memory of blocks. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        # A copy of it in a child would keep the sidecar's memory allocated.
        close_in_child(self, lambda memory: memory._close())

    def copy(self, offset: int, memory: memoryview) -> int:
        """Fills ``memory``; its crc32c. Raises IntegrityError: the sidecar's memory is shorter."""
        crc = 0
        for at in range(0, len(memory), _PIECE):
            piece = memory[at : at + _PIECE]
            if read_at(self._fd, offset + at, piece) < len(piece):
                raise IntegrityError("the sidecar's memory of blocks was cut")
            crc = crc32c.crc32c(piece, crc)
        return crc
