import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pannier.client.loading import range_reader
from pannier.client.loading.filesystem import StorageDir, open_dir
from pannier.client.loading.range_reader import (
    GAP_BYTES,
    PIECE_BYTES,
    Range,
    Read,
    in_parallel,
    read_ranges,
)
from pannier.wire.errors import StorageError
from support.processes.stretch import BOUND_S
from support.storage.part_by_part import PartByPart


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


def contents(
    place: StorageDir, ranges: Sequence[Range], **bounds: Any
) -> Iterator[tuple[Range, bytes]]:
    """What each range has, while it is there."""
    reads = [Read(each, lambda _: None) for each in ranges]
    for run in read_ranges(PartByPart(place), reads, **bounds):
        for read, view in run:
            yield read.range, bytes(view)


def spread(apart: int = 100_000) -> list[Range]:
    """Ranges too far apart to be read together."""
    return [Range("a", start, 1000) for start in range(0, 4 << 20, apart)]


def test_ranges_come_whole_and_in_order(tmp_path: Path, place: StorageDir) -> None:
    files = {name: fill(tmp_path, name, 300_000) for name in ("a", "b")}
    noise = random.Random(1)
    ranges = sorted(
        Range(
            noise.choice("ab"), start := noise.randrange(290_000), noise.randrange(300_000 - start)
        )
        for _ in range(200)
    )
    got = list(contents(place, ranges, threads=4, memory_bytes=100_000))
    assert got == [(r, files[r.file][r.offset : r.end]) for r in ranges]


def test_neighbours_are_read_together(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 100_000)
    ranges = [Range("a", 0, 10), Range("a", 10 + GAP_BYTES, 10), Range("a", 50_000, 10)]
    assert len(list(contents(place, ranges, threads=2, memory_bytes=1 << 20))) == 3
    assert sorted(reads.sizes) == [10, 20 + GAP_BYTES]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("direct", ["none", "all", "every other"])
def test_pieces_of_a_block_are_read_together_where_that_is_faster(
    tmp_path: Path, place: StorageDir, blocks: bool, direct: str
) -> None:
    size, length = 3 * PIECE_BYTES, PIECE_BYTES // 4 + 1000
    content = fill(tmp_path, "a", size)
    ranges = [Range("a", start, length) for start in range(0, size - length, length + 5000)]
    filled = {"none": [], "all": ranges, "every other": ranges[::2]}[direct]
    targets = {each: memoryview(bytearray(length)) for each in filled}
    source = PartByPart(place, blocks=blocks)
    reads = [Read(each, lambda _: None, targets.get(each)) for each in ranges]
    bounds: dict[str, Any] = {"threads": 2, "memory_bytes": size, "request_bytes": lambda _: length}
    got = [
        (read.range, bytes(view))
        for run in read_ranges(source, reads, **bounds)
        for read, view in run
    ]
    assert got == [(each, content[each.offset : each.end]) for each in ranges]
    assert len(source.asked) == (3 if blocks else len(ranges))
    # Some of them lie in two blocks.
    assert (sum(source.asked) > len(ranges)) is blocks


def test_neighbours_are_read_together_up_to_a_size(
    tmp_path: Path, place: StorageDir, reads: Reads
) -> None:
    fill(tmp_path, "a", 100_000)
    ranges = [Range("a", start, 1000) for start in range(0, 10_000, 1000)]
    list(contents(place, ranges, threads=2, memory_bytes=1 << 20, request_bytes=lambda _: 4000))
    assert sorted(reads.sizes) == [2000, 4000, 4000]


def test_long_ranges_are_read_in_pieces_side_by_side(
    tmp_path: Path, place: StorageDir, reads: Reads
) -> None:
    content = fill(tmp_path, "a", 2 * PIECE_BYTES + 5)
    both = threading.Barrier(3, timeout=BOUND_S)
    reads.before = lambda: both.wait() and None
    whole = Range("a", 0, len(content))
    ((_, got),) = contents(place, [whole], threads=3, memory_bytes=1)
    assert got == content
    assert sorted(reads.sizes) == [5, PIECE_BYTES, PIECE_BYTES]


def test_a_target_is_filled_where_it_is(tmp_path: Path, place: StorageDir) -> None:
    content = fill(tmp_path, "a", 2 * PIECE_BYTES)
    targets = [bytearray(PIECE_BYTES + 3), bytearray(1000)]
    ranges = [Range("a", 7, PIECE_BYTES + 3), Range("a", PIECE_BYTES + 10, 1000)]
    reads = [
        Read(each, lambda _: None, memoryview(target))
        for each, target in zip(ranges, targets, strict=True)
    ]
    views = [
        view.obj
        for run in read_ranges(PartByPart(place), reads, threads=2, memory_bytes=1)
        for _, view in run
    ]
    assert [view is target for view, target in zip(views, targets, strict=True)] == [True, True]
    assert [bytes(target) for target in targets] == [content[r.offset : r.end] for r in ranges]


def test_nothing_is_taken_before_what_must_be_used_first(tmp_path: Path, place: StorageDir) -> None:
    fill(tmp_path, "a", 4 << 20)
    used: list[Range] = []
    taken_after: list[int] = []

    def reads() -> Iterator[Read | None]:
        for number, each in enumerate(spread()):
            if number % 3 == 0:
                yield None
                taken_after.append(len(used))
            yield Read(each, lambda _: None)

    for run in read_ranges(PartByPart(place), reads(), threads=2, memory_bytes=1 << 20):
        used.extend(read.range for read, _ in run)
    assert used == spread()
    assert taken_after == list(range(0, len(used), 3))


def test_memory_stays_within_its_bound(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 4 << 20)
    for seen, _ in enumerate(contents(place, spread(), threads=8, memory_bytes=3000)):
        # Up to three are there already when the first of them is used.
        assert len(reads.sizes) <= seen + 3
    assert seen + 1 == len(reads.sizes) == len(spread())


def test_memory_of_long_ranges_is_not_kept_after_their_use(
    tmp_path: Path, place: StorageDir
) -> None:
    length = 100_000
    fill(tmp_path, "a", 40 * length)
    # Some are short: their memory is used again.
    ranges = [Range("a", 2 * n * length, length if n % 4 else 1000) for n in range(20)]
    bounds: dict[str, Any] = {"threads": 2, "memory_bytes": 1000, "request_bytes": lambda _: 1000}
    buffers: dict[int, weakref.ref[Any]] = {}
    reads = [Read(each, lambda _: None) for each in ranges]
    for run in read_ranges(PartByPart(place), reads, **bounds):
        buffers.update({id(view.obj): weakref.ref(view.obj) for _, view in run})
        held = [buffer.nbytes for ref in buffers.values() if (buffer := ref()) is not None]
        # This one, and what threads haven't let go yet.
        assert sum(held) <= 6 * length


def test_no_more_requests_at_once_than_threads(
    tmp_path: Path, place: StorageDir, reads: Reads
) -> None:
    fill(tmp_path, "a", 4 << 20)
    list(contents(place, spread(), threads=3, memory_bytes=1 << 30))
    assert 1 <= reads.most_at_once <= 3


def test_an_error_ends_everything(tmp_path: Path, place: StorageDir, reads: Reads) -> None:
    fill(tmp_path, "a", 4 << 20)
    ranges = [*spread(), Range("missing", 0, 1)]
    with pytest.raises(StorageError, match="missing doesn't exist"):
        list(contents(place, ranges, threads=2, memory_bytes=1 << 30))
    assert not [each for each in threading.enumerate() if each.name.startswith("pannier-read")]


def test_leaving_early_ends_the_threads(tmp_path: Path, place: StorageDir) -> None:
    fill(tmp_path, "a", 4 << 20)
    reads = [Read(each, lambda _: None) for each in spread()]
    runs = read_ranges(PartByPart(place), reads, threads=2, memory_bytes=10_000)
    next(runs)
    runs.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("pannier-read")]


class HalfStuck:
    """One file doesn't answer."""

    def __init__(self) -> None:
        self.begun, self.may_answer = threading.Event(), threading.Event()

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        if name == "stuck":
            self.begun.set()
            assert self.may_answer.wait(BOUND_S)
        target[:] = bytes([7]) * len(target)


def test_interrupts_end_it_while_a_buffer_is_read_though_targets_are_filled_beside_it(
    request: pytest.FixtureRequest,
) -> None:
    source, ended = HalfStuck(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != range_reader.__file__:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt

    def press() -> None:
        assert source.begun.wait(BOUND_S)
        while not ended.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    usual = signal.signal(signal.SIGINT, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    request.addfinalizer(source.may_answer.set)
    presser = threading.Thread(target=press)
    presser.start()
    target = memoryview(bytearray(100))
    reads = [
        Read(Range("file", 0, 100), lambda _: None, target),
        Read(Range("stuck", 0, 100), lambda _: None),
    ]
    with pytest.raises(KeyboardInterrupt):
        list(read_ranges(PartByPart(source), reads, threads=2, memory_bytes=1 << 20))
    ended.set()
    presser.join(BOUND_S)


def test_a_read_that_begins_after_the_end_of_the_load_is_refused_by_name() -> None:
    direct = range_reader._DirectReads()
    direct.close()
    with (
        pytest.raises(StorageError, match="reading a was cancelled: the load has ended"),
        direct.reading("a"),
    ):
        pass


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, place: StorageDir) -> None:
    fill(tmp_path, "a", 100)
    with pytest.raises(StorageError, match="a ends after 100 bytes"):
        list(contents(place, [Range("a", 50, 51)], threads=1, memory_bytes=10))


def test_results_of_threads_come_in_order() -> None:
    both = threading.Barrier(2, timeout=BOUND_S)

    def double(value: int) -> int:
        both.wait()
        return 2 * value

    assert in_parallel(double, [3, 1], threads=2) == [6, 2]
    assert in_parallel(double, [], threads=2) == []
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda value: 1 // value, [1, 0], threads=1)
