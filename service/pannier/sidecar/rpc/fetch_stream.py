"""One call of ``Restore.Fetch``: the blocks that one rank of this host reads.

In: the rank's requests, and blocks that it has released. Out: responses, in the order in which blocks
arrive. A rank holds at most its share of the memory at a time; further blocks that it has requested are
fetched meanwhile. On the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.sidecar.restore.block_cache import BlockRequest, CachedBlock
from pannier.sidecar.restore.block_memory import BlockMemory
from pannier.sidecar.restore.host_blocks import HostBlocks, LoadFiles
from pannier.v1 import restore_pb2
from pannier.wire import limits
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.failures import cut_text

_log = logging.getLogger(__name__)

MOST_REQUESTED: Final = 1024
"""Blocks that a rank may have requested and not released."""


class FetchStream:
    """See the module; from :meth:`open` to :meth:`close`.

    Args:
        start: the rank's first message, checked.
    """

    def __init__(self, blocks: HostBlocks, start: restore_pb2.FetchStart) -> None:
        self._blocks = blocks
        self._load = LoadFiles(start)
        self._load.add(start.files)
        self._requests: dict[int, BlockRequest] = {}
        """By id: requested, and not released."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By id: tasks of requests that have no response yet."""
        self._held: set[int] = set()
        self._responses: deque[restore_pb2.FetchResponse] = deque()
        self._changed = asyncio.Event()
        """There is a response, or nothing more to wait for."""
        self._released = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        self._failed_before = False

    def open(self, messages: AsyncIterator[restore_pb2.FetchRequest]) -> None:
        """Begins to read the rank's messages."""
        self._blocks.announce(self._load.start)
        self._blocks.cache.enter(self._load.start.load)
        self._receiving = asyncio.get_running_loop().create_task(self._receive(messages))
        self._receiving.add_done_callback(lambda _: self._changed.set())

    async def responses(self) -> AsyncIterator[restore_pb2.FetchResponse]:
        """Yields responses until the rank has ended the stream and each request has its response.

        Raises InvalidRequestError.
        """
        assert self._receiving is not None
        while True:
            while self._responses:
                yield self._responses.popleft()
            if self._receiving.done():
                self._receiving.result()
                if not self._tasks:
                    return
            self._changed.clear()
            if not await set_within(timeouts.BLOCK_ALIVE_S, self._changed) and self._tasks:
                yield restore_pb2.FetchResponse()

    async def close(self) -> None:
        """Releases all blocks."""
        tasks = list(self._tasks.values())
        if self._receiving is not None:
            tasks.append(self._receiving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in list(self._requests):
            self._release(number)
        self._blocks.cache.leave(self._load.start.load)

    async def _receive(self, messages: AsyncIterator[restore_pb2.FetchRequest]) -> None:
        async for message in messages:
            kind = message.WhichOneof("request")
            if kind == "block":
                self._request(message.block)
            elif kind == "done":
                self._release(message.done)
            elif kind == "files":
                limits.check_fetch_files(message.files, len(self._load.files))
                self._load.add(message.files)
            else:
                raise InvalidRequestError(f"{self._load.reader}: a Fetch stream has one start")

    def _request(self, request: restore_pb2.BlockRequest) -> None:
        if request.id in self._requests:
            raise InvalidRequestError(f"{self._load.reader} has requested {request.id} already")
        if len(self._requests) >= MOST_REQUESTED:
            raise InvalidRequestError(
                f"{self._load.reader} has {len(self._requests)} blocks requested, which is the limit"
            )
        block = self._requests[request.id] = self._blocks.request(self._load, request)
        task = asyncio.get_running_loop().create_task(self._answer(request.id, block))
        self._tasks[request.id] = task

    async def _answer(self, number: int, block: BlockRequest) -> None:
        try:
            response = await self._await(number, block)
        except PannierError as error:
            # One warning per stream: while storage can't be reached, every block fails.
            level = logging.DEBUG if self._failed_before else logging.WARNING
            self._failed_before = True
            where = f"{self._load.reader} of {self._load.start.checkpoint_id}"
            _log.log(level, "%s reads blocks from storage itself: %s", where, error)
            response = self._failed(number, str(error))
        except Exception as error:  # noqa: BLE001 - one block fails; the rank reads it elsewhere
            _log.exception("%s: a block can't be fetched", self._load.reader)
            response = self._failed(number, f"{type(error).__name__}: {error}")
        self._responses.append(restore_pb2.FetchResponse(block=response))
        self._tasks.pop(number, None)
        self._changed.set()

    async def _await(self, number: int, block: BlockRequest) -> restore_pb2.FetchedBlock:
        held: CachedBlock | None = None
        while held is None:
            await block.arrive()
            while len(self._held) >= self._share:
                self._released.clear()
                await self._released.wait()
            held = block.hold()
        self._held.add(number)
        fetched = held.fetched
        response = restore_pb2.FetchedBlock(
            id=number,
            offset=BlockMemory.offset(held.slot),
            size=held.size,
            crc32c=fetched.crc32c,
            source=fetched.source,
            kept=held.kept,
        )
        if not held.kept:
            response.rejected = fetched.rejected
            response.failed = fetched.failed
            response.hedged = fetched.hedged
            response.retries = fetched.retries
        return response

    @property
    def _share(self) -> int:
        """Blocks that the rank may hold at a time: all ranks together leave room for blocks under way."""
        cache = self._blocks.cache
        return max(1, cache.slots // (2 * max(1, cache.readers)))

    def _failed(self, number: int, error: str) -> restore_pb2.FetchedBlock:
        self._release(number)
        return restore_pb2.FetchedBlock(id=number, error=cut_text(error, limits.MAX_TEXT))

    def _release(self, number: int) -> None:
        block = self._requests.pop(number, None)
        if block is None:
            return
        task = self._tasks.get(number)
        if task is not None and task is not asyncio.current_task():
            # The rank doesn't wait for the block any more: it has read it elsewhere.
            task.cancel()
            del self._tasks[number]
        self._held.discard(number)
        block.release()
        self._released.set()
        self._changed.set()


async def first_message(
    messages: AsyncIterator[restore_pb2.FetchRequest],
) -> restore_pb2.FetchStart:
    """The start of a stream. Raises InvalidRequestError."""
    async for message in messages:
        if message.WhichOneof("request") == "start":
            limits.check_fetch_start(message.start)
            return message.start
        break
    raise InvalidRequestError("a Fetch stream begins with its start")
