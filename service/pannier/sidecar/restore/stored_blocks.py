"""Blocks of data files in storage, as a sidecar reads them for the loads of its host.

In: a checkpoint id that may be read here, and a range of one of its files. Out: its bytes, after as many
tries as the store makes; the caller checks them. On the event loop.
"""

import time
from collections.abc import Callable, Sequence

from pannier.common import timeouts
from pannier.sidecar.restore.block_fetcher import SourceRequest
from pannier.storage import (
    Store,
    check_allowed_in_time,
    check_shared,
    import_store,
    is_imported,
)
from pannier.storage.base import limited
from pannier.storage.io_threads import setup_threads
from pannier.wire import object_names
from pannier.wire.errors import PannierError


class StoredBlocks:
    """The stores of the checkpoints that are loaded.

    Args:
        open_store: makes the store of a checkpoint id, which reads only below ``allow``.
        allow: roots that checkpoints must lie below; empty: anywhere.
    """

    def __init__(self, open_store: Callable[[str], Store], allow: Sequence[str]) -> None:
        self._open_store = open_store
        self._allow = allow
        self._stores: dict[str, Store] = {}
        self._used_at: dict[str, float] = {}
        self._connecting: dict[str, set[SourceRequest]] = {}
        """By checkpoint id: reads under way of a store that hasn't answered any read yet."""

    async def check(self, checkpoint_id: str) -> None:
        """Raises InvalidRequestError or UnavailableError unless the checkpoint may be read here."""
        object_names.split_checkpoint_id(checkpoint_id)
        check_shared(checkpoint_id)
        await check_allowed_in_time(checkpoint_id, self._allow)

    async def may_read(self, checkpoint_id: str) -> bool:
        """Whether :meth:`check` passes."""
        try:
            await self.check(checkpoint_id)
        except PannierError:
            return False
        return True

    async def read(
        self, checkpoint_id: str, name: str, offset: int, size: int, request: SourceRequest
    ) -> bytes:
        """A range of a data file, shorter where the file ends. Raises StorageError."""

        def retried(reason: str) -> None:
            # A second request would only add to the load of a store that asks for less.
            request.patient = True
            request.retries += 1

        if checkpoint_id not in self._stores and not is_imported(checkpoint_id):
            # Not on the event loop: peers and ranks would take this sidecar for stopped.
            request.patient = True
            await setup_threads.run(import_store, checkpoint_id)
            # No longer patient: another reader may have connected to the store meanwhile.
            request.begin()
        store = self._stores.get(checkpoint_id)
        if store is None:
            store = self._stores[checkpoint_id] = self._open_store(checkpoint_id)
            self._connecting[checkpoint_id] = set()
        self._used_at[checkpoint_id] = end = time.monotonic() + timeouts.BLOCK_S
        connecting = self._connecting.get(checkpoint_id)
        if connecting is not None:
            # Another request would wait for the same connection and credentials.
            request.patient = True
            connecting.add(request)
        try:
            with limited(until=lambda: end, retried=retried):
                data = await store.read(name, offset, size)
        finally:
            if connecting is not None:
                connecting.discard(request)
        for waiting in self._connecting.pop(checkpoint_id, ()):
            waiting.begin()
        return data

    async def tick(self) -> None:
        """Closes stores that weren't used for a while."""
        now = time.monotonic()
        for checkpoint_id, used_at in list(self._used_at.items()):
            if now - used_at > timeouts.STORE_KEPT_S:
                del self._used_at[checkpoint_id]
                self._connecting.pop(checkpoint_id, None)
                await self._stores.pop(checkpoint_id).close()

    async def close(self) -> None:
        """Closes all stores."""
        for store in self._stores.values():
            await store.close()
        self._stores.clear()
        self._used_at.clear()


class StoredBlock:
    """One block in storage; see :class:`pannier.sidecar.restore.block_fetcher.BlockSource`."""

    kind = "storage"
    host = ""
    shows_life = False

    def __init__(
        self, stored: StoredBlocks, checkpoint_id: str, name: str, offset: int, size: int
    ) -> None:
        self._stored = stored
        self._place = checkpoint_id, name, offset, size

    async def read(self, request: SourceRequest) -> Sequence[bytes]:
        """Raises StorageError."""
        return [await self._stored.read(*self._place, request)]

    def succeeded(self) -> None:
        """Nothing: storage is the last source in any case."""

    def failed(self, error: PannierError | None) -> None:
        """Nothing: the error is raised when no source has the block."""
