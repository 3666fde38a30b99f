"""Removes an attempt's objects, after its ABORT or its supersession.

In: a checkpoint's store and an attempt. Data files are removed first, then the records: as long as records
exist, data files may. Async; idempotent.
"""

import logging
from collections.abc import Collection

from pannier.attempts.decisions import read_decisions
from pannier.attempts.manifests import ManifestRecord, read_manifest
from pannier.attempts.metadata_swap import settle_copies
from pannier.common.fault_points import point
from pannier.storage import ObjectInfo, StorageError, Store, Unfinished
from pannier.storage.many import for_each
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)


async def find_planned(store: Store, attempt: str) -> frozenset[str]:
    """Names that data files of an attempt may have, by its manifest, where uploads are listed by name only.

    Empty for other stores, and without a manifest. Raises StorageError.
    """
    if not store.lists_by_key:
        return frozenset()
    try:
        manifest = await read_manifest(store, attempt, ManifestRecord)
    except IntegrityError as error:
        _log.warning("uploads of an attempt may be left: %s", error)
        return frozenset()
    if manifest is None:
        return frozenset()
    names = set(manifest.header.metadata.files)
    for rank in manifest.ranks:
        names |= {object_names.objects_file(attempt, rank), object_names.extra_file(attempt, rank)}
    return frozenset(names)


async def find_uploads(store: Store, keys: Collection[str]) -> list[Unfinished]:
    """The unfinished uploads of these objects. Raises StorageError."""
    found = await for_each(store.list_unfinished_of, sorted(keys))
    return [item for items in found for item in items]


async def _discard_uploads(store: Store, attempt: str) -> None:
    """Ends the uploads of an aborted attempt, of which no record is left afterwards."""
    try:
        if planned := await find_planned(store, attempt):
            there = {info.key for info in await store.list(object_names.data_prefix(attempt))}
            uploads = await find_uploads(store, planned - there)
            await for_each(store.discard, uploads, try_all=True)
    except StorageError as error:
        # As where a sidecar uploads after the ABORT, `pannier gc` ends what the store lists to it.
        _log.warning("uploads of an aborted attempt may be left: %s", error)


async def remove_attempt(store: Store, attempt: str) -> None:
    """After a durable ABORT: removes the attempt's data files and records, except the decision.

    A sidecar removes its own uploads, too, but may be dead. Idempotent.
    """
    kept = object_names.decision(attempt)
    point("coordinator.removal.before")
    await _discard_uploads(store, attempt)
    # Records last: as long as they exist, data files may.
    for prefix in (object_names.data_prefix(attempt), object_names.attempt_prefix(attempt)):
        keys = [info.key for info in await store.list(prefix)]
        await for_each(store.delete, [key for key in keys if key != kept], try_all=True)
    point("coordinator.removal.after")


async def remove_ended(
    store: Store, attempt: str, *, needed: Collection[str], keep_decision: bool = False
) -> list[ObjectInfo]:
    """Removes all objects of an attempt that isn't the checkpoint's, copies of extra files included.

    Args:
        needed: names of the files that the current ``.metadata`` refers to.
        keep_decision: of an aborted attempt, so that a late COMMIT finds it.

    Returns the removed objects.

    Raises:
        IntegrityError: a file of the attempt is needed; nothing was removed.
        StorageError: a deletion failed; the others were tried.
    """
    decision = object_names.decision(attempt)
    marks = (object_names.superseded_mark(attempt), object_names.removal_mark(attempt))
    data = await store.list(object_names.data_prefix(attempt))
    records = await store.list(object_names.attempt_prefix(attempt))
    check_unneeded(store, attempt, data, needed)
    ended = (await read_decisions(store, records)).known.get(attempt)
    copies: list[ObjectInfo] = []
    if ended is not None and ended.extra_files:
        # First: without the decision, nothing shows which attempt the copies belong to.
        copies = await settle_copies(store, [ended])
    stages = [
        data,
        [info for info in records if info.key not in (*marks, decision)],
        # The marks show why the other objects are being removed, as long as any are left.
        [info for info in records if info.key in marks],
    ]
    for stage in stages:
        await _delete_all(store, stage)
    removed = [info for stage in (copies, *stages) for info in stage]
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
    """Raises IntegrityError when the current ``.metadata`` refers to one of these data files."""
    if held := sorted(info.key for info in data if info.key in needed):
        raise IntegrityError(
            f"{store.url}: {object_names.METADATA} refers to {len(held)} files of {attempt}, which isn't "
            f"the attempt of its decision ({held[0]}, …): nothing of it was removed"
        )


async def _delete_all(store: Store, objects: Collection[ObjectInfo]) -> None:
    async def delete(info: ObjectInfo) -> None:
        point("sweep.deletion.before")
        await store.delete(info.key)
        point("sweep.deletion.after")

    await for_each(delete, objects, try_all=True)
