"""Applies a retention policy to one root: ``pannier retain``, and the coordinator after each commit.

In: how to open stores, the policy, a job. Out: what was removed, what is kept and why. A checkpoint that is
being read (a valid lease) or written (an attempt that is undecided, or committed but not yet installed) is
kept until the next run. The result is recorded beside the checkpoints before the first removal, for
``pannier ls`` and for late readers. Async; after a crash, a cancellation or an error, the next run removes
the rest of a checkpoint whose ``.metadata`` was removed.
"""

import logging
import posixpath
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.leases import store_time
from pannier.attempts.listing import Checkpoint, CheckpointState, list_checkpoints
from pannier.maintenance.delete_checkpoint import (
    InUseError,
    RemovalPlan,
    name_readers,
    plan_removal,
    remove_files,
    remove_metadata,
    remove_numbering,
)
from pannier.maintenance.retention_policy import Policy, apply_policy
from pannier.storage import ConflictError, NotFoundError, StorageError, Store
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.records import MOST_RECORD
from pannier.wire.retention_record import RemovedCheckpoint, RetentionRecord

_log = logging.getLogger(__name__)

_RECORDED: Final = 100
"""Most removals in the record."""

Opener = Callable[[str], Store]


@dataclass(frozen=True)
class Outcome:
    """Result for one checkpoint."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]
    """Why it is kept; empty: it was removed, or would be."""
    removed: int = 0
    """Bytes; 0 where some could not be removed yet."""
    spared: bool = False
    """No rule keeps it, but it can't be removed now."""
    error: StorageError | None = field(default=None, compare=False)
    """Why it, or some of its files, could not be removed."""

    @property
    def why(self) -> str:
        """Its reasons, human-readable."""
        return ", ".join(self.reasons)


async def retain(
    open_store: Opener,
    root: str,
    policy: Policy,
    *,
    job: str,
    host: str,
    committed: str | None = None,
    dry_run: bool = False,
) -> list[Outcome]:
    """Removes the checkpoints of a job below ``root`` that the policy applies to and doesn't keep.

    Args:
        open_store: opens a checkpoint id or root; each store is closed here.
        host: recorded in removal marks.
        committed: the attempt whose commit triggers the run: it and newer ones are kept this time.
        dry_run: removes and records nothing.

    Raises:
        StorageError: the root can't be read. An error at one checkpoint is a reason to keep that one.
    """
    store = open_store(root)
    try:
        checkpoints = await list_checkpoints(store, policy.pattern)
        results = apply_policy(policy, checkpoints, job=job, committed=committed)
        now = await store_time(store) if any(not each.reasons for each in results) else 0.0
        going = []
        if policy.limits:
            going = await _find_unfinished(open_store, root, checkpoints, job)
        outcomes = [each.gone() for each in going]
        for result in results:
            if result.reasons:
                outcomes.append(Outcome(result.checkpoint, result.reasons))
                continue
            each = _Removal(open_store, root, result.checkpoint, now)
            outcomes.append(await each.check())
            if not outcomes[-1].reasons:
                going.append(each)
        if dry_run or not policy.limits:
            return outcomes
        await _record(store, policy, job, outcomes)
        removed = {each.checkpoint.name: await each.remove(host) for each in going}
        outcomes = [removed.get(each.checkpoint.name, each) for each in outcomes]
        if any(each.spared for each in removed.values()):
            await _record(store, policy, job, outcomes)
    finally:
        await store.close()
    return outcomes


@dataclass
class _Removal:
    """One checkpoint that no rule keeps, or what an earlier run has left of one."""

    open_store: Opener
    root: str
    checkpoint: Checkpoint
    now: float = 0.0
    """The store's time."""
    plan: RemovalPlan | None = None

    async def check(self) -> Outcome:
        """Whether it can be removed now; writes nothing."""
        store = self.open_store(self._url)
        try:
            plan = await plan_removal(store)
        except PannierError as error:
            return self._failed(error)
        finally:
            await store.close()
        standing = plan.seen.standing
        if standing is None or standing.name != self.checkpoint.attempt:
            return self._spared("it was overwritten a moment ago")
        if plan.undecided:
            return self._spared("a save to it is in progress")
        if plan.pending:
            return self._spared(
                "a newer save to it is decided, but not finished: `pannier recover` finishes it"
            )
        if readers := plan.readers(self.now):
            return self._spared(f"it is being read by {name_readers(readers)}")
        self.plan = plan
        return self.gone()

    async def is_unfinished(self, job: str) -> bool:
        """Whether a removal of a checkpoint of ``job`` ended between ``.metadata`` and its last record.

        Raises PannierError: it can't be read, or there is nothing of Pannier's by now.
        """
        store = self.open_store(self._url)
        try:
            plan = await plan_removal(store)
        finally:
            await store.close()
        if plan.seen.metadata is not None or plan.undecided or plan.pending or not plan.commits:
            return False
        self.plan = plan
        return plan.seen.decisions.known[plan.commits[-1]].save.job == job

    def gone(self) -> Outcome:
        """The outcome of the planned removal."""
        assert self.plan is not None
        return Outcome(self.checkpoint, (), self.plan.size)

    async def remove(self, host: str) -> Outcome:
        """Removes it, unless a reader has a lease by now."""
        assert self.plan is not None
        store = self.open_store(self._url)
        try:
            if self.plan.seen.metadata is not None:
                await remove_metadata(store, self.plan, host=host, spare_at=self.now)
            outcome = await self._remove_files(store, self.plan)
            await store.remove_directory()
        except InUseError as error:
            return self._spared(str(error))
        except PannierError as error:
            return self._failed(error)
        finally:
            await store.close()
        await self._remove_parents()
        return outcome

    async def _remove_files(self, store: Store, plan: RemovalPlan) -> Outcome:
        """Step 3 and 4 of a removal; an error is logged.

        Without ``.metadata`` the checkpoint is removed in any case; the next run removes the rest.
        """
        try:
            removed = await remove_files(store, plan)
        except PannierError as error:
            _log.warning(
                "retention: %s is no checkpoint any more, but not all its files are removed; the next run "
                "continues: %s",
                store.url,
                error,
            )
            return Outcome(self.checkpoint, (), error=_as_refusal(error))
        return Outcome(self.checkpoint, (), sum(info.size for info in removed.objects))

    async def _remove_parents(self) -> None:
        """Removes the directories between the root and the checkpoint that have nothing else."""
        assert self.checkpoint.attempt is not None
        above = self.checkpoint.name
        while above := posixpath.dirname(above):
            parent = self.open_store(posixpath.join(self.root, above))
            try:
                await remove_numbering(parent, self.checkpoint.attempt)
                await parent.remove_directory()
            except PannierError as error:
                _log.warning("what is left of %s could not be removed: %s", parent.url, error)
            finally:
                await parent.close()

    @property
    def _url(self) -> str:
        return f"{self.root.rstrip('/')}/{self.checkpoint.name}"

    def _spared(self, why: str) -> Outcome:
        return Outcome(self.checkpoint, (why,), spared=True)

    def _failed(self, error: PannierError) -> Outcome:
        why = f"it could not be removed: {error}"
        return Outcome(self.checkpoint, (why,), spared=True, error=_as_refusal(error))


def _as_refusal(error: PannierError) -> StorageError | None:
    return error if isinstance(error, StorageError) else None


async def _find_unfinished(
    open_store: Opener, root: str, checkpoints: Iterable[Checkpoint], job: str
) -> list[_Removal]:
    """Removals that were interrupted after ``.metadata`` was removed: their data files may be left."""
    found = []
    for checkpoint in checkpoints:
        if checkpoint.state is CheckpointState.UNDECIDED:
            each = _Removal(open_store, root, checkpoint)
            try:
                if await each.is_unfinished(job):
                    found.append(each)
            except PannierError as error:
                _log.info(
                    "retention: %s/%s is left to the next run: %s", root, checkpoint.name, error
                )
    return found


async def _record(store: Store, policy: Policy, job: str, outcomes: list[Outcome]) -> None:
    """Records the result for listings of the root, in place of the last run's.

    A report: what can't be read of the last one is dropped, and one that can't be written holds up no removal.
    """
    key = object_names.retention_record()
    try:
        info = await store.stat(key)
        known = await read_record(store)
        await store.replace(
            key,
            _updated(known, policy, job, outcomes).serialize(),
            expected=info.generation if info is not None else None,
        )
    except ConflictError:
        _log.info("%s/%s was written by another coordinator meanwhile", store.url, key)
    except StorageError as error:
        _log.warning("what retention keeps and removes can't be recorded: %s", error)


def _updated(
    known: RetentionRecord, policy: Policy, job: str, outcomes: list[Outcome]
) -> RetentionRecord:
    at = time.time()
    removed = [
        RemovedCheckpoint(each.checkpoint.name, job, each.removed, at)
        for each in outcomes
        if not each.reasons
    ]
    kept = {each.checkpoint.name: each.reasons for each in outcomes if each.reasons}
    # The checkpoint of an earlier entry may have been kept in the end, or saved again.
    names = {each.checkpoint.name for each in outcomes}
    former = [each for each in known.removed if each.job != job or each.name not in names]
    return RetentionRecord(
        {**known.kept, job: kept}, [*former, *removed][-_RECORDED:], policy.pattern.text
    )


async def read_record(store: Store) -> RetentionRecord:
    """Result of the last run; empty without one. Raises StorageError."""
    try:
        content = await store.read_whole(object_names.retention_record(), MOST_RECORD)
        return RetentionRecord.parse(content)
    except (NotFoundError, IntegrityError):
        return RetentionRecord()
