import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pannier.client.loading.filesystem import StorageDir, open_dir
from pannier.client.loading.range_reader import GAP_BYTES, PIECE_BYTES, Range, read_ranges
from pannier.wire.errors import StorageError
from support.processes.stretch import BOUND_S


@pytest.fixture
def place(tmp_path: Path) -> StorageDir:
    return open_dir(tmp_path)


def fill(tmp_path: Path, name: str, size: int) -> bytes:
    content = random.Random(name).randbytes(size)
    (tmp_path / name).write_bytes(content)
    return content


class Reads:
    """Records what is read, and what of it is held at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.at_once = 0
        self.most_at_once = 0
        self.before: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        original = StorageDir.read_into

        def recording(place: StorageDir, name: str, offset: int, target: memoryview) -> None:
            with self._lock:
                self.sizes.append(len(target))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            self.before()
            try:
                original(place, name, offset, target)
            finally:
                with self._lock:
                    self.at_once -= 1

        monkeypatch.setattr(StorageDir, "read_into", recording)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_ranges_come_whole_and_in_order(tmp_path: Path, place: StorageDir) -> None:
    contents = {name: fill(tmp_path, name, 300_000) for name in ("a", "b")}
    noise = random.Random(1)
    ranges = sorted(
        Range(
            noise.choice("ab"), start := noise.randrange(290_000), noise.randrange(300_000 - start)
        )
        for _ in range(200)
    )
    got = [
        (each, bytes(view))
        for each, view in read_ranges(place, ranges, threads=4, memory_bytes=100_000)
    ]
    assert got == [(r, contents[r.file][r.offset : r.offset + r.length]) for r in ranges]


def test_neighbours_are_read_together(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 100_000)
    ranges = [Range("a", 0, 10), Range("a", 10 + GAP_BYTES, 10), Range("a", 50_000, 10)]
    assert len(list(read_ranges(place, ranges, threads=2, memory_bytes=1 << 20))) == 3
    assert sorted(reads.sizes) == [10, 20 + GAP_BYTES]


def test_long_ranges_are_read_in_pieces_side_by_side(
    tmp_path: Path, place: StorageDir, reads: Reads
) -> None:
    content = fill(tmp_path, "a", 2 * PIECE_BYTES + 5)
    both = threading.Barrier(3, timeout=BOUND_S)
    reads.before = lambda: both.wait() and None
    ((_, view),) = read_ranges(place, [Range("a", 0, len(content))], threads=3, memory_bytes=1)
    assert view == content
    assert sorted(reads.sizes) == [5, PIECE_BYTES, PIECE_BYTES]


def test_memory_stays_within_its_bound(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 4 << 20)
    apart = 100_000
    ranges = [Range("a", start, 1000) for start in range(0, 4 << 20, apart)]
    seen = 0
    for _ in read_ranges(place, ranges, threads=8, memory_bytes=3000):
        seen += 1
        assert len(reads.sizes) <= seen + 2
    assert seen == len(ranges)


def test_no_more_requests_at_once_than_threads(
    tmp_path: Path, place: StorageDir, reads: Reads
) -> None:
    fill(tmp_path, "a", 4 << 20)
    ranges = [Range("a", start, 1000) for start in range(0, 4 << 20, 100_000)]
    list(read_ranges(place, ranges, threads=3, memory_bytes=1 << 30))
    assert 1 <= reads.most_at_once <= 3


def test_an_error_ends_everything(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 4 << 20)
    ranges = [Range("a", start, 1000) for start in range(0, 4 << 20, 100_000)]
    with pytest.raises(StorageError, match="missing doesn't exist"):
        list(read_ranges(place, [*ranges, Range("missing", 0, 1)], threads=2, memory_bytes=1 << 30))
    assert not [each for each in threading.enumerate() if each.name.startswith("pannier-read")]


def test_leaving_early_ends_the_threads(tmp_path: Path, place: StorageDir) -> None:
    fill(tmp_path, "a", 4 << 20)
    ranges = [Range("a", start, 1000) for start in range(0, 4 << 20, 100_000)]
    threads = threading.active_count()
    contents = read_ranges(place, ranges, threads=2, memory_bytes=10_000)
    next(contents)
    contents.close()
    assert threading.active_count() == threads


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, place: StorageDir) -> None:
    fill(tmp_path, "a", 100)
    with pytest.raises(StorageError, match="a ends after 100 bytes"):
        list(read_ranges(place, [Range("a", 50, 51)], threads=1, memory_bytes=10))
