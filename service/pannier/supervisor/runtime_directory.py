"""The runtime directory of embedded daemons: taken, kept from cleaners of ``/tmp``, and made again.

In: a path, and the record for trainers. Out: a directory with the supervisor's lock, pid file and record, until
:meth:`RuntimeDirectory.release`. systemd-tmpfiles leaves a directory alone that another process has locked
(https://www.freedesktop.org/software/systemd/man/latest/tmpfiles.d.html, "Age"), other cleaners go by the age of
files, and a user may remove all. Single-threaded.
"""

import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import filelock

from pannier.common import timeouts
from pannier.common.daemon_process import PID, UP_LOCK
from pannier.common.daemon_record import DaemonRecord
from pannier.wire import addresses

_log = logging.getLogger(__name__)


class AlreadyRunningError(Exception):
    """Another supervisor holds this runtime directory."""


class UnsafeDirectoryError(Exception):
    """The runtime directory belongs to another user or container, or isn't a directory."""


class RuntimeDirectory:
    """See the module.

    Args:
        path: created with mode 0700.
        record: what trainers compare their own environment and version with.
    """

    def __init__(self, path: Path, record: DaemonRecord) -> None:
        self.path = path
        self._record = record
        self._lock: filelock.BaseFileLock | None = None
        self._inode = (0, 0)
        """Of the lock's file."""
        self._shared: int | None = None
        """Descriptor of the directory, with a shared lock."""
        self._touched = 0.0

    def acquire(self) -> None:
        """Waits for a supervisor that is stopping. Raises AlreadyRunningError, UnsafeDirectoryError."""
        self._create()
        lock = filelock.FileLock(self.path / UP_LOCK, mode=0o600)
        while True:
            try:
                lock.acquire(timeout=timeouts.RUNTIME_DIR_LOCK_S)
                break
            except filelock.Timeout:
                if pid := read(self.path / PID):
                    raise AlreadyRunningError(
                        f"process {pid} already supervises {self.path}"
                    ) from None
                # The supervisor that holds the lock is stopping, within its grace period.
        self._lock, self._inode = lock, _inode(self.path / UP_LOCK)

    def publish(self) -> None:
        """Writes the record and the pid file, before a daemon serves."""
        self._record.write(self.path)
        (self.path / PID).write_text(f"{os.getpid()}\n")
        self._shared = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without flock is no cleaner's /tmp
            fcntl.flock(self._shared, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def keep(self) -> None:
        """Touches the files when that is due, and makes those again that were removed.

        Raises AlreadyRunningError: another supervisor has made the directory meanwhile.
        """
        if _inode(self.path / UP_LOCK) != self._inode:
            _log.warning("%s was removed or has lost its files: they are made again", self.path)
            self._drop()
            self.acquire()
            self.publish()
            self._reopen_log()
        elif not (self.path / PID).exists():
            self._drop_shared()
            self.publish()
        if not self._touched or time.monotonic() - self._touched >= timeouts.RUNTIME_DIR_TOUCH_S:
            self._touched = time.monotonic()
            for path in (self.path, *self.path.iterdir()):
                with suppress(OSError):
                    os.utime(path)

    def remove_sockets(self, daemon: str) -> None:
        """Removes what a killed daemon left, before its successor starts."""
        for path in self.sockets(daemon):
            path.unlink(missing_ok=True)

    def sockets(self, daemon: str) -> set[Path]:
        """The sockets that are there now."""
        with suppress(OSError):
            return {each for each in self.path.glob(f"{daemon}.*") if each.is_socket()}
        return set()

    def withdraw(self) -> None:
        """Removes the pid file, before the daemons end, so that the next supervisor waits for the lock."""
        if _inode(self.path / UP_LOCK) == self._inode:
            (self.path / PID).unlink(missing_ok=True)

    def release(self) -> None:
        """The daemons have ended."""
        self._drop()

    def _drop(self) -> None:
        self._drop_shared()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _drop_shared(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None

    def _reopen_log(self) -> None:
        """The log's file was removed, too: later lines go to a new one."""
        log = self.path / addresses.LOG
        for fd in (1, 2):
            if os.readlink(f"/proc/self/fd/{fd}") == f"{log} (deleted)":
                with log.open("ab") as new:
                    os.dup2(new.fileno(), fd)

    def _create(self) -> None:
        """Makes it, or checks its owner and sets its mode."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            check_directory(self.path)
            self.path.chmod(0o700)


def check_directory(directory: Path) -> None:
    """Raises UnsafeDirectoryError."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UnsafeDirectoryError(
            f"{directory} is not a directory of user {os.getuid()}; name another one with "
            "--runtime-dir or PANNIER_RUNTIME_DIR"
        ) from None


def read(path: Path) -> str:
    """A small file's text; empty without the file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)
