"""A store with the faults of a network."""

from collections.abc import Awaitable, Callable
from typing import Any

from pannier.storage import ObjectInfo, StorageError, Store


class UnreliableStore(Store):
    """Wraps a store: loses answers of writes, and runs code right before them."""

    upload_memory = 0

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.lose: set[str] = set()
        """Keys whose next write succeeds, but is answered with an error."""
        self.before: dict[str, Callable[[], Awaitable[Any]]] = {}
        """By key: called right before its next write."""

    async def _write(self, key: str, write: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
        interruption = self.before.pop(key, None)
        if interruption is not None:
            await interruption()
        info = await write()
        if key in self.lose:
            self.lose.discard(key)
            raise StorageError(f"{key}: the answer was lost")
        return info

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        return await self._write(key, lambda: self.inner.create(key, data))

    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        return await self._write(key, lambda: self.inner.replace(key, data, expected=expected))

    async def upload(self, key: str, source: Any, *, progress: Any, retried: Any) -> ObjectInfo:
        raise AssertionError("the coordinator uploads nothing")

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return await self.inner.read(key, offset, length)

    async def stat(self, key: str) -> ObjectInfo | None:
        return await self.inner.stat(key)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        return await self.inner.list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        await self.inner.delete(key, generation=generation)

    async def remove_directory(self) -> bool:
        return await self.inner.remove_directory()

    async def probe(self) -> None:
        await self.inner.probe()

    async def close(self) -> None:
        await self.inner.close()
