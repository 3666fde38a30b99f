"""Checkpoints in a directory of a file system.

A file is made beside its place, synced, and published by a link that fails when
something is there; what replaces an expected generation is renamed under a lock.
So readers never see a part, and what is reported is on disk, name and content.
"""

import asyncio
import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import crc32c

from pannier.storage import probing
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
)
from pannier.storage.draft import BLOCK, HIDDEN, Draft, LinksUnsupportedError, sync_directory
from pannier.storage.feed import Feed
from pannier.storage.limits import end_of
from pannier.storage.location import Location, check_key
from pannier.storage.lock import locked, release_unheld
from pannier.storage.threads import BUFFER, buffers, in_thread

_STEP = BUFFER // 2
"""One half of a buffer is filled while the other is written."""


class LocalStore(Store):
    """A directory. Created with the first object, except for what ``mkdir`` can't do."""

    upload_memory = BUFFER

    def __init__(self, location: Location, *, deadline_s: float) -> None:
        self._root = Path(location.path)
        self.url = str(self._root)
        self._deadline_s = deadline_s

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`.

        What is confirmed is that the bytes handed to the kernel have the sender's
        checksum and that it reported them durable (fsync); they are not read back.
        """
        path = self._path(key)
        with _os_errors(path):
            try:
                return await self._upload(key, path, source, progress)
            except IntegrityError as error:
                retried(str(error))
                return await self._upload(key, path, source, progress)

    async def _upload(self, key: str, path: Path, source: Source, progress: Progress) -> ObjectInfo:
        feed = Feed(source)
        buffer = buffers.take()
        draft: Draft | None = None
        try:
            draft = await in_thread(Draft, path, direct=source.size >= BLOCK)
            view = memoryview(buffer)
            await _copy(feed, draft, view, source.size, progress)
            crc = await feed.confirm()
            await in_thread(draft.sync, source.size)
            try:
                await self._publish(draft, path)
            except FileExistsError:
                there = await self.stat(key)
                if there and there.size == source.size and await in_thread(_file_crc, path) == crc:
                    return dataclasses.replace(there, crc32c=crc)
                raise ConflictError(f"{path} exists with other content", there) from None
            return _info(key, draft.stat(), crc)
        finally:
            if draft is not None:
                await in_thread(draft.close)
            feed.close()
            buffers.give(buffer)

    async def _publish(self, draft: Draft, path: Path) -> None:
        try:
            await in_thread(draft.link)
        except LinksUnsupportedError:
            async with locked(path.parent, end_of(self._deadline_s)):
                await in_thread(draft.move)

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """See :meth:`Store.create`."""
        return await self._put(key, data, None)

    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """See :meth:`Store.replace`."""
        return await self._put(key, data, expected)

    async def _put(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        path = self._path(key)
        with _os_errors(path):
            draft = await in_thread(Draft, path, direct=False)
            try:
                await in_thread(_fill, draft, data)
                if expected is None:
                    with suppress(FileExistsError):
                        await self._publish(draft, path)
                        return _info(key, draft.stat(), crc32c.crc32c(data))
                async with locked(path.parent, end_of(self._deadline_s)):
                    current = await self.stat(key)
                    if current and current.generation == expected:
                        await in_thread(draft.replace)
                        return _info(key, draft.stat(), crc32c.crc32c(data))
                    if current and await in_thread(_read, path, 0, None) == data:
                        return current
                    raise ConflictError(_conflict(path, current, expected), current)
            finally:
                await in_thread(draft.close)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        path = self._path(key)
        with _os_errors(path):
            return await in_thread(_read, path, offset, length)

    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`; a local file has no stored checksum."""
        path = self._path(key)
        with _os_errors(path):
            try:
                return _info(key, await in_thread(path.stat), None)
            except (FileNotFoundError, NotADirectoryError):
                return None

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        with _os_errors(self._root):
            return await in_thread(_walk, self._root, prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`. Directories that become empty go too, but for the store's own."""
        path = self._path(key)
        with _os_errors(path):
            try:
                async with locked(path.parent, end_of(self._deadline_s)):
                    if generation is not None:
                        current = await self.stat(key)
                        if current is None or current.generation != generation:
                            return
                    await in_thread(_unlink, path)
            except (FileNotFoundError, NotADirectoryError):
                return
            await in_thread(self._prune, path.parent)

    def _prune(self, directory: Path) -> None:
        while directory != self._root and self._root in directory.parents:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                    return
                raise
            directory = directory.parent

    async def list_unfinished(self) -> Sequence[Unfinished]:
        """See :meth:`Store.list_unfinished`: temporary files, and locks that nobody released."""
        with _os_errors(self._root):
            return await in_thread(_walk_hidden, self._root)

    async def discard(self, item: Unfinished) -> None:
        """See :meth:`Store.discard`. A lock that somebody holds stays."""
        path = self._path(item.key)
        with _os_errors(path):
            if not await in_thread(release_unheld, path):
                await in_thread(_unlink, path)
            await in_thread(self._prune, path.parent)

    async def probe(self) -> None:
        """See :meth:`Store.probe`. Directories that it had to make are removed again."""
        made = [path for path in (self._root, *self._root.parents) if not path.exists()]
        try:
            await probing.probe(self)
        finally:
            for path in made:
                with suppress(OSError):  # Somebody is using it by now.
                    path.rmdir()

    async def close(self) -> None:
        """Nothing is held open."""


async def _copy(feed: Feed, draft: Draft, view: memoryview, size: int, progress: Progress) -> None:
    halves = (view[:_STEP], view[_STEP:])
    writing: asyncio.Task[None] | None = None
    try:
        for turn, offset in enumerate(range(0, size, _STEP)):
            half, length = halves[turn % 2], min(_STEP, size - offset)
            await feed.fill(half[:length], offset)
            if writing is not None:
                await writing
                progress(offset)
            # Whole blocks; the draft is cut to its size in the end.
            blocks = half[: -(-length // BLOCK) * BLOCK]
            writing = asyncio.create_task(in_thread(draft.write, blocks, offset))
        if writing is not None:
            await writing
            progress(size)
    finally:
        if writing is not None and not writing.done():
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({writing})


def _fill(draft: Draft, data: bytes) -> None:
    draft.write(memoryview(data), 0)
    draft.sync(len(data))


def _read(path: Path, offset: int, length: int | None) -> bytes:
    with path.open("rb", buffering=0) as file:
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
    with path.open("rb", buffering=0) as file:
        while part := file.read(1 << 20):
            crc = crc32c.crc32c(part, crc)
    return crc


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def _info(key: str, stat: os.stat_result, crc: int | None) -> ObjectInfo:
    token = f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
    generation = hashlib.sha256(token.encode()).hexdigest()[:16]
    return ObjectInfo(key, stat.st_size, generation, crc, stat.st_mtime)


def _conflict(path: Path, current: ObjectInfo | None, expected: str | None) -> str:
    if current is None:
        return f"{path} is gone, where generation {expected} was expected"
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
                found.append(_info(key, path.stat(), None))
    return sorted(found, key=lambda info: info.key)


def _walk_hidden(root: Path) -> list[Unfinished]:
    found = []
    for directory, _, names in os.walk(root, onerror=_unless_gone):
        for name in names:
            path = Path(directory, name)
            if name.startswith(HIDDEN):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    key = path.relative_to(root).as_posix()
                    found.append(Unfinished(key, stat.st_size, stat.st_mtime, name))
    return found


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Says in the store's words what the operating system refused."""
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
            stat = os.statvfs(place)
            return f" ({stat.f_bavail * stat.f_frsize} bytes are free)"
    return ""
