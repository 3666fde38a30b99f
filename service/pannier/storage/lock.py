"""A lock of one directory, held across processes and, where the file system can, hosts.

The lock file exists only while somebody holds or wants it, so that a checkpoint
directory stays as plain DCP writes it.
"""

import asyncio
import errno
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pannier.storage.base import StorageError
from pannier.storage.draft import HIDDEN
from pannier.storage.threads import in_thread

_NAME = f"{HIDDEN}lock"
_RETRY_S = 0.005


@asynccontextmanager
async def locked(directory: Path, end: float) -> AsyncIterator[None]:
    """Holds the lock of an existing ``directory``.

    Args:
        end: time.monotonic() at which we wait no longer.

    Raises:
        StorageError: somebody else held it until the deadline.
        OSError: the directory doesn't exist or can't be written.
    """
    path = directory / _NAME
    began = time.monotonic()
    while (fd := await _take(path)) is None:
        if time.monotonic() > end:
            waited_s = time.monotonic() - began
            raise StorageError(
                f"{path} was held by another process for {waited_s:.0f} s: is one stopped? "
                "It is free again when that process ends"
            )
        # The kernel offers no wait for a file lock with a deadline.
        await asyncio.sleep(_RETRY_S * (0.5 + random.random()))
    try:
        yield
    finally:
        await in_thread(_release, path, fd)


async def _take(path: Path) -> int | None:
    """:func:`_try` in a thread; whoever is cancelled meanwhile holds nothing."""
    taken = []

    def take() -> int | None:
        fd = _try(path)
        if fd is not None:
            taken.append(fd)
        return fd

    try:
        return await in_thread(take)
    except asyncio.CancelledError:
        for fd in taken:
            _release(path, fd)
        raise


def _try(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.stat(path)
        mine = os.fstat(fd)
        if (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino):
            return fd
    except FileNotFoundError:
        # The holder before us removed it with its lock.
        pass
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            raise
    os.close(fd)
    return None


def _release(path: Path, fd: int) -> None:
    # First the name, then the lock: whoever locks the old file sees that it is old.
    path.unlink(missing_ok=True)
    os.close(fd)


def release_unheld(path: Path) -> bool:
    """Whether ``path`` is a lock's; removes it unless somebody holds it. Blocking."""
    if path.name != _NAME:
        return False
    if path.exists() and (fd := _try(path)) is not None:
        _release(path, fd)
    return True
