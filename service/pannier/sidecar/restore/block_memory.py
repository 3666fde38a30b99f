"""Memory for fetched blocks, which the ranks of this host map to read them.

In: blocks of up to BLOCK_BYTES. Out: their offsets, and read-only descriptors of the memory. The memory has a
fixed size and is sealed: a process that maps it can neither truncate it, which would kill this process by
SIGBUS, nor write to it. Pages are allocated as blocks are written, and freed when it is closed. Any thread;
one writer per slot.
"""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Final

from pannier.wire.chunk_codec import BLOCK_BYTES

_log = logging.getLogger(__name__)

_SEAL_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE, since Linux 5.1: only mappings that exist already can be written to."""


class BlockMemory:
    """``slots`` slots of one block each. Raises OSError: the process has no descriptors or memory left."""

    def __init__(self, slots: int) -> None:
        self.size = slots * BLOCK_BYTES
        self._fd = os.memfd_create("pannier-restore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            self._mapping = mmap.mmap(self._fd, self.size)
            _seal(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    @staticmethod
    def offset(slot: int) -> int:
        """Offset of a slot's block, in bytes."""
        return slot * BLOCK_BYTES

    def write(self, slot: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Puts a block into a slot; blocking."""
        at = self.offset(slot)
        for piece in pieces:
            self._mapping[at : at + len(piece)] = piece
            at += len(piece)

    def read(self, slot: int, start: int, count: int) -> bytes:
        """A copy of part of a slot's block."""
        at = self.offset(slot) + start
        return self._mapping[at : at + count]

    def open_for_reading(self) -> int:
        """A new descriptor; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Returns the memory, once the mappings of other processes have ended, too."""
        self._mapping.close()
        os.close(self._fd)


def _seal(fd: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Its readers check the bytes that they use.
        _log.debug("this kernel can't keep processes of this user from writing to fetched blocks")
