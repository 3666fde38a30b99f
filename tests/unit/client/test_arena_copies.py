"""Arenas in files of a spool that also hold the newest committed saves."""

from collections.abc import Sequence

import pytest

from pannier.client.staging.arena import AnonymousMapping, Arena, ArenaPool, MemoryMapping
from pannier.wire.errors import BusyError

SIZES = [2 << 20, 4096]


class Spool:
    """Maps files, at most ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.mapped: list[MemoryMapping] = []

    def map_files(self, sizes: Sequence[int]) -> list[AnonymousMapping]:
        if sum(each.capacity for each in self.mapped) + sum(sizes) > self.limit:
            raise BusyError("the spool is full")
        found = [AnonymousMapping(size) for size in sizes]
        for each in found:
            each.source = self
        self.mapped += found
        return found

    def unmap_files(self, mappings: list[MemoryMapping]) -> None:
        self.mapped = [each for each in self.mapped if each not in mappings]
        mappings.clear()


def places(arena: Arena) -> list[int]:
    return [buffer.address for buffer in arena.files]


def commit(pool: ArenaPool, spool: Spool, group: str = "g") -> list[int]:
    """Saves, and gives the arena back once it is committed; where it lies."""
    arena = pool.acquire(SIZES, spool)
    where = places(arena)
    pool.release(arena, copy_of=group)
    return where


def test_the_newest_committed_save_stays_while_there_is_another_set_of_files() -> None:
    pool, spool = ArenaPool(2), Spool()
    first = commit(pool, spool)
    second = commit(pool, spool)
    assert first != second
    for _ in range(3):
        assert commit(pool, spool) == first
        assert commit(pool, spool) == second
    assert len(spool.mapped) == 2 * len(SIZES)


def test_a_save_beside_another_one_takes_the_files_of_the_committed_one() -> None:
    pool, spool = ArenaPool(2), Spool()
    first = commit(pool, spool)
    beside = pool.acquire(SIZES, spool)
    third = pool.acquire(SIZES, spool)
    assert places(third) == first
    assert len(spool.mapped) == 2 * len(SIZES)
    pool.release(beside)
    # What is committed last is the copy, whatever was released in between.
    newest = places(third)
    pool.release(third, copy_of="g")
    assert newest != commit(pool, spool)


def test_one_set_alone_is_used_again() -> None:
    pool, spool = ArenaPool(1), Spool()
    assert commit(pool, spool) == commit(pool, spool)
    assert len(spool.mapped) == len(SIZES)


def test_a_spool_without_room_takes_the_files_of_the_committed_save() -> None:
    pool, spool = ArenaPool(2), Spool(limit=sum(SIZES) + 4096)
    first = commit(pool, spool)
    assert commit(pool, spool) == first


def test_without_room_and_without_a_copy_the_error_is_the_spools() -> None:
    pool, spool = ArenaPool(2), Spool(limit=sum(SIZES))
    held = pool.acquire(SIZES, spool)
    with pytest.raises(BusyError, match="the spool is full"):
        pool.acquire(SIZES, spool)
    pool.release(held)


def test_the_oldest_copy_of_several_groups_is_used_first() -> None:
    pool, spool = ArenaPool(2), Spool()
    oldest = commit(pool, spool, "a")
    newer = commit(pool, spool, "b")
    assert commit(pool, spool, "a") == oldest
    assert commit(pool, spool, "a") == newer


def test_a_save_that_ends_after_a_later_one_is_not_the_newest() -> None:
    pool, spool = ArenaPool(2), Spool()
    earlier, later = pool.acquire(SIZES, spool), pool.acquire(SIZES, spool)
    old, new = places(earlier), places(later)
    pool.release(later, copy_of="g")
    pool.release(earlier, copy_of="g")
    assert places(pool.acquire(SIZES, spool)) == old != new
