"""Takes a whole checkpoint away, so that nobody brings it back: ``pannier rm``.

In: a checkpoint id's store. Out: nothing of its ended attempts is there any more. The order:

1. every committed attempt gets a mark, so that neither ``pannier recover`` nor a coordinator that
   was stopped takes one of them for a commit that is to be finished;
2. ``.metadata`` goes, exactly the generation that was judged: from here on there is no checkpoint;
3. data files, records, the decision last;
4. a look whether a write that was delayed has brought ``.metadata`` back.

Retention spares what is being read, and so looks at the leases once more between 1 and 2. A reader
writes its lease first and looks for marks then, so that one of the two sees the other, however they
interleave: the reader gives up, or the marks are taken back.

Whoever dies on the way leaves marks: run again, it goes on. Async.
"""

import json
import os
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pannier.attempts.delete_attempt import remove_ended
from pannier.attempts.leases import Lease, find_leases
from pannier.attempts.metadata_swap import stat_metadata
from pannier.common.fault_points import point
from pannier.maintenance.inspect import View, find_needed, view
from pannier.storage import ConflictError, ObjectInfo, Store
from pannier.storage.url import parse
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, SaveAbortedError
from pannier.wire.records import match


class InUseError(PannierError):
    """A reader holds a lease of the checkpoint."""


@dataclass
class RemovalPlan:
    """What is to go from one checkpoint id."""

    seen: View
    attempts: list[str]
    """Ended ones, the newest last."""
    undecided: list[str]
    """They stay: a save may be under way."""
    leases: list[Lease]

    @property
    def size(self) -> int:
        """Bytes that are to go."""
        metadata = self.seen.metadata
        own = metadata.size if metadata is not None else 0
        return own + sum(self.seen.size(attempt) for attempt in self.attempts)

    def readers(self, now: float) -> list[Lease]:
        """Leases that live at ``now``, by the store's clock."""
        return _living(self.leases, now)


@dataclass
class RemovedObjects:
    """What was removed."""

    objects: list[ObjectInfo] = field(default_factory=list)


async def plan_removal(store: Store) -> RemovalPlan:
    """What :func:`remove_checkpoint` would remove; writes nothing.

    Raises:
        SaveAbortedError: there is nothing, or it isn't Pannier's.
        StorageError: it can't be read.
        IntegrityError: whose ``.metadata`` it is can't be told.
    """
    seen = await view(store)
    if seen.foreign or (not seen.attempts and await store.stat(object_names.METADATA) is not None):
        raise SaveAbortedError(
            f"{store.url} was not committed by Pannier, so that it isn't known which of its files "
            "may go: remove it with your storage's own tools"
        )
    if not seen.attempts:
        raise SaveAbortedError(f"there is no checkpoint at {store.url}, nor a save's records")
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
    """Removes it. Unless readers are spared, they fail, also with a lease.

    Args:
        host: signs the marks.
        reason: stands in the marks, for people.
        spare_at: the store's time; with it, nothing is removed while a lease lives.

    Raises:
        InUseError: a reader is spared; nothing was removed, and nothing is marked.
        SaveAbortedError: a newer save was committed there meanwhile, which stays.
        StorageError: a step failed: run it again.
        IntegrityError: ``.metadata`` refers to what isn't its attempt's.
    """
    seen, gone = plan.seen, RemovedObjects()
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
        gone.objects.append(seen.metadata)
        if await store.stat(object_names.METADATA) is not None:
            raise SaveAbortedError(
                f"another save was committed to {store.url} meanwhile: it stays, and what it has "
                "superseded goes by itself; run the command again to remove that one, too"
            )
    for lease in plan.leases:
        if lease.attempt in plan.attempts:
            point("sweep.leftover.before")
            await store.delete(lease.info.key)
            point("sweep.leftover.after")
    for attempt in plan.attempts:
        needed = await find_needed(store)
        gone.objects += await remove_ended(store, attempt, needed=needed)
    if not plan.undecided:
        await _discard(store)
    await _look_again(store, plan)
    return gone


def remove_directory(checkpoint_id: str) -> None:
    """On a local file system: what :func:`remove_checkpoint` left, unless something else is in it."""
    location = parse(checkpoint_id)
    if location.scheme == "file":
        with suppress(OSError):
            os.rmdir(location.path)


async def _discard(store: Store) -> None:
    """Uploads that were cut off, temporary files, locks; not those of checkpoints farther down."""
    for item in await store.list_unfinished():
        if "/" not in item.key or item.key.startswith(object_names.attempts_prefix()):
            await store.discard(item)


async def _mark(store: Store, attempt: str, content: bytes) -> None:
    """Replaces any other mark, which its writer may take back."""
    key = object_names.removal_mark(attempt)
    point("sweep.removal.before")
    try:
        await store.create(key, content)
    except ConflictError as error:
        current = error.current
        await store.replace(key, content, expected=current.generation if current else None)
    point("sweep.removal.after")


async def _mark_unread(store: Store, attempts: Collection[str], content: bytes, now: float) -> None:
    """Marks them, or raises InUseError. Another's marks stay."""
    own: list[ObjectInfo] = []
    for attempt in attempts:
        point("sweep.removal.before")
        try:
            own.append(await store.create(object_names.removal_mark(attempt), content))
        except ConflictError as error:
            if error.current is None:
                raise
        point("sweep.removal.after")
    if readers := _living(await find_leases(store), now):
        for mark in own:
            await store.delete(mark.key, generation=mark.generation)
        raise InUseError(f"it is being read by {name_readers(readers)}")


def _living(leases: Iterable[Lease], now: float) -> list[Lease]:
    return [lease for lease in leases if lease.expires > now]


def name_readers(leases: Iterable[Lease]) -> str:
    """The holders, for people."""
    return ", ".join(sorted({lease.holder for lease in leases}))


async def _look_again(store: Store, plan: RemovalPlan) -> None:
    """A coordinator that was stopped before its last write may have gone on since."""
    info, checksum = await stat_metadata(store)
    if info is None:
        return
    removed = {attempt: plan.seen.decisions.known[attempt] for attempt in plan.attempts}
    if match(removed, info.size, checksum) is not None:
        await store.delete(object_names.METADATA, generation=info.generation)
