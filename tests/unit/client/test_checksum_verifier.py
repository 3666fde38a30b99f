"""A file is read whole and once for its checksum, whatever parts of it the load wants."""

import random
from pathlib import Path
from typing import Any, cast

import crc32c
import pytest

from pannier.client.loading.checksum_verifier import ChecksumVerifier, Receipts
from pannier.client.loading.filesystem import open_dir
from pannier.client.loading.range_reader import KeyIndex, Range, Read, read_ranges
from pannier.v1 import records_pb2
from pannier.wire.errors import IntegrityError
from support.storage.part_by_part import PartByPart

SIZE = 50_000


class FixedReceipts:
    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def find(self, name: str) -> records_pb2.DataFile:
        content = self._files[name]
        return records_pb2.DataFile(name=name, size=len(content), crc32c=crc32c.crc32c(content))


def read_all(directory: Path, files: dict[str, bytes], ranges: list[Range]) -> list[Range]:
    """Reads the ranges with verification; all that was read, in order."""
    place = open_dir(directory)
    receipts = cast("Receipts", FixedReceipts(files))
    verifier = ChecksumVerifier(place, receipts, [r.file for r in ranges], KeyIndex({}))
    wanted: list[Read | None] = [Read(each, lambda _: None) for each in ranges]
    bounds: dict[str, Any] = {"threads": 2, "memory_bytes": 10_000, "request_bytes": lambda _: 5000}
    done = []
    for run in read_ranges(PartByPart(place), verifier.cover([None, *wanted]), **bounds):
        for read, content in run:
            verifier.update(read.range, content)
            done.append(read.range)
    return done


def some_ranges(noise: random.Random, name: str) -> list[Range]:
    """In any order, overlapping, with gaps, empty: as parts of strided tensors are."""
    starts = [noise.randrange(SIZE) for _ in range(noise.randrange(1, 8))]
    return [Range(name, start, noise.randrange(SIZE - start + 1)) for start in starts]


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_counts(tmp_path: Path, seed: int) -> None:
    noise = random.Random(seed)
    files = {name: noise.randbytes(SIZE) for name in ("a", "b")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ranges = some_ranges(noise, "a") + some_ranges(noise, "b")
    done = read_all(tmp_path, files, ranges)
    assert [each for each in done if each in ranges] == ranges
    damaged = bytearray(files["b"])
    damaged[noise.randrange(SIZE)] ^= 1
    (tmp_path / "b").write_bytes(damaged)
    with pytest.raises(IntegrityError, match="b has crc32c"):
        read_all(tmp_path, files, ranges)


def test_bytes_behind_the_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(SIZE))
    with pytest.raises(IntegrityError, match=f"up to {SIZE + 1} of a, which has {SIZE}"):
        read_all(tmp_path, {"a": bytes(SIZE)}, [Range("a", SIZE - 1, 2)])
