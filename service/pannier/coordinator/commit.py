"""How an attempt ends: one decision object, and ``.metadata`` by compare-and-swap.

In: a checkpoint's store and what was agreed. Out: the decision that stands there, ours or
another's. Knows nothing of saves and ranks' processes; whoever runs it, and however
often, the outcome is the same. The order of writes:

1. ``metadata``, the candidate: the exact bytes that ``.metadata`` will get;
2. ``decision``, created if absent: from here on the outcome is settled;
3. ``.metadata``, replacing exactly the generation that was judged.

Async; StorageError says that a step's outcome may be unknown: run it again.
"""

import asyncio
import os
import pickle
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Final

import crc32c
from google.protobuf import json_format
from torch.distributed.checkpoint.metadata import StorageMeta

from pannier.storage import ConflictError, NotFoundError, ObjectInfo, Store
from pannier.v1 import plan_pb2, records_pb2, save_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError, InvalidRequestError, StorageError
from pannier.wire.plans import build_metadata

_PARALLEL: Final = 16
"""Objects deleted at the same time."""
_RACES: Final = 100
"""Lost compare-and-swaps in a row before something must be wrong with the store."""


def pickle_metadata(message: plan_pb2.GlobalMetadata, *, checkpoint_id: str, attempt: str) -> bytes:
    """Bytes of ``.metadata`` as torch's readers take them. CPU-bound; any thread."""
    storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=attempt)
    # The protocol that torch's own writer uses, so that its readers of all versions know it.
    return pickle.dumps(build_metadata(message, storage_meta=storage_meta), protocol=4)


def propose(
    outcome: records_pb2.Outcome,
    *,
    save: save_pb2.SaveId,
    attempt: identity.Attempt,
    host: str,
    plan_id: str = "",
    metadata: bytes = b"",
    failures: Sequence[save_pb2.Failure] = (),
) -> records_pb2.Decision:
    """A decision to be put to storage; unlike any other, so that ours can be told."""
    return records_pb2.Decision(
        outcome=outcome,
        save=save,
        attempt=attempt.name,
        incarnation_number=attempt.incarnation_number,
        plan_id=plan_id,
        metadata_size=len(metadata),
        metadata_crc32c=crc32c.crc32c(metadata) if metadata else 0,
        failures=failures,
        decided_by=f"{host}/{os.getpid()}/{uuid.uuid4().hex}",
        decided_at=time.time(),
    )


async def publish_candidate(store: Store, attempt: str, metadata: bytes) -> bytes:
    """Step 1. Returns the candidate that stands: another coordinator's, when it was first."""
    key = identity.metadata_candidate(attempt)
    try:
        await store.create(key, metadata)
    except ConflictError:
        return await store.read(key)
    return metadata


async def decide(store: Store, proposal: records_pb2.Decision) -> records_pb2.Decision:
    """Step 2. Returns the decision that stands; whoever lost the race obeys it."""
    text = json_format.MessageToJson(proposal, sort_keys=True)
    try:
        await store.create(identity.decision(proposal.attempt), text.encode())
    except ConflictError:
        standing = await read_decision(store, proposal.attempt)
        if standing is None:
            raise StorageError(
                f"{store.url}: the decision of {proposal.attempt} could not be created, but isn't "
                "there"
            ) from None
        return standing
    return proposal


async def read_decision(store: Store, attempt: str) -> records_pb2.Decision | None:
    """The decision of an attempt; None when it has none yet. Raises IntegrityError."""
    key = identity.decision(attempt)
    try:
        data = await store.read(key)
    except NotFoundError:
        return None
    try:
        return json_format.Parse(data, records_pb2.Decision(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{store.url}/{key} is damaged: {error}") from error


async def find_newer(store: Store, attempt: identity.Attempt) -> identity.Attempt | None:
    """The attempt whose ``.metadata`` stands there, if it is newer than ``attempt``."""
    _, standing = await _standing(store)
    return standing if standing is not None and standing > attempt else None


async def install(store: Store, decision: records_pb2.Decision) -> None:
    """Step 3, for a COMMIT: makes ``.metadata`` the candidate, unless a newer attempt's is there.

    Raises IntegrityError when the candidate isn't what was decided.
    """
    own = identity.Attempt.parse(decision.attempt)
    data: bytes | None = None
    for _ in range(_RACES):
        info, standing = await _standing(store)
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


async def _standing(store: Store) -> tuple[ObjectInfo | None, identity.Attempt | None]:
    """What ``.metadata`` is, and whose: None for a foreign one, which is older than anything."""
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
        fitting = [
            identity.Attempt.parse(decision.attempt)
            for decision in await _decisions(store)
            if decision.outcome == records_pb2.OUTCOME_COMMIT
            and (decision.metadata_size, decision.metadata_crc32c) == (info.size, checksum)
        ]
        return info, max(fitting, default=None)


async def _decisions(store: Store) -> Iterable[records_pb2.Decision]:
    found = []
    for info in await store.list(identity.attempts_prefix()):
        attempt = info.key.removeprefix(identity.attempts_prefix()).partition("/")[0]
        try:
            if info.key != identity.decision(identity.Attempt.parse(attempt).name):
                continue
        except InvalidRequestError:
            continue
        decision = await read_decision(store, attempt)
        if decision is not None:
            found.append(decision)
    return found


async def remove_attempt(store: Store, attempt: str) -> None:
    """After ABORT is durable: removes the attempt's data files and records, but for the decision.

    A sidecar removes what it has uploaded itself, but it may be gone. Idempotent.
    """
    kept = identity.decision(attempt)
    limit = asyncio.Semaphore(_PARALLEL)

    async def delete(key: str) -> None:
        async with limit:
            await store.delete(key)

    # The records last: as long as there are any, they tell of what may be left.
    for prefix in (identity.data_prefix(attempt), f"{identity.attempts_prefix()}{attempt}/"):
        keys = [info.key for info in await store.list(prefix)]
        deleting = (delete(key) for key in keys if key != kept)
        # All of them, before one that failed is told.
        for problem in await asyncio.gather(*deleting, return_exceptions=True):
            if problem is not None:
                raise problem
