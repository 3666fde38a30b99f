"""The replicas of other hosts' ranks that this host's spool has, until their saves have ended.

In: streams of other hosts' sidecars, outcomes of saves, and the coordinator's requests to take ranks over.
Out: local copies of committed saves, free room after other saves, and ranks of lost hosts, which this sidecar
uploads in place of theirs. Replicas are journalled as ranks are, so that they outlive this process. They make
way when this host's own ranks need the room. On the event loop.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.common.units import size_text
from pannier.daemon.status_registry import TERMINAL
from pannier.sidecar.replicas.held_replica import Cancel, HeldReplica
from pannier.sidecar.replicas.replica_room import ReplicaRoom
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase, RankPlan
from pannier.sidecar.spool.data_file import DataFile, UploadProgress
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.rank_states import RankState
from pannier.sidecar.spool.spool import Spool
from pannier.sidecar.upload.uploader import Uploader
from pannier.v1 import coordinator_pb2, restore_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    OverloadedError,
    PannierError,
    UnavailableError,
)
from pannier.wire.object_names import save_text

_log = logging.getLogger(__name__)

_MOST: Final = 1024
"""Replicas at a time."""
_ENDED_KEPT: Final = 256
"""Saves of replicas whose end is remembered: their senders may not know it yet."""
_RECORD_BYTES: Final = 16 << 20
"""Progress is journalled at each multiple of these: a restarted sidecar resumes there."""
T = TypeVar("T")
Key = tuple[str, int]
"""Save and rank."""


class HeldReplicas:
    """All replicas of one spool.

    Args:
        host: the name of this host.
    """

    def __init__(
        self,
        saves: SaveRegistry,
        spool: Spool,
        mapped: MappedFiles,
        journal: JournalState,
        local_copies: LocalCopies,
        uploads: Uploader,
        host: str,
    ) -> None:
        self._saves = saves
        self._mapped = mapped
        self._journal = journal
        self._local_copies = local_copies
        self._uploads = uploads
        self._host = host
        self._replicas: dict[Key, HeldReplica] = {}
        """The oldest first."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._room = ReplicaRoom(spool, host)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: asyncio.Task[None] | None = None
        """Reads outcomes in storage."""
        self.refused = 0
        """Replicas that this host had no room for, when they were opened or later."""
        mapped.set_replicas(self)

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return sum(sum(each.held) for each in self._replicas.values())

    @property
    def reserved(self) -> int:
        """Bytes of their spool files."""
        return sum(each.room for each in self._replicas.values())

    @property
    def complete(self) -> int:
        """Replicas that this host could upload, of saves whose end it doesn't know."""
        return sum(each.complete and each.outcome is None for each in self._replicas.values())

    # Streams of other hosts.

    async def open(self, start: restore_pb2.ReplicaStart) -> HeldReplica:
        """The replica that a stream begins with, with all its room reserved.

        Args:
            start: checked by the caller.

        Raises:
            BusyError: the spool has no room for it now.
            ConfigurationError: the replica isn't needed here.
            UnavailableError: this sidecar is draining.
        """
        label = f"the replica of rank {start.context.rank} from {start.host or 'another host'}"
        if self._saves.draining:
            raise UnavailableError(f"the sidecar of {self._host} is draining: {label} isn't taken")
        save = start.context.save
        if save_text(save) in self._ended or self._saves.has_ended(save):
            raise ConfigurationError(f"{label} is of save {save_text(save)}, which has ended")
        if self._saves.find(start.context) is not None:
            raise ConfigurationError(
                f"{label} isn't needed: the sidecar of {self._host} uploads that rank itself"
            )
        return await self._run(self._open(start))

    async def begin(self, replica: HeldReplica, stream: object, cancel: Cancel) -> None:
        """``stream`` fills the replica from now on. Raises the error of a replica that has ended."""
        self._check(replica)
        await replica.begin(stream, cancel)

    async def append(
        self, replica: HeldReplica, stream: object, chunk: restore_pb2.ReplicaChunk
    ) -> None:
        """Takes a chunk; see :meth:`HeldReplica.append`. A wrong one ends the replica."""
        try:
            file = await replica.append(stream, chunk)
        except UnavailableError:
            self._check(replica)
            raise
        except PannierError as error:
            await self._run(self._end(replica, error))
            raise
        before = file.held - len(chunk.data)
        if file.complete or before // _RECORD_BYTES < file.held // _RECORD_BYTES:
            await self._journal.record_held(replica.rank, file)

    async def finish(self, replica: HeldReplica) -> None:
        """All of the replica has arrived: returns once it outlives this process."""
        await self._run(self._finish(replica))

    # Messages from and to the coordinator.

    def apply_status(self, status: save_pb2.SaveStatus) -> None:
        """Takes a status update of the coordinator, or an outcome that storage shows."""
        key = save_text(status.save)
        found = [each for each in self._replicas.values() if each.rank.save.key == key]
        if not found:
            return
        over = status.state in TERMINAL
        for each in found:
            each.status_at = time.monotonic()
            if over and each.outcome is None:
                each.outcome = status
                self._spawn(self._settle(each))
        if over:
            self._ended[key] = None
            while len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)

    def reports(self, known: set[str]) -> list[coordinator_pb2.HeldReplica]:
        """Reports of all replicas of undecided saves.

        Args:
            known: keys of saves whose ranks the coordinator knows; the keys of these reports are added.
        """
        messages = []
        for each in self._undecided():
            key = each.rank.save.key
            messages.append(each.report(brief=key in known))
            known.add(key)
        return messages

    def unknown(self, since: float) -> list[sidecar_pb2.PendingSave]:
        """Saves of which the coordinator hasn't sent a status since then, on the monotonic clock."""
        contexts = {
            each.rank.save.key: each.rank.context
            for each in self._undecided()
            if each.status_at < since
        }
        return [sidecar_pb2.PendingSave(context=context) for context in contexts.values()]

    def take_over(self, save: save_pb2.SaveId, rank: int) -> None:
        """Uploads the files of a rank whose host is lost.

        Does nothing if its replica isn't complete here, or was taken over before.
        """
        replica = self._replicas.get((save_text(save), rank))
        if replica is not None and replica.complete and replica.outcome is None:
            self._take_over(replica)

    async def take_over_all(self) -> bool:
        """Before this sidecar exits without a coordinator: takes over the complete replicas of saves that
        have no outcome in storage, either. Returns whether there is something left to do for any."""
        replicas = [each for each in self._undecided() if each.complete]
        with suppress(asyncio.TimeoutError):
            await within(timeouts.RECEIPTS_S, self._read_outcomes(replicas))
        busy = False
        for each in replicas:
            if each.outcome is not None:
                # It becomes a local copy, or its room is freed.
                busy = True
            elif self._replicas.get(each.key) is each:
                busy = self._take_over(each) or busy
        return busy

    # Room: see :class:`pannier.sidecar.spool.mapped_files.Replicas`.

    def room(self, job: str) -> int:
        """Bytes of spool files, of one job."""
        return sum(each.room for each in self._replicas.values() if each.rank.save.id.job == job)

    async def make_way(self) -> bool:
        """Gives the oldest incomplete replica up, else the oldest, else the one that is being opened; False:
        there is none."""
        replicas = list(self._replicas.values())
        replica = next((each for each in replicas if not each.complete), next(iter(replicas), None))
        if replica is None:
            return await self._room.contest()
        self.refused += 1
        await self._give_up(replica, "ranks of this host need its room", BusyError)
        return True

    # Upkeep.

    def restore(self, state: RankState, files: Iterable[DataFile]) -> None:
        """Takes a replica that an earlier process held, with files that were verified."""
        replica = HeldReplica.restored(state)
        for file in files:
            replica.rank.restore_file(file)
        self._journal.bind(replica.rank, state)
        self._replicas[replica.key] = replica

    async def tick(self) -> None:
        """Gives up replicas that aren't sent any more, and asks storage for outcomes. Every second or so."""
        now = time.monotonic()
        for each in list(self._replicas.values()):
            deadline = each.rank.deadlines.save
            if not each.complete and now - each.seen > timeouts.REPLICA_STALE_S:
                await self._give_up(each, "nothing of it arrives any more", UnavailableError)
            elif deadline and now - deadline > timeouts.REPLICA_KEPT_S:
                await self._give_up(each, "its save was over long ago", ConfigurationError)
        if self._asking is None or self._asking.done():
            late = [
                each
                for each in self._undecided()
                if now - max(each.status_at, each.asked_at) > timeouts.REPLICA_OUTCOME_S
            ]
            if late:
                self._asking = self._spawn(self._read_outcomes(late))

    async def close(self) -> None:
        """Ends what is under way here."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end_incomplete(self) -> None:
        """Frees all replicas that needn't be uploaded, or can't be, before an embedded sidecar exits."""
        for each in list(self._replicas.values()):
            if not each.complete or each.outcome is not None:
                await self._end(each, UnavailableError(f"the sidecar of {self._host} ends"))

    def _undecided(self) -> list[HeldReplica]:
        return [each for each in self._replicas.values() if each.outcome is None]

    def _check(self, replica: HeldReplica) -> None:
        if self._replicas.get(replica.key) is not replica:
            raise replica.problem or UnavailableError(
                f"{replica.label} takes no more bytes: its save has ended, or {self._host} uploads the rank"
            )

    async def _open(self, start: restore_pb2.ReplicaStart) -> HeldReplica:
        async with self._room.opening:
            known = self._replicas.get((save_text(start.context.save), start.context.rank))
            if known is not None:
                if known.resume(start):
                    return known
                why = "its host has other files of that rank now"
                await self._give_up(known, why, UnavailableError)
            if len(self._replicas) >= _MOST:
                raise OverloadedError(
                    f"{len(self._replicas)} replicas are on {self._host}, which is the limit"
                )
            try:
                replica = await self._reserve(start)
            except BusyError:
                self.refused += 1
                raise
            self._replicas[replica.key] = replica
            if self._saves.has_ended(start.context.save):
                # The save ended while the room was reserved, when apply_status found no replica.
                await self._end(replica, ConfigurationError(f"{replica.label}: its save has ended"))
            return replica

    async def _reserve(self, start: restore_pb2.ReplicaStart) -> HeldReplica:
        """A new replica, journalled. Raises BusyError: no room for it, or this host's ranks need the room."""
        sizes = [file.size for file in start.receipt.files]
        replica = HeldReplica.begun(start, await self._room.take(start.context.save.job, sizes))
        try:
            for file in replica.files:
                await self._journal.record_opened(replica.rank, file)
            self._room.check()
        except BaseException as error:
            await self._free(replica, UnavailableError(f"{replica.label}: {error}"))
            raise
        return replica

    async def _finish(self, replica: HeldReplica) -> None:
        self._check(replica)
        if replica.complete:
            return
        await self._journal.record_ingested(replica.rank, replica.final_receipt)
        self._check(replica)
        self._mark_complete(replica)
        if replica.outcome is not None:
            await self._settle(replica)

    def _mark_complete(self, replica: HeldReplica) -> None:
        if replica.complete:
            # An earlier stream, whose end wasn't awaited, has completed the replica.
            return
        replica.finish()
        size = size_text(sum(replica.held))
        _log.info("%s is complete: %s", replica.label, size, extra=_fields(replica))

    async def _settle(self, replica: HeldReplica) -> None:
        """Ends a replica whose save has ended; a complete one of a committed save becomes a local copy."""
        outcome = replica.outcome
        assert outcome is not None
        if self._replicas.get(replica.key) is not replica:
            return
        if outcome.state != save_pb2.SAVE_STATE_COMMITTED:
            await self._end(replica, ConfigurationError(f"{replica.label}: its save has ended"))
        elif replica.complete:
            await self._add_copy(replica, outcome)

    async def _add_copy(self, replica: HeldReplica, outcome: save_pb2.SaveStatus) -> None:
        del self._replicas[replica.key]
        rank = replica.rank
        rank.save.end(outcome)
        released = await replica.release()
        files = replica.local_files(released)
        if not files:
            await self._journal.forget(rank)
            return
        await self._journal.record_ended(rank, outcome)
        await self._local_copies.add(
            *(rank.save.id, rank.context.checkpoint_id, rank.attempt, files, rank),
            ended_at=rank.save.ended_at,
        )

    async def _give_up(self, replica: HeldReplica, why: str, error: type[PannierError]) -> None:
        if self._replicas.get(replica.key) is not replica:
            return
        size = size_text(sum(replica.held))
        what = "complete" if replica.complete else "incomplete"
        _log.info(
            "%s (%s, %s) is given up: %s", replica.label, what, size, why, extra=_fields(replica)
        )
        await self._end(replica, error(f"{self._host} has given {replica.label} up: {why}"))

    async def _end(self, replica: HeldReplica, problem: PannierError) -> None:
        if self._replicas.get(replica.key) is replica:
            del self._replicas[replica.key]
            await self._free(replica, problem)

    async def _free(self, replica: HeldReplica, problem: PannierError) -> None:
        released = await replica.release(problem)
        # Before the files are used for something else.
        await self._journal.forget(replica.rank)
        for spool_file in released.values():
            await self._mapped.give_back(spool_file)

    def _take_over(self, replica: HeldReplica) -> bool:
        """Makes the replica a rank of this sidecar, like one that was recovered from the journal.

        False: this sidecar has that rank itself, or its save has ended here.
        """
        held, receipt = replica.rank, replica.final_receipt
        if self._saves.find(held.context) is not None or self._saves.has_ended(held.save.id):
            return False
        del self._replicas[replica.key]
        left = held.deadlines.save - time.monotonic() if held.deadlines.save else 0.0
        rank = self._saves.restore(
            held.context,
            Phase.INGESTED,
            created_at=held.save.created_at,
            save_timeout_s=max(0.001, left) if held.deadlines.save else 0.0,
            attempt=held.attempt,
            plan=RankPlan(held.plan.id),
            receipt=receipt,
            replica=True,
        )
        self._journal.rebind(held, rank)
        for file in held.files.values():
            rank.restore_file(file)
            file.upload = UploadProgress()
            self._uploads.start(rank, file)
        self._uploads.finish(rank)
        _log.warning(
            "%s is uploaded by this host from its replica", rank.label, extra=rank.log_fields
        )
        self._saves.record_progress(rank)
        return True

    async def _read_outcomes(self, replicas: Sequence[HeldReplica]) -> None:
        for each in replicas:
            if each.outcome is not None:
                continue
            outcome = await self._uploads.stored_outcome(each.rank)
            each.asked_at = time.monotonic()
            if outcome is not None:
                self.apply_status(outcome)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` to its end, even if the caller is cancelled."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Callers raise it, unless they were cancelled.
            level = logging.DEBUG if isinstance(error, PannierError) else logging.ERROR
            _log.log(level, "a replica: %r", error, exc_info=error)


def _fields(replica: HeldReplica) -> dict[str, str | int]:
    return replica.rank.log_fields
