"""A directory of a file system, and accesses below it that follow no symbolic link.

In: a path as a user wrote it, the roots that it must lie below, and names relative to it. Out: descriptors of
directories, for calls with ``dir_fd``. The path itself may lead through symbolic links (a home directory on
another disk): they are resolved once, at the first access, and the result is compared with the roots. From
then on every access opens the resolved path, and a symbolic link in any place of it is an error (ELOOP). So a
link that another process makes later leads nowhere. No descriptor stays open between accesses:
directories are removed and made again, and file systems are mounted. Blocking; any thread.
"""

import ctypes
import errno
import functools
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from pannier.storage.url import resolve

_OPENAT2: Final = 437
"""System call of Linux 5.6, on x86-64 and AArch64: https://man7.org/linux/man-pages/man2/openat2.2.html"""
_NO_SYMLINKS: Final = 0x04
"""RESOLVE_NO_SYMLINKS. RESOLVE_BENEATH would add nothing: no name has a ``..``."""
_DIRECTORY: Final = os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_STEP: Final = _DIRECTORY | os.O_PATH
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
"""Without O_NONBLOCK a pipe would wait for a writer."""


class Directory:
    """A directory, which need not exist. Names are relative to it, without ``..``; the empty one is itself.

    Args:
        path: absolute.
        allowed: roots that it must lie below, or be; empty: anywhere.

    All methods raise OSError (ELOOP: a symbolic link is in the way), and DeniedError when the path leads out of
    the roots.
    """

    def __init__(self, path: str, allowed: Sequence[str] = ()) -> None:
        self.path = path
        self._allowed = allowed
        self._resolved: str | None = None

    def _at(self, name: str) -> str:
        if self._resolved is None:
            self._resolved = resolve(self.path, self._allowed)
        return posixpath.join(self._resolved, name) if name else self._resolved

    @contextmanager
    def opened(self, name: str = "", flags: int = os.O_PATH) -> Iterator[int]:
        """A descriptor of the directory ``name``."""
        fd = _open(self._at(name), flags)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def parent(self, name: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that ``name`` is in, and its name there."""
        with _parent(self._at(name)) as found:
            yield found

    def make(self, name: str = "") -> int:
        """Creates the directory ``name`` and its parents, durably; a descriptor that the caller closes."""
        path = self._at(name)
        missing: list[str] = []
        while True:
            try:
                fd = _open(path, os.O_RDONLY)
                break
            except FileNotFoundError:
                path, last = posixpath.split(path)
                missing.append(last)
            except NotADirectoryError as error:
                while not os.path.lexists(path):
                    path = posixpath.dirname(path)
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory") from error
        for last in reversed(missing):
            try:
                with suppress(FileExistsError):
                    os.mkdir(last, dir_fd=fd)
                sync(fd)
                below = _step(fd, last, os.O_RDONLY)
            finally:
                os.close(fd)
            fd = below
        return fd

    def missing(self) -> list[str]:
        """The paths that :meth:`make` would create, the deepest first."""
        path, found = self._at(""), []
        while not os.path.lexists(path):
            found.append(path)
            path = posixpath.dirname(path)
        return found

    def remove_made(self, paths: list[str]) -> None:
        """Removes those of :meth:`missing` that are empty, once they were made."""
        for path in paths:
            with suppress(OSError):  # It is in use by now.
                _rmdir(path)

    def open_file(self, name: str) -> int:
        """A descriptor of the file ``name`` for reading."""
        with self.parent(name) as (fd, last):
            return os.open(last, _FILE, dir_fd=fd)

    def stat(self, name: str) -> os.stat_result:
        """Status of ``name``, or of a symbolic link there."""
        if not name:
            with self.opened() as fd:
                return os.fstat(fd)
        with self.parent(name) as (fd, last):
            return os.stat(last, dir_fd=fd, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Removes a file durably. No error when it doesn't exist, but its directory must."""
        above, last = posixpath.split(name)
        with self.opened(above, os.O_RDONLY) as fd:
            with suppress(FileNotFoundError):
                os.unlink(last, dir_fd=fd)
            sync(fd)

    def prune(self, name: str) -> None:
        """Removes the directory ``name`` and its parents below this one, as far as they are empty."""
        while name and self.remove(name):
            name = posixpath.dirname(name)

    def remove(self, name: str = "") -> bool:
        """Removes the directory ``name``, unless it is in use."""
        try:
            _rmdir(self._at(name))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                return False
            raise
        return True

    def directories(self, name: str = "") -> list[str]:
        """Names of the directories in ``name``, sorted."""
        with self.opened(name, os.O_RDONLY) as fd, os.scandir(fd) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def walk(self, name: str = "") -> Iterator[tuple[str, int, list[str], list[str]]]:
        """``name`` and each directory below: its name, a descriptor until the next, its directories, the rest.

        Directories that are removed meanwhile are left out.
        """
        pending = [name]
        while pending:
            at = pending.pop()
            with suppress(FileNotFoundError, NotADirectoryError):
                with self.opened(at, os.O_RDONLY) as fd:
                    below: list[str] = []
                    others: list[str] = []
                    with os.scandir(fd) as entries:
                        for entry in entries:
                            into = below if entry.is_dir(follow_symlinks=False) else others
                            into.append(entry.name)
                    yield at, fd, below, others
                pending += [posixpath.join(at, each) for each in below]

    def free_bytes(self) -> int:
        """Bytes that are free where it is, or would be created."""
        path = self._at("")
        while True:
            try:
                fd = _open(path, os.O_PATH)
            except FileNotFoundError:
                path = posixpath.dirname(path)
                continue
            try:
                space = os.fstatvfs(fd)
                return space.f_bavail * space.f_frsize
            finally:
                os.close(fd)


def sync(directory: int) -> None:
    """Makes the names in an open directory durable."""
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network file systems refuse it: there, names are durable without. NFS answers ESTALE when
        # the directory was removed.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ESTALE):
            raise


@contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    above, name = posixpath.split(path)
    fd = _open(above, os.O_PATH)
    try:
        yield fd, name
    finally:
        os.close(fd)


def _rmdir(path: str) -> None:
    with _parent(path) as (fd, name):
        os.rmdir(name, dir_fd=fd)


def _open(path: str, flags: int) -> int:
    """Opens the directory at an absolute path; raises OSError (ELOOP) for a symbolic link in any place."""
    if has_openat2():
        return _openat2(path, flags)
    fd = os.open("/", _STEP)
    names = [each for each in path.split("/") if each]
    for name in [*names[:-1], *(names[-1:] or ["."])]:
        try:
            below = _step(fd, name, os.O_PATH)
        finally:
            os.close(fd)
        fd = below
    if flags & os.O_PATH:
        return fd
    try:
        return os.open(".", flags | _DIRECTORY, dir_fd=fd)
    finally:
        os.close(fd)


def _step(fd: int, name: str, flags: int) -> int:
    """Opens a directory in an open one."""
    try:
        return os.open(name, flags | _DIRECTORY, dir_fd=fd)
    except NotADirectoryError:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


@functools.cache
def has_openat2() -> bool:
    """Whether the kernel has the call (ENOSYS) and the container's filter lets it through (EPERM)."""
    try:
        os.close(_openat2("/", os.O_PATH))
    except OSError:
        return False
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _openat2(path: str, flags: int) -> int:
    # With O_NOFOLLOW it would open a link in the last place.
    how = _OpenHow(flags | os.O_DIRECTORY | os.O_CLOEXEC, 0, _NO_SYMLINKS)
    text = os.fsencode(path)
    while True:
        # No directory for the call to begin at: the path is absolute.
        fd = int(
            _libc().syscall(
                _OPENAT2, -1, text, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
            )
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code), path)
