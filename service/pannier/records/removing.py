"""Takes away what an attempt left in storage, once it is decided that it may be.

In: a checkpoint's store and an attempt. Out: its objects are gone. Async; idempotent.
"""

import asyncio
from typing import Final

from pannier.daemon.crashing import point
from pannier.storage import Store
from pannier.wire import identity

_PARALLEL: Final = 16
"""Objects deleted at the same time."""


async def remove_attempt(store: Store, attempt: str) -> None:
    """After ABORT is durable: removes the attempt's data files and records, but for the decision.

    A sidecar removes what it has uploaded itself, but it may be gone. Idempotent.
    """
    kept = identity.decision(attempt)
    limit = asyncio.Semaphore(_PARALLEL)

    async def delete(key: str) -> None:
        async with limit:
            await store.delete(key)

    point("coordinator.removal.before")
    # The records last: as long as there are any, they tell of what may be left.
    for prefix in (identity.data_prefix(attempt), identity.attempt_prefix(attempt)):
        keys = [info.key for info in await store.list(prefix)]
        deleting = (delete(key) for key in keys if key != kept)
        # All of them, before one that failed is told.
        for problem in await asyncio.gather(*deleting, return_exceptions=True):
            if problem is not None:
                raise problem
    point("coordinator.removal.after")
