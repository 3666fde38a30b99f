"""A local file that becomes visible only when it is complete and on disk.

In: content. Out: a file that is published by a link (creates) or a rename (replaces), with file and
directory synced. A :class:`Draft` blocks and runs in threads; an :class:`OpenDraft` calls it from the
event loop.
"""

import errno
import fcntl
import math
import os
import posixpath
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pannier.common import timeouts
from pannier.storage.base import Progress
from pannier.storage.io_threads import Guarded, HungError, Threads
from pannier.storage.local.directory import Directory, sync
from pannier.storage.source_reader import SourceReader

T = TypeVar("T")

HIDDEN = ".pannier-"
"""Names of the store's own files in a checkpoint directory start with it."""
BLOCK = 4096
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_PRUNES = 100
"""Times in a row that other processes may remove the empty directory of a new file."""
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LinksUnsupportedError(OSError):
    """This file system has no hard links."""


class Draft:
    """One unpublished file in the directory of its target.

    Where the kernel supports it, the file has no name, so that even a killed process leaves nothing
    behind.

    Args:
        target: final name; its directory is created.
        direct: write past the page cache, whose fresh pages cost several times the write
            itself; needs aligned buffers.
    """

    def __init__(self, directory: Directory, target: str, *, direct: bool) -> None:
        self._directory = directory
        self._above, self._target = posixpath.split(target)
        self._parent = -1
        """Descriptor of the target's directory."""
        self._name = ""
        """Temporary name; empty: none."""
        self._direct = direct
        try:
            self._fd = self._in_parent(self._open)
        except BaseException:
            self._leave()
            raise

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        while True:
            direct = os.O_DIRECT if self._direct else 0
            try:
                return os.open(".", flags | os.O_TMPFILE | direct, 0o666, dir_fd=self._parent)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
            name = self._new_name()
            create = flags | os.O_CREAT | os.O_EXCL | direct
            try:
                fd = os.open(name, create, 0o666, dir_fd=self._parent)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=self._parent)  # Created before the refusal.
                    self._direct = False
                    continue
                raise
            self._name = name
            return fd

    def _in_parent(self, make: Callable[[], T]) -> T:
        """Runs ``make`` in the target's directory, which is created again when it is removed.

        A directory with nothing but a nameless file counts as empty, and is removed with its last
        named file.
        """
        for last in range(_PRUNES, -1, -1):
            try:
                parent = self._directory.make(self._above)
                self._leave()
                self._parent = parent
                return make()
            except FileNotFoundError:
                if not last:
                    raise
        raise AssertionError("unreachable")

    def _leave(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
            self._parent = -1

    def _new_name(self) -> str:
        return f"{HIDDEN}{uuid.uuid4().hex}.tmp"

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of ``view``.

        When direct, start, length and offset are multiples of BLOCK; :meth:`sync` cuts off the
        bytes beyond the end.
        """
        done = 0
        while done < len(view):
            if self._direct and done % BLOCK:
                self._go_through_cache()
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_through_cache()

    def _go_through_cache(self) -> None:
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def sync(self, size: int) -> None:
        """Gives the file its final size and makes its content durable."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def fill(self, data: bytes) -> None:
        """Writes all content at once, durably."""
        self.write(memoryview(data), 0)
        self.sync(len(data))

    def link(self) -> None:
        """Publishes it unless the target exists.

        Raises:
            FileExistsError: the target exists.
            LinksUnsupportedError: use :meth:`move`.
        """
        self._link(self._target)
        sync(self._parent)

    def move(self) -> None:
        """:meth:`link` for file systems without links; only safe under the directory's lock."""
        with suppress(FileNotFoundError):
            os.stat(self._target, dir_fd=self._parent, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, "exists", self._target)
        self.replace()

    def replace(self) -> None:
        """Publishes it in place of the target; readers see the old or the new file."""
        if not self._name:
            name = self._new_name()
            self._link(name)
            self._name = name
        os.rename(self._name, self._target, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._name = ""
        sync(self._parent)

    def _link(self, name: str) -> None:
        try:
            if self._name:
                os.link(self._name, name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            else:
                self._in_parent(lambda: self._link_nameless(name))
        except OSError as error:
            if error.errno in _NO_LINK:
                raise LinksUnsupportedError(error.errno, error.strerror) from error
            raise

    def _link_nameless(self, name: str) -> None:
        # os.link() follows /proc's link to the file only when a directory is given.
        os.link(f"/proc/self/fd/{self._fd}", name, src_dir_fd=self._fd, dst_dir_fd=self._parent)

    def stat(self) -> os.stat_result:
        """Status of the file, published or not."""
        return os.fstat(self._fd)

    def close(self) -> None:
        """Closes the file; removes it if it wasn't published."""
        os.close(self._fd)
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._parent)
            self._name = ""
        self._leave()


class OpenDraft:
    """A draft that is written by calls in threads."""

    def __init__(self, file: Draft, threads: Threads) -> None:
        self.file = file
        self.guard = Guarded(file.close)
        self._threads = threads

    async def run(self, function: Callable[..., T], *args: Any, until: float = math.inf) -> T:
        """Runs a call that uses the draft; a call that hangs keeps the draft open."""
        return await self._threads.run(self.guard.use, function, *args, until=until)

    async def copy(
        self, reader: SourceReader, view: memoryview, size: int, progress: Progress
    ) -> None:
        """Writes ``size`` bytes of ``reader`` by way of the buffer ``view``.

        A file is read and written by turns, in one call: several files at a time keep the disk busy, and a
        call in another thread costs as much CPU as reading 1 MiB.
        """
        for offset in range(0, size, len(view)):
            length = min(len(view), size - offset)
            await reader.wait_for(offset + length)
            await reader.take(length)
            await self.run(self._copy_part, reader, view, length, offset)
            progress(offset + length)

    def _copy_part(self, reader: SourceReader, view: memoryview, length: int, offset: int) -> None:
        reader.read(view[:length], offset)
        # Whole blocks; the draft is cut to its size in the end.
        self.file.write(view[: -(-length // BLOCK) * BLOCK], offset)

    async def close(self) -> bool:
        """Closes it; False while a call still uses it, or when the file system doesn't answer."""
        until = time.monotonic() + timeouts.HUNG_CALL_S
        try:
            return await self._threads.run(self.guard.close, until=until, closing=True)
        except HungError:
            return False
