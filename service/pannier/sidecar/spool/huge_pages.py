"""Huge pages for the spool's files in memory: reading, mapping and sealing them takes half the CPU, or less.

In: a part of a file of a tmpfs, with its content. Out: the same content in huge pages, also for the processes
that map the file. This needs no privilege, mount option or setting of the kernel: ``MADV_COLLAPSE`` (Linux
6.1) disregards them, also on a tmpfs with ``huge=never``. Blocking, thread-safe.
"""

import ctypes
import errno
import functools
import mmap
import os
from contextlib import closing
from pathlib import Path
from typing import Final

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


def collapse(fd: int, start: int, end: int) -> None:
    """Moves bytes ``start`` to ``end`` of a file into huge pages, as far as they fill whole ones.

    The kernel allocates the huge pages first. That takes about 0.3 s of CPU per GiB, and up to 2 s in a
    virtual machine whose host has to supply the memory. A process that accesses a page meanwhile waits until
    that page has moved.

    Raises OSError: the kernel has no huge pages, or none left; or the file is not on a tmpfs.
    """
    size = _huge_page()
    if not size or not is_tmpfs(fd):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    # The page that begins before ``start`` may be whole by now.
    first, last = start // size * size, end // size * size
    if first < last:
        _collapse(fd, first, last - first, size)


def _collapse(fd: int, offset: int, length: int, size: int) -> None:
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


def is_tmpfs(fd: int) -> bool:
    """Whether a file or directory lies in memory."""
    found = (ctypes.c_long * 64)()
    return _libc.fstatfs(fd, found) == 0 and found[0] == _TMPFS_MAGIC


@functools.cache
def _huge_page() -> int:
    """Bytes of a huge page; 0: the kernel has none."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0
