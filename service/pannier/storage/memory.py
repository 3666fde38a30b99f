"""Checkpoints in fsspec's memory file system, for tests within one process.

``FsspecReader("memory://...")`` reads them in the same process.
"""

import itertools
import threading
import weakref
from typing import Any

import crc32c
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from pannier.common.locations import Location
from pannier.storage.base import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Progress,
    Retried,
    Source,
    Store,
)
from pannier.storage.io_threads import BUFFER
from pannier.storage.retry import in_time
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from pannier.storage.url import check_key

_lock = threading.Lock()
_counter = itertools.count(1)
_generations: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class MemoryStore(Store):
    """A directory of this process's memory."""

    upload_memory = BUFFER

    def __init__(self, location: Location, threads: UploadThreads) -> None:
        self._directory = location.path.rstrip("/")
        self.url = f"memory://{location.path}"
        self._threads = threads
        self._fs = MemoryFileSystem()

    def _path(self, key: str) -> str:
        return f"{self._directory}/{check_key(key)}"

    @in_time
    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`."""
        data = bytearray(source.size)
        for last in (False, True):
            reader = SourceReader(source, self._threads)
            try:
                with memoryview(data) as view:
                    for offset in range(0, source.size, BUFFER):
                        await reader.fill(view[offset : offset + BUFFER], offset)
                        progress(min(offset + BUFFER, source.size))
                await reader.confirm()
                break
            except IntegrityError as error:
                if last:
                    raise
                retried(str(error))
            finally:
                reader.close()
        return await self.create(key, bytes(data))

    @in_time
    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """See :meth:`Store.create`."""
        return await self.replace(key, data, expected=None)

    @in_time
    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """See :meth:`Store.replace`."""
        path = self._path(key)
        with _lock:
            file = self._fs.store.get(path)
            current = _info(key, file) if file is not None else None
            if (current.generation if current else None) == expected:
                fresh = MemoryFile(self._fs, path, data)
                self._fs.store[path] = fresh
                return _info(key, fresh)
            if file is not None and file.getvalue() == data:
                return _info(key, file)
        stands = f"generation {current.generation}" if current else "nothing"
        raise ConflictError(
            f"memory:/{path}: found {stands}, expected {expected or 'nothing'}", current
        )

    @in_time
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`."""
        path = self._path(key)
        file = self._fs.store.get(path)
        if file is None:
            raise NotFoundError(f"memory:/{path} doesn't exist")
        with file.getbuffer() as view:
            return bytes(view[offset : None if length is None else offset + length])

    @in_time
    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        file = self._fs.store.get(self._path(key))
        return None if file is None else _info(key, file)

    @in_time
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        start = f"{self._directory}/"
        found = [
            (path.removeprefix(start), file)
            for path, file in list(self._fs.store.items())
            if path.startswith(start + prefix)
        ]
        return [_info(key, file) for key, file in sorted(found, key=lambda pair: pair[0])]

    @in_time
    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`."""
        path = self._path(key)
        with _lock:
            file = self._fs.store.get(path)
            if file is not None and generation in (None, _info(key, file).generation):
                del self._fs.store[path]

    async def close(self) -> None:
        """The objects exist until the process exits."""


def _info(key: str, file: Any) -> ObjectInfo:
    # fsspec makes a new MemoryFile for each write; appending changes size and time.
    number = _generations.setdefault(file, next(_counter))
    modified = file.modified.timestamp()
    with file.getbuffer() as view:
        size, crc = len(view), crc32c.crc32c(view)
    return ObjectInfo(key, size, f"{number}-{size}-{modified}", crc, modified)
