"""A local file in the making: nobody sees it before it is whole and on disk.

Blocking; runs in threads. In goes content, out comes a file that is published by
a link (creates) or a rename (replaces), with file and directory synced.
"""

import errno
import fcntl
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HIDDEN = ".pannier-"
"""Names of the store's own files in a checkpoint directory start with it."""
BLOCK = 4096
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_PRUNES = 100
"""Times in a row that others may remove an empty directory in which a file is to be made."""
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LinksUnsupportedError(OSError):
    """This file system has no hard links."""


def sync_directory(directory: Path) -> None:
    """Makes names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems refuse it: there, names are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Creates a directory and its parents, durably."""
    missing = []
    at = directory
    while not at.is_dir():
        # Asked once more: another rank's upload may just have made it.
        if at.exists() and not at.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{at} is not a directory")
        missing.append(at)
        at = at.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


class Draft:
    """One unpublished file beside ``target``.

    Where the kernel can, it has no name at all, so that even a killed process
    leaves nothing behind.

    Args:
        target: final path; its directory is created.
        direct: write around the page cache, whose fresh pages cost several
            times the write itself; needs aligned buffers.
    """

    def __init__(self, target: Path, *, direct: bool) -> None:
        self._target = target
        self._name: Path | None = None
        self._direct = direct
        self._fd = self._in_directory(self._open)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        while True:
            direct = os.O_DIRECT if self._direct else 0
            try:
                return os.open(self._target.parent, flags | os.O_TMPFILE | direct, 0o666)
            except OSError as error:
                if error.errno not in _NO_TMPFILE or not self._target.parent.is_dir():
                    raise
            name = self._new_name()
            try:
                fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | direct, 0o666)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    name.unlink(missing_ok=True)  # Created before the refusal.
                    self._direct = False
                    continue
                raise
            self._name = name
            return fd

    def _in_directory(self, make: Callable[[], T]) -> T:
        """Runs ``make`` in the target's directory, which is created again when others remove it.

        A file without a name doesn't keep its directory: it counts as empty, and is removed after
        the last other file in it.
        """
        for last in range(_PRUNES, -1, -1):
            try:
                make_directory(self._target.parent)
                return make()
            except FileNotFoundError:
                if not last:
                    raise
        raise AssertionError("unreachable")

    def _new_name(self) -> Path:
        return self._target.with_name(f"{HIDDEN}{uuid.uuid4().hex}.tmp")

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of ``view``. When direct, start, length and offset are multiples of BLOCK;
        what lies beyond the end is cut off by :meth:`sync`.
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

    def link(self) -> None:
        """Publishes it unless something is there.

        Raises:
            FileExistsError: something is there.
            LinksUnsupportedError: use :meth:`move`.
        """
        self._link(self._target)
        self._sync_name()

    def move(self) -> None:
        """:meth:`link` for file systems without links; only safe under the directory's lock."""
        if os.path.lexists(self._target):
            raise FileExistsError(errno.EEXIST, "exists", str(self._target))
        self.replace()

    def replace(self) -> None:
        """Publishes it in place of what is there; readers see the one or the other."""
        if self._name is None:
            name = self._new_name()
            self._link(name)
            self._name = name
        os.rename(self._name, self._target)
        self._name = None
        self._sync_name()

    def _sync_name(self) -> None:
        # Gone with its directory: others have removed what was published, which is durable, too.
        with suppress(FileNotFoundError):
            sync_directory(self._target.parent)

    def _link_nameless(self, path: Path) -> None:
        # Only with a directory does os.link() follow /proc's link to the file.
        os.link(f"/proc/self/fd/{self._fd}", path, src_dir_fd=self._fd)

    def _link(self, path: Path) -> None:
        try:
            if self._name is None:
                self._in_directory(lambda: self._link_nameless(path))
            else:
                os.link(self._name, path)
        except OSError as error:
            if error.errno in _NO_LINK:
                raise LinksUnsupportedError(error.errno, error.strerror) from error
            raise

    def stat(self) -> os.stat_result:
        """Of the file, published or not."""
        return os.fstat(self._fd)

    def close(self) -> None:
        """Ends it; what wasn't published is gone."""
        os.close(self._fd)
        if self._name is not None:
            with suppress(FileNotFoundError):
                self._name.unlink()
            self._name = None
