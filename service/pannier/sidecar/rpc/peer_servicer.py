"""The methods of ``pannier.v1.Peer``, for the sidecars of other hosts.

In: requests for blocks. Out: their bytes, in pieces, from this host's spool, or from the memory of fetched
blocks; errors become statuses in :mod:`pannier.daemon.interceptors`. On the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import crc32c
import grpc

from pannier.common import timeouts
from pannier.sidecar.restore.block_cache import BlockRequest, Held
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.spool_blocks import PIECE_BYTES
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire import limits
from pannier.wire.errors import IntegrityError, StorageError

NAME: Final = "pannier.v1.Peer"
LIMITS: Final = {f"/{NAME}/ReadBlock": 1024}
"""Calls at a time."""


class PeerServicer(restore_pb2_grpc.PeerServicer):
    """See the proto for what each call does."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks

    async def ReadBlock(
        self, request: restore_pb2.ReadBlockRequest, context: Any
    ) -> AsyncIterator[restore_pb2.ReadBlockResponse]:
        """Sends a block."""
        limits.check_read_block(request)
        self._blocks.check_peer(request)
        sent = False
        try:
            async for response in self._from_spool(request):
                yield response
                sent = True
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
        stuck: asyncio.TimerHandle | None = None
        try:
            arriving = asyncio.ensure_future(_hold(block))
            try:
                while not (await asyncio.wait({arriving}, timeout=timeouts.BLOCK_ALIVE_S))[0]:
                    yield restore_pb2.ReadBlockResponse()
                held = arriving.result()
            finally:
                arriving.cancel()
            # A peer that doesn't receive must not keep the block's memory.
            task = asyncio.current_task()
            assert task is not None
            stuck = asyncio.get_running_loop().call_later(timeouts.BLOCK_SEND_S, task.cancel)
            for start in range(0, held.size, PIECE_BYTES):
                count = min(PIECE_BYTES, held.size - start)
                response = restore_pb2.ReadBlockResponse(
                    data=self._blocks.cache.memory.read(held.slot, start, count)
                )
                if start + count == held.size:
                    response.crc32c = held.fetched.crc32c
                    response.from_storage = not held.kept and not held.fetched.source
                yield response
            self._blocks.sent += held.size
        finally:
            if stuck is not None:
                stuck.cancel()
            block.release()

    async def _from_spool(
        self, request: restore_pb2.ReadBlockRequest
    ) -> AsyncIterator[restore_pb2.ReadBlockResponse]:
        """Raises NotFoundError, IntegrityError, StorageError."""
        pieces = self._blocks.read_spool(request)
        if pieces is None:
            raise NotFoundError(f"{request.file} isn't in the spool of {self._blocks.host}")
        crc = size = 0
        last: bytes | None = None
        async for piece in pieces:
            if last is not None:
                yield restore_pb2.ReadBlockResponse(data=last)
            last = piece
            crc, size = crc32c.crc32c(piece, crc), size + len(piece)
        yield restore_pb2.ReadBlockResponse(data=last or b"", crc32c=crc)
        self._blocks.sent += size


async def _hold(block: BlockRequest) -> Held:
    while True:
        await block.arrive()
        held = block.hold()
        if held is not None:
            return held
