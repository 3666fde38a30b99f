"""Whether a place can be written and keeps its word on preconditions: rule 1 rests on it."""

import logging
import time
import uuid

from pannier.storage.base import ConflictError, StorageError, Store, UnreachableError
from pannier.storage.time_limits import limited, listener

_log = logging.getLogger(__name__)


async def probe(store: Store) -> None:
    """Tries what a commit does, on an object of its own; leaves nothing behind.

    Raises StorageError: what the store raised, or that it ignores preconditions, or doesn't list
    what is there.
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
        if [info.key for info in await store.list(key)] != [key]:
            raise StorageError(f"{store.url}: an object that is there was not listed")
        await store.delete(key, generation=first.generation)
        if await store.stat(key) is None:
            raise StorageError(_ignores(store, "a removal of an old generation"))
    finally:
        await store.delete(key)


async def contact(store: Store, seconds: float) -> None:
    """Returns once the place has answered, whatever it says; that is for :func:`probe` to judge.

    Raises UnreachableError when nothing has come from it in so many seconds, with the last cause.
    """
    end = time.monotonic() + seconds
    with limited(until=lambda: end, told=listener()):
        try:
            await store.stat(f".pannier/probe-{uuid.uuid4().hex}")
        except UnreachableError as error:
            raise UnreachableError(
                f"{store.url} can't be reached from this host: {error}; check its name, the endpoint "
                "and the network"
            ) from error
        except StorageError as error:
            _log.debug("%s answers, if with an error: %s", store.url, error)


async def _must_conflict(store: Store, key: str, what: str, expected: str | None = None) -> None:
    try:
        if expected is None:
            await store.create(key, b"second")
        else:
            await store.replace(key, b"fourth", expected=expected)
    except ConflictError:
        return
    raise StorageError(_ignores(store, what))


def _ignores(store: Store, what: str) -> str:
    return (
        f"{store.url}: this store ignores preconditions ({what} succeeded), so two commits could "
        "overwrite each other. Use a store that honours them: Google Cloud Storage, Amazon S3, a "
        "local file system, or a recent version of an S3-compatible server."
    )
