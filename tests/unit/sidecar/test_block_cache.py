"""Fetched blocks: each once for all readers, kept as long as announced, within the budget."""

import asyncio
import math
import mmap
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import crc32c
import pytest

from pannier.common import timeouts
from pannier.sidecar.restore.block_cache import (
    BlockCache,
    BlockKey,
    BlockRequest,
    CachedBlock,
    Fetched,
    WantedBlock,
)
from pannier.sidecar.restore.block_memory import BlockMemory
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import OverloadedError, StorageError
from support.processes.stretch import BOUND_S, until

MIB = 1 << 20


class Source:
    """Sends blocks when it is allowed to; counts what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.open = asyncio.Event()
        self.open.set()

    def fetch(self, block: int) -> Callable[[], "asyncio.Future[Fetched]"]:
        async def fetched() -> Fetched:
            self.asked.append(block)
            try:
                await self.open.wait()
            finally:
                self.ended.append(block)
            if block in self.errors:
                raise self.errors[block]
            data = content(block)
            return Fetched([data[:100], data[100:]], crc32c.crc32c(data), "node-1", rejected=1)

        return lambda: asyncio.ensure_future(fetched())


def content(block: int) -> bytes:
    return bytes([block % 256]) * (1000 + block)


class Reader:
    """Requests blocks of one load from a cache."""

    def __init__(self, cache: BlockCache, source: Source, name: str = "rank 0") -> None:
        self.cache = cache
        self.source = source
        self.name = name

    def request(
        self, block: int, *, readers: int = 0, remote: bool = False, load: str = "load"
    ) -> BlockRequest:
        key = BlockKey(load, "id", "attempt", "file", block, len(content(block)), None)
        fetch = self.source.fetch(block)
        wanted = WantedBlock(key, len(content(block)), readers, fetch, remote)
        return self.cache.request(wanted, self.name)

    async def read(self, block: int, *, readers: int = 0, load: str = "load") -> CachedBlock:
        """Reads it, and releases it."""
        request = self.request(block, readers=readers, load=load)
        held = await hold(request)
        assert self.content(held) == content(block)
        request.release()
        return held

    def content(self, held: CachedBlock) -> bytes:
        return self.cache.memory.read(held.slot, 0, held.size)


async def hold(request: BlockRequest) -> CachedBlock:
    await request.arrive()
    held = request.hold()
    assert held is not None
    return held


@asynccontextmanager
async def reading(blocks: int = 32) -> AsyncIterator[Reader]:
    cache = BlockCache(blocks * BLOCK_BYTES)
    cache.enter("load")
    try:
        yield Reader(cache, Source())
    finally:
        await cache.close()


def test_a_block_is_fetched_once_for_all_its_readers_and_goes_after_the_last() -> None:
    async def main() -> None:
        async with reading() as reader:
            requests = [reader.request(7, readers=3) for _ in range(2)]
            helds = [await hold(request) for request in requests]
            assert [held.kept for held in helds] == [False, True]
            assert helds[0].fetched.rejected == 1
            assert reader.content(helds[0]) == content(7)
            for request in requests:
                request.release()
                request.release()
            assert reader.cache.used == len(content(7))
            assert (await reader.read(7, readers=3)).kept
            assert reader.cache.used == 0
            assert reader.source.asked == [7]

    asyncio.run(main())


def test_without_a_number_of_readers_it_stays_until_the_load_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with reading() as reader:
            await reader.read(1)
            reader.cache.tick()
            assert (await reader.read(1)).kept
            reader.cache.leave("load")
            reader.cache.tick()
            assert reader.cache.used, "another host may still need it"
            monkeypatch.setattr(timeouts, "BLOCKS_KEPT_S", -1.0)
            reader.cache.tick()
            assert not reader.cache.used
            assert reader.cache._memory is None

    asyncio.run(main())


def test_a_failed_fetch_fails_all_who_wait_and_the_next_request_tries_again() -> None:
    async def main() -> None:
        async with reading() as reader:
            reader.source.errors[3] = StorageError("no")
            requests = [reader.request(3), reader.request(3)]
            for request in requests:
                with pytest.raises(StorageError, match="no"):
                    await request.arrive()
                request.release()
            del reader.source.errors[3]
            await reader.read(3)
            assert reader.source.asked == [3, 3]

    asyncio.run(main())


def test_a_fetch_that_is_not_wanted_any_more_ends() -> None:
    async def main() -> None:
        async with reading() as reader:
            reader.source.open.clear()
            first, second = reader.request(1), reader.request(1)
            await until(lambda: reader.source.asked)
            first.release()
            await asyncio.sleep(0)
            assert not reader.source.ended
            second.release()
            await until(lambda: reader.source.ended)
            reader.source.open.set()
            await reader.read(1)

    asyncio.run(main())


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 32, 64])
def test_blocks_in_memory_and_under_way_stay_within_the_budget(blocks: int) -> None:
    async def main() -> None:
        async with reading(blocks) as reader:
            reader.source.open.clear()
            requests = [reader.request(number) for number in range(100)]
            requests += [reader.request(1000 + number, remote=True) for number in range(100)]
            await until(lambda: {n >= 1000 for n in reader.source.asked} == {False, True})
            for _ in range(10):
                await asyncio.sleep(0)
            under_way = len(reader.source.asked)
            # At least one block, one under way from peers, and one from elsewhere.
            assert reader.cache.slots + under_way + reader.cache.spare <= max(3, blocks)
            assert reader.cache.memory.size == reader.cache.slots * BLOCK_BYTES
            for request in requests:
                request.release()

    asyncio.run(main())


def test_one_block_of_room_serves_many_readers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", 0.02)

    async def main() -> None:
        async with reading(1) as reader:
            assert reader.cache.slots == 1

            async def sweep() -> None:
                for block in range(12):
                    await reader.read(block, readers=5)

            await asyncio.gather(*(sweep() for _ in range(5)))
            assert {*reader.source.asked} == {*range(12)}

    asyncio.run(main())


def test_a_block_that_is_mapped_never_goes_and_its_reader_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", 0.01)
    monkeypatch.setattr(timeouts, "BLOCK_FULL_S", 0.1)

    async def main() -> None:
        async with reading(1) as reader:
            request = reader.request(1)
            held = await hold(request)
            other = Reader(reader.cache, reader.source, "rank 1")
            with pytest.raises(OverloadedError, match=r"all mapped by rank 0.*--restore-budget"):
                await other.read(2)
            assert reader.content(held) == content(1)
            request.release()
            await other.read(2)
            assert reader.cache.used == len(content(2))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["released", "left"])
def test_who_waits_for_room_gets_it_once_a_block_may_go(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", 0.01 if how == "released" else math.inf)
    monkeypatch.setattr(timeouts, "BLOCK_FULL_S", 100 * BOUND_S)

    async def main() -> None:
        async with reading(1) as reader:
            reader.cache.enter("earlier")
            # Another one is to read it, too: it stays when it is released.
            request = reader.request(1, readers=2, load="earlier")
            await hold(request)
            if how == "left":
                request.release()
            waiting = asyncio.create_task(reader.read(2))
            await until(reader.cache._room.locked)
            if how == "released":
                request.release()
            else:
                reader.cache.leave("earlier")
            await asyncio.wait_for(waiting, BOUND_S)

    asyncio.run(main())


def test_who_waits_for_room_when_its_stream_ends_takes_none() -> None:
    async def main() -> None:
        async with reading(1) as reader:
            first = reader.request(1, readers=1)
            await hold(first)
            second = reader.request(2)
            await until(reader.cache._room.locked)
            for _ in range(10):
                await asyncio.sleep(0)
            # A stream that ends releases all its blocks at once: the room of one is free when the other isn't wanted.
            first.release()
            second.release()
            await until(lambda: len(reader.cache._free) == reader.cache.slots)
            await reader.read(3)

    asyncio.run(main())


def test_a_reader_that_does_not_come_is_waited_for_once_and_not_for_each_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with reading(6) as reader:
            monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", 0.01)
            for block in range(reader.cache.slots + 1):
                await reader.read(block, readers=2)
            monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", math.inf)
            for block in range(100, 120):
                await reader.read(block, readers=2)
            # It is here after all, and nearly in step.
            assert (await reader.read(119, readers=2)).kept
            assert not reader.cache._impatient

    asyncio.run(main())


def test_blocks_of_a_load_that_has_ended_go_first_and_at_once() -> None:
    async def main() -> None:
        async with reading(6) as reader:
            cache = reader.cache
            cache.enter("earlier")
            for block in range(cache.slots - 1):
                await reader.read(block, load="earlier")
            await reader.read(50)
            cache.leave("earlier")
            for block in range(60, 60 + cache.slots - 1):
                await reader.read(block)
            assert (await reader.read(50)).kept

    asyncio.run(main())


def test_a_block_that_went_before_its_turn_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ROOM_S", 0.01)

    async def main() -> None:
        async with reading(1) as reader:
            waiting = reader.request(1)
            await waiting.arrive()
            await reader.read(2)
            assert waiting.hold() is None
            held = await hold(waiting)
            assert reader.content(held) == content(1)
            waiting.release()
            assert reader.source.asked == [1, 2, 1]

    asyncio.run(main())


def test_peers_that_wait_for_each_other_do_not_keep_storage_from_being_read() -> None:
    async def main() -> None:
        async with reading() as reader:
            stuck = Reader(reader.cache, Source(), "rank 1")
            stuck.source.open.clear()
            requests = [stuck.request(100 + n, remote=True) for n in range(50)]
            for block in range(50):
                await reader.read(block)
            for request in requests:
                request.release()

    asyncio.run(main())


def test_processes_that_map_the_memory_can_neither_change_nor_shorten_it() -> None:
    memory = BlockMemory(2)
    memory.write(1, [b"before", b" and after"])
    descriptor = memory.open_for_reading()
    # As a process of the same user could.
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        with mmap.mmap(descriptor, memory.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            assert mapped[BLOCK_BYTES : BLOCK_BYTES + 16] == b"before and after"
            memory.write(1, [b"later"])
            assert mapped[BLOCK_BYTES : BLOCK_BYTES + 5] == b"later"
        for change in (
            lambda: os.pwrite(again, b"x", 0),
            lambda: os.ftruncate(again, 0),
            lambda: os.ftruncate(again, 4 * BLOCK_BYTES),
            lambda: mmap.mmap(again, memory.size),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(again)
        os.close(descriptor)
        memory.close()
