"""Arenas: memory that is there when it is needed, and is used again."""

import ctypes
import errno
import gc
import itertools
import os
import re
import resource
import threading
from pathlib import Path

import pytest

from pannier.client.staging import arena as arena_module
from pannier.client.staging.arena import ArenaPool
from pannier.wire.errors import PannierError

MIB = 1 << 20


def _minor_faults() -> int:
    """Of this thread: others of the process, left by other tests, have their own."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _flags(address: int) -> set[str]:
    """The kernel's flags of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def test_regions_have_the_sizes_asked_for_and_nothing_is_a_size() -> None:
    pool = ArenaPool(2)
    arena = pool.acquire([0, 1, 4096, 3 * MIB + 5])

    assert [region.size for region in arena.files] == [0, 1, 4096, 3 * MIB + 5]
    assert [len(region.view) for region in arena.files] == [0, 1, 4096, 3 * MIB + 5]
    assert arena.files[0].address == 0
    region = arena.files[3]
    region.view[-4:] = b"tail"
    assert ctypes.string_at(region.address + region.size - 4, 4) == b"tail"
    pool.release(arena)


def test_no_files_are_an_arena_too() -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([])
    assert arena.files == []
    pool.release(arena)


def test_memory_is_populated_when_it_is_acquired_and_recycled_when_it_is_released() -> None:
    pool = ArenaPool(1)
    first = pool.acquire([16 * MIB, 300_000])
    addresses = [region.address for region in first.files]

    faults = _minor_faults()
    for region in first.files:
        ctypes.memset(region.address, 1, region.size)
    assert _minor_faults() - faults < 20

    pool.release(first)
    faults = _minor_faults()
    second = pool.acquire([16 * MIB, 300_000])
    for region in second.files:
        ctypes.memset(region.address, 2, region.size)
    assert [region.address for region in second.files] == addresses
    assert _minor_faults() - faults < 20
    pool.release(second)


def test_sizes_that_change_a_little_are_recycled_too() -> None:
    pool = ArenaPool(1)
    first = pool.acquire([16 * MIB, 10 * MIB])
    addresses = {region.address for region in first.files}
    pool.release(first)
    second = pool.acquire([9 * MIB, 15 * MIB, 0])
    assert {region.address for region in second.files if region.size} == addresses
    pool.release(second)


def test_two_acquired_arenas_never_share_memory() -> None:
    pool = ArenaPool(2)
    arenas = [pool.acquire([2 * MIB, 5000]) for _ in range(2)]
    spans = sorted((r.address, r.address + r.size) for a in arenas for r in a.files)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for arena in arenas:
        pool.release(arena)
        pool.release(arena)
    again = [pool.acquire([2 * MIB, 5000]) for _ in range(2)]
    spans = sorted((r.address, r.address + r.size) for a in again for r in a.files)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_changing_sizes_do_not_pile_up() -> None:
    pool = ArenaPool(2)
    for step in range(12):
        pool.release(pool.acquire([4 * MIB * (step + 1)]))
    kept = sum(mapping.capacity for mapping in pool._free)
    assert kept <= 2 * 12 * 4 * MIB


def test_a_closed_pool_keeps_nothing_and_acquired_memory_stays_valid() -> None:
    pool = ArenaPool(2)
    pool.release(pool.acquire([MIB]))
    arena = pool.acquire([2 * MIB])
    address = arena.files[0].address
    pool.close()
    arena.files[0].view[:5] = b"alive"
    assert ctypes.string_at(address, 5) == b"alive"
    assert not pool._free
    pool.release(arena)
    del arena
    gc.collect()
    assert not _flags(address)


def test_memory_is_freed_with_its_last_view() -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([8 * MIB])
    address, view = arena.files[0].address, arena.files[0].view
    pool.close()
    pool.release(arena)
    del arena
    gc.collect()
    view[:4] = b"here"
    assert ctypes.string_at(address, 4) == b"here"
    del view
    gc.collect()
    assert not _flags(address)


def test_a_spill_grows_and_keeps_what_was_written() -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([0])
    assert arena.spilled is None
    spill = arena.spill
    pieces = [os.urandom(size) for size in (3, 0, 700_000, 1, 5 * MIB, 64)]
    for piece in pieces:
        assert spill.write(memoryview(piece)) == len(piece)
    assert ctypes.string_at(spill.address, spill.size) == b"".join(pieces)

    spill.align(10, 64)
    assert (spill.size + 10) % 64 == 0
    assert spill.reserve(7) == spill.size - 7
    pool.release(arena)


def test_a_spill_is_recycled_empty() -> None:
    pool = ArenaPool(1)
    first = pool.acquire([])
    first.spill.write(bytes(8 * MIB))
    pool.release(first)
    faults = _minor_faults()
    second = pool.acquire([])
    assert second.spill.size == 0
    second.spill.reserve(8 * MIB)
    ctypes.memset(second.spill.address, 1, 8 * MIB)
    assert _minor_faults() - faults < 20


def test_two_arenas_have_two_spills() -> None:
    pool = ArenaPool(2)
    arenas = [pool.acquire([]) for _ in range(2)]
    for arena, byte in zip(arenas, (b"a", b"b"), strict=True):
        arena.spill.write(byte * 100)
    texts = [ctypes.string_at(a.spill.address, a.spill.size) for a in arenas]
    assert texts == [b"a" * 100, b"b" * 100]


@pytest.mark.parametrize("size", [4096, 4 * MIB])
def test_memory_is_not_inherited_by_a_fork(size: int) -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([size])
    arena.spill.write(bytes(2 * MIB))
    # "dc": don't copy on fork.
    assert "dc" in _flags(arena.files[0].address)
    assert "dc" in _flags(arena.spill.address)
    pool.release(arena)


def test_a_forked_child_that_drops_the_pool_unmaps_nothing_of_its_own() -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([4 * MIB])
    address = arena.files[0].address
    child = os.fork()
    if child == 0:
        # The child maps something into the hole, then lets the arena go.
        status = 1
        try:
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = (
                (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
            )
            fixed, private, anonymous = 0x10, 0x02, 0x20
            got = libc.mmap(address, 4096, 3, fixed | private | anonymous, -1, 0)
            ctypes.memmove(got, b"mine", 4)
            pool.close()
            del arena, pool
            gc.collect()
            status = 0 if ctypes.string_at(address, 4) == b"mine" else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    arena.files[0].view[:4] = b"ours"
    pool.release(arena)


def test_a_forked_child_has_no_mapping_of_an_arena() -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([4096])
    address = arena.files[0].address
    assert _flags(address)
    child = os.fork()
    if child == 0:
        os._exit(1 if _flags(address) else 0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    pool.release(arena)


def test_kernels_without_populate_are_served_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    pool = ArenaPool(1)
    arena = pool.acquire([8 * MIB])
    faults = _minor_faults()
    ctypes.memset(arena.files[0].address, 1, 8 * MIB)
    assert _minor_faults() - faults < 20


def test_no_memory_is_an_error_with_the_size_and_the_pool_goes_on() -> None:
    pool = ArenaPool(1)
    kept = pool.acquire([MIB])
    address = kept.files[0].address
    pool.release(kept)
    with pytest.raises(PannierError, match=str(1 << 60)):
        pool.acquire([MIB, 1 << 60])
    again = pool.acquire([MIB])
    assert again.files[0].address == address


def test_populating_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        @staticmethod
        def madvise(*_: int) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(arena_module, "_libc", NoMemory)
    with pytest.raises(PannierError, match="Cannot allocate memory"):
        ArenaPool(1).acquire([MIB])


def test_threads_may_acquire_and_release_at_the_same_time() -> None:
    pool = ArenaPool(4)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            arena = pool.acquire([9000, 5000])
            for region in arena.files:
                ctypes.memset(region.address, number, region.size)
            if any(bytes(r.view) != bytes([number]) * r.size for r in arena.files):
                wrong.append(number)
            pool.release(arena)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
