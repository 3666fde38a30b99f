"""Takes away what an attempt left in storage, once it is decided that it may be.

In: a checkpoint's store and an attempt. Out: its objects are gone. Data files go first, then the
records: as long as there are any, they tell of what may be left. Async; idempotent.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from pannier.common.fault_points import point
from pannier.storage import ObjectInfo, Store
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError

_PARALLEL: Final = 16
"""Objects deleted at the same time."""


async def remove_attempt(store: Store, attempt: str) -> None:
    """After ABORT is durable: removes the attempt's data files and records, but for the decision.

    A sidecar removes what it has uploaded itself, but it may be gone. Idempotent.
    """
    kept = object_names.decision(attempt)
    limit = asyncio.Semaphore(_PARALLEL)

    async def delete(key: str) -> None:
        async with limit:
            await store.delete(key)

    point("coordinator.removal.before")
    # The records last: as long as there are any, they tell of what may be left.
    for prefix in (object_names.data_prefix(attempt), object_names.attempt_prefix(attempt)):
        keys = [info.key for info in await store.list(prefix)]
        deleting = (delete(key) for key in keys if key != kept)
        # All of them, before one that failed is told.
        for problem in await asyncio.gather(*deleting, return_exceptions=True):
            if problem is not None:
                raise problem
    point("coordinator.removal.after")


async def remove_ended(
    store: Store, attempt: str, *, needed: Collection[str], keep_decision: bool = False
) -> list[ObjectInfo]:
    """Removes all of an attempt that is no checkpoint any more; returns what that was.

    Args:
        needed: names of the files that the standing ``.metadata`` refers to.
        keep_decision: for an aborted attempt, whose decision stops whoever comes late.

    Raises:
        IntegrityError: a file of the attempt is needed; nothing was removed.
        StorageError: a deletion failed; the others were tried.
    """
    decision = object_names.decision(attempt)
    marks = (object_names.superseded_mark(attempt), object_names.removal_mark(attempt))
    data = await store.list(object_names.data_prefix(attempt))
    records = await store.list(object_names.attempt_prefix(attempt))
    check_unneeded(store, attempt, data, needed)
    stages = [
        data,
        [info for info in records if info.key not in (*marks, decision)],
        # They still say what is going on, as long as there is anything else.
        [info for info in records if info.key in marks],
    ]
    for stage in stages:
        await _delete_all(store, stage)
    removed = [info for stage in stages for info in stage]
    last = [info for info in records if info.key == decision]
    if last and not keep_decision:
        point("sweep.decision.before")
        await store.delete(decision)
        point("sweep.decision.after")
        removed += last
    return removed


def check_unneeded(
    store: Store, attempt: str, data: Collection[ObjectInfo], needed: Collection[str]
) -> None:
    """Raises IntegrityError when the standing ``.metadata`` refers to one of these data files."""
    if held := sorted(info.key for info in data if info.key in needed):
        raise IntegrityError(
            f"{store.url}: {object_names.METADATA} refers to {len(held)} files of {attempt}, which isn't "
            f"the attempt that its decision names ({held[0]}, …): nothing of it was removed"
        )


async def _delete_all(store: Store, objects: Collection[ObjectInfo]) -> None:
    limit = asyncio.Semaphore(_PARALLEL)

    async def delete(key: str) -> None:
        async with limit:
            point("sweep.deletion.before")
            await store.delete(key)
            point("sweep.deletion.after")

    # All of them, before one that failed is told.
    deleting = (delete(info.key) for info in objects)
    for problem in await asyncio.gather(*deleting, return_exceptions=True):
        if problem is not None:
            raise problem
