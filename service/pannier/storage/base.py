"""The interface every store implements.

A :class:`Store` is bound to one directory URL (a checkpoint id or a root); keys
are relative to it. All methods are coroutines of one event loop. What can be
tried again is tried again inside, with jitter, until the store's deadline; what
is raised is final.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pannier.wire.errors import IntegrityError, StorageError


class NotFoundError(StorageError):
    """The object, or the bucket, doesn't exist."""


class DeniedError(StorageError):
    """Credentials are missing, expired or without the permission."""


class HeldError(StorageError):
    """A hold or a retention policy keeps the object as it is until it is released."""


class UnreachableError(StorageError):
    """The store has not answered at all: no name, no connection, or no word on it."""


class ConflictError(StorageError):
    """A precondition failed: ``current`` is what stands there instead (None: nothing)."""

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
    """None where the store doesn't keep one."""
    modified: float
    """Unix time, seconds, of the store's clock."""
    hold: str = ""
    """What keeps it from being replaced or removed, as the store names it; empty: nothing known."""


@dataclass(frozen=True)
class Unfinished:
    """What an upload that was cut off left behind, and no listing of objects shows."""

    key: str
    """Of the object that it was to become, or of the temporary file."""
    size: int
    """Bytes; 0 where the store doesn't say."""
    modified: float
    """When it was begun or last written to, by the store's clock; Unix time, seconds."""
    token: str
    """The store's name for it."""


class Source(Protocol):
    """A data file in the spool, possibly still growing."""

    @property
    def size(self) -> int:
        """Final size in bytes."""

    @property
    def path(self) -> Path:
        """The file; complete below what :meth:`read` has returned."""

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly these bytes (within ``size``); waits until they are there.

        Raises when the file will never be complete (its save was aborted).
        """

    async def crc32c(self) -> int:
        """Checksum of the whole file; waits until it is complete."""


Progress = Callable[[int], None]
"""Called with the number of bytes that the store holds so far."""
Retried = Callable[[str], None]
"""Called with the reason whenever an operation is tried again."""


class Store(ABC):
    """Objects below one directory URL."""

    url: str
    upload_memory: int
    """Most bytes of memory that one running upload takes for its buffers."""

    @abstractmethod
    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """Creates ``key`` from ``source`` and confirms its size and checksum with the store.

        Data-file names are unique to an attempt and rank: an object that is
        already there with the same size and checksum is the answer that got
        lost, any other is a ConflictError. On error or cancellation nothing
        half-made stays behind.

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

        A lost answer is settled by reading back. Readers see the old or the new
        content, never a mixture and never none.

        Raises:
            ConflictError: another generation stands there.
        """

    @abstractmethod
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Content, or a range of it, shorter where the object ends. Raises NotFoundError."""

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo | None:
        """None when there is no such object."""

    @abstractmethod
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose key starts with ``prefix``, recursively, sorted by key."""

    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """Names of the directories directly below ``prefix``, sorted.

        Where the store has directories of its own, empty ones count. Stores override this: it
        reads a full listing.

        Args:
            prefix: empty, or a key that ends with ``/``.
        """
        below = (info.key.removeprefix(prefix) for info in await self.list(prefix))
        return sorted({name for name, slash, _ in (key.partition("/") for key in below) if slash})

    @abstractmethod
    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """Removes ``key`` (only that generation, when given). No error when it is gone.

        Another generation than the one given stays, without an error.
        """

    async def list_unfinished(self) -> Sequence[Unfinished]:
        """Uploads, temporary files and empty directories of any age that can be discarded.

        None where the store drops them by itself.
        """
        return []

    async def discard(self, item: Unfinished) -> None:
        """Removes one; an upload that is still under way fails. No error when it is gone."""
        raise NotImplementedError(f"{self.url} keeps nothing unfinished")

    @abstractmethod
    async def probe(self) -> None:
        """Checks that the place can be written and that preconditions are honoured.

        Creates a small object twice, lists, replaces and removes it; leaves nothing behind.

        Raises:
            StorageError: with what to check; a store that ignores a precondition of a
                write or of a removal is refused by name.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases connections. Running operations fail."""


__all__ = [
    "ConflictError",
    "DeniedError",
    "HeldError",
    "IntegrityError",
    "NotFoundError",
    "ObjectInfo",
    "Progress",
    "Retried",
    "Source",
    "StorageError",
    "Store",
    "Unfinished",
    "UnreachableError",
]
