"""Checkpoints in a directory of a file system.

A file is written under another name or none, synced, and published by a link, which fails when the name
is taken; a file that replaces an expected generation is renamed under a lock. So readers see complete
files only, and what is reported is on disk, name and content.
"""

import dataclasses
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import crc32c

from pannier.common import timeouts
from pannier.common.locations import Location
from pannier.storage.base import (
    ConflictError,
    DeniedError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Progress,
    Retried,
    Source,
    StorageError,
    Store,
    Unfinished,
    end_of,
)
from pannier.storage.io_threads import BUFFER, buffers, threads_of
from pannier.storage.local.atomic_file import (
    BLOCK,
    HIDDEN,
    Draft,
    LinksUnsupportedError,
    OpenDraft,
    sync_directory,
)
from pannier.storage.local.lock import Locked, locked, release_unheld
from pannier.storage.retry import UnsettledError, in_time, settle
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from pannier.storage.url import check_key, is_allowed_file
from pannier.wire import object_names

T = TypeVar("T")

_RECORDS = object_names.attempts_prefix().rstrip("/")


class LocalStore(Store):
    """A directory, created with its first object."""

    upload_memory = BUFFER
    host_local = True

    def __init__(
        self,
        location: Location,
        threads: UploadThreads,
        *,
        deadline_s: float,
        allow: Sequence[str] = (),
    ) -> None:
        self._allow = allow
        self._root = Path(location.path)
        self.url = str(self._root)
        self._deadline_s = deadline_s
        self._upload_threads = threads
        # Checkpoints of one root share the threads.
        self._threads = threads_of(str(self._root.parent))

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a call in a thread; the call is abandoned at the deadline."""
        return await self._threads.run(function, *args, until=self._until())

    def _until(self) -> float:
        # A call that begins at the deadline still gets its answer if the file system works.
        return max(end_of(self._deadline_s), time.monotonic() + timeouts.HUNG_CALL_S)

    async def _walk(self, walk: Callable[..., T], *args: Any) -> T:
        """As :meth:`_call`, for calls that take longer in larger directories."""
        until = max(self._until(), time.monotonic() + timeouts.WALK_S)
        return await self._threads.run(walk, *args, until=until)

    def _locked(self, path: Path) -> AbstractAsyncContextManager[Locked]:
        return locked(path.parent, end_of(self._deadline_s), self._threads)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @in_time
    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`.

        Confirms that the bytes given to the kernel have the sender's checksum and that fsync
        succeeded; nothing is read back.
        """
        path = self._path(key)
        with _os_errors(path):
            try:
                return await self._upload(key, path, source, progress)
            except IntegrityError as error:
                retried(str(error))
                return await self._upload(key, path, source, progress)

    async def _upload(self, key: str, path: Path, source: Source, progress: Progress) -> ObjectInfo:
        reader = SourceReader(source, self._upload_threads)
        buffer = buffers.take()
        draft: OpenDraft | None = None
        # Writes have no deadline but the caller's.
        try:
            draft = await self._open_draft(path, direct=source.size >= BLOCK)
            await draft.copy(reader, memoryview(buffer), source.size, progress)
            crc = await reader.confirm()
            await draft.run(draft.file.sync, source.size)
            try:
                await self._publish(draft, path)
            except FileExistsError:
                there = await self.stat(key)
                same = there is not None and there.size == source.size
                if there and same and await self._threads.run(_file_crc, path) == crc:
                    return dataclasses.replace(there, crc32c=crc)
                raise ConflictError(f"{path} exists with other content", there) from None
            return _info(key, await draft.run(draft.file.stat), crc)
        finally:
            # A call that hangs still uses the buffer, which is not reused. The spool file may belong to
            # another save by then; what the call reads there is never published.
            if draft is None or await draft.close():
                reader.close()
                buffers.give(buffer)

    async def _open_draft(self, path: Path, *, direct: bool) -> "OpenDraft":
        made = await self._threads.run(
            partial(Draft, path, direct=direct), until=self._until(), undo=Draft.close
        )
        return OpenDraft(made, self._threads)

    async def _publish(self, draft: "OpenDraft", path: Path) -> None:
        try:
            await draft.run(draft.file.link, until=self._until())
        except LinksUnsupportedError:
            async with self._locked(path) as lock:
                await lock.run(draft.guard.use, draft.file.move, until=self._until())

    @in_time
    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """See :meth:`Store.create`."""
        return await self._put(key, data, None)

    @in_time
    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """See :meth:`Store.replace`."""
        return await self._put(key, data, expected)

    async def _put(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        return await settle(lambda: self._try_put(key, data, expected))

    async def _try_put(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        path = self._path(key)
        current: ObjectInfo | None = None
        with _os_errors(path):
            draft = await self._open_draft(path, direct=False)
            try:
                await draft.run(draft.file.fill, data, until=self._until())
                if expected is None:
                    with suppress(FileExistsError):
                        await self._publish(draft, path)
                        return await self._published(key, draft, data)
                # The directory was removed.
                with suppress(FileNotFoundError):
                    async with self._locked(path) as lock:
                        current = await self.stat(key)
                        if current and current.generation == expected:
                            replace = draft.file.replace
                            await lock.run(draft.guard.use, replace, until=self._until())
                            return await self._published(key, draft, data)
                        if current and await self._call(_read, path, 0, None) == data:
                            return current
                if current is None and expected is None:
                    raise UnsettledError(f"{path} existed and was removed again")
                raise ConflictError(_conflict(path, current, expected), current)
            finally:
                await draft.close()

    async def _published(self, key: str, draft: "OpenDraft", data: bytes) -> ObjectInfo:
        stat = await draft.run(draft.file.stat, until=self._until())
        return _info(key, stat, crc32c.crc32c(data))

    @in_time
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        path = self._path(key)
        with _os_errors(path):
            return await self._call(_read, path, offset, length, self._allow)

    @in_time
    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`; a local file has no stored checksum."""
        path = self._path(key)
        with _os_errors(path):
            try:
                return _info(key, await self._call(_stat, path), None)
            except (FileNotFoundError, NotADirectoryError):
                return None

    @in_time
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        with _os_errors(self._root):
            return await self._walk(_walk, self._root, prefix)

    @in_time
    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`Store.list_directories`."""
        path = self._path(prefix.rstrip("/")) if prefix else self._root
        with _os_errors(path):
            return await self._walk(_directories, path)

    @in_time
    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`. Directories below the store's own that become empty are removed."""
        path = self._path(key)
        with _os_errors(path):
            try:
                async with self._locked(path) as lock:
                    if generation is not None:
                        current = await self.stat(key)
                        if current is None or current.generation != generation:
                            return
                    await lock.run(_unlink, path, until=self._until())
            except (FileNotFoundError, NotADirectoryError):
                return
            await self._call(self._prune, path.parent)

    def _prune(self, directory: Path) -> None:
        while directory != self._root and self._root in directory.parents:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                    return
                raise
            directory = directory.parent

    @in_time
    async def list_unfinished(self) -> Sequence[Unfinished]:
        """See :meth:`Store.list_unfinished`: temporary files, locks, and empty directories that
        killed processes left.
        """
        with _os_errors(self._root):
            return await self._walk(_walk_hidden, self._root)

    @in_time
    async def discard(self, item: Unfinished) -> None:
        """See :meth:`Store.discard`. A lock that is held and a directory in use stay."""
        path = self._path(item.key)
        with _os_errors(path):
            if await self._call(path.is_dir):
                await self._call(self._prune, path)
                return
            with suppress(FileNotFoundError):  # Removed with its directory.
                if not await self._call(release_unheld, path):
                    await self._call(_unlink, path)
            await self._call(self._prune, path.parent)

    async def probe(self) -> None:
        """See :meth:`Store.probe`. Directories that it created are removed again."""
        with _os_errors(self._root):
            made = await self._call(_missing, self._root)
        try:
            await super().probe()
        finally:
            await self._call(_remove_empty, made)

    async def close(self) -> None:
        """Nothing is held open."""


def _missing(directory: Path) -> list[Path]:
    return [path for path in (directory, *directory.parents) if not path.exists()]


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with suppress(OSError):  # It is in use by now.
            path.rmdir()


def _stat(path: Path) -> os.stat_result:
    found = path.stat()
    _check_kind(path, found)
    return found


def _check_kind(path: Path, found: os.stat_result) -> None:
    """Raises StorageError for pipes, sockets and devices: reading them might never end."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise StorageError(
            f"{path} is not a regular file ({stat.filemode(found.st_mode)}): remove it"
        )


def _open_regular(path: Path, allow: Sequence[str] = ()) -> FileIO:
    # Without O_NONBLOCK a pipe would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(fd))
        # Not before it is open: links on the way to it may change at any time.
        if allow and not is_allowed_file(os.readlink(f"/proc/self/fd/{fd}"), allow):
            raise DeniedError(
                f"{path} leads to a file that is not below an allowed root ({', '.join(allow)})"
            )
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _read(path: Path, offset: int, length: int | None, allow: Sequence[str] = ()) -> bytes:
    with _open_regular(path, allow) as file:
        file.seek(offset)
        if length is None:
            return file.readall()
        parts = []
        while length > 0 and (part := file.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _file_crc(path: Path) -> int:
    crc = 0
    with _open_regular(path) as file:
        while part := file.read(1 << 20):
            crc = crc32c.crc32c(part, crc)
    return crc


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def _info(key: str, found: os.stat_result, crc: int | None) -> ObjectInfo:
    token = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    generation = hashlib.sha256(token.encode()).hexdigest()[:16]
    return ObjectInfo(key, found.st_size, generation, crc, found.st_mtime)


def _conflict(path: Path, current: ObjectInfo | None, expected: str | None) -> str:
    if current is None:
        return f"{path} does not exist, expected was generation {expected}"
    if expected is None:
        return f"{path} exists with other content"
    return f"{path} has generation {current.generation}, not {expected}"


def _walk(root: Path, prefix: str) -> list[ObjectInfo]:
    above, _, _ = prefix.rpartition("/")
    found = []
    for directory, _, names in os.walk(
        root / check_key(above) if above else root, onerror=_unless_gone
    ):
        for name in names:
            path = Path(directory, name)
            key = path.relative_to(root).as_posix()
            if name.startswith(HIDDEN) or not key.startswith(prefix):
                continue
            with suppress(FileNotFoundError):
                info = path.stat()
                if stat.S_ISREG(info.st_mode):
                    found.append(_info(key, info, None))
    return sorted(found, key=lambda info: info.key)


def _directories(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk_hidden(root: Path) -> list[Unfinished]:
    found = []
    for directory, below, names in os.walk(root, onerror=_unless_gone):
        leftovers = [Path(directory, name) for name in names if name.startswith(HIDDEN)]
        # Empty directories may be intended, but not among the records.
        if not below and not names and _RECORDS in Path(directory).relative_to(root).parts:
            leftovers.append(Path(directory))
        for path in leftovers:
            with suppress(FileNotFoundError):
                info = path.stat()
                size = 0 if path.is_dir() else info.st_size
                key = path.relative_to(root).as_posix()
                found.append(Unfinished(key, size, info.st_mtime, path.name))
    return found


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Raises the operating system's errors as the store's."""
    try:
        yield
    except OSError as error:
        text = f"{path}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DeniedError(
                f"{text}; check its owner and mode, and whose user runs the daemon"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{text}{_room(path)}; free some and save again") from error
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            raise NotFoundError(text) from error
        raise StorageError(text) from error


def _room(path: Path) -> str:
    for place in (path, *path.parents):
        with suppress(OSError):
            space = os.statvfs(place)
            return f" ({space.f_bavail * space.f_frsize} bytes are free)"
    return ""
