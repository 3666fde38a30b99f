"""A data file in this host's spool, as a load reads it: every byte checked before it is used.

In: a descriptor of the spool file, and what the file's receipt says. Out: bytes, or an error when they are
not those that were saved. A trainer may stage something else into the file at any time, after it has
changed its stamp, and no trust is put in other processes: so each block is compared with its checksum when it
is read first. Never through a mapping, which a truncated file would make fatal. Blocking; thread-safe.
"""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import crc32c

from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.errors import IntegrityError
from pannier.wire.records import parse_blocks

_PIECE: Final = 256 << 10
"""Bytes that are read before their checksum is taken: then they are cached."""


class LocalFile:
    """See the module. Owns the descriptor, which is closed with it."""

    def __init__(self, located: restore_pb2.LocatedFile, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._file: records_pb2.DataFile = located.file
        self._stamp = located.stamp
        self._stamp_offset = located.stamp_offset
        # Without checksums of blocks the file is one block.
        self._sums = parse_blocks(located.file) or (located.file.crc32c,)
        self._block_bytes = located.file.block_bytes if len(self._sums) > 1 else located.file.size
        self._checked: set[int] = set()

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills ``target`` with the file's bytes from ``offset`` on.

        Raises:
            IntegrityError: the spool file has other content, or the file ends before.
            OSError: it can't be read.
        """
        end = offset + len(target)
        if end > self._file.size:
            raise IntegrityError(f"{self._file.name} has {self._file.size} bytes, wanted are {end}")
        self._check_stamp()
        while offset < end:
            block = offset // self._block_bytes
            stop = min(end, (block + 1) * self._block_bytes)
            piece, target = target[: stop - offset], target[stop - offset :]
            if block in self._checked:
                self._read(offset, piece)
            else:
                self._read_checked(block, offset, piece)
            offset = stop
        self._check_stamp()

    def _read_checked(self, block: int, offset: int, target: memoryview) -> None:
        """Reads a part of a block, and the rest of it for its checksum."""
        start = block * self._block_bytes
        end = min(start + self._block_bytes, self._file.size)
        scratch = memoryview(bytearray(min(_PIECE, end - start - len(target))))
        crc = self._sum(start, offset, scratch, 0)
        for at in range(0, len(target), _PIECE):
            piece = target[at : at + _PIECE]
            self._read(offset + at, piece)
            crc = crc32c.crc32c(piece, crc)
        crc = self._sum(offset + len(target), end, scratch, crc)
        if crc != self._sums[block]:
            raise IntegrityError(
                f"bytes {start} to {end} of {self._file.name} have crc32c {crc:08x} in the spool, saved "
                f"was {self._sums[block]:08x}"
            )
        self._checked.add(block)

    def _sum(self, start: int, end: int, scratch: memoryview, crc: int) -> int:
        while start < end:
            piece = scratch[: end - start]
            self._read(start, piece)
            crc = crc32c.crc32c(piece, crc)
            start += len(piece)
        return crc

    def _read(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done:]], offset + done)
            if not count:
                raise IntegrityError(
                    f"the spool file of {self._file.name} ends at byte {offset + done}"
                )
            done += count

    def _check_stamp(self) -> None:
        stamp = self._stamp
        if stamp and os.pread(self._fd, len(stamp), self._stamp_offset) != stamp:
            raise IntegrityError(
                f"a trainer has staged another save into the spool file of {self._file.name}"
            )


Locate = Callable[[str, Sequence[str]], Mapping[str, LocalFile]]
"""Finds those data files of an attempt that are in this host's spool; raises nothing."""
