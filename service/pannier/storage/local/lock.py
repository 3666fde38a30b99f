"""A lock of one directory across processes and, where the file system supports it, hosts.

The lock file exists only while a process holds or requests it, so that a checkpoint directory stays as
plain DCP writes it. Async.
"""

import asyncio
import errno
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from pannier.common import timeouts
from pannier.storage.base import StorageError
from pannier.storage.io_threads import Guarded, Threads, threads_of
from pannier.storage.local.atomic_file import HIDDEN

T = TypeVar("T")

_NAME = f"{HIDDEN}lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Locked:
    """A held lock. Released when the last call that needs it has returned."""

    def __init__(self, path: Path, fd: int, threads: Threads) -> None:
        self._guard = Guarded(lambda: _release(path, fd))
        self._threads = threads

    async def run(self, function: Callable[..., T], *args: Any, until: float) -> T:
        """As :meth:`Threads.run`; an abandoned call keeps the lock until it ends."""
        return await self._threads.run(self._guard.use, function, *args, until=until)

    async def release(self) -> None:
        """Releases the lock. Raises HungError when the file system does not answer."""
        until = time.monotonic() + timeouts.HUNG_CALL_S
        await self._threads.run(self._guard.close, until=until, closing=True)


@asynccontextmanager
async def locked(
    directory: Path, end: float, threads: Threads | None = None
) -> AsyncIterator[Locked]:
    """Holds the lock of an existing ``directory``.

    Args:
        end: time.monotonic() until which to wait for it.
        threads: default: those of the directory.

    Raises:
        StorageError: another process held it until ``end``.
        OSError: the directory doesn't exist or can't be written.
    """
    threads = threads or threads_of(str(directory))
    path = directory / _NAME
    began = time.monotonic()

    def undo(fd: int | None) -> None:
        if fd is not None:
            _release(path, fd)

    while True:
        until = max(end, time.monotonic() + timeouts.HUNG_CALL_S)
        fd = await threads.run(_try, path, until=until, undo=undo)
        if fd is not None:
            break
        if time.monotonic() > end:
            waited_s = time.monotonic() - began
            raise StorageError(
                f"{path} was held by another process for {waited_s:.0f} s: is one stopped? "
                "It is free again when that process ends"
            )
        # The kernel has no wait for a file lock with a deadline.
        await asyncio.sleep(timeouts.LOCK_AGAIN_S * (0.5 + random.random()))
    held = Locked(path, fd, threads)
    try:
        yield held
    finally:
        await held.release()


def _try(path: Path) -> int | None:
    fd = os.open(path, _FLAGS, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.stat(path)
        mine = os.fstat(fd)
        if (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino):
            return fd
    except FileNotFoundError:
        # The previous holder removed it with its lock.
        pass
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            raise
    os.close(fd)
    return None


def _release(path: Path, fd: int) -> None:
    # First the name, then the lock: a process that locks the old file sees that it has no name.
    path.unlink(missing_ok=True)
    os.close(fd)


def release_unheld(path: Path) -> bool:
    """Whether ``path`` is a lock file; removes it unless it is held. Blocking."""
    if path.name != _NAME:
        return False
    if path.exists() and (fd := _try(path)) is not None:
        _release(path, fd)
    return True
