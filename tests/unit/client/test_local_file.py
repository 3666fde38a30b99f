"""A data file in the host's spool, as a load reads it."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import crc32c
import pytest

from pannier.client.restore.local_file import BlockCache, LocalFile
from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums
from pannier.wire.errors import IntegrityError
from support.processes.stretch import BOUND_S

SIZE = 2 * BLOCK_BYTES + 1000
STAMP = b"stampED!"


@pytest.fixture
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "spool file"
    path.write_bytes(data + bytes(24) + STAMP)
    return path


def opened(
    path: Path, data: bytes, *, blocks: bool = True, stamp: bytes = STAMP, size: int | None = None
) -> LocalFile:
    block_bytes, column = Checksums().followed_by(memoryview(data)).columns()
    file = records_pb2.DataFile(name="f", size=SIZE, crc32c=crc32c.crc32c(data))
    if blocks:
        file.block_bytes, file.block_crc32c = block_bytes, column
    located = restore_pb2.LocatedFile(
        name="f", size=SIZE if size is None else size, stamp=stamp, stamp_offset=SIZE + 24
    )
    return LocalFile(located, file, os.open(path, os.O_RDONLY))


def read(file: LocalFile, offset: int, length: int, cache: BlockCache | None = None) -> bytes:
    target = bytearray(length)
    file.read_parts([(offset, memoryview(target))], cache or BlockCache())
    return bytes(target)


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_any_part_can_be_read(path: Path, data: bytes) -> None:
    file = opened(path, data)
    for offset, length in (
        (5, 10),
        (BLOCK_BYTES - 3, 6),
        (0, SIZE),
        (SIZE - 1, 1),
        (0, 0),
        (SIZE, 0),
    ):
        assert read(file, offset, length) == data[offset : offset + length]


def test_a_changed_byte_fails_what_is_read_of_its_block_and_nothing_else(
    path: Path, data: bytes
) -> None:
    change(path, BLOCK_BYTES + 100)
    file = opened(path, data)
    assert read(file, 0, BLOCK_BYTES) == data[:BLOCK_BYTES]
    assert read(file, 2 * BLOCK_BYTES, 1000) == data[2 * BLOCK_BYTES :]
    for offset in (BLOCK_BYTES, BLOCK_BYTES + 5000, 2 * BLOCK_BYTES - 1):
        with pytest.raises(IntegrityError, match=f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} of f"):
            read(file, offset, 1)


@pytest.mark.parametrize("gap", [0, 1, 5000, BLOCK_BYTES // 8, BLOCK_BYTES // 2])
def test_several_parts_are_filled_at_once_and_all_between_is_checked(
    path: Path, data: bytes, gap: int
) -> None:
    length = BLOCK_BYTES // 3 + 77
    offsets = range(11, SIZE - length, length + gap)
    file, cache = opened(path, data), BlockCache()

    def read_all() -> list[bytes]:
        targets = [bytearray(length) for _ in offsets]
        parts = [(at, memoryview(each)) for at, each in zip(offsets, targets, strict=True)]
        file.read_parts(parts, cache)
        return [bytes(each) for each in targets]

    assert read_all() == [data[at : at + length] for at in offsets]
    cache = BlockCache()
    # In no part, but in a block with parts.
    change(path, 3)
    with pytest.raises(IntegrityError, match="bytes 0 to"):
        read_all()


def test_a_block_of_which_most_is_wanted_goes_past_the_cache(path: Path, data: bytes) -> None:
    class NoCache(BlockCache):
        def block(self, *_: object) -> NoReturn:
            raise AssertionError("a block was put into the cache")

    file = opened(path, data)
    assert read(file, 100, BLOCK_BYTES - 200, NoCache()) == data[100 : BLOCK_BYTES - 100]
    with pytest.raises(AssertionError):
        read(file, 100, 1000, NoCache())


def test_parts_of_a_block_come_from_what_was_checked(path: Path, data: bytes) -> None:
    """A change of the file between two reads is seen, or has no effect."""
    file, cache = opened(path, data), BlockCache()
    assert read(file, 5, 10, cache) == data[5:15]
    change(path, 100)
    assert read(file, 50, 100, cache) == data[50:150]
    with pytest.raises(IntegrityError, match="bytes 0 to"):
        read(file, 0, BLOCK_BYTES, cache)


def test_a_block_is_read_once_for_all_who_want_it_at_the_same_time() -> None:
    cache, reads = BlockCache(), []
    begun, go_on = threading.Event(), threading.Event()

    def read_block(target: memoryview) -> None:
        reads.append(1)
        begun.set()
        assert go_on.wait(BOUND_S)
        target[:] = b"block"

    def use() -> bytes:
        with cache.block("f", 0, 5, read_block) as content:
            return bytes(content)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(use)
        assert begun.wait(BOUND_S)
        others = [pool.submit(use) for _ in range(3)]
        go_on.set()
        assert [each.result() for each in (first, *others)] == 4 * [b"block"]
    assert len(reads) == 1


def test_a_block_that_could_not_be_read_is_tried_again_and_its_memory_used_again() -> None:
    cache = BlockCache()

    def fail(target: memoryview) -> None:
        raise OSError("no")

    for number in range(20):
        with pytest.raises(OSError, match="no"), cache.block("f", number, 5, fail):
            pass
    reads = iter(range(20))
    for _ in range(20):
        with cache.block("f", 1, 1, lambda target: target.__setitem__(0, next(reads))) as content:
            assert content[0] == 0


def test_a_file_of_another_size_than_was_committed_is_refused(path: Path, data: bytes) -> None:
    with pytest.raises(IntegrityError, match=f"it has 8 bytes in the spool, {SIZE} by its receipt"):
        opened(path, data, size=8)


def test_a_long_file_without_checksums_of_blocks_is_refused(path: Path, data: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IntegrityError, match="have no checksums of its blocks") as refused:
        opened(path, data, blocks=False)
    del refused
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_process_has_no_descriptor_of_it(path: Path, data: bytes) -> None:
    file = opened(path, data)

    def descriptors() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(os.path.realpath(each) == str(path.resolve()) for each in links)

    assert descriptors() == 1
    child = os.fork()
    if not child:
        os._exit(descriptors())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(file, 0, 10) == data[:10]


def test_another_stamp_fails_every_read(path: Path, data: bytes) -> None:
    file = opened(path, data)
    assert read(file, 0, 10) == data[:10]
    change(path, SIZE + 24)
    with pytest.raises(IntegrityError, match="a trainer has staged another save into the spool"):
        read(file, 0, 10)


def test_a_shorter_file_fails(path: Path, data: bytes) -> None:
    file, plain = opened(path, data), opened(path, data, stamp=b"")
    os.truncate(path, BLOCK_BYTES + 100)
    with pytest.raises(IntegrityError, match="the spool file of f was truncated"):
        read(file, 0, 10)
    assert read(plain, 0, BLOCK_BYTES) == data[:BLOCK_BYTES]
    for block, length in ((1, 10), (1, BLOCK_BYTES), (2, 1000)):
        with pytest.raises(IntegrityError, match="of f ends at byte"):
            read(plain, block * BLOCK_BYTES, length)


def test_nothing_is_read_beyond_the_end_of_the_data_file(path: Path, data: bytes) -> None:
    with pytest.raises(IntegrityError, match=f"f has {SIZE} bytes, wanted are {SIZE + 8}"):
        read(opened(path, data), SIZE, 8)


def test_the_descriptor_is_closed_with_it(path: Path, data: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = opened(path, data)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del file
    assert len(os.listdir("/proc/self/fd")) == before
