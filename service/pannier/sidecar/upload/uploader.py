"""From the spool to storage: data files while they fill, then the rank's receipt.

In: files and ranks as they become ready, outcomes of saves. Out: ranks that are durable or have
failed, and spool space given back. On the event loop; the tasks here are the boundary at which an error
becomes the failure of its rank.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pannier.attempts.decisions import read_decision
from pannier.common import fault_points, timeouts
from pannier.common.deadline import set_within
from pannier.daemon.logging import bind
from pannier.sidecar.restore.local_copies import LocalCopies, LocalFile
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import FAILED, Phase, RankSave, Save
from pannier.sidecar.spool.data_file import DataFile, SpoolSource
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.spool import SpoolFile
from pannier.sidecar.upload.concurrency import UploadSlots
from pannier.storage import IntegrityError, Store, import_store, is_imported
from pannier.storage.io_threads import setup_threads
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


T = TypeVar("T")
Opener = Callable[[str], Store]
"""Makes the store of one checkpoint id."""


class Uploader:
    """Uploads the files of all ranks of this host.

    Args:
        slots: limit running uploads, of this and other jobs.
        open_store: makes the store of a checkpoint id.
    """

    def __init__(
        self,
        saves: SaveRegistry,
        mapped: MappedFiles,
        journal: JournalState,
        local_copies: LocalCopies,
        *,
        slots: UploadSlots,
        open_store: Opener,
    ) -> None:
        self._saves = saves
        self._mapped = mapped
        self._journal = journal
        self._local_copies = local_copies
        self._slots = slots
        self._open_store = open_store
        self._stores: dict[tuple[str, str], Store] = {}
        """By save and checkpoint id."""
        self._uploads: dict[RankSave, dict[str, asyncio.Task[bool]]] = {}
        self._unconfirmed: dict[RankSave, asyncio.Event] = {}
        """By rank whose uploads wait for the confirmation of its claim: set when that has come."""
        self._finishing: dict[RankSave, asyncio.Task[None]] = {}
        self._cleanups: dict[RankSave, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    def start(self, rank: RankSave, file: DataFile) -> None:
        """Starts the upload of a file, which follows the file as it fills; idempotent."""
        if rank.save.outcome is not None or rank.phase in FAILED:
            # The save or the rank ended while the file was opened.
            self._background_task(self._release(file))
            return
        started = self._uploads.setdefault(rank, {})
        if file.name not in started:
            started[file.name] = _create_task(self._upload(rank, file))

    def finish(self, rank: RankSave) -> None:
        """Writes the receipt of a rank that is ingested, once its files are in storage."""
        # Its files are complete now, so more of their uploads may run.
        self._slots.admit()
        if rank.phase is Phase.INGESTED and rank not in self._finishing:
            self._finishing[rank] = _create_task(self._write_receipt(rank))

    def clean_up(self, save: Save) -> None:
        """Cleans up after a save that ended before this process started."""
        self._clean_up(save, None)

    async def await_clean_up(self, attempt: str) -> None:
        """Returns when no rank of an attempt is being cleaned up: its files are a local copy, or free."""
        tasks = [task for rank, task in self._cleanups.items() if rank.attempt == attempt]
        # The tasks go on when the caller is cancelled.
        await asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of :class:`SaveRegistry`: finishes ingested ranks, cleans up after failed ranks and
        ended saves.
        """
        over = save.outcome is not None or (rank is not None and rank.phase in FAILED)
        if rank is not None and rank in self._unconfirmed and rank.phase is not Phase.HANDED_OVER:
            self._unconfirmed.pop(rank).set()
        if urgent and over:
            self._clean_up(save, rank)
        elif urgent and rank is not None and rank.phase in (Phase.HANDED_OVER, Phase.INGESTED):
            self.finish(rank)

    async def read_outcomes(self) -> None:
        """Ends saves whose decision storage shows, before this sidecar exits without a coordinator.

        A later ABORT finds all objects of this sidecar. Those that were uploaded after an earlier ABORT are
        known to this sidecar only.
        """
        for save in self._saves.undecided():
            rank = next((rank for rank in save.ranks.values() if rank.attempt), None)
            if rank is None:
                continue
            outcome = await read_outcome(self._store(rank), rank)
            if outcome is not None:
                self._saves.apply_status(outcome)

    async def stored_outcome(self, rank: RankSave) -> save_pb2.SaveStatus | None:
        """As :func:`read_outcome`, of a rank whose save needn't be in the registry."""
        checkpoint_id = rank.context.checkpoint_id
        if not is_imported(checkpoint_id):
            await setup_threads.run(import_store, checkpoint_id)
        store = self._open_store(checkpoint_id)
        try:
            return await read_outcome(store, rank)
        finally:
            await store.close()

    async def close(self) -> None:
        """Cancels all uploads, which leaves no half-written object; the journal knows what is left to do."""
        tasks = [
            *(task for tasks in self._uploads.values() for task in tasks.values()),
            *self._finishing.values(),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._cleanups.values(), return_exceptions=True)
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=timeouts.UPLOADS_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for store in self._stores.values():
            await store.close()
        self._stores.clear()

    async def _upload(self, rank: RankSave, file: DataFile) -> bool:
        """One data file; True when it is durable."""
        bind(lambda: rank.log_fields)

        def progress(count: int) -> None:
            file.upload.advance(count)
            self._saves.record_progress(rank)

        def retried(reason: str) -> None:
            _log.warning("%s: retrying: %s", file.label, reason)
            self._saves.record_retry(rank, reason)

        async def upload() -> None:
            store = await self._imported_store(rank)
            await self._let_confirm(rank)
            async with self._slots.slot(store.upload_memory, lambda: not file.complete):
                info = await store.upload(
                    file.name, SpoolSource(file), progress=progress, retried=retried
                )
            if info.size != file.size or info.crc32c not in (None, file.checksums.whole):
                raise IntegrityError(
                    f"the store has {info.size} bytes with crc32c {info.crc32c}, the spool "
                    f"{file.size} with {file.checksums.whole}"
                )
            await file.check_stamp()
            await self._journal.record_durable(rank, file)
            file.upload.complete(file.size)
            self._saves.record_progress(rank)

        return await self._or_fail(rank, upload(), f"uploading {file.name}")

    async def _let_confirm(self, rank: RankSave) -> None:
        """Waits a moment for the confirmation of the rank's claim.

        Where the coordinator and the upload write to one disk, the coordinator's few bytes would be synced
        after the upload's, and the trainer would wait for them.
        """
        if rank.phase is Phase.HANDED_OVER:
            event = self._unconfirmed.setdefault(rank, asyncio.Event())
            await set_within(timeouts.CONFIRM_S, event)

    async def _write_receipt(self, rank: RankSave) -> None:
        """Waits for the files, writes the receipt: then the rank is durable."""
        bind(lambda: rank.log_fields)
        done = await asyncio.gather(*self._uploads.get(rank, {}).values())
        if not all(done):
            return
        receipt = rank.complete_receipt()

        async def write() -> None:
            if lacking := [file.name for file in rank.files.values() if not file.upload.durable]:
                raise RuntimeError(f"{lacking} were never uploaded")
            fault_points.point("sidecar.receipt.before")
            store = await self._imported_store(rank)
            await store.create(
                object_names.receipt(receipt.attempt, receipt.rank), encoded(receipt)
            )
            await self._journal.record_stored(rank)
            self._saves.mark_durable(rank)

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

    async def _imported_store(self, rank: RankSave) -> Store:
        """As :meth:`_store`, whose imports would block the event loop for seconds the first time."""
        checkpoint_id = rank.context.checkpoint_id
        if not is_imported(checkpoint_id):
            await setup_threads.run(import_store, checkpoint_id)
        return self._store(rank)

    def _store(self, rank: RankSave) -> Store:
        """The store of the rank's own checkpoint id: ranks may disagree until the plan is confirmed."""
        key = (rank.save.key, rank.context.checkpoint_id)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = self._open_store(rank.context.checkpoint_id)
        return store

    def _clean_up(self, save: Save, rank: RankSave | None) -> None:
        for each in [rank] if rank is not None else save.ranks.values():
            if each not in self._cleanups:
                task = _create_task(self._stop(each))
                self._cleanups[each] = task
        if save.outcome is not None:
            self._background_task(self._settle(save))

    async def _stop(self, rank: RankSave) -> None:
        """Cancels the rank's uploads, and frees its spool files unless they are a local copy from now on."""
        self._unconfirmed.pop(rank, None)
        tasks: list[asyncio.Task[Any]] = list(self._uploads.pop(rank, {}).values())
        finishing = self._finishing.pop(rank, None)
        if finishing is not None:
            tasks.append(finishing)
        for task in tasks:
            task.cancel()
        # A cancelled upload ends only when nothing reads the spool file any more.
        await asyncio.gather(*tasks, return_exceptions=True)
        released = {file.name: await file.release() for file in list(rank.files.values())}
        # A failure or outcome is recorded before the spool files are used for something else.
        await self._journal.settle()
        if not await self._keep(rank, released):
            for spool_file in released.values():
                await self._give_back(spool_file)

    async def _keep(self, rank: RankSave, released: Mapping[str, SpoolFile | None]) -> bool:
        """Makes the files of a committed save a local copy; False: they aren't needed."""
        outcome = rank.save.outcome
        committed = outcome is not None and outcome.state == save_pb2.SAVE_STATE_COMMITTED
        if not committed or rank.receipt is None:
            return False
        files = [
            LocalFile(each.name, each.size, spool_file, rank.files[each.name].stamp)
            for each in rank.receipt.files
            if (spool_file := released.get(each.name)) is not None
        ]
        if not files:
            return False
        await self._local_copies.add(
            rank.save.id,
            rank.context.checkpoint_id,
            rank.attempt,
            files,
            rank,
            ended_at=rank.save.ended_at,
        )
        return True

    async def _release(self, file: DataFile) -> None:
        spool_file = await file.release()
        await self._journal.settle()
        await self._give_back(spool_file)

    async def _give_back(self, spool_file: SpoolFile | None) -> None:
        if spool_file is not None:
            await self._mapped.give_back(spool_file)

    async def _settle(self, save: Save) -> None:
        """Deletes the objects of an aborted save, and closes the save's store."""
        ranks = list(save.ranks.values())
        await asyncio.gather(*(self._cleanups[rank] for rank in ranks if rank in self._cleanups))
        assert save.outcome is not None
        for rank in ranks:
            if save.outcome.state == save_pb2.SAVE_STATE_ABORTED:
                await self._delete_objects(rank)
            if not self._local_copies.has_recorded(rank):
                await self._journal.forget(rank)
        for rank in ranks:
            self._cleanups.pop(rank, None)
        for key in [key for key in self._stores if key[0] == save.key]:
            await self._stores.pop(key).close()

    async def _delete_objects(self, rank: RankSave) -> None:
        """Deletes what the rank uploaded; only after ABORT is durable."""
        keys = list(rank.files)
        if rank.receipt is not None:
            keys.append(object_names.receipt(rank.attempt, rank.rank))
        for key in keys:
            fault_points.point("sidecar.deletion.before")
            try:
                store = self._store(rank)
                await store.delete(key)
                # Of this sidecar, when it was killed.
                for item in await store.list_unfinished_of(key):
                    await store.discard(item)
            except PannierError as error:
                _log.error(
                    "%s was aborted, but its object %s can't be deleted and stays: %s",
                    rank.label,
                    key,
                    error,
                    extra=rank.log_fields,
                )
            fault_points.point("sidecar.deletion.after")

    def _background_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = _create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("cleaning up after a save failed", exc_info=task.exception())


async def read_outcome(store: Store, rank: RankSave) -> save_pb2.SaveStatus | None:
    """The outcome of the rank's save by its decision in storage; None: there is none, or it can't be read."""
    save = rank.save
    try:
        decision = await read_decision(store, rank.attempt, save.id)
    except PannierError as error:
        _log.warning("save %s: its outcome can't be read: %s", save.key, error)
        return None
    if decision is None:
        return None
    committed = decision.outcome == records_pb2.OUTCOME_COMMIT
    return save_pb2.SaveStatus(
        save=save.id,
        id=save.key,
        checkpoint_id=save.checkpoint_id,
        attempt=rank.attempt,
        state=save_pb2.SAVE_STATE_COMMITTED if committed else save_pb2.SAVE_STATE_ABORTED,
        failures=decision.failures,
    )


def encoded(receipt: records_pb2.Receipt) -> bytes:
    """The receipt's object: the same bytes for the same receipt."""
    return receipt.SerializeToString(deterministic=True)


def _create_task(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    return asyncio.get_running_loop().create_task(work)
