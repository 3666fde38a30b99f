"""Reads many ranges of a checkpoint's files: in parallel, within a memory limit, in order.

In: ranges (file, offset, length). Out: their bytes, range by range, in the order of the request.
Neighbouring ranges of a file are read in one request, long ranges in several at the same time.
Blocking; for one load.
"""

import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from pannier.client.interrupts import aside
from pannier.client.loading.filesystem import StorageDir
from pannier.wire.errors import IntegrityError, StorageError
from pannier.wire.failures import shorten

PIECE_BYTES: Final = 8 << 20
"""Most bytes per request."""
_SHOWN: Final = 3
"""Keys that an error names."""
GAP_BYTES: Final = 4096
"""Ranges no farther apart are read together: the largest gap of alignment between archives."""


class Range(NamedTuple):
    """Bytes of one file."""

    file: str
    """Relative to the checkpoint."""
    offset: int
    length: int


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


class _Run(NamedTuple):
    """Ranges of one file that are read together."""

    file: str
    offset: int
    end: int
    ranges: list[Range]


class _Fetch(NamedTuple):
    """A run that is being read."""

    run: _Run
    memory: memoryview
    pieces: list[Future[None]]


def read_ranges(
    directory: StorageDir,
    ranges: Sequence[Range],
    *,
    threads: int,
    memory_bytes: int,
    index: KeyIndex | None = None,
) -> Generator[tuple[Range, memoryview], None, None]:
    """The bytes of each range, in the order of ``ranges``.

    Args:
        directory: the checkpoint.
        ranges: sorted by file and offset.
        threads: requests at the same time.
        memory_bytes: most memory, unless a single range is longer. Holds if each view is released
            before the next one is taken.
        index: the keys that the ranges hold, for errors.

    Raises:
        StorageError: a file can't be read, or ends too early.
    """
    index = index or KeyIndex({})
    todo = deque(_runs(ranges))
    window: deque[_Fetch] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pannier-read")

    def take_first() -> _Fetch:
        nonlocal held
        while todo and (not window or held + _size(todo[0]) <= memory_bytes):
            window.append(_start(pool, directory, todo.popleft()))
            held += len(window[-1].memory)
        first = window.popleft()
        for number, piece in enumerate(first.pieces):
            start = first.run.offset + number * PIECE_BYTES
            end = min(start + PIECE_BYTES, first.run.end)
            with index.naming(first.run.file, start, end):
                piece.result()
        return first

    try:
        while todo or window:
            first = aside(take_first)
            for each in first.run.ranges:
                start = each.offset - first.run.offset
                yield each, first.memory[start : start + each.length]
            held -= len(first.memory)
            # Before the next one is read: so the memory stays within its limit.
            del first
    finally:
        aside(lambda: pool.shutdown(cancel_futures=True))


def _runs(ranges: Sequence[Range]) -> Iterator[_Run]:
    run: _Run | None = None
    for each in ranges:
        end = each.offset + each.length
        if (
            run is not None
            and run.file == each.file
            and run.offset <= each.offset <= run.end + GAP_BYTES
            and end - run.offset <= PIECE_BYTES
        ):
            run.ranges.append(each)
            run = run._replace(end=max(run.end, end))
            continue
        if run is not None:
            yield run
        run = _Run(each.file, each.offset, end, [each])
    if run is not None:
        yield run


def _size(run: _Run) -> int:
    return run.end - run.offset


def _start(pool: ThreadPoolExecutor, directory: StorageDir, run: _Run) -> _Fetch:
    # Uninitialised, unlike a bytearray, which would be written twice.
    memory = np.empty(_size(run), np.uint8).data
    pieces = [
        pool.submit(
            directory.read_into, run.file, run.offset + start, memory[start : start + PIECE_BYTES]
        )
        for start in range(0, len(memory), PIECE_BYTES)
    ]
    return _Fetch(run, memory, pieces)
