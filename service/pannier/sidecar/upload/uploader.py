"""From the spool to storage: data files while they fill, then the rank's receipt.

In: files and ranks as they become ready, verdicts of saves. Out: ranks that are
durable or have failed, and spool space given back. All on the sidecar's event
loop but for the few methods that say so; the tasks here are the boundary at
which an error becomes the failure of its rank.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from pannier.common import fault_points
from pannier.daemon.logging import bind
from pannier.sidecar.save_state import Phase, RankSave, Save, Saves
from pannier.sidecar.spool.data_file import DataFile, SpoolSource
from pannier.sidecar.spool.journal_state import Ledger
from pannier.sidecar.spool.mapped_files import Lending
from pannier.sidecar.upload.concurrency import Slots
from pannier.storage import IntegrityError, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

_CLOSE_S: Final = 2.0
"""At the end, for objects of aborted saves to be deleted: storage may not answer."""

Opener = Callable[[str], Store]
"""Makes the store of one checkpoint id."""


class Uploads:
    """Carries the files of all ranks of this host.

    Args:
        slots: places of running uploads, of this and other jobs.
        open_store: called on the loop.
    """

    def __init__(
        self,
        saves: Saves,
        lending: Lending,
        ledger: Ledger,
        *,
        slots: Slots,
        open_store: Opener,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._saves = saves
        self._lending = lending
        self._ledger = ledger
        self._slots = slots
        self._open_store = open_store
        self._loop = loop
        self._stores: dict[str, Store] = {}
        self._uploads: dict[RankSave, dict[str, asyncio.Task[bool]]] = {}
        self._finishing: dict[RankSave, asyncio.Task[None]] = {}
        self._clearing: dict[RankSave, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    # From any thread.

    def begin(self, rank: RankSave, file: DataFile) -> None:
        """A data file was opened: its upload begins, and follows it as it fills."""
        self._loop.call_soon_threadsafe(self._begin, rank, file)

    def finish(self, rank: RankSave) -> None:
        """The rank is ingested: once its files are in storage, its receipt follows."""
        self._loop.call_soon_threadsafe(self._finish, rank)

    def clear(self, save: Save) -> None:
        """The save had ended in a former life, which may not have cleared everything away."""
        self._loop.call_soon_threadsafe(self._clear, save, None)

    def changed(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of :class:`Saves`: what has failed or ended is cleared away."""
        over = save.verdict is not None or (rank is not None and rank.phase is Phase.FAILED)
        if urgent and over:
            self._loop.call_soon_threadsafe(self._clear, save, rank)

    # On the loop.

    async def close(self) -> None:
        """Stops what runs; its objects are not half-made. The journal knows what is left to do."""
        tasks = [
            *(task for tasks in self._uploads.values() for task in tasks.values()),
            *self._finishing.values(),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._clearing.values(), return_exceptions=True)
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for store in self._stores.values():
            await store.close()
        self._stores.clear()

    def _begin(self, rank: RankSave, file: DataFile) -> None:
        if rank.save.verdict is not None or rank.phase is Phase.FAILED:
            # It ended in the moment before.
            self._background_task(self._release(file))
            return
        task = self._loop.create_task(self._upload(rank, file))
        self._uploads.setdefault(rank, {})[file.name] = task

    def _finish(self, rank: RankSave) -> None:
        # Its files are complete now, so they may take more of the room.
        self._slots.admit()
        if rank.phase is Phase.INGESTED and rank not in self._finishing:
            self._finishing[rank] = self._loop.create_task(self._write_receipt(rank))

    async def _upload(self, rank: RankSave, file: DataFile) -> bool:
        """One data file; True when it is durable."""
        bind(lambda: rank.about)

        def progress(count: int) -> None:
            file.uploaded = count
            self._saves.progressed(rank)

        def retried(reason: str) -> None:
            rank.retries += 1
            rank.last_error = reason
            _log.warning("%s: trying again: %s", file.label, reason)
            self._saves.progressed(rank)

        async def upload() -> None:
            store = self._store(rank.save)
            async with self._slots.place(
                store.upload_memory, lambda: not file.complete, rank.save.id.job
            ):
                info = await store.upload(
                    file.name, SpoolSource(file), progress=progress, retried=retried
                )
            if info.size != file.size or info.crc32c not in (None, file.crc):
                raise IntegrityError(
                    f"the store has {info.size} bytes with crc32c {info.crc32c}, the spool "
                    f"{file.size} with {file.crc}"
                )
            file.check_stamp()
            file.uploaded = file.size
            self._ledger.durable(rank, file)
            file.durable = True
            file.stored = time.monotonic()
            self._saves.progressed(rank)

        return await self._or_fail(rank, upload(), f"uploading {file.name}")

    async def _write_receipt(self, rank: RankSave) -> None:
        """Waits for the files, writes the receipt: then the rank is durable."""
        bind(lambda: rank.about)
        done = await asyncio.gather(*self._uploads.get(rank, {}).values())
        if not all(done):
            return
        receipt = rank.receipt
        assert receipt is not None

        async def write() -> None:
            fault_points.point("sidecar.receipt.before")
            await self._store(rank.save).create(
                object_names.receipt(receipt.attempt, receipt.rank), encoded(receipt)
            )
            self._ledger.stored(rank)
            self._saves.durable(rank)

        await self._or_fail(rank, write(), "writing its receipt")

    async def _or_fail(self, rank: RankSave, work: Coroutine[Any, Any, None], what: str) -> bool:
        """Awaits ``work``; its error becomes the rank's failure."""
        try:
            await work
        except IntegrityError as error:
            self._saves.fail(rank, save_pb2.FAILURE_KIND_INTEGRITY, f"{what}: {error}")
        except PannierError as error:
            self._saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - top of a task: the save must not hang
            _log.exception("%s: %s", rank.label, what)
            self._saves.fail(
                rank, save_pb2.FAILURE_KIND_INTERNAL, f"{what}: {type(error).__name__}: {error}"
            )
        else:
            return True
        return False

    def _store(self, save: Save) -> Store:
        store = self._stores.get(save.key)
        if store is None:
            store = self._stores[save.key] = self._open_store(save.checkpoint_id)
        return store

    def _clear(self, save: Save, rank: RankSave | None) -> None:
        for each in [rank] if rank is not None else list(save.ranks.values()):
            if each not in self._clearing:
                task = self._loop.create_task(self._stop(each))
                self._clearing[each] = task
        if save.verdict is not None:
            self._background_task(self._settle(save))

    async def _stop(self, rank: RankSave) -> None:
        """Ends the rank's uploads and frees its spool files: nobody needs their content."""
        tasks: list[asyncio.Task[Any]] = list(self._uploads.pop(rank, {}).values())
        finishing = self._finishing.pop(rank, None)
        if finishing is not None:
            tasks.append(finishing)
        for task in tasks:
            task.cancel()
        # Cancelled uploads wait until nothing reads the spool file any more.
        await asyncio.gather(*tasks, return_exceptions=True)
        for file in list(rank.files.values()):
            await self._release(file)

    async def _release(self, file: DataFile) -> None:
        # A stream that writes a chunk at this moment holds the file: not on the loop.
        slab = await self._loop.run_in_executor(None, file.release)
        if slab is not None:
            self._lending.give(slab)

    async def _settle(self, save: Save) -> None:
        """After the verdict: objects of an aborted save go, and what the save held here."""
        ranks = list(save.ranks.values())
        await asyncio.gather(*(self._clearing[rank] for rank in ranks if rank in self._clearing))
        assert save.verdict is not None
        if save.verdict.state == save_pb2.SAVE_STATE_ABORTED:
            for rank in ranks:
                await self._delete_objects(rank)
                self._ledger.forget(rank)
        for rank in ranks:
            self._clearing.pop(rank, None)
        store = self._stores.pop(save.key, None)
        if store is not None:
            await store.close()

    async def _delete_objects(self, rank: RankSave) -> None:
        """Removes what the rank uploaded; only after ABORT is durable."""
        keys = list(rank.files)
        if rank.receipt is not None:
            keys.append(object_names.receipt(rank.attempt, rank.rank))
        for key in keys:
            fault_points.point("sidecar.deletion.before")
            try:
                await self._store(rank.save).delete(key)
            except PannierError as error:
                _log.error(
                    "%s was aborted, but its object %s can't be deleted and stays: %s",
                    rank.label,
                    key,
                    error,
                    extra=rank.about,
                )
            fault_points.point("sidecar.deletion.after")

    def _background_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("clearing away a save failed", exc_info=task.exception())


def encoded(receipt: records_pb2.Receipt) -> bytes:
    """The receipt's object: the same bytes for the same receipt."""
    return receipt.SerializeToString(deterministic=True)
