"""Removes a whole checkpoint, so that no process can install it again: ``pannier rm``.

In: a checkpoint id's store. Out: all objects of its decided attempts are removed. The order:

1. every committed attempt gets a mark, so that neither ``pannier recover`` nor a stopped coordinator
   finishes its commit;
2. ``.metadata`` is removed, exactly the generation that was checked: from here on no checkpoint exists;
3. copies of extra files, data files, records, the decision last;
4. a check whether a delayed write has created ``.metadata`` or such a copy again.

Retention keeps checkpoints that are being read, and so reads the leases again between 1 and 2. A reader
writes its lease first and then looks for marks, so that one of the two sees the other in any order: the
reader fails, or the marks are removed.

A process that dies halfway leaves marks; run it again to finish. Async.
"""

import json
import os
import posixpath
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pannier.attempts.delete_attempt import remove_ended
from pannier.attempts.leases import Lease, find_leases
from pannier.attempts.metadata_swap import settle_copies, stat_metadata
from pannier.common.fault_points import point
from pannier.common.locations import parse
from pannier.maintenance.inspect import View, find_needed, view
from pannier.storage import ConflictError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, SaveAbortedError
from pannier.wire.records import match


class InUseError(PannierError):
    """A reader holds a lease of the checkpoint."""


@dataclass
class RemovalPlan:
    """The objects of one checkpoint id that are to be removed."""

    seen: View
    attempts: list[str]
    """Decided ones, the newest last."""
    undecided: list[str]
    """Not removed: a save may be in progress."""
    leases: list[Lease]

    @property
    def size(self) -> int:
        """Bytes to remove."""
        metadata, standing = self.seen.metadata, self.seen.standing
        own = metadata.size if metadata is not None else 0
        if standing is not None:
            own += sum(file.size for file in self.seen.decisions.known[standing.name].extra_files)
        return own + sum(self.seen.size(attempt) for attempt in self.attempts)

    def readers(self, now: float) -> list[Lease]:
        """Leases that are valid at ``now``, by the store's clock."""
        return _valid(self.leases, now)


@dataclass
class RemovedObjects:
    """Objects that were removed."""

    objects: list[ObjectInfo] = field(default_factory=list)


async def plan_removal(store: Store) -> RemovalPlan:
    """The objects that :func:`remove_checkpoint` would remove; writes nothing.

    Raises:
        SaveAbortedError: there is no checkpoint, or Pannier didn't write it.
        StorageError: it can't be read.
        IntegrityError: a damaged record makes the attempt of ``.metadata`` unknown.
    """
    seen = await view(store)
    if seen.foreign or (not seen.attempts and await store.stat(object_names.METADATA) is not None):
        raise SaveAbortedError(
            f"{store.url} was not committed by Pannier, so that its files aren't known: "
            "remove it with your storage's own tools"
        )
    if not seen.attempts:
        raise SaveAbortedError(f"there is no checkpoint at {store.url}, and no records of a save")
    known = seen.decisions.known
    leases = await find_leases(store)
    return RemovalPlan(
        seen,
        [attempt for attempt in seen.attempts if attempt in known],
        [attempt for attempt in seen.attempts if attempt not in known],
        leases,
    )


async def remove_checkpoint(
    store: Store,
    plan: RemovalPlan,
    *,
    host: str,
    reason: str = "pannier rm",
    spare_at: float | None = None,
) -> RemovedObjects:
    """Removes the checkpoint. Without ``spare_at``, its readers fail, also those with a lease.

    Args:
        host: recorded in the marks.
        reason: recorded in the marks.
        spare_at: the store's time; with it, nothing is removed while a lease is valid.

    Raises:
        InUseError: a reader has a lease; nothing was removed, and no mark is left.
        SaveAbortedError: a newer save was committed there meanwhile, and isn't removed.
        StorageError: a step failed: run it again.
        IntegrityError: ``.metadata`` refers to files of another attempt.
    """
    seen, removed = plan.seen, RemovedObjects()
    content = json.dumps({"by": host, "reason": reason, "token": uuid.uuid4().hex}).encode()
    committed = [
        attempt
        for attempt in plan.attempts
        if seen.decisions.known[attempt].outcome == records_pb2.OUTCOME_COMMIT
    ]
    if spare_at is None:
        for attempt in committed:
            await _mark(store, attempt, content)
    else:
        await _mark_unread(store, committed, content, spare_at)
    if seen.metadata is not None:
        point("sweep.metadata.before")
        await store.delete(object_names.METADATA, generation=seen.metadata.generation)
        point("sweep.metadata.after")
        removed.objects.append(seen.metadata)
        if await store.stat(object_names.METADATA) is not None:
            raise SaveAbortedError(
                f"another save was committed to {store.url} meanwhile and is kept; the attempts that "
                "it superseded are removed later; run the command again to remove it, too"
            )
    for lease in plan.leases:
        if lease.attempt in plan.attempts:
            point("sweep.leftover.before")
            await store.delete(lease.info.key)
            point("sweep.leftover.after")
    for attempt in plan.attempts:
        needed = await find_needed(store)
        removed.objects += await remove_ended(store, attempt, needed=needed)
    await _discard(store, plan.attempts)
    await _remove_delayed(store, plan)
    return removed


def remove_directory(checkpoint_id: str) -> None:
    """On a local file system: removes the checkpoint's directory if it is empty."""
    location = parse(checkpoint_id)
    if location.scheme == "file":
        with suppress(OSError):
            os.rmdir(location.path)


async def remove_numbering(parent: Store, attempt: str) -> None:
    """Removes the numbers of incarnations from a directory that has nothing else.

    For one above a checkpoint that a pattern matched: else it would be listed for ever. A number above that of
    the removed ``attempt`` belongs to a save that has just begun: then all stay.
    """
    last = object_names.Attempt.parse(attempt).incarnation_number
    listed = await parent.list()
    for info in listed:
        number = object_names.incarnation_number(info.key)
        if not 0 < number <= last or info.key != object_names.incarnation_record(number):
            return
    for info in listed:
        await parent.delete(info.key, generation=info.generation)


async def _discard(store: Store, attempts: Collection[str]) -> None:
    """Removes unfinished uploads, temporary files and locks, except of checkpoints in subdirectories.

    Those of other attempts stay: a save may have begun since the plan. What names no attempt could be theirs, too.

    Args:
        attempts: those that were removed.
    """
    records = object_names.attempts_prefix()
    unfinished = [
        item
        for item in await store.list_unfinished()
        if "/" not in item.key or item.key.startswith(records)
    ]
    if not unfinished:
        return
    # After them: a save that began one of them has its manifest by now, or uploads by its own names.
    listed = [*await store.list(records), *await store.list("__")]
    alone = {object_names.attempt_of(info.key) for info in listed} <= {"", *attempts}
    for item in unfinished:
        attempt = object_names.attempt_of(posixpath.basename(item.key))
        may_go = attempt in attempts if attempt else alone
        if may_go:
            await store.discard(item)


async def _mark(store: Store, attempt: str, content: bytes) -> None:
    """Replaces another process's mark, which that process may remove."""
    key = object_names.removal_mark(attempt)
    point("sweep.removal.before")
    try:
        await store.create(key, content)
    except ConflictError as error:
        current = error.current
        await store.replace(key, content, expected=current.generation if current else None)
    point("sweep.removal.after")


async def _mark_unread(store: Store, attempts: Collection[str], content: bytes, now: float) -> None:
    """Marks the attempts, or raises InUseError. Keeps other processes' marks."""
    own: list[ObjectInfo] = []
    for attempt in attempts:
        point("sweep.removal.before")
        try:
            own.append(await store.create(object_names.removal_mark(attempt), content))
        except ConflictError as error:
            if error.current is None:
                raise
        point("sweep.removal.after")
    if readers := _valid(await find_leases(store), now):
        for mark in own:
            await store.delete(mark.key, generation=mark.generation)
        raise InUseError(f"it is being read by {name_readers(readers)}")


def _valid(leases: Iterable[Lease], now: float) -> list[Lease]:
    return [lease for lease in leases if lease.expires > now]


def name_readers(leases: Iterable[Lease]) -> str:
    """The holders, human-readable."""
    return ", ".join(sorted({lease.holder for lease in leases}))


async def _remove_delayed(store: Store, plan: RemovalPlan) -> None:
    """Removes what a stopped coordinator wrote after the removal: ``.metadata``, copies of extra files."""
    info, checksum = await stat_metadata(store)
    decisions = {attempt: plan.seen.decisions.known[attempt] for attempt in plan.attempts}
    if info is not None and match(decisions, info.size, checksum) is not None:
        await store.delete(object_names.METADATA, generation=info.generation)
    if commits := [each for each in decisions.values() if each.extra_files]:
        await settle_copies(store, commits)
