"""Checksums of a file and of its blocks, from one pass over the bytes."""

import random

import crc32c
import pytest

from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums, RunningChecksums
from pannier.wire.records import parse_blocks

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345])
@pytest.mark.parametrize("known", [True, False])
def test_the_checksums_do_not_depend_on_how_the_bytes_come(size: int, known: bool) -> None:
    data = memoryview(random.Random(size).randbytes(size))
    pieces = random.Random(7)
    found, running = Checksums(), RunningChecksums()
    while found.size < size:
        piece = data[found.size : found.size + pieces.choice([MIB, MIB, 3 * MIB, 9 * MIB, 4097])]
        found = found.followed_by(piece, crc32c.crc32c(piece) if known else None)
        running.add(piece)
    assert running.result() == found
    blocks = [crc32c.crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
    assert found == Checksums(size, crc32c.crc32c(data), tuple(blocks))


def test_parts_that_begin_and_end_with_blocks_have_theirs() -> None:
    size = 3 * BLOCK_BYTES + 12345
    data = memoryview(random.Random(3).randbytes(size))
    running = RunningChecksums()
    running.add(data[: BLOCK_BYTES + 77])
    assert running.of(BLOCK_BYTES, BLOCK_BYTES + 77) == crc32c.crc32c(data[BLOCK_BYTES:][:77])
    running.add(data[BLOCK_BYTES + 77 :])
    for start, end in ((0, BLOCK_BYTES), (BLOCK_BYTES, 3 * BLOCK_BYTES), (2 * BLOCK_BYTES, size)):
        assert running.of(start, end) == crc32c.crc32c(data[start:end])


def test_a_receipt_has_them_as_a_column() -> None:
    sums = Checksums().followed_by(memoryview(bytes(BLOCK_BYTES + 1)))
    block_bytes, column = sums.columns()
    assert (block_bytes, len(column)) == (BLOCK_BYTES, 8)
    file = records_pb2.DataFile(size=sums.size, block_bytes=block_bytes, block_crc32c=column)
    assert parse_blocks(file) == sums.blocks


def test_columns_that_do_not_fit_the_file_are_none() -> None:
    for file in (
        records_pb2.DataFile(size=5),
        records_pb2.DataFile(size=5, block_bytes=4, block_crc32c=bytes(4)),
        records_pb2.DataFile(size=5, block_bytes=0, block_crc32c=bytes(4)),
    ):
        assert parse_blocks(file) == ()
    # From a journal of an earlier version, which had the whole file's alone.
    assert Checksums(5, 7).columns() == (0, b"")
