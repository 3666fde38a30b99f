"""Checkpoints in a directory of a file system.

A file is written under another name or none, synced, and published by a link, which fails when the name
is taken; a file that replaces an expected generation is renamed under a lock. So readers see complete
files only, and what is reported is on disk, name and content. Every access goes through the store's
:class:`~pannier.storage.local.directory.Directory`, in a thread.
"""

import dataclasses
import errno
import hashlib
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from io import FileIO
from typing import Any, TypeVar

import crc32c

from pannier.common import timeouts
from pannier.common.locations import Location
from pannier.common.units import size_text
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
)
from pannier.storage.local.directory import Directory
from pannier.storage.local.lock import Locked, locked, release_unheld
from pannier.storage.retry import UnsettledError, in_time, settle
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from pannier.storage.url import check_key
from pannier.wire import object_names

T = TypeVar("T")

_RECORDS = object_names.attempts_prefix().rstrip("/")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore(Store):
    """A directory, created with its first object.

    Args:
        allow: roots that it must lie below, or be; empty: anywhere.
    """

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
        self._directory = Directory(location.path, allow)
        self.url = location.path
        self._deadline_s = deadline_s
        self._upload_threads = threads
        # Checkpoints of one root share the threads.
        self._threads = threads_of(os.path.dirname(location.path))

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

    def _locked(self, key: str) -> AbstractAsyncContextManager[Locked]:
        above = os.path.dirname(key)
        return locked(self._directory, above, end_of(self._deadline_s), self._threads)

    def _path(self, key: str) -> str:
        return os.path.join(self.url, check_key(key))

    @asynccontextmanager
    async def _errors(self, path: str) -> AsyncIterator[None]:
        """Raises the operating system's errors as the store's."""
        try:
            yield
        except OSError as error:
            free = ""
            if error.errno in _FULL:
                with suppress(OSError, StorageError):
                    free = f" ({size_text(await self._call(self._directory.free_bytes))} are free)"
            raise _as_storage_error(error, path, free) from error

    @in_time
    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`.

        Confirms that the bytes given to the kernel have the sender's checksum and that fsync
        succeeded; nothing is read back.
        """
        path = self._path(key)
        async with self._errors(path):
            try:
                return await self._upload(key, source, progress)
            except IntegrityError as error:
                retried(str(error))
                return await self._upload(key, source, progress)

    async def _upload(self, key: str, source: Source, progress: Progress) -> ObjectInfo:
        reader = SourceReader(source, self._upload_threads)
        buffer = buffers.take()
        draft: OpenDraft | None = None
        # Writes have no deadline but the caller's.
        try:
            draft = await self._open_draft(key, direct=source.size >= BLOCK)
            await draft.copy(reader, memoryview(buffer), source.size, progress)
            crc = await reader.confirm()
            await draft.run(draft.file.sync, source.size)
            try:
                await self._publish(draft, key)
            except FileExistsError:
                there = await self.stat(key)
                same = there is not None and there.size == source.size
                checksum = partial(_file_crc, self._directory)
                if there and same and await self._threads.run(checksum, key) == crc:
                    return dataclasses.replace(there, crc32c=crc)
                raise ConflictError(f"{self._path(key)} exists with other content", there) from None
            return _info(key, await draft.run(draft.file.stat), crc)
        finally:
            # A call that hangs still uses the buffer, which is not reused. The spool file may belong to
            # another save by then; what the call reads there is never published.
            if draft is None or await draft.close():
                reader.close()
                buffers.give(buffer)

    async def _open_draft(self, key: str, *, direct: bool) -> "OpenDraft":
        made = await self._threads.run(
            partial(Draft, self._directory, key, direct=direct),
            until=self._until(),
            undo=Draft.close,
        )
        return OpenDraft(made, self._threads)

    async def _publish(self, draft: "OpenDraft", key: str) -> None:
        try:
            await draft.run(draft.file.link, until=self._until())
        except LinksUnsupportedError:
            async with self._locked(key) as lock:
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
        async with self._errors(path):
            draft = await self._open_draft(key, direct=False)
            try:
                await draft.run(draft.file.fill, data, until=self._until())
                if expected is None:
                    with suppress(FileExistsError):
                        await self._publish(draft, key)
                        return await self._published(key, draft, data)
                # The directory was removed.
                with suppress(FileNotFoundError):
                    async with self._locked(key) as lock:
                        current = await self.stat(key)
                        if current and current.generation == expected:
                            replace = draft.file.replace
                            await lock.run(draft.guard.use, replace, until=self._until())
                            return await self._published(key, draft, data)
                        if (
                            current
                            and await self._call(_read, self._directory, key, 0, None) == data
                        ):
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
        async with self._errors(path):
            return await self._call(_read, self._directory, key, offset, length)

    @in_time
    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`; a local file has no stored checksum."""
        path = self._path(key)
        async with self._errors(path):
            try:
                return _info(key, await self._call(_stat, self._directory, key), None)
            except (FileNotFoundError, NotADirectoryError):
                return None

    @in_time
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        async with self._errors(self.url):
            return await self._walk(_walk, self._directory, prefix)

    @in_time
    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`Store.list_directories`."""
        name = check_key(prefix.rstrip("/")) if prefix else ""
        async with self._errors(os.path.join(self.url, name)):
            try:
                return await self._walk(self._directory.directories, name)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @in_time
    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`. Directories below the store's own that become empty are removed."""
        path = self._path(key)
        async with self._errors(path):
            try:
                async with self._locked(key) as lock:
                    if generation is not None:
                        current = await self.stat(key)
                        if current is None or current.generation != generation:
                            return
                    await lock.run(self._directory.unlink, key, until=self._until())
            except (FileNotFoundError, NotADirectoryError):
                return
            await self._call(self._directory.prune, os.path.dirname(key))

    @in_time
    async def list_unfinished(self) -> Sequence[Unfinished]:
        """See :meth:`Store.list_unfinished`: temporary files, locks, and empty directories that
        killed processes left.
        """
        async with self._errors(self.url):
            return await self._walk(_walk_hidden, self._directory)

    @in_time
    async def discard(self, item: Unfinished) -> None:
        """See :meth:`Store.discard`. A lock that is held and a directory in use stay."""
        path = self._path(item.key)
        async with self._errors(path):
            await self._call(_discard, self._directory, item.key)

    async def remove_directory(self) -> bool:
        """See :meth:`Store.remove_directory`."""
        try:
            return await self._call(self._directory.remove)
        except (OSError, StorageError):
            return False

    async def probe(self) -> None:
        """See :meth:`Store.probe`. Directories that it created are removed again."""
        async with self._errors(self.url):
            made = await self._call(self._directory.missing)
        try:
            await super().probe()
        finally:
            await self._call(self._directory.remove_made, made)

    async def close(self) -> None:
        """Nothing is held open."""


def _stat(directory: Directory, key: str) -> os.stat_result:
    found = directory.stat(key)
    _check_kind(directory, key, found)
    return found


def _check_kind(directory: Directory, key: str, found: os.stat_result) -> None:
    """Raises StorageError for links, pipes, sockets and devices: reading the latter might never end."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise StorageError(
            f"{directory.path}/{key} is not a regular file ({stat.filemode(found.st_mode)}): remove it"
        )


def _open_regular(directory: Directory, key: str) -> FileIO:
    fd = directory.open_file(key)
    try:
        _check_kind(directory, key, os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _read(directory: Directory, key: str, offset: int, length: int | None) -> bytes:
    with _open_regular(directory, key) as file:
        file.seek(offset)
        if length is None:
            return file.readall()
        parts = []
        while length > 0 and (part := file.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _file_crc(directory: Directory, key: str) -> int:
    crc = 0
    with _open_regular(directory, key) as file:
        while part := file.read(1 << 20):
            crc = crc32c.crc32c(part, crc)
    return crc


def _discard(directory: Directory, key: str) -> None:
    try:
        if stat.S_ISDIR(directory.stat(key).st_mode):
            directory.prune(key)
            return
        if not release_unheld(directory, key):
            directory.unlink(key)
    except (FileNotFoundError, NotADirectoryError):
        pass  # Removed with its directory.
    directory.prune(os.path.dirname(key))


def _info(key: str, found: os.stat_result, crc: int | None) -> ObjectInfo:
    token = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    generation = hashlib.sha256(token.encode()).hexdigest()[:16]
    return ObjectInfo(key, found.st_size, generation, crc, found.st_mtime)


def _conflict(path: str, current: ObjectInfo | None, expected: str | None) -> str:
    if current is None:
        return f"{path} does not exist, expected was generation {expected}"
    if expected is None:
        return f"{path} exists with other content"
    return f"{path} has generation {current.generation}, not {expected}"


def _walk(directory: Directory, prefix: str) -> list[ObjectInfo]:
    above, _, _ = prefix.rpartition("/")
    found = []
    for at, fd, _, names in directory.walk(check_key(above) if above else ""):
        for name in names:
            key = os.path.join(at, name)
            if name.startswith(HIDDEN) or not key.startswith(prefix):
                continue
            with suppress(FileNotFoundError):
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found.append(_info(key, info, None))
    return sorted(found, key=lambda info: info.key)


def _walk_hidden(directory: Directory) -> list[Unfinished]:
    found = []
    for at, fd, below, names in directory.walk():
        for name in names:
            if name.startswith(HIDDEN):
                with suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    key = os.path.join(at, name)
                    found.append(Unfinished(key, info.st_size, info.st_mtime, name))
        # Empty directories may be intended, but not among the records.
        if not below and not names and _RECORDS in at.split("/"):
            found.append(Unfinished(at, 0, os.fstat(fd).st_mtime, os.path.basename(at)))
    return found


def _as_storage_error(error: OSError, path: str, free: str) -> StorageError:
    """The operating system's error as the store's; ``free`` is for the text of a full disk."""
    text = f"{path}: {error.strerror or error}"
    if error.errno == errno.ELOOP:
        return DeniedError(
            f"{path}: a symbolic link is in the way, and none is followed in a checkpoint's directory; "
            "remove it"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(f"{text}; check its owner and mode, and whose user runs the daemon")
    if error.errno in _FULL:
        return StorageError(f"{text}{free}; free some and save again")
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError(text)
    return StorageError(text)
