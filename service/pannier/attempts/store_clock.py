"""What time it is by the store's clock: ages are never taken from two clocks.

In: a store that can be written. Out: Unix time in seconds. Async.
"""

import uuid

from pannier.storage import Store
from pannier.wire import object_names


async def store_time(store: Store) -> float:
    """The store's time, from a fresh object that is removed again. Raises StorageError."""
    token = uuid.uuid4().hex
    key = object_names.clock(token)
    try:
        return (await store.create(key, token.encode())).modified
    finally:
        await store.delete(key)
