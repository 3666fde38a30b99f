"""A data file in this host's spool, as a load reads it: every byte checked before it is used.

In: a descriptor of the spool file, and the file's entry in the committed receipt. Out: bytes, or an error when they are not those
that were saved. A trainer may stage another save into the file at any time, after it has changed its stamp,
and other processes aren't trusted: so the checksum of a block is computed from the very bytes that are
delivered. If most of a block is wanted, it is read straight into the caller's memory; if only a small part
is, the block is read into a cache, from which further parts are copied. The file is never mapped: truncation
would then be fatal, and page faults cost as much as the system calls. Blocking; thread-safe.
"""

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import crc32c
import numpy as np

from pannier.client.fork_hooks import close_in_child
from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import IntegrityError
from pannier.wire.records import parse_blocks

_PIECE: Final = 2 << 20
"""Bytes that are read before their checksum is taken: then they are in the processor's cache. With smaller
pieces, threads would wait longer for the GIL."""
_DIRECT_PARTS: Final = 0.5
"""If at least this share of a block is wanted, it is read into the targets, and the rest is dropped."""
_CACHED: Final = 4
"""Most blocks in a cache. Threads wait when all of them are in use."""


Part = tuple[int, memoryview]
"""An offset in a file, and the memory that the bytes from there on fill."""


class _Slot:
    """Memory for one block."""

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, np.uint8).data
        self.key: tuple[str, int] | None = None
        """File and block; None: nothing that can be used."""
        self.is_read = False
        self.users = 0
        self.waiters = 0
        """Number of threads that will use it when another one has read it."""


class BlockCache:
    """Keeps the last used blocks of which parts are needed; a block is read by one thread. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slots: list[_Slot] = []
        """The most recently used one last."""

    @contextmanager
    def block(
        self, name: str, block: int, size: int, read: Callable[[memoryview], None]
    ) -> Iterator[memoryview]:
        """A block of a file, of ``size`` bytes, as long as the context lasts; raises what ``read`` raises."""
        slot = self._take((name, block), size)
        try:
            if not slot.is_read:
                read(slot.memory[:size])
            with self._changed:
                slot.is_read = True
                self._changed.notify_all()
            yield slot.memory[:size]
        finally:
            with self._changed:
                slot.users -= 1
                if not slot.is_read:
                    slot.key = None
                self._changed.notify_all()

    def _take(self, key: tuple[str, int], size: int) -> _Slot:
        """A slot that has the block, or into which the caller must read it."""
        with self._changed:
            while True:
                slot = next((each for each in self._slots if each.key == key), None)
                if slot is None:
                    slot = self._free_slot(size)
                    if slot is None:
                        self._changed.wait()
                        continue
                    slot.key, slot.is_read = key, False
                elif not slot.is_read:
                    # Counted: else the slot might be taken for another block before this thread runs.
                    slot.waiters += 1
                    self._changed.wait()
                    slot.waiters -= 1
                    continue
                slot.users += 1
                self._slots.remove(slot)
                self._slots.append(slot)
                return slot

    def _free_slot(self, size: int) -> _Slot | None:
        if len(self._slots) < _CACHED:
            self._slots.append(_Slot(max(size, BLOCK_BYTES)))
        return next((each for each in self._slots if not each.users and not each.waiters), None)


class LocalFile:
    """See the module. Owns the descriptor, which is closed with it.

    Args:
        located: where the sidecar has it. The sidecar may have other bytes than were committed.
        committed: as in the receipt that storage has.

    Raises IntegrityError: the receipt has another size, or no checksums that its blocks can be compared with.
    """

    def __init__(
        self, located: restore_pb2.LocatedFile, committed: records_pb2.DataFile, fd: int
    ) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        # A copy of it in a child would keep the spool file locked after the load.
        close_in_child(self, lambda file: file._close())
        self._file = committed
        self._stamp = located.stamp
        self._stamp_offset = located.stamp_offset
        if located.size != committed.size:
            raise IntegrityError(
                f"it has {located.size} bytes in the spool, {committed.size} by its receipt"
            )
        self._sums = parse_blocks(committed)
        self._block_bytes = committed.block_bytes
        if not self._sums:
            if committed.size > BLOCK_BYTES or not committed.HasField("crc32c"):
                raise IntegrityError("the receipts of its attempt have no checksums of its blocks")
            self._sums, self._block_bytes = (committed.crc32c,), max(1, committed.size)

    def read_parts(self, parts: Sequence[Part], cache: BlockCache) -> None:
        """Fills the targets with the file's bytes; the parts are in the order of their offsets.

        Raises:
            IntegrityError: the spool file has other content, or the file ends before.
            OSError: it can't be read.
        """
        by_block: defaultdict[int, list[Part]] = defaultdict(list)
        for offset, target in parts:
            self._check_end(offset + len(target))
            at = 0
            while at < len(target):
                block = (offset + at) // self._block_bytes
                count = min(self._bounds(block)[1] - offset - at, len(target) - at)
                by_block[block].append((offset + at, target[at : at + count]))
                at += count
        self._check_stamp()
        for block, held in by_block.items():
            start, stop = self._bounds(block)
            if sum(len(target) for _, target in held) >= _DIRECT_PARTS * (stop - start):
                self._read_block(block, held)
                continue
            with cache.block(
                self._file.name, block, stop - start, partial(self._read_whole, block)
            ) as content:
                for offset, target in held:
                    target[:] = content[offset - start : offset - start + len(target)]
        self._check_stamp()

    def peek(self, offset: int, target: memoryview) -> None:
        """As :meth:`read_parts`, but not checked: for bytes that are compared with what is known."""
        self._check_end(offset + len(target))
        self._read(offset, target)

    def _check_end(self, end: int) -> None:
        if end > self._file.size:
            raise IntegrityError(f"{self._file.name} has {self._file.size} bytes, wanted are {end}")

    def _bounds(self, block: int) -> tuple[int, int]:
        start = block * self._block_bytes
        return start, min(start + self._block_bytes, self._file.size)

    def _read_whole(self, block: int, target: memoryview) -> None:
        self._read_block(block, [(self._bounds(block)[0], target)])

    def _read_block(self, block: int, parts: Sequence[Part]) -> None:
        """Reads all of a block: its parts into their targets, and what lies between, for the checksum."""
        start, stop = self._bounds(block)
        crc, at = 0, start
        for offset, target in parts:
            crc = self._read_between(at, offset, crc)
            for begin in range(0, len(target), _PIECE):
                piece = target[begin : begin + _PIECE]
                self._read(offset + begin, piece)
                crc = crc32c.crc32c(piece, crc)
            at = offset + len(target)
        crc = self._read_between(at, stop, crc)
        if crc != self._sums[block]:
            raise IntegrityError(
                f"bytes {start} to {stop} of {self._file.name} have crc32c {crc:08x} in the spool, saved "
                f"was {self._sums[block]:08x}"
            )

    def _read_between(self, start: int, stop: int, crc: int) -> int:
        """``crc``, extended by these bytes."""
        if start < stop:
            buffer = np.empty(min(_PIECE, stop - start), np.uint8).data
            for at in range(start, stop, len(buffer)):
                piece = buffer[: stop - at]
                self._read(at, piece)
                crc = crc32c.crc32c(piece, crc)
        return crc

    def _read(self, offset: int, target: memoryview) -> None:
        count = read_at(self._fd, offset, target)
        if count < len(target):
            raise IntegrityError(
                f"the spool file of {self._file.name} ends at byte {offset + count}"
            )

    def _check_stamp(self) -> None:
        found = os.pread(self._fd, len(self._stamp), self._stamp_offset)
        if len(found) < len(self._stamp):
            raise IntegrityError(f"the spool file of {self._file.name} was truncated")
        if found != self._stamp:
            raise IntegrityError(
                f"a trainer has staged another save into the spool file of {self._file.name}"
            )


def read_at(fd: int, offset: int, target: memoryview) -> int:
    """Fills ``target`` with a file's bytes from ``offset`` on; fewer only at the file's end. Returns their count."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if not count:
            break
        done += count
    return done
