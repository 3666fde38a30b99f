"""Attempts whose ``.metadata`` a newer one's has replaced: kept for a while, then removed.

In: a checkpoint id. Out: its superseded attempts are marked; those whose grace period has passed,
and that no living lease names, are gone: data files, then records, the decision last. The grace
period counts from the mark, by the store's clock, so it doesn't matter who sweeps, how often, and
whether a sweeper died. Async.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.delete_attempt import check_unneeded, remove_ended
from pannier.attempts.leases import find_leases, store_time
from pannier.common.fault_points import point
from pannier.maintenance.inspect import View, find_needed, view
from pannier.storage import ConflictError, ObjectInfo, Store
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError

GRACE_S: Final = 3600.0
"""Seconds that a superseded attempt stays, by default."""
LOOK_S: Final = 30.0
"""Seconds after which a lease is looked at again, at most."""


@dataclass
class Swept:
    """What a sweep found superseded."""

    removed: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    """By attempt: its objects; what would be, when nothing was to be removed."""
    kept: dict[str, str] = field(default_factory=dict)
    """By attempt: why, for people."""
    due_s: float | None = None
    """Seconds until the next one may be removed; None when none is left."""

    def wait(self, seconds: float) -> None:
        """One more is left, for so long at least."""
        self.due_s = seconds if self.due_s is None else min(self.due_s, seconds)


async def sweep_checkpoint(store: Store, *, grace_s: float) -> Swept:
    """Marks and removes the superseded attempts of one checkpoint id.

    Raises:
        StorageError: storage can't be read or written.
        IntegrityError: a record is damaged, so that nothing may be removed.
    """
    seen = await view(store, data=False)
    if not seen.superseded():
        return Swept()
    return await sweep_superseded(store, seen, grace_s=grace_s, now=await store_time(store))


async def sweep_superseded(
    store: Store, seen: View, *, grace_s: float, now: float, dry_run: bool = False
) -> Swept:
    """The same, where one has looked already.

    Args:
        now: the store's time.
        dry_run: writes and removes nothing.

    Raises as :func:`sweep_checkpoint`.
    """
    swept = Swept()
    due = []
    for attempt in seen.superseded():
        mark = seen.find(attempt, object_names.superseded_mark(attempt))
        if mark is None and dry_run:
            left = grace_s
        else:
            marked = mark or await _mark(store, seen, attempt)
            left = grace_s - max(0.0, now - marked.modified)
        if left > 0:
            swept.kept[attempt] = f"superseded; its grace period ends in {left:.0f} s"
            swept.wait(left)
        else:
            due.append(attempt)
    if not due:
        return swept
    # Looked for after it is known that .metadata is another's: whoever takes a lease looks at
    # .metadata once more, so that a later lease is of the newer attempt.
    living = {lease.attempt: lease for lease in await find_leases(store) if lease.expires > now}
    needed = await find_needed(store)
    for attempt in due:
        lease = living.get(attempt)
        if lease is not None:
            swept.kept[attempt] = f"superseded, but {lease.holder} is reading it"
            # It may be let go sooner.
            swept.wait(min(lease.expires - now, LOOK_S))
            continue
        objects = list(seen.attempts[attempt])
        try:
            if dry_run:
                check_unneeded(store, attempt, objects, needed)
            else:
                objects = await remove_ended(store, attempt, needed=needed)
        except IntegrityError as error:
            swept.kept[attempt] = str(error)
        else:
            swept.removed[attempt] = objects
    return swept


async def _mark(store: Store, seen: View, attempt: str) -> ObjectInfo:
    assert seen.standing is not None
    key = object_names.superseded_mark(attempt)
    point("sweep.mark.before")
    try:
        mark = await store.create(key, json.dumps({"by": seen.standing.name}).encode())
    except ConflictError as error:
        if error.current is None:
            raise
        mark = error.current
    point("sweep.mark.after")
    return mark
