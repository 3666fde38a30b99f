"""Huge pages for the spool's files in memory: reading, mapping and sealing them takes half the CPU, or less.

In: a file of a tmpfs that is about to get space. Out: huge pages in it, as far as the kernel has some; the
caller reserves the rest. That needs no privilege, mount option or setting of the kernel: ``MADV_COLLAPSE`` (Linux
6.1) goes by none, where tmpfs is mounted with ``huge=never``, too. Blocking, thread-safe; reads no byte of the file.
"""

import ctypes
import functools
import mmap
import os
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from pannier.common import timeouts

_PIECE: Final = 64 << 20
"""Bytes of one call: what fails, fails after so many."""
_TMPFS_MAGIC: Final = 0x01021994
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_COLLAPSE: Final = 25
_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


def add_huge_pages(fd: int, start: int, end: int) -> int:
    """Fills bytes ``start`` to ``end`` of a file of a tmpfs with huge pages, and extends it to ``end``.

    Returns the bytes that have one; where they end, the kernel had none left or took
    too long to make them (``timeouts.HUGE_PAGES_S``), or the file system had no space.
    """
    size = _huge_page()
    first, last = -(-start // size) * size if size else 0, end // size * size if size else 0
    if first >= last or not _is_tmpfs(fd):
        return 0
    done = first
    with suppress(OSError):
        os.ftruncate(fd, max(end, os.fstat(fd).st_size))
        end_s = time.monotonic() + timeouts.HUGE_PAGES_S
        while done < last and time.monotonic() < end_s:
            piece = min(_PIECE, last - done)
            # The kernel fills up what has begun, and leaves what is empty alone.
            for at in range(done, done + piece, size):
                os.posix_fallocate(fd, at, mmap.PAGESIZE)
            _collapse(fd, done, piece, size)
            done += piece
    return done - first


def _collapse(fd: int, offset: int, length: int, size: int) -> None:
    """Raises OSError: not all of it has huge pages."""
    # An address that is a multiple of the huge page.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    with closing(mmap.mmap(-1, length + size, flags=flags)) as room:
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        aligned = -(-address // size) * size
        shared = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(aligned, length, mmap.PROT_READ, shared, fd, offset) != aligned:
            raise _last_error()
        if _libc.madvise(aligned, length, _MADV_COLLAPSE):
            raise _last_error()


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _is_tmpfs(fd: int) -> bool:
    found = (ctypes.c_long * 64)()
    return _libc.fstatfs(fd, found) == 0 and found[0] == _TMPFS_MAGIC


@functools.cache
def _huge_page() -> int:
    """Bytes of one; 0: the kernel has none, or only such as are larger than a piece."""
    try:
        size = int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _PIECE else 0
