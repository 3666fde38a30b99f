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
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pannier.common import timeouts
from pannier.storage.base import StorageError
from pannier.storage.io_threads import Guarded, Threads
from pannier.storage.local.atomic_file import HIDDEN
from pannier.storage.local.directory import Directory

T = TypeVar("T")

_NAME = f"{HIDDEN}lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Locked:
    """A held lock. Released when the last call that needs it has returned."""

    def __init__(self, held: "_Held", threads: Threads) -> None:
        self._guard = Guarded(lambda: _release(held))
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
    directory: Directory, name: str, end: float, threads: Threads
) -> AsyncIterator[Locked]:
    """Holds the lock of the existing directory ``name`` in ``directory``.

    Args:
        end: time.monotonic() until which to wait for it.

    Raises:
        StorageError: another process held it until ``end``.
        OSError: the directory doesn't exist or can't be written.
    """
    began = time.monotonic()

    def undo(held: _Held | None) -> None:
        if held is not None:
            _release(held)

    while True:
        until = max(end, time.monotonic() + timeouts.HUNG_CALL_S)
        taken = await threads.run(_try, directory, name, until=until, undo=undo)
        if taken is not None:
            break
        if time.monotonic() > end:
            path = os.path.join(directory.path, name, _NAME)
            raise StorageError(
                f"{path} was held by another process for {time.monotonic() - began:.0f} s: is one stopped? "
                "It is free again when that process ends"
            )
        # The kernel has no wait for a file lock with a deadline.
        await asyncio.sleep(timeouts.LOCK_AGAIN_S * (0.5 + random.random()))
    held = Locked(taken, threads)
    try:
        yield held
    finally:
        await held.release()


_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock(2) says on a file system without locks."""


@dataclass(frozen=True)
class _Held:
    """Descriptors of a lock file that is locked, and of its directory."""

    file: int
    parent: int


def _try(directory: Directory, name: str) -> _Held | None:
    with directory.opened(name) as parent:
        fd = os.open(_NAME, _FLAGS, 0o666, dir_fd=parent)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.stat(_NAME, dir_fd=parent, follow_symlinks=False)
            mine = os.fstat(fd)
            if (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino):
                return _Held(fd, os.dup(parent))
        except FileNotFoundError:
            # The previous holder removed it with its lock.
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                os.close(fd)
                raise StorageError(
                    f"{os.path.join(directory.path, name)} can't be locked (flock: {error.strerror}): checkpoints "
                    "need file locks; mount its file system with them (Lustre: the option flock; NFS: a lock "
                    "daemon), or save elsewhere"
                ) from error
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                raise
        os.close(fd)
        return None


def _release(held: _Held) -> None:
    # First the name, then the lock: a process that locks the old file sees that it has no name.
    try:
        with suppress(FileNotFoundError):
            os.unlink(_NAME, dir_fd=held.parent)
    finally:
        os.close(held.parent)
        os.close(held.file)


def release_unheld(directory: Directory, name: str) -> bool:
    """Whether ``name`` is a lock file; removes it unless it is held. Blocking."""
    above, last = os.path.split(name)
    if last != _NAME:
        return False
    directory.stat(name)  # Raises FileNotFoundError: a lock must not be made only to be removed.
    if (held := _try(directory, above)) is not None:
        _release(held)
    return True
