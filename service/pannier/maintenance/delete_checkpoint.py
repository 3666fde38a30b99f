"""Removes a whole checkpoint, so that no process can install it again: ``pannier rm``.

In: a checkpoint id's store. Out: all objects of its decided attempts are removed. The order:

1. every committed attempt gets a mark, so that neither ``pannier recover`` nor a stopped coordinator
   finishes its commit;
2. ``.metadata`` is removed, exactly the generation that was checked: from here on no checkpoint exists;
3. copies of extra files, data files, records, the decision last;
4. a check whether a delayed write has created ``.metadata`` or such a copy again.

Retention keeps checkpoints that are being read, and so reads the leases again between 1 and 2. A reader
writes its lease first and then looks for marks, so that one of the two sees the other in any order: the
reader fails, or the marks are taken back. They are also taken back when 2 fails. A run that finds another
run's mark replaces it: from then on neither takes it back, since both rely on it.

A process that dies halfway leaves marks; run it again to finish. Async.
"""

import json
import posixpath
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.delete_attempt import find_planned, find_uploads, remove_ended
from pannier.attempts.leases import Lease, find_leases
from pannier.attempts.metadata_swap import settle_copies, stat_metadata
from pannier.common.fault_points import point
from pannier.maintenance.inspect import View, describe_root, find_needed, view
from pannier.storage import ConflictError, HeldError, NotFoundError, ObjectInfo, StorageError, Store
from pannier.storage.local.atomic_file import HIDDEN
from pannier.storage.retry import clean_up, contend
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, SaveAbortedError
from pannier.wire.records import MOST_NOTE, match

_RETENTION: Final = "retention"
"""Reason in the marks of retention, which may be taken back; those of ``pannier rm`` never are."""
_RACES: Final = 10
"""Changes of a mark in a row by other processes."""


class InUseError(PannierError):
    """A reader holds a lease of the checkpoint."""


@dataclass
class RemovalPlan:
    """The objects of one checkpoint id that are to be removed."""

    seen: View
    attempts: list[str]
    """Decided ones, the newest last, and remains of removed ones."""
    undecided: list[str]
    """Not removed: a save may be in progress."""
    leases: list[Lease]

    @property
    def commits(self) -> list[str]:
        """The committed ones of ``attempts``."""
        known = self.seen.decisions.known
        return [
            name
            for name in self.attempts
            if name in known and known[name].outcome == records_pb2.OUTCOME_COMMIT
        ]

    @property
    def pending(self) -> list[str]:
        """Commits that are decided, but whose ``.metadata`` has yet to be written."""
        standing, known = self.seen.standing, self.seen.decisions.known
        return [
            name
            for name in self.commits
            if (standing is None or object_names.Attempt.of(known[name]) > standing)
            and not self._is_removed(name)
        ]

    def _is_removed(self, attempt: str) -> bool:
        """As :func:`pannier.attempts.metadata_swap.is_removed`; a manifest shows that nothing is missing."""
        mark, manifest = object_names.removal_mark(attempt), object_names.manifest(attempt)
        return bool(self.seen.find(attempt, mark)) or not self.seen.find(attempt, manifest)

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
        HeldError: ``.metadata`` can't be removed.
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
        root = await describe_root(store)
        raise SaveAbortedError(
            f"there is no checkpoint at {store.url}, and no records of a save{root and f': {root}'}"
        )
    if seen.metadata is not None and seen.metadata.hold:
        raise HeldError(
            f"{store.url}/{object_names.METADATA} is under a hold ({seen.metadata.hold}) and can't be "
            "removed: release it first"
        )
    undecided = [
        attempt
        for attempt, objects in seen.attempts.items()
        if attempt not in seen.decisions.known
        and not object_names.is_remains(attempt, {info.key for info in objects})
    ]
    attempts = [attempt for attempt in seen.attempts if attempt not in undecided]
    return RemovalPlan(seen, attempts, undecided, await find_leases(store))


async def remove_checkpoint(store: Store, plan: RemovalPlan, *, host: str) -> RemovedObjects:
    """Removes the checkpoint. Its readers fail, also those with a lease.

    Args:
        host: recorded in the marks.

    Raises as :func:`remove_metadata` and :func:`remove_files`: run it again.
    """
    await remove_metadata(store, plan, host=host)
    return await remove_files(store, plan)


async def remove_metadata(
    store: Store, plan: RemovalPlan, *, host: str, spare_at: float | None = None
) -> None:
    """Steps 1 and 2: afterwards there is no checkpoint, and nothing installs it again.

    Args:
        host: recorded in the marks.
        spare_at: for retention: the store's time; nothing is removed if a lease is valid then.

    With ``spare_at``, the marks that this call alone has written are taken back before it raises, if
    ``.metadata`` is still there.

    Raises:
        InUseError: a reader has a lease.
        SaveAbortedError: a newer save was committed there meanwhile, and isn't removed.
        StorageError: a step failed.
    """
    marks = _Marks(host, "pannier rm" if spare_at is None else _RETENTION)
    try:
        for attempt in plan.commits:
            point("sweep.removal.before")
            await _write_mark(store, object_names.removal_mark(attempt), marks)
            point("sweep.removal.after")
        if spare_at is not None and (readers := _valid(await find_leases(store), spare_at)):
            raise InUseError(f"it is being read by {name_readers(readers)}")
        await _delete_metadata(store, plan)
    except BaseException:
        if spare_at is not None and plan.seen.metadata is not None:
            what = f"{store.url}: removal marks could not be taken back"
            await clean_up(_take_back(store, plan.commits, marks, plan.seen.metadata), what)
        raise


async def remove_files(store: Store, plan: RemovalPlan) -> RemovedObjects:
    """Steps 3 and 4: removes what is left after ``.metadata``; returns all removed objects, of step 2, too.

    Raises:
        StorageError: a step failed: run it again.
        IntegrityError: ``.metadata`` refers to files of another attempt.
    """
    removed = RemovedObjects([plan.seen.metadata] if plan.seen.metadata is not None else [])
    for lease in plan.leases:
        if lease.attempt in plan.attempts:
            point("sweep.leftover.before")
            await store.delete(lease.info.key)
            point("sweep.leftover.after")
    planned: set[str] = set()
    for attempt in plan.attempts:
        planned |= await find_planned(store, attempt)
        needed = await find_needed(store)
        removed.objects += await remove_ended(store, attempt, needed=needed)
    await _discard(store, plan.attempts, planned)
    await _remove_delayed(store, plan)
    return removed


async def remove_numbering(parent: Store, attempt: str) -> None:
    """Removes the numbers of incarnations from a directory that has nothing else.

    For a directory above a checkpoint that a pattern matched, which would otherwise be listed for ever. A
    number above that of the removed ``attempt`` belongs to a save that has just begun: then all stay.
    """
    last = object_names.Attempt.parse(attempt).incarnation_number
    listed = await parent.list()
    for info in listed:
        number, term = object_names.term_of(info.key)
        if term:
            continue  # of the incarnation's record beside it
        number = object_names.incarnation_number(info.key)
        if not 0 < number <= last or info.key != object_names.incarnation_record(number):
            return
    for info in listed:
        await parent.delete(info.key, generation=info.generation)


async def _discard(store: Store, attempts: Collection[str], planned: Collection[str]) -> None:
    """Removes unfinished uploads, temporary files and locks, except of checkpoints in subdirectories.

    Items of other attempts stay: a save may have begun since the plan. An item that names no attempt could be
    such an attempt's, too, or, beside the data files, another program's.

    Args:
        attempts: those that were removed.
        planned: their data files: uploads of these may only be listed by name.
    """
    for item in await find_uploads(store, planned):
        await store.discard(item)
    records = object_names.attempts_prefix()
    unfinished = [
        item
        for item in await store.list_unfinished()
        if f"{item.key}/".startswith(records)
        or (
            "/" not in item.key
            and (object_names.attempt_of(item.key) or item.key.startswith(HIDDEN))
        )
    ]
    if not unfinished:
        return
    # Listed after the items: a save that began one of them has its manifest by now, or the item's name has
    # its attempt.
    listed = [*await store.list(records), *await store.list("__")]
    alone = {object_names.attempt_of(info.key) for info in listed} <= {"", *attempts}
    for item in unfinished:
        attempt = object_names.attempt_of(posixpath.basename(item.key))
        may_go = attempt in attempts if attempt else alone
        if may_go:
            await store.discard(item)


class _Marks:
    """The removal marks of one process."""

    def __init__(self, host: str, reason: str) -> None:
        self._fields = {"by": host, "reason": reason, "token": uuid.uuid4().hex}

    @property
    def own(self) -> bytes:
        """Content of marks that this process alone has written."""
        return json.dumps(self._fields).encode()

    @property
    def shared(self) -> bytes:
        """Content of marks that replaced another process's, which may rely on them."""
        return json.dumps({**self._fields, "shared": True}).encode()


async def _write_mark(store: Store, key: str, marks: _Marks) -> None:
    """Creates a mark, or replaces one that another process might take back."""
    async for _ in contend(_RACES):
        try:
            await store.create(key, marks.own)
            return
        except ConflictError as error:
            current = error.current
        if current is None:
            continue  # Taken back just now.
        with suppress(ConflictError, NotFoundError):
            if _may_be_taken_back(await store.read_whole(key, MOST_NOTE)):
                # The other process takes back only the generation that it wrote.
                await store.replace(key, marks.shared, expected=current.generation)
            return
    raise StorageError(f"{store.url}/{key} changed {_RACES} times while it was written")


def _may_be_taken_back(mark: bytes) -> bool:
    try:
        found = json.loads(mark)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("reason") == _RETENTION


async def _take_back(
    store: Store, attempts: Collection[str], marks: _Marks, metadata: ObjectInfo
) -> None:
    """Removes the marks that only this process has written, unless ``metadata`` is gone."""
    if not await _stands(store, metadata):
        return
    taken = []
    for attempt in attempts:
        key = object_names.removal_mark(attempt)
        info = await store.stat(key)
        with suppress(NotFoundError):
            if info is not None and await store.read_whole(key, MOST_NOTE) == marks.own:
                await store.delete(key, generation=info.generation)
                taken.append(key)
    if taken and not await _stands(store, metadata):
        # A request to delete it, whose answer was not awaited, has taken effect since.
        for key in taken:
            await _write_mark(store, key, marks)


async def _stands(store: Store, metadata: ObjectInfo) -> bool:
    """Whether ``.metadata`` still has this generation."""
    info = await store.stat(object_names.METADATA)
    return info is not None and info.generation == metadata.generation


async def _delete_metadata(store: Store, plan: RemovalPlan) -> None:
    """Removes the ``.metadata`` of the plan, and one that another commit of the plan has installed since."""
    commits = {attempt: plan.seen.decisions.known[attempt] for attempt in plan.commits}
    info = plan.seen.metadata
    async for _ in contend(_RACES):
        if info is not None:
            point("sweep.metadata.before")
            try:
                await store.delete(object_names.METADATA, generation=info.generation)
            except StorageError:
                # If only the answer was lost, it is removed.
                if await _stands(store, info):
                    raise
            point("sweep.metadata.after")
        info, checksum = await stat_metadata(store)
        if info is None:
            return
        if match(commits, info.size, checksum) is None:
            raise SaveAbortedError(
                f"another save was committed to {store.url} meanwhile and is kept; the attempts that "
                "it superseded are removed later; run the command again to remove it, too"
            )
    raise StorageError(
        f"{store.url}/{object_names.METADATA} changed {_RACES} times while it was removed"
    )


def _valid(leases: Iterable[Lease], now: float) -> list[Lease]:
    return [lease for lease in leases if lease.expires > now]


def name_readers(leases: Iterable[Lease]) -> str:
    """The holders, human-readable."""
    return ", ".join(sorted({lease.holder for lease in leases}))


async def _remove_delayed(store: Store, plan: RemovalPlan) -> None:
    """Removes what a stopped coordinator wrote after the removal: ``.metadata``, copies of extra files."""
    info, checksum = await stat_metadata(store)
    known = plan.seen.decisions.known
    decisions = {attempt: known[attempt] for attempt in plan.attempts if attempt in known}
    if info is not None and match(decisions, info.size, checksum) is not None:
        await store.delete(object_names.METADATA, generation=info.generation)
    if commits := [each for each in decisions.values() if each.extra_files]:
        await settle_copies(store, commits)
