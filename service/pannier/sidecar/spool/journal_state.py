"""The journal of a spool, and the state of each rank in each save that it records.

In: changes of ranks and their files. Out: records in the journal, each written before anything relies
on it, and at start the states that the previous process left. Methods are called on the event loop; one
thread, which owns the states, writes records in the order of the calls.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pannier.common import fault_points
from pannier.common.daemon_record import differing
from pannier.sidecar.save_state import RankSave, Save
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal import Contents, Journal
from pannier.sidecar.spool.rank_states import RankState, RankStates, Record
from pannier.storage.io_threads import Threads, ingest_threads
from pannier.v1 import journal_pb2, plan_pb2, records_pb2, save_pb2
from pannier.wire.errors import ConfigurationError, PannierError

_log = logging.getLogger(__name__)

_GROWTH: Final = 1 << 20
"""Bytes that a journal may grow by at least, before it is compacted."""

Recorded = RankSave | RankState
"""The owner of records: a rank of this process's saves, or its state as an earlier process left it."""
T = TypeVar("T")


class JournalState:
    """The journal of one spool, and the states that it records. Made in a thread: it reads all of it.

    Raises ConfigurationError when the journal that is there can't be read, or none can be written.
    """

    def __init__(self, directory: Path, storage: Mapping[str, str] = {}) -> None:
        """Reads the journal in the directory, if there is one.

        Args:
            storage: see :func:`pannier.common.daemon_record.storage_variables`; recorded with each rank.
        """
        self._storage = journal_pb2.StorageSettings(hashes=storage)
        self._journal = Journal(directory)
        self._states = RankStates()
        self._threads = Threads("the journal", patience_s=math.inf, threads=1)
        self._numbers: dict[RankSave, int] = {}
        self._full = 0
        """Bytes that the journal had grown by when it couldn't be compacted; 0: it could."""
        contents = self._read()
        for state in self._states:
            boot_clock.adopt(state.begun)
        try:
            self._journal.rewrite(self._records())
            if not contents.end:
                # There is nothing to upload: no hand-over could be confirmed without it.
                self._journal.sync()
        except PannierError as error:
            if not contents.end or contents.damaged_at is not None:
                raise ConfigurationError(f"{error}: name another --spool") from error
            self._journal.reopen(contents)
        self.space = self._journal.space
        """Bytes that the journal takes on its file system at first."""

    def states(self) -> list[RankState]:
        """The states that the previous process left, oldest first, but those that have ended last, in the
        order of their ends; before the first change."""
        return list(self._states)

    def other_storage(self, state: RankState) -> list[str]:
        """Names of the variables by which the state's rank was to be stored elsewhere than this process stores."""
        if not state.begun.HasField("storage"):
            return []
        return differing(dict(state.begun.storage.hashes), dict(self._storage.hashes))

    def bind(self, rank: RankSave, state: RankState) -> None:
        """Records changes of ``rank`` under ``state`` from now on; before the first change."""
        self._numbers[rank] = state.number

    def rebind(self, rank: RankSave, successor: RankSave) -> None:
        """Records changes of ``successor`` under the state of ``rank``, which has no further changes.

        Before the successor's first change.
        """
        self._threads.submit(self._rebind, rank, successor)

    # Changes of ranks. Each raises PannierError when it can't be recorded.

    async def record_opened(self, rank: RankSave, file: DataFile) -> None:
        """The spool file of ``file`` belongs to it from now on; before its first byte."""
        opened = journal_pb2.FileOpened(
            name=file.name,
            size=file.size,
            spool_file=file.spool_file.path.name,
            stamp=file.stamp,
            boot_id=boot_clock.boot_id() if file.stamp else "",
        )
        await self._run(self._append, rank, "opened", Record(opened=opened), self._begun(rank))

    async def record_held(self, rank: RankSave, file: DataFile) -> None:
        """More bytes of ``file`` are in the spool."""
        held = journal_pb2.FileHeld(name=file.name, held=file.held, crc32c=file.checksums.whole)
        await self._run(self._append, rank, "held", Record(held=held))

    async def record_ingested(self, rank: RankSave, receipt: records_pb2.Receipt) -> None:
        """The trainer may die once this returns: the record is on disk. May take long."""
        await self._run(self._append, rank, "ingested", Record(ingested=receipt), self._begun(rank))
        await self._sync()
        fault_points.point("sidecar.ingested.synced")

    async def record_confirmed(self, rank: RankSave, plan_id: str) -> None:
        """The rank's claim is confirmed; on disk once this returns. May take long."""
        await self._run(self._append, rank, "confirmed", _confirmed(plan_id))
        await self._sync()

    # Errors of these are only logged: without the record, a restarted sidecar only repeats work.

    async def record_durable(self, rank: RankSave, file: DataFile) -> None:
        """The store has confirmed ``file``."""
        block_bytes, block_crc32c = file.checksums.columns()
        durable = journal_pb2.FileDurable(
            name=file.name,
            crc32c=file.checksums.whole,
            block_bytes=block_bytes,
            block_crc32c=block_crc32c,
        )
        await self._run(self._try, rank, "durable", Record(durable=durable))

    async def record_stored(self, rank: RankSave) -> None:
        """The receipt is in storage."""
        await self._run(self._try, rank, "stored", Record(stored=journal_pb2.ReceiptStored()))

    async def record_ended(self, rank: RankSave, outcome: save_pb2.SaveStatus) -> None:
        """The save of a rank that the registry doesn't know has ended."""
        await self._run(self._try, rank, "ended", _ended(outcome))

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the registry; see :meth:`settle`."""
        if rank is not None and rank.failure is not None:
            self._threads.submit(self._try, rank, "failed", Record(failed=rank.failure))
        if rank is not None and urgent and rank.claim is not None and rank.plan.id:
            self._threads.submit(self._try, rank, "confirmed", _confirmed(rank.plan.id))
        if rank is None and save.outcome is not None:
            for each in save.ranks.values():
                self._threads.submit(self._try, each, "ended", _ended(save.outcome))

    async def settle(self) -> None:
        """Returns when all changes so far are recorded: before spool files are given away."""
        await self._run(lambda: None)

    async def forget(self, recorded: Recorded) -> None:
        """Records that nothing is left to do for the rank."""
        forgotten = Record(forgotten=journal_pb2.PartForgotten())
        if isinstance(recorded, RankState):
            await self._run(self._try_state, recorded, forgotten)
        else:
            await self._run(self._try, recorded, "forgotten", forgotten)

    # The file.

    async def compact(self) -> None:
        """Rewrites the journal if it has grown or couldn't be synced. To be called now and then; may take long."""
        await self._run(self._compact)

    async def close(self, *, keep_copies: bool) -> set[str]:
        """Closes the journal, and removes it when nothing is pending. Returns the spool files that must stay.

        Args:
            keep_copies: files that are in storage stay, too, though only loads of this host would need them.
        """
        return await self._run(self._close, keep_copies)

    async def _sync(self) -> None:
        # Not in the journal's own thread: records of other ranks needn't wait for the disk.
        await asyncio.shield(asyncio.wrap_future(ingest_threads.submit(self._journal.sync)))

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls it in the journal's thread, to the end even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._threads.submit(function, *args)))

    # In the journal's thread.

    def _compact(self) -> None:
        enough = max(_GROWTH, self._journal.compact, 2 * self._full)
        if self._journal.growth < enough and not self._journal.sync_failed:
            return
        try:
            self._journal.rewrite(self._records())
            self._full = 0
        except PannierError as error:
            _log.warning("%s", error)
            self._full = self._journal.growth

    def _close(self, keep_copies: bool) -> set[str]:
        needed = {
            file.spool_file
            for state in self._states
            for file in (state.in_spool if keep_copies else state.needed)
            if file.spool_file
        }
        pending = any(keep_copies or not state.committed for state in self._states)
        if pending:
            try:
                self._journal.sync()
            except PannierError as error:
                _log.error("%s", error)
        self._journal.close(remove=not pending)
        return needed

    def _read(self) -> Contents:
        contents = self._journal.read()
        for record in contents.records:
            self._states.apply(record)
        if contents.torn:
            _log.warning(
                "%s: its last %d bytes are an incomplete record and are dropped; no client got a "
                "confirmation of it",
                *(self._journal.path, contents.torn),
            )
        if contents.damaged_at is not None:
            problem = (
                f"the journal {self._journal.path} is damaged at byte {contents.damaged_at}: later "
                "records of this rank are lost"
            )
            _log.error("%s", problem)
            self._states.salvage(contents.beyond, problem)
        return contents

    def _records(self) -> Iterator[Record]:
        return (record for state in self._states for record in state.records())

    def _try(self, rank: RankSave, what: str, record: Record) -> None:
        try:
            self._append(rank, what, record)
        except PannierError as error:
            _log.error("%s: %s is not recorded: %s", rank.label, what, error, extra=rank.log_fields)

    def _rebind(self, rank: RankSave, successor: RankSave) -> None:
        number = self._numbers.pop(rank, None)
        if number is not None:
            self._numbers[successor] = number

    def _try_state(self, state: RankState, record: Record) -> None:
        record.part = state.number
        try:
            self._journal.append(record)
        except PannierError as error:
            _log.error("%s: %s is not recorded: %s", state.label, record, error)
        else:
            self._states.apply(record)

    def _append(
        self,
        rank: RankSave,
        what: str,
        record: Record,
        begun: journal_pb2.PartBegun | None = None,
    ) -> None:
        """Appends a record; for a rank without a state, only with ``begun``."""
        number = self._numbers.get(rank)
        records = [record]
        if number is None:
            if begun is None:
                return
            number = self._states.highest + 1
            records.insert(0, Record(begun=begun))
        elif begun is not None and begun.save_timeout_s and not self._has_deadline(number):
            records.insert(0, Record(begun=begun))
        elif self._is_recorded(number, what):
            return
        for each in records:
            each.part = number
        fault_points.point(f"sidecar.{what}.before")
        self._journal.append(*records)
        for each in records:
            self._states.apply(each)
        if number in self._states.by_number:
            self._numbers[rank] = number
        else:
            self._numbers.pop(rank, None)
        fault_points.point(f"sidecar.{what}.after")

    def _is_recorded(self, number: int, what: str) -> bool:
        state = self._states.by_number.get(number)
        if state is None:
            return False
        return (what == "failed" and state.failure is not None) or (
            what == "confirmed" and bool(state.begun.plan_id)
        )

    def _begun(self, rank: RankSave) -> journal_pb2.PartBegun | None:
        """The rank's first record; None when it has ended: its end wasn't recorded, since it had no state yet."""
        if rank.save.outcome is not None or rank.failure is not None:
            return None
        begun = journal_pb2.PartBegun(
            context=rank.context,
            attempt=rank.attempt,
            plan_id=rank.plan.id,
            planned=rank.plan.sizes is not None,
            created_at=rank.save.created_at,
            replica=rank.replica,
            storage=self._storage,
        )
        for name, size in (rank.plan.sizes or {}).items():
            begun.files.append(plan_pb2.PlannedFile(name=name, size=size))
        if rank.claim is not None:
            begun.claim.CopyFrom(rank.claim)
        boot_clock.note(begun, rank.deadlines.save)
        return begun

    def _has_deadline(self, number: int) -> bool:
        state = self._states.by_number.get(number)
        return state is None or bool(state.begun.save_timeout_s)


def _ended(outcome: save_pb2.SaveStatus) -> Record:
    return Record(ended=journal_pb2.PartEnded(state=outcome.state, failures=outcome.failures))


def _confirmed(plan_id: str) -> Record:
    return Record(confirmed=journal_pb2.PlanConfirmed(plan_id=plan_id))
