"""The methods of ``pannier.v1.Peer``, for the sidecars of other hosts.

In: requests for blocks. Out: their bytes, in pieces, from this host's spool, or from the memory of fetched
blocks; errors become statuses in :mod:`pannier.daemon.interceptors`. On the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, Final

import crc32c
import grpc

from pannier.common import timeouts
from pannier.sidecar.restore.block_cache import BlockRequest
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.spool_blocks import PIECE_BYTES
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire import limits
from pannier.wire.errors import IntegrityError, StorageError

NAME: Final = "pannier.v1.Peer"
LIMITS: Final = {f"/{NAME}/ReadBlock": 1024}
"""Calls at a time."""


_SENDERS: Final = 16
"""Calls that send at a time: each has a piece or two in memory."""

Responses = AsyncGenerator[restore_pb2.ReadBlockResponse, None]


class PeerServicer(restore_pb2_grpc.PeerServicer):
    """See the proto for what each call does."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks
        self._senders = asyncio.Semaphore(_SENDERS)

    async def ReadBlock(self, request: restore_pb2.ReadBlockRequest, context: Any) -> Responses:
        """Sends a block."""
        limits.check_read_block(request)
        self._blocks.check_peer(request)
        sent = False
        try:
            async with aclosing(self._in_turn(self._from_spool(request))) as responses:
                async for response in responses:
                    yield response
                    sent = sent or bool(response.data)
            return
        except NotFoundError as error:
            if request.spool_only:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            if sent:
                raise
        except (IntegrityError, StorageError):
            if request.spool_only or sent:
                raise
        block = self._blocks.request_for_peer(request)
        try:
            async with aclosing(_alive_until(block.arrive())) as responses:
                async for response in responses:
                    yield response
            async with aclosing(self._in_turn(self._from_memory(block))) as responses:
                async for response in responses:
                    yield response
        finally:
            block.release()

    async def _in_turn(self, responses: Responses) -> Responses:
        """The responses, once few enough calls send; a peer that doesn't receive loses its turn."""
        task = asyncio.current_task()
        assert task is not None
        stuck: asyncio.TimerHandle | None = None
        turn = asyncio.ensure_future(self._senders.acquire())
        try:
            async with aclosing(_alive_until(turn)) as signs:
                async for sign in signs:
                    yield sign
            stuck = asyncio.get_running_loop().call_later(timeouts.BLOCK_SEND_S, task.cancel)
            async with aclosing(responses):
                async for response in responses:
                    yield response
        finally:
            if stuck is not None:
                stuck.cancel()
            if turn.done() and not turn.cancelled():
                self._senders.release()
            turn.cancel()

    async def _from_spool(self, request: restore_pb2.ReadBlockRequest) -> Responses:
        """Raises NotFoundError, IntegrityError, StorageError."""
        pieces = self._blocks.read_spool(request)
        if pieces is None:
            raise NotFoundError(f"{request.file} isn't in the spool of {self._blocks.host}")
        crc = size = 0
        last = b""
        async for piece in pieces:
            if last:
                yield restore_pb2.ReadBlockResponse(data=last)
            last = piece
            crc, size = crc32c.crc32c(piece, crc), size + len(piece)
        yield restore_pb2.ReadBlockResponse(data=last, crc32c=crc)
        self._blocks.sent += size

    async def _from_memory(self, block: BlockRequest) -> Responses:
        while (held := block.hold()) is None:
            await block.arrive()
        for start in range(0, held.size, PIECE_BYTES):
            count = min(PIECE_BYTES, held.size - start)
            data = self._blocks.cache.memory.read(held.slot, start, count)
            response = restore_pb2.ReadBlockResponse(data=data)
            if start + count == held.size:
                response.crc32c = held.fetched.crc32c
                response.from_storage = not held.kept and not held.fetched.source
            yield response
        self._blocks.sent += held.size


async def _alive_until(work: Awaitable[object]) -> Responses:
    """Signs of life until ``work`` is done. Raises what it raises."""
    future = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({future}, timeout=timeouts.BLOCK_ALIVE_S))[0]:
            yield restore_pb2.ReadBlockResponse()
        future.result()
    finally:
        future.cancel()
