"""Removal of superseded attempts, whose ``.metadata`` a newer one's has replaced, after a grace period.

In: a checkpoint id. Out: its superseded attempts are marked; those whose grace period has passed and that
no valid lease names are removed: data files, then records, the decision last. The grace period counts from
the mark, by the store's clock, so that any process can sweep, at any time and after a crash. Async.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.delete_attempt import check_unneeded, remove_ended
from pannier.attempts.leases import find_leases, store_time
from pannier.attempts.metadata_swap import settle_copies
from pannier.common import timeouts
from pannier.common.fault_points import point
from pannier.maintenance.inspect import View, find_needed, view
from pannier.storage import ConflictError, ObjectInfo, Store
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, StorageError

GRACE_S: Final = 3600.0
"""Seconds for which a superseded attempt is kept, by default."""


@dataclass
class Swept:
    """Result of a sweep."""

    removed: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    """By attempt: its objects; with ``dry_run``, those that would be removed."""
    kept: dict[str, str] = field(default_factory=dict)
    """By attempt: human-readable reason."""
    failed: dict[str, StorageError] = field(default_factory=dict)
    """By attempt: why storage didn't remove all of it."""
    due_s: float | None = None
    """Seconds until the next attempt may be removed; None: none has to wait."""

    def wait(self, seconds: float) -> None:
        """Records that an attempt is kept for at least ``seconds``."""
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
    swept = await sweep_superseded(store, seen, grace_s=grace_s, now=await store_time(store))
    for error in swept.failed.values():
        raise error
    return swept


async def sweep_superseded(
    store: Store, seen: View, *, grace_s: float, now: float, dry_run: bool = False
) -> Swept:
    """As :func:`sweep_checkpoint`, for a view; continues after an attempt that can't be removed.

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
            if mark is None and await store.stat(object_names.decision(attempt)) is None:
                # `pannier rm` has removed it since the listing, and would have removed the mark.
                await store.delete(object_names.superseded_mark(attempt))
                continue
            commit = seen.decisions.known[attempt]
            if mark is None and commit.extra_files:
                # The newer commit has removed the copies of extra files, unless its process died just then.
                await settle_copies(store, [commit])
            left = grace_s - max(0.0, now - marked.modified)
        if left > 0:
            swept.kept[attempt] = f"superseded; its grace period ends in {left:.0f} s"
            swept.wait(left)
        else:
            due.append(attempt)
    if not due:
        return swept
    # The leases are read after .metadata: a reader reads .metadata again after it has written its lease, so
    # that a later lease names the newer attempt.
    valid = {lease.attempt: lease for lease in await find_leases(store) if lease.expires > now}
    needed = await find_needed(store)
    for attempt in due:
        lease = valid.get(attempt)
        if lease is not None:
            swept.kept[attempt] = f"superseded, but {lease.holder} is reading it"
            # The reader may finish sooner.
            swept.wait(min(lease.expires - now, timeouts.LEASE_LOOK_S))
            continue
        objects = list(seen.attempts[attempt])
        try:
            if dry_run:
                check_unneeded(store, attempt, objects, needed)
            else:
                objects = await remove_ended(store, attempt, needed=needed)
        except IntegrityError as error:
            swept.kept[attempt] = str(error)
        except StorageError as error:
            swept.failed[attempt] = error
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
