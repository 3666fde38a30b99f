"""Reads many ranges of a checkpoint's files: in parallel, in order, straight into their targets.

In: reads, each a range (file, offset, length) and the memory that it fills, if the caller has it. Out:
their bytes, in the order of the reads. Reads without a target go through buffers of the reader's,
within a limit of memory: neighbours in a file are read in one request. Long ranges are read in several
requests at the same time. Blocking; for one load.
"""

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import numpy as np

from pannier.client.interrupts import aside
from pannier.client.loading.filesystem import MissingError
from pannier.client.restore.local_file import Part
from pannier.client.restore.sources import RangeSource
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import IntegrityError, StorageError
from pannier.wire.failures import shorten

_In = TypeVar("_In")
_Out = TypeVar("_Out")

PIECE_BYTES: Final = BLOCK_BYTES
"""Most bytes per request."""
_PIECES_AHEAD: Final = 4
"""Requests per thread that are under way or wait for a thread."""
_SHOWN: Final = 3
"""Keys that an error names."""
GAP_BYTES: Final = 4096
"""Ranges that are at most this far apart are read together: the largest alignment gap between archives."""


class Range(NamedTuple):
    """Bytes of one file."""

    file: str
    """Relative to the checkpoint."""
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.length


class Read(NamedTuple):
    """A range that is wanted, and what for."""

    range: Range
    use: Callable[[memoryview], None]
    """Called by the caller of :func:`read_ranges` with the bytes, which stay valid until it takes more."""
    target: memoryview | None = None
    """Memory of the range's length, kept alive by ``use``; None: a buffer of the reader's."""


class KeyIndex:
    """The keys of the state that each range of bytes holds, for errors.

    Args:
        keys: by range.
    """

    def __init__(self, keys: Mapping[Range, Sequence[str]]) -> None:
        self._keys = keys

    @contextmanager
    def naming(self, file: str, start: int = 0, end: int = sys.maxsize) -> Iterator[None]:
        """Adds the keys in these bytes of a file to a StorageError or an IntegrityError."""
        try:
            yield
        except (StorageError, IntegrityError) as error:
            if isinstance(error, MissingError):
                start, end = 0, sys.maxsize
            held = [
                key
                for each, keys in self._keys.items()
                if each.file == file and each.offset < end and start < each.offset + each.length
                for key in keys
            ]
            if not held:
                raise
            raise type(error)(f"{error} (it holds {_some(held)})") from error


def _some(keys: Sequence[str]) -> str:
    return shorten([repr(key) for key in dict.fromkeys(keys)], _SHOWN)


@dataclass(slots=True)
class _Run:
    """Reads of neighbouring ranges, made together."""

    reads: list[Read]
    file: str
    offset: int
    end: int
    in_blocks: bool
    """Whether its file is read in blocks: see :class:`RangeSource`."""
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    requests: list["_Request"] = field(default_factory=list)
    """One for each of its pieces."""

    @property
    def size(self) -> int:
        return self.end - self.offset

    @property
    def is_direct(self) -> bool:
        """Whether it fills the caller's memory."""
        return self.reads[0].target is not None

    @property
    def buffered(self) -> int:
        """Bytes of the reader's memory that it takes."""
        return 0 if self.is_direct else self.size

    @property
    def count(self) -> int:
        """Number of its pieces."""
        shift = self._shift
        return -(-(self.end - shift) // PIECE_BYTES) - (self.offset - shift) // PIECE_BYTES

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Start and end of each."""
        start, shift = self.offset, self._shift
        while start < self.end:
            end = min(self.end, ((start - shift) // PIECE_BYTES + 1) * PIECE_BYTES + shift)
            yield start, end
            start = end

    @property
    def _shift(self) -> int:
        """Distance of the pieces' ends from multiples of PIECE_BYTES, where blocks with checksums end."""
        return 0 if self.in_blocks else self.offset % PIECE_BYTES

    def is_done(self) -> bool:
        return all(request.is_done() for request in self.requests)

    def contents(self) -> list[tuple[Read, memoryview]]:
        return [
            (each, self.memory[each.range.offset - self.offset : each.range.end - self.offset])
            for each in self.reads
        ]


class _DirectReads:
    """Counts reads into the caller's memory, so that none is under way once it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._closed = False

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Around a read of the file."""
        with self._changed:
            if self._closed:
                raise StorageError(f"reading {name} was cancelled: the load has ended")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Returns when no read is under way; none begins afterwards."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._count)


class _Request:
    """What a thread reads at once: one piece of a run, or neighbouring pieces of several runs in a block."""

    def __init__(self, file: str, block: int) -> None:
        self.file = file
        self.is_direct = False
        """Whether one of its parts fills the caller's memory."""
        self.parts: list[Part] = []
        self.future: Future[None] | None = None
        """None: more parts may come."""
        self._block = block

    def takes(self, run: _Run, start: int) -> bool:
        """Whether a piece of this run may be one more part."""
        offset, memory = self.parts[-1]
        same = (run.file, start // PIECE_BYTES) == (self.file, self._block)
        return same and offset + len(memory) <= start

    def add(self, run: _Run, start: int, end: int) -> None:
        self.is_direct = self.is_direct or run.is_direct
        self.parts.append((start, run.memory[start - run.offset : end - run.offset]))
        run.requests.append(self)

    def is_done(self) -> bool:
        return self.future is not None and self.future.done()


class _Requests:
    """Hands the pieces of runs to threads: those of one block together, where that is faster."""

    def __init__(self, pool: ThreadPoolExecutor, source: RangeSource) -> None:
        self.direct = _DirectReads()
        self._pool = pool
        self._source = source
        self._open: _Request | None = None
        """The request that the next run's first piece may join."""

    def start(self, run: _Run) -> None:
        for start, end in run.pieces():
            request = self._open
            if request is None or not request.takes(run, start):
                self._submit()
                request = self._open = _Request(run.file, start // PIECE_BYTES)
            request.add(run, start, end)
            if not run.in_blocks:
                self._submit()

    def wait(self, run: _Run, index: KeyIndex) -> None:
        """Returns when all of the run was read. Raises StorageError."""
        for (start, end), request in zip(run.pieces(), run.requests, strict=True):
            if request.future is None:
                self._submit()
            assert request.future is not None
            with index.naming(run.file, start, end):
                request.future.result()

    def _submit(self) -> None:
        request, self._open = self._open, None
        if request is not None:
            request.future = self._pool.submit(self._read, request)

    def _read(self, request: _Request) -> None:
        with self.direct.reading(request.file) if request.is_direct else nullcontext():
            self._source.read_parts(request.file, request.parts)


class _Buffers:
    """Memory that is used again: touching fresh pages takes longer than reading into them."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        """By their usual size; longer ones are not kept: they would add up beyond the limit of memory."""

    def take(self, size: int, usual: int) -> memoryview:
        """Uninitialised memory, unlike a bytearray, which would be written twice."""
        free = self._free[usual]
        if size <= usual and free:
            return free.pop()[:size]
        return np.empty(max(size, usual), np.uint8).data[:size]

    def give_back(self, memory: memoryview, usual: int) -> None:
        whole = memoryview(memory.obj)
        if len(whole) == usual:
            self._free[usual].append(whole)


def read_ranges(
    source: RangeSource,
    reads: Iterable[Read | None],
    *,
    threads: int,
    memory_bytes: int,
    request_bytes: Callable[[str], int] = lambda _: PIECE_BYTES,
    index: KeyIndex | None = None,
    cancel: Callable[[], None] = lambda: None,
) -> Generator[Sequence[tuple[Read, memoryview]], None, None]:
    """The bytes of each read, in order; several small ones at a time.

    Args:
        source: of the bytes.
        reads: taken as memory and threads become free; a None holds back later reads until all earlier
            ones were used.
        threads: requests at the same time.
        memory_bytes: most memory for reads without a target, unless a single one is longer.
        request_bytes: neighbouring reads of a file are made together up to this size.
        index: the keys that the ranges hold, for errors.
        cancel: ends reads that are under way, when no more are wanted.

    Raises:
        StorageError: a file can't be read, or ends too early.
    """
    index = index or KeyIndex({})
    runs = _Runs(reads, request_bytes, source.reads_blocks)
    window: deque[_Run] = deque()
    buffers = _Buffers()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pannier-read")
    started = _Requests(pool, source)

    def fill() -> list[_Run]:
        """Takes the runs that may be started; in the caller's thread, since it may run the user's planner."""
        first = len(window)
        held, requests = sum(r.buffered for r in window), sum(r.count for r in window)
        while runs.has_next():
            run = runs.next
            if run is None:
                if window:
                    break
                runs.take()
                continue
            held, requests = held + run.buffered, requests + run.count
            if window and (held > memory_bytes or requests > _PIECES_AHEAD * threads):
                break
            target = run.reads[0].target
            if target is None:
                target = buffers.take(run.size, request_bytes(run.file))
            run.memory = target
            window.append(run)
            runs.take()
        return list(window)[first:]

    def advance(fresh: Sequence[_Run]) -> int:
        """Starts new runs, and waits for the first of the window; returns how many of it are done.

        That is at most a part of the window, so that threads read while the caller uses it.
        """
        for run in fresh:
            started.start(run)
        done = 0
        for run in islice(window, threads):
            if done and not run.is_done():
                break
            started.wait(run, index)
            done += 1
        return done

    try:
        while True:
            fresh = fill()
            if not window:
                return
            for _ in range(aside(partial(advance, fresh))):
                run = window.popleft()
                yield run.contents()
                if run.buffered:
                    buffers.give_back(run.memory, request_bytes(run.file))
    finally:
        try:
            cancel()
        finally:
            _end(pool, started.direct)


def _end(pool: ThreadPoolExecutor, direct: _DirectReads | None = None) -> None:
    """Ends the threads; an interrupt ends the wait for them.

    Args:
        direct: their reads into the caller's memory, none of which is under way any more when this
            returns or raises the interrupt.
    """
    interrupt: BaseException | None = None
    try:
        aside(lambda: pool.shutdown(cancel_futures=True))
    except BaseException as error:  # noqa: BLE001 - raised below
        interrupt = error
    while interrupt is not None and direct is not None:
        try:
            aside(direct.close)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if interrupt is not None:
        raise interrupt


def in_parallel(
    function: Callable[[_In], _Out], values: Sequence[_In], *, threads: int
) -> list[_Out]:
    """``function`` of each value, in order; raises the first error."""
    if not values:
        return []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pannier-read")
    try:
        return aside(lambda: list(pool.map(function, values)))
    finally:
        _end(pool)


class _Runs:
    """The runs to be read next, made from the reads on demand."""

    def __init__(
        self,
        reads: Iterable[Read | None],
        most: Callable[[str], int],
        in_blocks: Callable[[str], bool],
    ) -> None:
        self._runs = _joined(reads, most, in_blocks)
        self._next: list[_Run | None] = []

    def has_next(self) -> bool:
        if not self._next:
            self._next = list(islice(self._runs, 1))
        return bool(self._next)

    @property
    def next(self) -> _Run | None:
        """Only after :meth:`has_next`."""
        return self._next[0]

    def take(self) -> None:
        self._next.clear()


def _joined(
    reads: Iterable[Read | None], most: Callable[[str], int], in_blocks: Callable[[str], bool]
) -> Iterator[_Run | None]:
    run: _Run | None = None
    for each in reads:
        if run is not None and each is not None and _fits(run, each, most(run.file)):
            run.reads.append(each)
            run.end = max(run.end, each.range.end)
            continue
        if run is not None:
            yield run
        run = None
        if each is None:
            yield None
        else:
            file, offset, _ = each.range
            run = _Run([each], file, offset, each.range.end, in_blocks(file))
    if run is not None:
        yield run


def _fits(run: _Run, each: Read, most: int) -> bool:
    file, offset, _ = each.range
    return (
        run.reads[0].target is None
        and each.target is None
        and run.file == file
        and run.offset <= offset <= run.end + GAP_BYTES
        and each.range.end - run.offset <= most
    )
