"""Garbage collection of what crashes, aborts and overwrites leave behind: ``pannier gc``.

In: a checkpoint id's store, the rules, the store's time. Out: what was removed and what was kept, and why.
Objects of an attempt are removed only after its decision, so that a save in progress loses nothing; files
that the current ``.metadata`` refers to are never removed, and nothing is removed from a checkpoint that
Pannier didn't write. Async.
"""

import enum
import posixpath
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.delete_attempt import (
    check_unneeded,
    find_planned,
    find_uploads,
    remove_ended,
)
from pannier.attempts.leases import read_leases
from pannier.common.fault_points import point
from pannier.maintenance.inspect import View, find_needed, view
from pannier.maintenance.recover import (
    CurrentMetadata,
    Found,
    Interrupted,
    decide_abort,
    diagnose_attempt,
)
from pannier.maintenance.superseded import GRACE_S, sweep_superseded
from pannier.storage import ObjectInfo, Store, Unfinished
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, StorageError

ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Seconds without a write after which an undecided attempt is aborted, by default."""
_PRIVATE: Final = object_names.attempts_prefix().rstrip("/")
"""Names of the records' directory and of the local store's own files begin with it."""


@dataclass(frozen=True)
class Rules:
    """Ages by the store's clock, in seconds."""

    grace_s: float = GRACE_S
    """Age of a superseded attempt's mark at which the attempt is removed."""
    abandoned_after_s: float = ABANDONED_AFTER_S
    """Time without a write after which unfinished attempts, uploads and temporary files are removed, and so
    are aborted attempts' decisions."""


class Reason(enum.Enum):
    """Why an object is removed."""

    SUPERSEDED = "superseded"
    """A newer save to the same id was committed, and the grace period has passed."""
    ABORTED = "aborted"
    """Its save was aborted: its objects, late ones included, and finally its decision."""
    ABANDONED = "abandoned"
    """Its undecided attempt has had no write for long and can't be committed."""
    REMOVED = "removed"
    """It belongs to a checkpoint whose removal has begun."""
    LEASE = "lease"
    """An expired lease."""
    UPLOAD = "upload"
    """An unfinished upload."""
    TEMPORARY = "temporary"
    """A temporary file of a dead process."""


@dataclass(frozen=True)
class Removed:
    """One object that was removed, or would be."""

    name: str
    """Relative to the checkpoint id."""
    reason: Reason
    attempt: str
    """Empty: of no attempt."""
    size: int


@dataclass(frozen=True)
class Kept:
    """An attempt that was kept, or with an empty ``attempt`` a whole checkpoint."""

    attempt: str
    why: str
    size: int = 0


@dataclass
class Report:
    """Result for one checkpoint id."""

    removed: list[Removed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    """Aborted attempts, whose unfinished uploads are garbage."""
    undecided: set[str] = field(default_factory=set)
    """Attempts that may be in progress."""
    planned: set[str] = field(default_factory=set)
    """Data files that the removed attempts may have been uploading."""
    errors: list[StorageError] = field(default_factory=list)
    """Storage errors; what each was about is in ``kept``."""

    def add(self, objects: Iterable[ObjectInfo], reason: Reason, attempt: str = "") -> None:
        """Records the removal of these objects."""
        self.removed += [Removed(info.key, reason, attempt, info.size) for info in objects]

    def fail(self, error: StorageError, attempt: str = "", size: int = 0) -> None:
        """Records an attempt, or the rest of the checkpoint, as kept for an error."""
        self.errors.append(error)
        self.kept.append(Kept(attempt, str(error), size))


async def sweep(store: Store, rules: Rules, *, now: float, host: str, dry_run: bool) -> Report:
    """Sweeps one checkpoint id.

    Args:
        now: the store's time.
        host: recorded in decisions.
        dry_run: writes and removes nothing.

    Errors are in the report, beside what was removed before them.
    """
    report = Report()
    try:
        await _sweep(store, rules, now, host, dry_run, report)
    except IntegrityError as error:
        report.kept.append(Kept("", str(error)))
    except StorageError as error:
        report.fail(error)
    return report


async def _sweep(
    store: Store, rules: Rules, now: float, host: str, dry_run: bool, report: Report
) -> None:
    seen = await view(store)
    if seen.foreign:
        # The checkpoint is another writer's, or a copy: it may need any file there.
        report.kept.append(Kept("", "its .metadata was not committed by Pannier"))
        return
    needed = await find_needed(store)
    sweeper = _Sweeper(store, seen, needed, rules, now, host, dry_run, report)
    await sweeper.sweep_attempts()
    await sweeper.sweep_others()


@dataclass
class _Sweeper:
    """One sweep of one checkpoint id."""

    store: Store
    seen: View
    needed: frozenset[str]
    rules: Rules
    now: float
    host: str
    dry_run: bool
    report: Report

    async def sweep_attempts(self) -> None:
        """The objects of attempts."""
        swept = await sweep_superseded(
            self.store, self.seen, grace_s=self.rules.grace_s, now=self.now, dry_run=self.dry_run
        )
        for attempt, objects in swept.removed.items():
            self.report.add(objects, Reason.SUPERSEDED, attempt)
        for attempt, why in swept.kept.items():
            self._keep(attempt, why)
        for attempt, error in swept.failed.items():
            self._fail(attempt, error)
        done = self.seen.superseded()
        for attempt in self.seen.attempts:
            if attempt not in done:
                try:
                    await self._sweep_attempt(attempt)
                except IntegrityError as error:
                    self._keep(attempt, str(error))
                except StorageError as error:
                    self._fail(attempt, error)

    async def _sweep_attempt(self, attempt: str) -> None:
        decision = self.seen.decisions.known.get(attempt)
        marked = self.seen.find(attempt, object_names.removal_mark(attempt)) is not None
        standing = self.seen.standing
        if standing is not None and attempt == standing.name:
            if marked:
                self._keep(attempt, "its removal has begun: run `pannier rm` again to finish it")
        elif decision is None:
            await self._sweep_undecided(attempt)
        elif decision.outcome == records_pb2.OUTCOME_ABORT:
            await self._sweep_aborted(attempt)
        elif marked or await self.store.stat(object_names.manifest(attempt)) is None:
            # Without its manifest the COMMIT can't be carried out: it is the last that a removal has left.
            await self._remove(attempt, self.seen.attempts[attempt], Reason.REMOVED)
        else:
            self._keep(attempt, "its commit is decided, but not finished: run `pannier recover`")

    async def _sweep_aborted(self, attempt: str) -> None:
        """Removes the attempt's objects and, once only its decision is left and is old, the decision.

        The decision prevents a late COMMIT. It isn't needed for that once the other objects are
        removed: a coordinator that was stopped before its decision then finds neither manifest nor
        receipts, and installs nothing (:func:`pannier.attempts.metadata_swap.is_removed`). It is kept
        for a while only to show how the save ended.
        """
        self.report.aborted.add(attempt)
        key = object_names.decision(attempt)
        objects = self.seen.attempts[attempt]
        left = [info for info in objects if info.key != key]
        if left:
            await self._remove(attempt, left, Reason.ABORTED, keep_decision=True)
        elif all(self._is_old(info.modified) for info in objects):
            await self._remove(attempt, objects, Reason.ABORTED)

    async def _sweep_undecided(self, attempt: str) -> None:
        objects = self.seen.attempts[attempt]
        if object_names.is_remains(attempt, {info.key for info in objects}):
            await self._remove(attempt, objects, Reason.REMOVED)
            return
        self.report.undecided.add(attempt)
        idle_s = max(0.0, self.now - max(info.modified for info in objects))
        if idle_s < self.rules.abandoned_after_s:
            self._keep(
                attempt, f"undecided, last written {idle_s:.0f} s ago: a save may be in progress"
            )
            return
        found = await diagnose_attempt(
            self.store, attempt, objects, self.seen.decisions, CurrentMetadata(self.store)
        )
        if found is None:
            return
        if found.found is Found.COMPLETE:
            self._keep(attempt, "all its ranks are durable: run `pannier recover` to commit it")
            return
        if not self.dry_run and not await self._abort(found):
            return
        self.report.undecided.discard(attempt)
        left = [info for info in objects if info.key != object_names.decision(attempt)]
        await self._remove(attempt, left, Reason.ABANDONED, keep_decision=True)

    async def _abort(self, found: Interrupted) -> bool:
        """Decides ABORT; False when another process has decided COMMIT meanwhile."""
        why = f"aborted by `pannier gc` {self.rules.abandoned_after_s:.0f} s after its last write"
        decision = await decide_abort(self.store, found, self.host, why)
        if decision.outcome == records_pb2.OUTCOME_ABORT:
            self.report.aborted.add(found.attempt)
            return True
        self._keep(found.attempt, "its commit was decided meanwhile")
        return False

    async def _remove(
        self,
        attempt: str,
        objects: Collection[ObjectInfo],
        reason: Reason,
        *,
        keep_decision: bool = False,
    ) -> None:
        self.report.planned |= await find_planned(self.store, attempt)
        if self.dry_run:
            check_unneeded(self.store, attempt, objects, self.needed)
        else:
            # Read again: .metadata may have been replaced since.
            needed = self.needed | await find_needed(self.store)
            objects = await remove_ended(
                self.store, attempt, needed=needed, keep_decision=keep_decision
            )
        self.report.add(objects, reason, attempt)

    async def sweep_others(self) -> None:
        """Leases and temporary objects."""
        leases = await read_leases(self.store, self.seen.others)
        expired = [lease for lease in leases if lease.expires <= self.now]
        for lease in expired:
            await self._delete(lease.info)
            self.report.add([lease.info], Reason.LEASE, lease.attempt)
        for info in self.seen.others:
            if object_names.is_temporary(info.key) and self._is_old(info.modified):
                await self._delete(info)
                self.report.add([info], Reason.TEMPORARY)

    async def _delete(self, info: ObjectInfo) -> None:
        if not self.dry_run:
            point("sweep.leftover.before")
            # Keeps a lease that was renewed meanwhile.
            await self.store.delete(info.key, generation=info.generation)
            point("sweep.leftover.after")

    def _is_old(self, modified: float) -> bool:
        return max(0.0, self.now - modified) >= self.rules.abandoned_after_s

    def _keep(self, attempt: str, why: str) -> None:
        self.report.kept.append(Kept(attempt, why, self.seen.size(attempt)))

    def _fail(self, attempt: str, error: StorageError) -> None:
        self.report.fail(error, attempt, self.seen.size(attempt))


async def sweep_unfinished(
    store: Store,
    rules: Rules,
    *,
    aborted: Collection[str],
    undecided: Collection[str],
    planned: Collection[str],
    now: float,
    dry_run: bool,
) -> AsyncIterator[Removed]:
    """Removes Pannier's abandoned uploads and temporary files below ``store``.

    Args:
        aborted: aborted attempts, as paths relative to ``store``: theirs are removed at any age.
        undecided: attempts that may be in progress, as paths: theirs are kept.
        planned: data files of removed attempts, as paths: their uploads may only be listed by name.

    Raises StorageError.
    """
    listed = await store.list_unfinished()
    known = {item.key for item in listed}
    by_name = await find_uploads(store, [key for key in planned if key not in known])
    for item in [*listed, *by_name]:
        if not _is_own(item.key) or not _may_go(item, rules, aborted, undecided, now):
            continue
        if not dry_run:
            point("sweep.leftover.before")
            await store.discard(item)
            point("sweep.leftover.after")
        attempt = object_names.attempt_of(posixpath.basename(item.key))
        yield Removed(item.key, Reason.UPLOAD, attempt, item.size)


def _is_own(key: str) -> bool:
    """Whether Pannier began the upload: other programs' may be pending for longer than any save takes."""
    return bool(object_names.attempt_of(posixpath.basename(key))) or any(
        part.startswith(_PRIVATE) for part in key.split("/")
    )


def _may_go(
    item: Unfinished,
    rules: Rules,
    aborted: Collection[str],
    undecided: Collection[str],
    now: float,
) -> bool:
    directory, name = posixpath.split(item.key)
    attempt = posixpath.join(directory, object_names.attempt_of(name))
    if attempt in aborted or attempt in undecided:
        return attempt in aborted
    return max(0.0, now - item.modified) >= rules.abandoned_after_s
