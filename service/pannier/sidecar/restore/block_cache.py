"""Blocks that this host has fetched for loads: each once, for all its readers, within a budget.

In: requests of ranks and peers for blocks, and functions that fetch them. Out: their places in memory that
ranks map. A block stays until it was read as often as its requests announce, or until some seconds after its
load has ended. When other blocks need its room, it is evicted once it wasn't read for a moment, unless a rank
has it mapped. Fetches from peers and other fetches have separate limits, so that two hosts that wait for each
other can still read storage. On the event loop; memory is written by threads.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.sidecar.restore.block_memory import BlockMemory
from pannier.storage.io_threads import Threads
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import OverloadedError

_log = logging.getLogger(__name__)

MOST_FETCHES: Final = 8
"""Blocks that are fetched at a time, from peers and from elsewhere each; fewer within a small budget."""
block_threads = Threads("the memory of fetched blocks", patience_s=math.inf, threads=4)
"""For checksums and copies of whole blocks."""


class BlockKey(NamedTuple):
    """A block of a load."""

    load: str
    checkpoint_id: str
    attempt: str
    file: str
    block: int
    size: int
    crc32c: int | None
    """From the receipt; None: not known. A rank that knows it gets no block that was fetched without it."""


@dataclass(frozen=True)
class Fetched:
    """A block, and what it took to get it."""

    pieces: Sequence[bytes]
    """Its bytes, in order."""
    crc32c: int
    source: str
    """Name of the host that sent it; empty: storage."""
    rejected: int = 0
    """Blocks with a wrong checksum."""
    failed: int = 0
    """Sources that failed."""
    hedged: int = 0
    """Second requests, since a source took long."""
    retries: int = 0
    """Requests that storage had to be asked again."""


Fetch = Callable[[], Awaitable[Fetched]]


@dataclass(frozen=True)
class WantedBlock:
    """What a reader requests."""

    key: BlockKey
    size: int
    """Bytes."""
    readers: int
    """How often it will be read on this host, in all; 0: not known."""
    fetch: Fetch
    """Called unless the block is here or under way; raises PannierError."""
    remote: bool = False
    """It comes from a peer."""


@dataclass(frozen=True)
class CachedBlock:
    """A block in memory, which stays there until its request is released."""

    slot: int
    size: int
    fetched: Fetched
    """Its ``pieces`` are empty."""
    kept: bool
    """It was fetched for an earlier reader."""


@dataclass(eq=False)
class _Block:
    key: BlockKey
    size: int
    readers: int = 0
    """How often it will be read; 0: not known."""
    served: int = 0
    waiting: int = 0
    """Requests for it that don't hold it yet."""
    holders: Counter[str] = field(default_factory=Counter)
    """The readers that hold it now."""
    slot: int | None = None
    fetched: Fetched | None = None
    used_at: float = 0.0
    task: "asyncio.Task[None] | None" = None

    @property
    def is_evictable(self) -> bool:
        return self.slot is not None and not self.holders


class BlockRequest:
    """One reader's request for a block; made by :meth:`BlockCache.request`. To be released in any case."""

    def __init__(self, cache: "BlockCache", wanted: WantedBlock, reader: str) -> None:
        self._cache = cache
        self._wanted = wanted
        self._reader = reader
        self._block = cache._await_block(wanted)
        self._holds = False
        self._ended = False

    async def arrive(self) -> None:
        """Returns when the block is here. Raises what its fetch raises."""
        while True:
            assert self._block.task is not None
            # The fetch goes on for other readers when this caller is cancelled.
            await asyncio.shield(self._block.task)
            if self._block.slot is not None:
                return
            # The block was evicted before this reader could hold it.
            self._block = self._cache._await_block(self._wanted)

    def hold(self) -> CachedBlock | None:
        """The block, which is kept for this reader from now on; None: it isn't here (any more)."""
        block = self._block
        if block.slot is None or block.fetched is None:
            return None
        self._holds = True
        block.waiting -= 1
        block.holders[self._reader] += 1
        block.served += 1
        block.used_at = time.monotonic()
        if block.served > 1 and block.served >= block.readers > 0:
            # All announced readers came before an eviction: blocks of the load are kept for readers again.
            self._cache._impatient.discard(block.key.load)
        return CachedBlock(block.slot, block.size, block.fetched, kept=block.served > 1)

    def release(self) -> None:
        """The reader doesn't need the block any more; more than once does nothing."""
        if self._ended:
            return
        self._ended = True
        block = self._block
        if self._holds:
            block.holders -= Counter([self._reader])
            block.used_at = time.monotonic()
        else:
            block.waiting -= 1
        self._cache._settle(block)


class BlockCache:
    """See the module.

    Args:
        budget: bytes of all blocks, including those under way and second requests. Whatever it is, one block
            can be kept, one be fetched from a peer, and one from elsewhere.
    """

    def __init__(self, budget: int) -> None:
        blocks = max(1, budget // BLOCK_BYTES)
        fetches = max(1, min(MOST_FETCHES, blocks // 4))
        self.spare = fetches // 2
        """Blocks that may be requested a second time at once, because their source is slow."""
        self.slots = max(1, blocks - 2 * fetches - self.spare)
        self._memory: BlockMemory | None = None
        self._free = list(range(self.slots))
        self._freed = asyncio.Event()
        """Set when a slot is free, or when a block can be evicted now, or earlier than before."""
        self._room = asyncio.Lock()
        self._near = asyncio.Semaphore(fetches)
        self._remote = asyncio.Semaphore(fetches)
        self._blocks: dict[BlockKey, _Block] = {}
        self._loads: Counter[str] = Counter()
        """Ranks that are loading, by load."""
        self._ended: dict[str, float] = {}
        """When the last rank of a load has left."""
        self._impatient: set[str] = set()
        """Loads that lost a block before its further readers came: none of their blocks is kept for such."""
        self.evicted = 0
        """Blocks that were evicted though more readers were announced, or their number wasn't known."""

    @property
    def memory(self) -> BlockMemory:
        """Made at the first use; see :meth:`enter` for how long it lasts."""
        if self._memory is None:
            self._memory = BlockMemory(self.slots)
        return self._memory

    @property
    def used(self) -> int:
        """Bytes of the blocks in memory."""
        return sum(block.size for block in self._blocks.values() if block.slot is not None)

    @property
    def readers(self) -> int:
        """Ranks that are loading."""
        return self._loads.total()

    def is_read(self, load: str) -> bool:
        """Whether a rank here reads blocks of a load."""
        return load in self._loads

    def enter(self, load: str) -> None:
        """A rank begins to read: the memory stays as it is until it leaves."""
        self._loads[load] += 1
        self._ended.pop(load, None)

    def leave(self, load: str) -> None:
        """A rank has ended its reading, and released all its blocks."""
        self._loads[load] -= 1
        if self._loads[load] <= 0:
            del self._loads[load]
            self._impatient.discard(load)
            self._ended[load] = time.monotonic()
            self._freed.set()

    def request(self, wanted: WantedBlock, reader: str) -> BlockRequest:
        """Begins to fetch a block, unless it is here or under way.

        Args:
            reader: who asks, for messages.
        """
        return BlockRequest(self, wanted, reader)

    def tick(self) -> None:
        """Drops the blocks of loads that have ended, then the memory. Every second or so."""
        now = time.monotonic()
        for block in list(self._blocks.values()):
            load = block.key.load
            since = max(block.used_at, self._ended.get(load, 0.0))
            idle = block.is_evictable and not block.waiting and load not in self._loads
            if idle and now - since > timeouts.BLOCKS_KEPT_S:
                self._drop(block)
        for load, since in list(self._ended.items()):
            if now - since > timeouts.BLOCKS_KEPT_S:
                del self._ended[load]
        if not self._blocks and not self._loads and self._memory is not None:
            self._memory.close()
            self._memory = None

    async def close(self) -> None:
        """Ends all fetches, and drops the memory."""
        tasks = [block.task for block in self._blocks.values() if block.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._blocks.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # Of requests.

    def _await_block(self, wanted: WantedBlock) -> _Block:
        block = self._blocks.get(wanted.key)
        if block is None:
            block = self._blocks[wanted.key] = _Block(wanted.key, wanted.size)
            block.task = asyncio.get_running_loop().create_task(self._fetch(block, wanted))
            block.task.add_done_callback(_retrieve)
        block.readers = max(block.readers, wanted.readers)
        block.waiting += 1
        return block

    def _settle(self, block: _Block) -> None:
        """After a reader has left: cancels a fetch, or drops a block, that no further reader needs."""
        if block.is_evictable:
            self._freed.set()
        if block.waiting or block.holders:
            return
        if block.slot is None:
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]
            if block.task is not None:
                block.task.cancel()
        elif 0 < block.readers <= block.served:
            self._drop(block)

    # Fetching.

    async def _fetch(self, block: _Block, wanted: WantedBlock) -> None:
        try:
            # Held until the bytes are in a slot: until then the block counts as under way.
            async with self._remote if wanted.remote else self._near:
                fetched = await wanted.fetch()
                slot = await self._take_slot()
                try:
                    await block_threads.run(self.memory.write, slot, fetched.pieces)
                except BaseException:
                    self._return(slot)
                    raise
        except BaseException:
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]
            raise
        block.slot, block.fetched = slot, replace(fetched, pieces=())
        block.used_at = time.monotonic()
        if not block.waiting:
            self._settle(block)

    async def _take_slot(self) -> int:
        """A free slot, after an eviction if need be. Raises OverloadedError: ranks keep all slots mapped."""
        end = time.monotonic() + timeouts.BLOCK_FULL_S
        # One caller after the other, in order.
        async with self._room:
            while not self._free:
                now = time.monotonic()
                block = self._oldest()
                due = math.inf if block is None else self._due(block)
                if block is not None and due <= now:
                    if block.key.load in self._loads and not block.waiting:
                        self._impatient.add(block.key.load)
                    self.evicted += 1
                    self._drop(block)
                    continue
                if now >= end:
                    raise OverloadedError(
                        f"the {self.slots} blocks that --restore-budget holds are all mapped by "
                        f"{', '.join(sorted(self._mapped_by()))}: does that process run? Give a "
                        "larger --restore-budget if it is only slow"
                    )
                self._freed.clear()
                await set_within(min(due, end) - now, self._freed)
            return self._free.pop()

    def _oldest(self) -> _Block | None:
        """The block to evict first: one without waiting readers, of an ended load, read least recently."""
        return min(
            (block for block in self._blocks.values() if block.is_evictable),
            key=lambda block: (
                block.waiting > 0,
                block.key.load in self._loads,
                block.used_at,
            ),
            default=None,
        )

    def _due(self, block: _Block) -> float:
        """When the block may be evicted, on the monotonic clock."""
        load = block.key.load
        if not block.waiting and (load not in self._loads or load in self._impatient):
            return 0.0
        return block.used_at + timeouts.BLOCK_ROOM_S

    def _mapped_by(self) -> set[str]:
        return {reader for block in self._blocks.values() for reader in block.holders}

    def _drop(self, block: _Block) -> None:
        slot, block.slot = block.slot, None
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        if slot is not None:
            self._return(slot)

    def _return(self, slot: int) -> None:
        self._free.append(slot)
        self._freed.set()


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.debug("a block could not be fetched: %s", error)
