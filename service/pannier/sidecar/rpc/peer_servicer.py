"""The methods of ``pannier.v1.Peer``, for the sidecars of other hosts.

In: requests for blocks, and replicas. Out: blocks' bytes, in pieces, from this host's spool, or from the
memory of fetched blocks; errors become statuses in :mod:`pannier.daemon.interceptors`. The number of blocks
that are sent at a time is limited; calls that wait for their turn send empty responses as signs of life. On
the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

import crc32c
import grpc

from pannier.common import timeouts
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.restore.block_cache import CachedBlock
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.spool_blocks import PIECE_BYTES
from pannier.sidecar.rpc.replicate_stream import ReplicateStream
from pannier.sidecar.rpc.send_turns import SendTurns
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire import limits
from pannier.wire.errors import IntegrityError, StorageError

T = TypeVar("T")

NAME: Final = "pannier.v1.Peer"
LIMITS: Final = {f"/{NAME}/ReadBlock": 1024, f"/{NAME}/Replicate": 64}
"""Calls at a time."""


class PeerServicer(restore_pb2_grpc.PeerServicer):
    """See the proto for what each call does."""

    def __init__(self, blocks: HostBlocks, replicas: Replicas) -> None:
        self._blocks = blocks
        self._replicas = replicas
        self._turns = SendTurns()

    async def ReadBlock(
        self, request: restore_pb2.ReadBlockRequest, context: Any
    ) -> AsyncIterator[restore_pb2.ReadBlockResponse]:
        """Sends a block."""
        limits.check_read_block(request)
        await self._blocks.check_peer(request)
        sent = False
        try:
            async with aclosing(self._from_spool(request)) as responses:
                async for response in responses:
                    yield response
                    sent = sent or bool(response.data)
                    self._blocks.sent += len(response.data)
            return
        except NotFoundError as error:
            if request.spool_only:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            if sent:
                raise
        except (IntegrityError, StorageError):
            if request.spool_only or sent:
                raise
        async with aclosing(self._fetched(request)) as responses:
            async for response in responses:
                yield response
                self._blocks.sent += len(response.data)

    async def Replicate(
        self, requests: AsyncIterator[restore_pb2.ReplicateRequest], context: Any
    ) -> AsyncIterator[restore_pb2.ReplicateResponse]:
        """Takes a replica into this host's spool."""
        stream = ReplicateStream(self._replicas)
        async with aclosing(stream.responses(requests)) as responses:
            async for response in responses:
                yield response

    async def _from_spool(
        self, request: restore_pb2.ReadBlockRequest
    ) -> AsyncGenerator[restore_pb2.ReadBlockResponse, None]:
        """Raises NotFoundError, IntegrityError, StorageError."""
        pieces = self._blocks.read_spool(request)
        if pieces is None:
            raise NotFoundError(f"{request.file} isn't in the spool of {self._blocks.host}")
        crc = 0
        last: bytes | None = None
        async with aclosing(pieces), self._turn(request.host) as turn:
            async for response in _signs_of_life(turn):
                yield response
            with _bounded():
                while True:
                    async with _running(anext(pieces, None)) as reading:
                        async for response in _signs_of_life(reading):
                            yield response
                        piece = reading.result()
                    if piece is None:
                        break
                    if last is not None:
                        yield restore_pb2.ReadBlockResponse(data=last)
                    last = piece
                    crc = crc32c.crc32c(piece, crc)
                yield restore_pb2.ReadBlockResponse(data=last or b"", crc32c=crc)

    async def _fetched(
        self, request: restore_pb2.ReadBlockRequest
    ) -> AsyncGenerator[restore_pb2.ReadBlockResponse, None]:
        """From the memory of fetched blocks. Raises PannierError."""
        block = self._blocks.request_for_peer(request)
        try:
            # A turn is taken only once the block is here.
            async with _running(block.arrive()) as arriving:
                async for response in _signs_of_life(arriving):
                    yield response
                arriving.result()
            async with self._turn(request.host) as turn:
                async for response in _signs_of_life(turn):
                    yield response
                while (held := block.hold()) is None:
                    # The block was evicted while this call waited for its turn.
                    async with _running(block.arrive()) as arriving:
                        async for response in _signs_of_life(arriving):
                            yield response
                        arriving.result()
                with _bounded():
                    for response in self._pieces(held):
                        yield response
        finally:
            block.release()

    def _pieces(self, held: CachedBlock) -> Iterator[restore_pb2.ReadBlockResponse]:
        for start in range(0, held.size, PIECE_BYTES):
            count = min(PIECE_BYTES, held.size - start)
            response = restore_pb2.ReadBlockResponse(
                data=self._blocks.cache.memory.read(held.slot, start, count)
            )
            if start + count == held.size:
                response.crc32c = held.fetched.crc32c
                response.from_storage = not held.kept and not held.fetched.source
            yield response

    @asynccontextmanager
    async def _turn(self, host: str) -> "AsyncIterator[asyncio.Future[None]]":
        turn = self._turns.take(host)
        try:
            yield turn
        finally:
            self._turns.give(host, turn)


@contextmanager
def _bounded() -> Iterator[None]:
    """Cancels the call after BLOCK_SEND_S: a peer that doesn't receive would keep a turn, and memory."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(timeouts.BLOCK_SEND_S, task.cancel)
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def _running(awaited: Awaitable[T]) -> "AsyncIterator[asyncio.Future[T]]":
    """Runs ``awaited`` in a task, which is cancelled and awaited at the end of the context."""
    task = asyncio.ensure_future(awaited)
    try:
        yield task
    finally:
        task.cancel()
        # Also retrieves the error of an ended task, which the caller may not have retrieved.
        await asyncio.gather(task, return_exceptions=True)


async def _signs_of_life(
    awaited: "asyncio.Future[Any]",
) -> AsyncIterator[restore_pb2.ReadBlockResponse]:
    """Yields empty responses until ``awaited`` is done."""
    while not awaited.done():
        await asyncio.wait({awaited}, timeout=timeouts.BLOCK_ALIVE_S)
        if not awaited.done():
            yield restore_pb2.ReadBlockResponse()
