"""``.metadata``: which attempt it belongs to, and its compare-and-swap by another attempt's.

In: a checkpoint's store and a COMMIT. Out: ``.metadata`` of the newest committed attempt.
The order of writes:

1. ``metadata``, the candidate: the exact bytes of the new ``.metadata``;
2. ``decision``, created if absent: it settles the outcome (:mod:`decisions`);
3. a check that the attempt wasn't removed, so that no checkpoint is replaced by a removed one; the copies
   of its extra files (:mod:`extra_files`); then ``.metadata``, replacing exactly the checked generation;
4. another check that the attempt wasn't removed: a process that was stopped before one of these writes
   and resumes after the removal undoes its writes;
5. copies of extra files that only the replaced checkpoint had are removed.

Async; after a StorageError the outcome of a step may be unknown: run it again.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, NoReturn

import crc32c

from pannier.attempts.decisions import find_committed, read_decision, read_decisions
from pannier.attempts.extra_files import find_foreign, missing_copies, remove_copies, write_copies
from pannier.attempts.manifests import ManifestRecord, read_manifest
from pannier.attempts.metadata_refs import saved_by
from pannier.common.fault_points import point
from pannier.storage import ConflictError, HeldError, NotFoundError, ObjectInfo, Store
from pannier.storage.retry import contend
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError, StorageError
from pannier.wire.records import MOST_METADATA, match

_log = logging.getLogger(__name__)

_RACES: Final = 100
"""Lost compare-and-swaps in a row that indicate a faulty store."""


class RemovedError(PannierError):
    """Another process removed the attempt from storage: there is nothing to commit."""


class OccupiedError(PannierError):
    """The save may not replace the existing checkpoint."""

    kind = save_pb2.FAILURE_KIND_EXISTS


class _Standing(NamedTuple):
    """The current checkpoint."""

    info: ObjectInfo | None
    """Of ``.metadata``; None without one."""
    crc32c: int
    committed: records_pb2.Decision | None
    """The COMMIT that installed it; None: a foreign checkpoint."""
    records: Collection[ObjectInfo] = ()
    """Listing of the records of all attempts; empty without ``.metadata``."""
    removed: bool = False
    """It belongs to a removed attempt: a late coordinator has written it, and will undo that."""

    @property
    def attempt(self) -> object_names.Attempt | None:
        """The attempt of ``.metadata``; None: it is foreign, or there is none."""
        return None if self.committed is None else object_names.Attempt.of(self.committed)

    def is_of(self, decision: records_pb2.Decision) -> bool:
        """Whether ``.metadata`` is what was decided."""
        return self.info is not None and (self.info.size, self.crc32c) == (
            decision.metadata_size,
            decision.metadata_crc32c,
        )


async def check_free(
    store: Store,
    *,
    save: save_pb2.SaveId,
    attempt: str,
    overwrite: "save_pb2.Overwrite",
) -> None:
    """Raises OccupiedError when the save may not replace the existing ``.metadata``.

    Args:
        attempt: the save's own; empty: not known yet.
        overwrite: as in the save's manifest.
    """
    if overwrite != save_pb2.OVERWRITE_ANY:
        _check_replaceable(store, await _read_standing(store), save, attempt, overwrite)


def _check_replaceable(
    store: Store,
    stands: _Standing,
    save: save_pb2.SaveId,
    attempt: str,
    overwrite: "save_pb2.Overwrite",
) -> None:
    committed = stands.committed
    continues = ""
    if stands.info is None or stands.removed or overwrite == save_pb2.OVERWRITE_ANY:
        return
    if committed is None:
        whose = "a checkpoint that Pannier didn't write"
    elif committed.attempt == attempt:
        return
    elif committed.save.job != save.job:
        whose = f"a checkpoint of job {committed.save.job}, and this is job {save.job}"
        continues = f"set PANNIER_JOB={committed.save.job} for a run that continues that job, "
    elif overwrite == save_pb2.OVERWRITE_NEVER:
        whose = f"a checkpoint, attempt {committed.attempt}, and overwrite=False"
    else:
        return
    raise OccupiedError(
        f"{store.url} holds {whose}: save to another checkpoint_id, {continues}or give "
        "overwrite=True to replace it"
    )


async def publish_candidate(store: Store, attempt: str, metadata: bytes) -> bytes:
    """Step 1. Returns the stored candidate, which another coordinator may have stored first."""
    key = object_names.metadata_candidate(attempt)
    point("coordinator.candidate.before")
    try:
        await store.create(key, metadata)
    except ConflictError:
        return await store.read_whole(key, MOST_METADATA)
    point("coordinator.candidate.after")
    return metadata


async def find_newer(store: Store, attempt: object_names.Attempt) -> object_names.Attempt | None:
    """The attempt of the current ``.metadata``, if it is newer than ``attempt``.

    Raises HeldError when an older one is under a hold and can't be replaced.
    """
    info, standing = await find_standing(store)
    if standing is not None and standing >= attempt:
        return standing if standing > attempt else None
    if info is not None and info.hold:
        raise HeldError(
            f"{store.url}/{object_names.METADATA} is under a hold ({info.hold}) and can't be replaced: "
            "release it, or save to another checkpoint id"
        )
    return None


async def install(store: Store, decision: records_pb2.Decision) -> None:
    """Steps 3 and 4, for a COMMIT: replaces ``.metadata`` by the candidate, unless it is newer.

    Raises:
        IntegrityError: the candidate differs from the decision.
        RemovedError: the attempt was removed meanwhile; the writes here are undone.
        OccupiedError: a checkpoint that this attempt may not replace was committed meanwhile;
            the attempt's records are removed.
    """
    own = object_names.Attempt.of(decision)
    data: bytes | None = None
    wrote = False
    async for _ in contend(_RACES):
        stands = await _read_standing(store)
        info = stands.info
        if stands.attempt is not None and stands.attempt >= own:
            if decision.extra_files:
                await settle_copies(store, [decision], wrote=wrote)
            return
        if (
            info is not None
            and _seems_removed(decision.attempt, {record.key for record in stands.records})
            and await is_removed(store, decision.attempt)
        ):
            await _undo_install(store, decision)
        try:
            # ``.metadata`` of this attempt without its decision: it was removed, as the check below finds.
            if not stands.is_of(decision):
                _check_replaceable(
                    store, stands, decision.save, decision.attempt, decision.overwrite
                )
        except OccupiedError as error:
            # The other was committed after this decision: this attempt must not be installed later, either.
            await settle_copies(store, [decision], wrote=wrote)
            if await store.stat(object_names.METADATA) != info:
                continue  # Removed or replaced meanwhile, maybe by another coordinator of this attempt.
            await _remove_records(store, decision)
            _log.warning("%s: attempt %s isn't installed: %s", store.url, decision.attempt, error)
            raise
        if data is None:
            data = await _read_candidate(store, decision)
        if decision.extra_files:
            wrote = True
            try:
                await write_copies(store, decision)
            except NotFoundError:
                if await is_removed(store, decision.attempt):
                    await _undo_install(store, decision)
                raise
        point("coordinator.metadata.before")
        try:
            await store.replace(
                object_names.METADATA, data, expected=info.generation if info is not None else None
            )
        except ConflictError:
            continue
        point("coordinator.metadata.after")
        if await is_removed(store, decision.attempt):
            await _undo_install(store, decision)
        both = [decision] if stands.committed is None else [decision, stands.committed]
        if any(each.extra_files for each in both):
            await settle_copies(store, both)
        return
    raise StorageError(
        f"{store.url}: {object_names.METADATA} changed {_RACES} times during the commit"
    )


async def settle_copies(
    store: Store, gone: Sequence[records_pb2.Decision], *, wrote: bool = False
) -> list[ObjectInfo]:
    """Makes the copies of extra files those of the checkpoint that ``.metadata`` names.

    Every process calls it after it has changed copies, and after it has replaced ``.metadata``: so the last
    of several concurrent processes leaves the right copies, whatever their order. What no save has written
    stays: a user may have edited a copy.

    Args:
        gone: COMMITs whose copies are removed, except names that the current checkpoint has, too.
        wrote: this process has just written copies of ``gone``: they are removed from a checkpoint that
            Pannier didn't write, too, in which nothing else is changed.

    Returns what was removed.
    """
    removed: list[ObjectInfo] = []
    written: list[records_pb2.Decision] = []
    lacking: records_pb2.Decision | None = None
    async for _ in contend(_RACES):
        stands = await _read_standing(store)
        standing = stands.committed
        if stands.info is not None and standing is None and not wrote:
            return removed
        kept = {file.name for file in standing.extra_files} if standing is not None else set()
        now = [
            info for each in (*gone, *written) for info in await remove_copies(store, each, kept)
        ]
        removed += now
        missing, foreign = set[str](), set[str]()
        if standing is not None:
            missing = await missing_copies(store, standing)
        if missing:
            known = (await read_decisions(store, stands.records)).known.values()
            foreign = await find_foreign(store, missing, (*gone, *known))
            missing -= foreign
        if standing is not None and missing:
            # This checkpoint may have been replaced meanwhile by one with other names.
            written.append(standing)
            try:
                await write_copies(store, standing, but=foreign)
            except NotFoundError:
                # The checkpoint is being removed, or is damaged.
                if lacking == standing:
                    raise
                lacking = standing
        elif not now:
            return removed
    raise StorageError(f"{store.url}: extra files changed {_RACES} times while they were compared")


async def _read_candidate(store: Store, decision: records_pb2.Decision) -> bytes:
    try:
        data = await store.read(
            object_names.metadata_candidate(decision.attempt), 0, decision.metadata_size + 1
        )
    except NotFoundError:
        if await is_removed(store, decision.attempt):
            await _undo_install(store, decision)
        raise
    found = (len(data), crc32c.crc32c(data))
    if found != (decision.metadata_size, decision.metadata_crc32c):
        raise IntegrityError(
            f"{store.url}: the metadata of {decision.attempt} has size and crc32c {found}, decided "
            f"were {(decision.metadata_size, decision.metadata_crc32c)}"
        )
    return data


async def is_removed(store: Store, attempt: str) -> bool:
    """Whether a decided attempt was removed: it has a removal mark, or required records are missing.

    Required are its decision, manifest and receipts, each written before ``.metadata``. An attempt is
    removed after ABORT or supersession, data files first, and ``pannier gc`` removes an ABORT last. A
    coordinator that was stopped until then finds no ABORT that prevents its COMMIT, but no manifest,
    either: it stored or read the manifest before the ranks wrote anything, and none is stored twice.
    Where torch made the plan, the manifest is written after the receipts, and only while all of them
    and their files exist; from then on no sidecar writes any.

    As long as a receipt is left, the removal is still running; it checks ``.metadata`` again at its end.

    A listing may be stale (NFS): it proves that an object exists, while only a request by name proves
    that it doesn't.
    """
    receipts = object_names.receipts_prefix(attempt)
    mark, decision, manifest, listed = await asyncio.gather(
        store.stat(object_names.removal_mark(attempt)),
        store.stat(object_names.decision(attempt)),
        store.stat(object_names.manifest(attempt)),
        store.list(receipts),
    )
    if mark is not None or decision is None or manifest is None:
        return True
    if listed:
        return False
    plan = await read_manifest(store, attempt, ManifestRecord)
    return plan is None or await store.stat(object_names.receipt(attempt, plan.ranks[0])) is None


def _seems_removed(attempt: str, listed: Collection[str]) -> bool:
    """Whether a listing, which may be stale, suggests that the attempt was removed."""
    receipts = object_names.receipts_prefix(attempt)
    return (
        object_names.removal_mark(attempt) in listed
        or object_names.decision(attempt) not in listed
        or object_names.manifest(attempt) not in listed
        or not any(key.startswith(receipts) for key in listed)
    )


async def _undo_install(store: Store, decision: records_pb2.Decision) -> NoReturn:
    """Undoes the writes for a removed attempt; raises RemovedError."""
    info, checksum = await stat_metadata(store)
    if info is not None and (info.size, checksum) == (
        decision.metadata_size,
        decision.metadata_crc32c,
    ):
        await store.delete(object_names.METADATA, generation=info.generation)
    await settle_copies(store, [decision])
    await _remove_records(store, decision)
    text = (
        f"attempt {decision.attempt} was removed from {store.url} before this coordinator "
        "finished its commit: none of its objects is left"
    )
    _log.warning("%s", text)
    raise RemovedError(text)


async def _remove_records(store: Store, decision: records_pb2.Decision) -> None:
    """Removes the attempt's records, the decision last."""
    kept = object_names.decision(decision.attempt)
    left = [item.key for item in await store.list(object_names.attempt_prefix(decision.attempt))]
    for key in sorted(left, key=lambda key: key == kept):
        await store.delete(key)


async def find_standing(store: Store) -> tuple[ObjectInfo | None, object_names.Attempt | None]:
    """``.metadata`` and its attempt; None for a foreign one, which counts as oldest.

    Raises IntegrityError when a damaged decision makes the attempt unknown.
    """
    stands = await _read_standing(store)
    return stands.info, stands.attempt


async def _read_standing(store: Store) -> _Standing:
    async for _ in contend(_RACES):
        info, checksum = await stat_metadata(store)
        if info is None:
            return _Standing(None, 0, None)
        records = await store.list(object_names.attempts_prefix())
        committed = await find_committed(store, records, info.size, checksum)
        if committed is not None:
            return _Standing(info, checksum, committed, records)
        # A stale listing (NFS) may lack the decision: a newer checkpoint would be taken for foreign, and
        # replaced.
        try:
            content = await store.read_whole(object_names.METADATA, MOST_METADATA)
        except NotFoundError:
            continue
        if (len(content), crc32c.crc32c(content)) != (info.size, checksum):
            continue  # It was replaced meanwhile: this content doesn't belong to ``info``.
        attempt, files = await _read_names(content, f"{store.url}/{object_names.METADATA}")
        decision = await read_decision(store, attempt) if attempt else None
        if decision is not None:
            committed = match({attempt: decision}, info.size, checksum)
        gone = bool(attempt) and decision is None and await _lacks_one(store, files)
        return _Standing(info, checksum, committed, records, gone)
    raise _changing(store, "was compared with the records")


async def _read_names(content: bytes, where: str) -> tuple[str, frozenset[str]]:
    """The attempt that a ``.metadata`` names as its own, if any, and its files."""
    try:
        return await asyncio.to_thread(saved_by, content, where)
    except IntegrityError:
        return "", frozenset()  # Not DCP's: it belongs to no attempt.


async def _lacks_one(store: Store, files: frozenset[str]) -> bool:
    """Whether the first data file is missing, or there is none: a removal begins with the data files."""
    return not files or await store.stat(min(files)) is None


async def stat_metadata(store: Store) -> tuple[ObjectInfo | None, int]:
    """``.metadata`` and its checksum. Raises StorageError."""
    async for _ in contend(_RACES):
        info = await store.stat(object_names.METADATA)
        if info is None:
            return None, 0
        if info.crc32c is not None:
            return info, info.crc32c
        try:
            data = await store.read_whole(object_names.METADATA, MOST_METADATA)
        except NotFoundError:
            continue
        again = await store.stat(object_names.METADATA)
        if again is not None and again.generation == info.generation:
            return info, crc32c.crc32c(data)
    raise _changing(store, "was read")


def _changing(store: Store, during: str) -> StorageError:
    return StorageError(
        f"{store.url}: {object_names.METADATA} changed {_RACES} times while it {during}"
    )
