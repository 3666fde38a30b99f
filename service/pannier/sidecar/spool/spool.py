"""The directory that holds data files until they are durable: space is reserved before a byte comes.

In: sizes. Out: files with reserved space. When their content is no longer needed, they are recycled for
the same job: fresh pages of a tmpfs cost about ten times the copy itself. Blocking, thread-safe.
"""

import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pannier.common import fault_points, timeouts
from pannier.common.cgroup import MemoryLimit, memory_limit
from pannier.common.units import size_text
from pannier.daemon.listeners import make_private_directory
from pannier.sidecar.spool.allocation import PAGE, reserve, whole_pages
from pannier.sidecar.spool.huge_pages import collapse, is_tmpfs
from pannier.sidecar.spool.lock_holder import lock_holder
from pannier.wire.errors import BusyError, ConfigurationError, PannierError
from pannier.wire.file_layout import STAMP_BYTES

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"\d{8,}\.data")
"""Names of spool files; no other file of the directory is touched."""
_SMALL: Final = 1 << 20
"""Spool files up to this size fit any small data file."""
_BUSY: Final = (errno.EAGAIN, errno.EBUSY)
_PIECE: Final = 8 << 20  # bytes that are moved into huge pages at a time
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""The kernel, the file system or a sandbox has no such call."""


class SpoolInUseError(ConfigurationError):
    """Another sidecar has locked the spool, or another user made its directory."""


class SpoolFile:
    """One file of the spool with ``capacity`` bytes reserved, owned by the caller of :meth:`Spool.take`."""

    def __init__(self, path: Path, fd: int, job: str) -> None:
        self.path = path
        self.fd = fd
        self.job = job
        self.capacity = 0
        self.collapsed = 0
        """Bytes that have huge pages, or can't have them."""

    @property
    def stageable(self) -> int:
        """Bytes that a trainer may stage into; the stamp follows them."""
        return self.capacity - STAMP_BYTES

    def read_stamp(self) -> bytes:
        """The stamp that the trainer has written; shorter where the file was truncated."""
        return os.pread(self.fd, STAMP_BYTES, self.stageable)


@dataclass(frozen=True)
class SpoolUsage:
    """How full a spool is, in bytes."""

    reserved: int = 0
    """All files, taken or free."""
    spare: int = 0
    """Files that no save uses."""
    capacity: int = 0
    """The most that it can have."""
    bound: str = ""
    """What allows no more: ``in its budget``."""
    free: int = 0
    """Free for saves."""
    limit: MemoryLimit | None = None
    """Of this process, which pays for the files of a spool in memory; None: it has none, or the spool is on a disk."""


class Spool:
    """One sidecar's spool directory, locked against others as long as it is open.

    At start, :meth:`adopt` takes over what the journal needs, then :meth:`sweep` removes what else an
    earlier sidecar process left.
    """

    def __init__(self, directory: Path, budget: int | None = None) -> None:
        """Opens the directory, making it if need be.

        Args:
            directory: has mode 0700 when it is made here.
            budget: most bytes of all spool files together; None: what the file system has. In memory, files
                also stay within this process's memory limit.

        Raises ConfigurationError: it can't be used, or another sidecar does.
        """
        self.directory = directory
        self.budget = budget
        self.usage = SpoolUsage()
        """As of the last change, or of :meth:`measure`."""
        self.overhead = 0
        """Bytes of the file system that the journal takes."""
        self._lock = threading.Lock()
        self._free: dict[str, deque[SpoolFile]] = {}
        """Unused files by job, the most recently used one last; jobs in order of their first use."""
        self._files: set[SpoolFile] = set()
        """All files, free or taken."""
        self._active: dict[str, float] = {}
        """When a job with free files was last active, as of :meth:`trim`."""
        self._taken = 0
        self._reserved = 0
        self._requested = 0
        """Of these bytes: the kernel may not have counted them to this process's memory yet."""
        self._next = 0
        try:
            make_private_directory(directory)
            self._check()
            self._directory_fd = self._take_lock()
        except OSError as error:
            raise ConfigurationError(f"the spool {directory} can't be used: {error}") from error
        self.measure()

    def measure(self) -> None:
        """Updates :attr:`usage`, which no lock protects. To be called every second or so."""
        space = os.fstatvfs(self._directory_fd)
        limit = self.limit()
        with self._lock:
            capacity, bound = self._capacity(space, limit)
            free = max(0, self._room(space, limit))
            self.usage = SpoolUsage(self._reserved, self._unused(), capacity, bound, free, limit)

    def limit(self) -> MemoryLimit | None:
        """See :attr:`SpoolUsage.limit`; as of now."""
        return memory_limit() if is_tmpfs(self._directory_fd) else None

    @property
    def too_large(self) -> str:
        """What to change where this process's memory can't hold as much as the spool may have; "": it can."""
        limit, fits = self.usage.limit, self.usage.capacity
        size, _ = self._capacity(os.fstatvfs(self._directory_fd), None)
        if limit is None or size <= fits:
            return ""
        return (
            f"the spool {self.directory} may have {size_text(size)}, but {limit}: it is kept to "
            f"{size_text(fits)}; give this container more memory (Kubernetes: SIDECAR_MEMORY), or the spool "
            "less (SPOOL_SIZE, --spool-budget), or name a --spool (embedded: PANNIER_SPOOL) on a disk"
        )

    def check_fits(self, sizes: Iterable[int]) -> None:
        """Raises ConfigurationError when files of these sizes never fit, even into an empty spool."""
        space, limit = os.statvfs(self.directory), self.limit()
        with self._lock:
            room, of = self._capacity(space, limit)
        needed = sum(whole_pages(size) for size in sizes)
        if room and needed > room:
            raise ConfigurationError(
                f"the spool {self.directory} is too small for this save: {needed} bytes needed on "
                f"this host until it is committed, {room} {of} in total; give the sidecar a larger "
                "--spool-budget, or a --spool (embedded: PANNIER_SPOOL) on a larger file system"
                + (", such as a disk's" if limit is not None else "")
            )

    def take(self, job: str, size: int, *, spare: int = 0) -> SpoolFile:
        """A file of at least ``size`` bytes, which no other job has ever used, with any content.

        Args:
            spare: bytes of room that must be left afterwards.

        Raises:
            BusyError: there is no room, with the bytes needed and free.
            PannierError: the spool can't be written.
        """
        if self.removed:
            raise PannierError(
                f"the spool {self.directory} was removed under the running sidecar: restart the sidecar"
            )
        with self._lock:
            if spare:
                self._check_spare(whole_pages(size), spare)
            file, missing = self._choose(job, size)
            self._requested += missing
            try:
                self._evict_for(missing, job)
            except BusyError:
                self._requested -= missing
                if file is not None:
                    self._free[job].append(file)
                raise
            self._reserved += missing
            self._taken += 1
        try:
            if file is None:
                file = self._create(job)
            self._reserve(file, missing)
        except BaseException as error:
            with self._lock:
                self._taken -= 1
                self._reserved -= missing
                if file is not None:
                    self._remove(file)
            if isinstance(error, OSError):
                raise PannierError(
                    f"the spool {self.directory} can't be written: {error}"
                ) from error
            raise
        finally:
            with self._lock:
                self._requested -= missing
        self.measure()
        return file

    @property
    def removed(self) -> bool:
        """Whether the directory was removed, or another one is in its place.

        Raises PannierError: its file system doesn't say.
        """
        try:
            found = os.stat(self.directory)
            return not os.path.samestat(found, os.fstat(self._directory_fd))
        except FileNotFoundError:
            return True
        except OSError as error:
            raise PannierError(f"the spool {self.directory} can't be used: {error}") from error

    def taken_by(self, job: str) -> int:
        """Bytes of the job's files that aren't free."""
        with self._lock:
            free = sum(file.capacity for file in self._free.get(job, ()))
            return sum(file.capacity for file in self._files if file.job == job) - free

    def give(self, file: SpoolFile) -> None:
        """Takes a file back whose content is no longer needed, read or written."""
        # A trainer that maps a truncated file dies of SIGBUS.
        whole = os.fstat(file.fd).st_size == file.capacity
        with self._lock:
            self._taken -= 1
            if whole:
                self._free.setdefault(file.job, deque()).append(file)
            else:
                self._remove(file)
        self.measure()
        if not whole:
            _log.warning("%s isn't recycled: a trainer has changed its size", file.path)

    def trim(self, active: Collection[str]) -> None:
        """Removes the unused files of jobs that haven't been ``active`` for a while, and where memory is short.

        To be called now and then.
        """
        now = time.monotonic()
        with self._lock:
            for job in list(self._free):
                if job in active or job not in self._active:
                    self._active[job] = now
                elif now - self._active[job] >= timeouts.SPOOL_FILE_KEPT_S:
                    del self._active[job]
                    for file in self._free.pop(job):
                        self._remove(file)
            # Other memory of this process's group has grown.
            while (limit := self.limit()) is not None and limit.free < 0 and self._evict_one(""):
                pass
        self.measure()

    def collapse(self, may_go_on: Callable[[], bool]) -> None:
        """Moves files into huge pages, a few MiB at a time, for a second at most. In any thread.

        Args:
            may_go_on: False: a save is under way, and needs the processor.
        """
        end_s = time.monotonic() + timeouts.CHECK_S
        while may_go_on() and time.monotonic() < end_s:
            with self._lock:
                file = next((each for each in self._files if each.collapsed < each.capacity), None)
                if file is None:
                    return
                start, end = file.collapsed, min(file.collapsed + _PIECE, file.capacity)
                # It may be removed meanwhile.
                fd = os.dup(file.fd)
            try:
                collapse(fd, start, end)
            except OSError as error:
                # Pages that aren't moved stay as they are, which is only slower.
                if error.errno not in _BUSY:
                    end = file.capacity
            finally:
                os.close(fd)
            file.collapsed = end

    def adopt(self, name: str, job: str, size: int) -> SpoolFile:
        """The file that an earlier sidecar process had taken for that job, with its content.

        Raises PannierError: it isn't there, or isn't a file of the spool.
        """
        path = self.directory / name
        if not _NAME.fullmatch(name):
            raise PannierError(f"{name!r} is not the name of a spool file")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise PannierError(f"the spool file {path} can't be opened: {error}") from error
        found = os.fstat(fd)
        if not (
            stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size >= size
        ):
            os.close(fd)
            raise PannierError(
                f"the spool file {path} has {found.st_size} bytes and belongs to user "
                f"{found.st_uid}, not {size} or more and user {os.geteuid()}"
            )
        file = SpoolFile(path, fd, job)
        file.capacity = found.st_size // PAGE * PAGE
        with self._lock:
            self._files.add(file)
            self._taken += 1
            self._reserved += file.capacity
            self._next = max(self._next, int(path.stem))
        return file

    def sweep(self) -> None:
        """Removes files that an earlier sidecar process left and that weren't adopted."""
        with self._lock:
            ours = {file.path.name for file in self._files}
            for path in self.directory.iterdir():
                if _NAME.fullmatch(path.name) and path.name not in ours:
                    path.unlink()
                    fault_points.point("sidecar.spool_file.removed")

    def close(self, keep: Collection[str] | None = ()) -> None:
        """Removes all files but those with a name in ``keep``, and unlocks the directory.

        No save uses them any more. None: removes none.
        """
        with self._lock:
            self._free.clear()
            for file in list(self._files):
                if keep is None or file.path.name in keep:
                    os.close(file.fd)
                    self._files.discard(file)
                else:
                    self._remove(file)
        os.close(self._directory_fd)

    def _check_spare(self, size: int, spare: int) -> None:
        room = self._room(os.statvfs(self.directory), self.limit())
        if room - size < spare:
            raise BusyError(
                f"the spool {self.directory} has room for {max(0, room)} more bytes, {spare} of "
                f"them for saves that began earlier, and {size} are needed: wait for those, or "
                "give the sidecar more room (--spool, --spool-budget)"
            )

    def _total(self, space: os.statvfs_result) -> int:
        """Bytes of the file system for spool files; 0: it doesn't report them."""
        # Without what only root may use.
        total = (space.f_blocks - space.f_bfree + space.f_bavail) * space.f_frsize
        return total - min(total, self.overhead)

    def _capacity(self, space: os.statvfs_result, limit: MemoryLimit | None) -> tuple[int, str]:
        """Most bytes of spool files, and what allows no more; with the lock held. 0: that isn't known."""
        capacity, of = self._total(space), "on its file system"
        if self.budget is not None and not 0 < capacity <= self.budget:
            capacity, of = self.budget, "in its budget"
        if limit is not None:
            within = max(1, self._reserved - self._requested + limit.free)
            if not 0 < capacity <= within:
                capacity, of = within, f"in memory ({limit})"
        return capacity, of

    def _room(self, space: os.statvfs_result, limit: MemoryLimit | None) -> int:
        """Bytes that could still be taken; with the lock held."""
        room: int = space.f_bavail * space.f_frsize
        if self.budget is not None:
            room = min(room, self.budget - self._reserved)
        if limit is not None:
            room = min(room, limit.free - self._requested)
        return room + self._unused()

    def _unused(self) -> int:
        """Bytes of the files that no save uses; with the lock held."""
        return sum(file.capacity for files in self._free.values() for file in files)

    def _check(self) -> None:
        found = self.directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SpoolInUseError(
                f"the spool {self.directory} belongs to user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):o}: others can write it; name a directory "
                "below it that doesn't exist yet, or chmod go-w one of your own"
            )

    def _take_lock(self) -> int:
        """Locks the directory itself, so that an empty spool is an empty directory."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SpoolInUseError(
                    f"another sidecar works on the spool {self.directory}{lock_holder(fd)}; end it (embedded "
                    "daemons: `pannier down --runtime-dir DIRECTORY`), or give each its own --spool "
                    "(PANNIER_SPOOL)"
                ) from error
            except OSError as error:
                raise ConfigurationError(
                    f"the spool {self.directory} can't be locked (flock: {error.strerror}): its file system, such as "
                    "NFS without locks or Lustre without the mount option flock, has no file locks; name a directory "
                    "on a local disk or tmpfs (--spool, PANNIER_SPOOL)"
                ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _choose(self, job: str, size: int) -> tuple[SpoolFile | None, int]:
        """A free file of the job, if one fits well, and how many bytes it lacks."""
        free = self._free.get(job, ())
        # Not a huge one for a small file: the next huge file would need fresh pages.
        fitting = [s for s in free if size <= s.capacity <= max(2 * size, _SMALL)]
        if fitting:
            best = min(fitting, key=lambda file: file.capacity)
        else:
            near = [s for s in free if size // 2 <= s.capacity < size]
            if not near:
                return None, whole_pages(size)
            best = max(near, key=lambda file: file.capacity)
        self._free[job].remove(best)
        return best, max(0, whole_pages(size) - best.capacity)

    def _evict_for(self, missing: int, job: str) -> None:
        """Removes free files, those of other jobs first, until ``missing`` more bytes are within budget and memory."""
        while self.budget is not None and self._reserved + missing > self.budget:
            if not self._evict_one(job):
                free = max(0, self.budget - self._reserved)
                raise self._full(missing, f"{free} free of its budget of {self.budget}")
        while missing and (limit := self.limit()) is not None and limit.free < self._requested:
            if limit.free + self._unused() < self._requested or not self._evict_one(job):
                free = max(0, limit.free - self._requested + missing)
                raise self._full(missing, f"{free} free, since {limit}")

    def _evict_one(self, job: str) -> bool:
        """Removes a free file, one of ``job`` last; False: there is none. With the lock held."""
        for owner in sorted(self._free, key=lambda owner: owner == job):
            if self._free[owner]:
                self._remove(self._free[owner].popleft())
                return True
        return False

    def _reserve(self, file: SpoolFile, missing: int) -> None:
        while missing:
            try:
                reserve(file.fd, file.path, file.capacity, missing)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with self._lock:
                    evicted = self._evict_one(file.job)
                if not evicted:
                    free = (space := os.statvfs(self.directory)).f_bavail * space.f_frsize
                    raise self._full(missing, f"{free} free on its file system") from error
            else:
                file.capacity += missing
                return

    def _create(self, job: str) -> SpoolFile:
        with self._lock:
            self._next += 1
            path = self.directory / f"{self._next:08d}.data"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path.name, flags, 0o600, dir_fd=self._directory_fd)
        os.fchmod(fd, 0o600)  # whatever the umask: a restarted sidecar opens it, too
        file = SpoolFile(path, fd, job)
        with self._lock:
            self._files.add(file)
        fault_points.point("sidecar.spool_file.created")
        return file

    def _remove(self, file: SpoolFile) -> None:
        self._files.discard(file)
        with suppress(FileNotFoundError):
            # In the opened directory: another one may be in its place by now.
            os.unlink(file.path.name, dir_fd=self._directory_fd)
        fault_points.point("sidecar.spool_file.removed")
        os.close(file.fd)
        self._reserved -= file.capacity

    def _full(self, missing: int, free: str) -> BusyError:
        return BusyError(
            f"the spool {self.directory} is full: {missing} bytes needed, {free}, {self._taken} "
            "files of saves under way; wait for those, or give the sidecar more room (--spool, "
            "--spool-budget)"
        )
