"""The interface every store implements, and the limits that its callers set.

A :class:`Store` is bound to one directory URL (a checkpoint id or a root); keys are relative to it. All
methods are coroutines of one event loop. They retry inside, with random pauses, until the store's
deadline, or until the end that the caller sets with :func:`limited` for its task and the tasks that this
starts; errors are final.
"""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pannier.wire import object_names
from pannier.wire.chunk_codec import Checksums
from pannier.wire.errors import IntegrityError as IntegrityError
from pannier.wire.errors import StorageError as StorageError

_log = logging.getLogger(__name__)

_READS: Final = 10
"""Times that an object is read which another one has replaced meanwhile."""


class NotFoundError(StorageError):
    """The object, or the bucket, doesn't exist."""


class DeniedError(StorageError):
    """Credentials are missing, expired or without the permission."""


class HeldError(StorageError):
    """A hold or a retention policy keeps the object as it is until it is released."""


class UnreachableError(StorageError):
    """The store has not answered at all: its name isn't known, or no connection was made or carried bytes."""


class ConflictError(StorageError):
    """A precondition failed: ``current`` is the existing object (None: none)."""

    def __init__(self, message: str, current: "ObjectInfo | None") -> None:
        super().__init__(message)
        self.current = current


@dataclass(frozen=True)
class ObjectInfo:
    """What a store knows of one object."""

    key: str
    size: int
    generation: str
    """Opaque; changes whenever the content is replaced."""
    crc32c: int | None
    """None where the store keeps none."""
    modified: float
    """Unix time, seconds, of the store's clock."""
    hold: str = ""
    """Hold that prevents its replacement and removal, as the store names it; empty: none known."""


@dataclass(frozen=True)
class Unfinished:
    """An unfinished upload: no listing of objects shows it."""

    key: str
    """Key of the planned object, or of the temporary file."""
    size: int
    """Bytes; 0 where the store doesn't report it."""
    modified: float
    """Time of its begin or last write, by the store's clock; Unix time, seconds."""
    token: str
    """The store's name for it."""


class Source(Protocol):
    """A data file in the spool, possibly still growing."""

    @property
    def size(self) -> int:
        """Final size in bytes."""

    @property
    def path(self) -> Path:
        """The file; complete below the ``end`` for which :meth:`wait_for` has returned."""

    async def wait_for(self, end: int) -> int:
        """Waits until all bytes below ``end`` have arrived; returns how many have arrived by then.

        Raises when the file will never be complete (its save was aborted).
        """

    def confirm(self, found: Checksums) -> None:
        """Called when all bytes were read for the store, with their checksums.

        Raises IntegrityError when the sender's checksums differ.
        """


Progress = Callable[[int], None]
"""Called with the number of bytes that the store holds so far."""
Retried = Callable[[str], None]
"""Called with the reason before an operation is tried again."""


@dataclass(frozen=True)
class _Limits:
    """Limits of a task's operations."""

    until: Callable[[], float] | None = None
    retried: Retried | None = None


_limits: ContextVar[_Limits] = ContextVar("pannier-storage-limits")
_UNLIMITED: Final = _Limits()


@contextmanager
def limited(
    *, until: Callable[[], float] | None = None, retried: Retried | None = None
) -> Iterator[None]:
    """Operations of any store in this block end at ``until()``, with a StorageError.

    Args:
        until: asked before each try; on the clock of ``time.monotonic()``. None: the store's own
            deadline.
        retried: called before each retry, in addition to an upload's own callback.
    """
    token = _limits.set(_Limits(until, retried))
    try:
        yield
    finally:
        _limits.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """For clean-up, which must also run after the deadline."""
    with limited():
        yield


def end_of(deadline_s: float) -> float:
    """End of an operation that begins now and may take ``deadline_s``; time.monotonic()."""
    end = time.monotonic() + deadline_s
    until = _limits.get(_UNLIMITED).until
    return end if until is None else min(end, until())


def retry_callback() -> Retried | None:
    """The callback for retries that :func:`limited` set for this task."""
    return _limits.get(_UNLIMITED).retried


def notify_retry(reason: str) -> None:
    """Calls :func:`retry_callback`, if there is one."""
    callback = retry_callback()
    if callback is not None:
        callback(reason)


class Store(ABC):
    """Objects below one directory URL."""

    url: str
    upload_memory: int
    """Most bytes of memory that one running upload takes for its buffers."""
    host_local: bool = False
    """Whether the URL may mean another directory on another host."""
    lists_by_key: bool = False
    """Whether :meth:`list_unfinished_of` may show more than :meth:`list_unfinished`."""

    @abstractmethod
    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """Creates ``key`` from ``source`` and confirms its size and checksum with the store.

        Data-file names are unique to an attempt and rank: an object that is already there with
        the same size and checksum is this upload's, whose answer was lost; any other is a
        ConflictError. On error or cancellation no unfinished upload stays behind.

        Raises:
            IntegrityError: the store's checksum differed twice.
            StorageError: anything final.
        """

    @abstractmethod
    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """Creates ``key`` if absent; has exactly one winner.

        An object that is there with exactly ``data`` counts as ours (the answer
        of an earlier try was lost): make the content unique where that matters.

        Raises:
            ConflictError: it exists with other content.
        """

    @abstractmethod
    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """Compare-and-swap: writes ``key`` if its generation is ``expected`` (None: if absent).

        After a lost answer the object is read back. Readers see the old or the new content,
        never a mixture and never none.

        Raises:
            ConflictError: it has another generation.
        """

    @abstractmethod
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Content, or a range of it, shorter where the object ends. Raises NotFoundError."""

    async def read_whole(self, key: str, most: int, listed: "ObjectInfo | None" = None) -> bytes:
        """The content of an object that may be anybody's; not read if it is longer than a real one would be.

        Args:
            most: bytes.
            listed: its entry in a listing, which saves a request.

        Raises NotFoundError, and IntegrityError when it is longer.
        """
        for _ in range(_READS):
            info, listed = listed or await self.stat(key), None
            if info is None:
                raise NotFoundError(f"{self.url}/{key} doesn't exist")
            if info.size > most:
                raise IntegrityError(
                    f"{self.url}/{key} has {info.size} bytes, at most {most} are read of such an object"
                )
            if info.crc32c is not None:
                # Only whole objects are compared with the stored checksum.
                return await self.read(key)
            content = await self.read(key, 0, info.size + 1)
            if len(content) <= info.size:
                return content
        raise StorageError(f"{self.url}/{key} grew {_READS} times while it was read")

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo | None:
        """Properties of ``key``; None when there is no such object."""

    @abstractmethod
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose key starts with ``prefix``, recursively, sorted by key."""

    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """Names of the directories directly below ``prefix``, sorted.

        Where the store has real directories, empty ones count. Stores override this: it
        reads a full listing.

        Args:
            prefix: empty, or a key that ends with ``/``.
        """
        below = (info.key.removeprefix(prefix) for info in await self.list(prefix))
        return sorted({name for name, slash, _ in (key.partition("/") for key in below) if slash})

    @abstractmethod
    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """Removes ``key`` (only that generation, when given). No error when it doesn't exist.

        An object of another generation is kept, without an error.
        """

    async def list_unfinished(self) -> Sequence[Unfinished]:
        """Uploads, temporary files and empty directories of any age that can be discarded.

        Empty where the store removes them itself.
        """
        return []

    async def list_unfinished_of(self, key: str) -> Sequence[Unfinished]:
        """Unfinished uploads of one object, of any age.

        Some S3 servers list uploads by their exact key only
        (https://github.com/minio/minio/issues/20989), so that
        :meth:`list_unfinished` lacks them.
        """
        return []

    async def discard(self, item: Unfinished) -> None:
        """Removes an unfinished upload, which fails if it is running. No error when it doesn't exist."""
        raise NotImplementedError(f"{self.url} keeps nothing unfinished")

    async def remove_directory(self) -> bool:
        """Whether the directory itself was removed: it was empty, and the store has real ones."""
        return False

    async def probe(self) -> None:
        """Checks that the directory can be written and that preconditions of writes are honoured.

        Creates a small object twice, lists, replaces and removes it; leaves nothing behind.

        Raises:
            StorageError: with what to check; a store that ignores a precondition of a
                write or of a removal is refused by name.
        """
        key = object_names.probe(uuid.uuid4().hex)
        first = await self.create(key, b"first")
        try:
            await self._must_conflict(key, "a second create of one object")
            second = await self.replace(key, b"third", expected=first.generation)
            if second.generation == first.generation:
                raise StorageError(f"{self.url}: a replaced object kept its generation")
            await self._must_conflict(key, "a replace of an old generation", first.generation)
            if await self.read(key) != b"third":
                raise StorageError(f"{self.url}: a replaced object was read with its old content")
            if [info.key for info in await self.list(key)] != [key]:
                raise StorageError(f"{self.url}: an existing object was not listed")
            await self.delete(key, generation=first.generation)
            if await self.stat(key) is None:
                raise self._ignores_preconditions("a removal of an old generation")
        finally:
            await self.delete(key)

    async def _must_conflict(self, key: str, what: str, expected: str | None = None) -> None:
        try:
            if expected is None:
                await self.create(key, b"second")
            else:
                await self.replace(key, b"fourth", expected=expected)
        except ConflictError:
            return
        raise self._ignores_preconditions(what)

    def _ignores_preconditions(self, what: str) -> StorageError:
        return StorageError(
            f"{self.url}: this store ignores preconditions ({what} succeeded), so two commits could "
            "overwrite each other. Use a store that honours them: Google Cloud Storage, Amazon S3, "
            "a local file system, or a recent version of an S3-compatible server."
        )

    async def contact(self, seconds: float) -> None:
        """Returns once the store has answered, even with an error, which :meth:`probe` reports.

        Raises UnreachableError, with the last cause, when no answer came within ``seconds``.
        """
        end = time.monotonic() + seconds
        with limited(until=lambda: end, retried=retry_callback()):
            try:
                await self.stat(object_names.probe(uuid.uuid4().hex))
            except UnreachableError as error:
                raise UnreachableError(
                    f"{self.url} can't be reached from this host: {error}; check its name, the "
                    "endpoint and the network"
                ) from error
            except StorageError as error:
                _log.debug("%s answers with an error: %s", self.url, error)

    @abstractmethod
    async def close(self) -> None:
        """Releases connections. Running operations fail."""
