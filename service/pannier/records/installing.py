"""``.metadata``: whose it is, and how it becomes another attempt's, by compare-and-swap.

In: a checkpoint's store and a COMMIT. Out: ``.metadata`` of the newest committed attempt.
The order of writes:

1. ``metadata``, the candidate: the exact bytes that ``.metadata`` will get;
2. ``decision``, created if absent: from here on the outcome is settled (:mod:`decisions`);
3. ``.metadata``, replacing exactly the generation that was judged;
4. a look whether the attempt is still there: whoever was stopped before one of these writes, and
   goes on after the checkpoint was removed, takes back what it wrote.

Async; StorageError says that a step's outcome may be unknown: run it again.
"""

import logging
from typing import Final, NoReturn

import crc32c

from pannier.daemon.crashing import point
from pannier.records.decisions import match, read_decisions
from pannier.storage import ConflictError, NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError, PannierError, StorageError

_log = logging.getLogger(__name__)

_RACES: Final = 100
"""Lost compare-and-swaps in a row before something must be wrong with the store."""


class RemovedError(PannierError):
    """The attempt was removed from storage by somebody else: there is nothing to commit."""


async def publish_candidate(store: Store, attempt: str, metadata: bytes) -> bytes:
    """Step 1. Returns the candidate that stands: another coordinator's, when it was first."""
    key = identity.metadata_candidate(attempt)
    point("coordinator.candidate.before")
    try:
        await store.create(key, metadata)
    except ConflictError:
        return await store.read(key)
    point("coordinator.candidate.after")
    return metadata


async def find_newer(store: Store, attempt: identity.Attempt) -> identity.Attempt | None:
    """The attempt whose ``.metadata`` stands there, if it is newer than ``attempt``."""
    _, standing = await find_standing(store)
    return standing if standing is not None and standing > attempt else None


async def install(store: Store, decision: records_pb2.Decision) -> None:
    """Steps 3 and 4, for a COMMIT: makes ``.metadata`` the candidate, unless a newer one is there.

    Raises:
        IntegrityError: the candidate isn't what was decided.
        RemovedError: the attempt was removed meanwhile; what this wrote is taken back.
    """
    own = identity.Attempt.parse(decision.attempt)
    data: bytes | None = None
    for _ in range(_RACES):
        info, standing = await find_standing(store)
        if standing is not None and standing >= own:
            return
        if data is None:
            data = await _read_candidate(store, decision)
        point("coordinator.metadata.before")
        try:
            await store.replace(
                identity.METADATA, data, expected=info.generation if info is not None else None
            )
        except ConflictError:
            continue
        point("coordinator.metadata.after")
        if await is_removed(store, decision.attempt):
            await _take_back(store, decision)
        return
    raise StorageError(f"{store.url}: {identity.METADATA} changed {_RACES} times under our hands")


async def _read_candidate(store: Store, decision: records_pb2.Decision) -> bytes:
    try:
        data = await store.read(identity.metadata_candidate(decision.attempt))
    except NotFoundError:
        if await is_removed(store, decision.attempt):
            await _take_back(store, decision)
        raise
    found = (len(data), crc32c.crc32c(data))
    if found != (decision.metadata_size, decision.metadata_crc32c):
        raise IntegrityError(
            f"{store.url}: the metadata of {decision.attempt} has size and crc32c {found}, decided "
            f"were {(decision.metadata_size, decision.metadata_crc32c)}"
        )
    return data


async def is_removed(store: Store, attempt: str) -> bool:
    """Whether a decided attempt is removed: marked so, or its decision or all receipts are gone.

    Of the receipts, no coordinator makes one anew, and every attempt has some before its
    decision. As long as any is left, whoever removes the attempt is still at it, and looks for
    ``.metadata`` once more in the end.
    """
    keys = {info.key for info in await store.list(identity.attempt_prefix(attempt))}
    receipts = identity.receipts_prefix(attempt)
    return (
        identity.removal_mark(attempt) in keys
        or identity.decision(attempt) not in keys
        or not any(key.startswith(receipts) for key in keys)
    )


async def _take_back(store: Store, decision: records_pb2.Decision) -> NoReturn:
    """Removes what was written for an attempt that isn't there any more; raises RemovedError."""
    info, checksum = await stat_metadata(store)
    if info is not None and (info.size, checksum) == (
        decision.metadata_size,
        decision.metadata_crc32c,
    ):
        await store.delete(identity.METADATA, generation=info.generation)
    kept = identity.decision(decision.attempt)
    left = [item.key for item in await store.list(identity.attempt_prefix(decision.attempt))]
    for key in sorted(left, key=lambda key: key == kept):
        await store.delete(key)
    text = (
        f"attempt {decision.attempt} was removed from {store.url} before this coordinator had "
        "brought its commit to an end: nothing of it is there any more"
    )
    _log.warning("%s", text)
    raise RemovedError(text)


async def find_standing(store: Store) -> tuple[ObjectInfo | None, identity.Attempt | None]:
    """What ``.metadata`` is, and whose: None for a foreign one, which is older than anything.

    Raises IntegrityError when a decision is damaged, so that it can't be told.
    """
    info, checksum = await stat_metadata(store)
    if info is None:
        return None, None
    keys = [item.key for item in await store.list(identity.attempts_prefix())]
    decisions = await read_decisions(store, keys)
    for damage in decisions.damaged.values():
        raise damage
    committed = match(decisions.known, info.size, checksum)
    return info, identity.Attempt.parse(committed.attempt) if committed is not None else None


async def stat_metadata(store: Store) -> tuple[ObjectInfo | None, int]:
    """What ``.metadata`` is, and its checksum. Raises StorageError."""
    while True:
        info = await store.stat(identity.METADATA)
        if info is None:
            return None, 0
        if info.crc32c is not None:
            return info, info.crc32c
        try:
            data = await store.read(identity.METADATA)
        except NotFoundError:
            continue
        again = await store.stat(identity.METADATA)
        if again is not None and again.generation == info.generation:
            return info, crc32c.crc32c(data)
