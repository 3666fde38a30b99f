"""Whether a place can be written and keeps its word on preconditions: rule 1 rests on it."""

import uuid

from pannier.storage.base import ConflictError, StorageError, Store


async def probe(store: Store) -> None:
    """Tries what a commit does, on an object of its own; leaves nothing behind.

    Raises StorageError: what the store raised, or that it ignores preconditions.
    """
    key = f".pannier/probe-{uuid.uuid4().hex}"
    first = await store.create(key, b"first")
    try:
        await _must_conflict(store, key, "a second create of one object")
        second = await store.replace(key, b"third", expected=first.generation)
        if second.generation == first.generation:
            raise StorageError(f"{store.url}: a replaced object kept its generation")
        await _must_conflict(store, key, "a replace of an old generation", first.generation)
        if await store.read(key) != b"third":
            raise StorageError(f"{store.url}: a replaced object was read with its old content")
    finally:
        await store.delete(key)


async def _must_conflict(store: Store, key: str, what: str, expected: str | None = None) -> None:
    try:
        if expected is None:
            await store.create(key, b"second")
        else:
            await store.replace(key, b"fourth", expected=expected)
    except ConflictError:
        return
    raise StorageError(
        f"{store.url}: this store ignores preconditions ({what} succeeded), so two commits could "
        "overwrite each other. Use a store that honours them: Google Cloud Storage, Amazon S3, a "
        "local file system, or a recent version of an S3-compatible server."
    )
