"""``.metadata``: whose it is, and how it becomes another attempt's, by compare-and-swap.

In: a checkpoint's store and a COMMIT. Out: ``.metadata`` of the newest committed attempt.
The order of writes:

1. ``metadata``, the candidate: the exact bytes that ``.metadata`` will get;
2. ``decision``, created if absent: from here on the outcome is settled (:mod:`decisions`);
3. ``.metadata``, replacing exactly the generation that was judged.

Async; StorageError says that a step's outcome may be unknown: run it again.
"""

from typing import Final

import crc32c

from pannier.records.decisions import match, read_decisions
from pannier.storage import ConflictError, NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError, StorageError

_RACES: Final = 100
"""Lost compare-and-swaps in a row before something must be wrong with the store."""


async def publish_candidate(store: Store, attempt: str, metadata: bytes) -> bytes:
    """Step 1. Returns the candidate that stands: another coordinator's, when it was first."""
    key = identity.metadata_candidate(attempt)
    try:
        await store.create(key, metadata)
    except ConflictError:
        return await store.read(key)
    return metadata


async def find_newer(store: Store, attempt: identity.Attempt) -> identity.Attempt | None:
    """The attempt whose ``.metadata`` stands there, if it is newer than ``attempt``."""
    _, standing = await find_standing(store)
    return standing if standing is not None and standing > attempt else None


async def install(store: Store, decision: records_pb2.Decision) -> None:
    """Step 3, for a COMMIT: makes ``.metadata`` the candidate, unless a newer attempt's is there.

    Raises IntegrityError when the candidate isn't what was decided.
    """
    own = identity.Attempt.parse(decision.attempt)
    data: bytes | None = None
    for _ in range(_RACES):
        info, standing = await find_standing(store)
        if standing is not None and standing >= own:
            return
        if data is None:
            data = await _read_candidate(store, decision)
        try:
            await store.replace(
                identity.METADATA, data, expected=info.generation if info is not None else None
            )
        except ConflictError:
            continue
        return
    raise StorageError(f"{store.url}: {identity.METADATA} changed {_RACES} times under our hands")


async def _read_candidate(store: Store, decision: records_pb2.Decision) -> bytes:
    data = await store.read(identity.metadata_candidate(decision.attempt))
    found = (len(data), crc32c.crc32c(data))
    if found != (decision.metadata_size, decision.metadata_crc32c):
        raise IntegrityError(
            f"{store.url}: the metadata of {decision.attempt} has size and crc32c {found}, decided "
            f"were {(decision.metadata_size, decision.metadata_crc32c)}"
        )
    return data


async def find_standing(store: Store) -> tuple[ObjectInfo | None, identity.Attempt | None]:
    """What ``.metadata`` is, and whose: None for a foreign one, which is older than anything.

    Raises IntegrityError when a decision is damaged, so that it can't be told.
    """
    while True:
        info = await store.stat(identity.METADATA)
        if info is None:
            return None, None
        checksum = info.crc32c
        if checksum is None:
            try:
                data = await store.read(identity.METADATA)
            except NotFoundError:
                continue
            again = await store.stat(identity.METADATA)
            if again is None or again.generation != info.generation:
                continue
            checksum = crc32c.crc32c(data)
        keys = [item.key for item in await store.list(identity.attempts_prefix())]
        decisions = await read_decisions(store, keys)
        for damage in decisions.damaged.values():
            raise damage
        committed = match(decisions.known, info.size, checksum)
        return info, identity.Attempt.parse(committed.attempt) if committed is not None else None
