"""Interrupted attempts, found and finished from the bucket alone: ``pannier recover``.

In: a store. Out: what each interrupted attempt lacks and, on request, its end, by the coordinator's steps. A
save in progress looks the same: these steps are idempotent, so finishing it twice does no harm. Async.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.attempts.commit import SupersededError, carry_out, check_commit, prepare_commit
from pannier.attempts.decisions import (
    Decisions,
    decide,
    new_decision,
    read_decision,
    read_decisions,
)
from pannier.attempts.extra_files import ExtraFilesError, collect
from pannier.attempts.manifests import ManifestRecord, read_manifest
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import (
    OccupiedError,
    RemovedError,
    check_free,
    find_newer,
    find_standing,
    is_removed,
)
from pannier.attempts.receipts import find_receipts
from pannier.maintenance.inspect import by_checkpoint
from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
)
from pannier.wire.failures import ranks_text
from pannier.wire.records import MOST_METADATA

Build = Callable[[bytes, Sequence[records_pb2.Receipt]], Awaitable[bytes]]
"""From a manifest and the receipts of all ranks to the bytes of ``.metadata``.

Raises IntegrityError when they contradict each other, ConfigurationError when torch is missing.
"""

_DAMAGED: Final = (IntegrityError, InvalidRequestError)
"""What the records of one attempt cause: they are damaged, or name what can't be a name."""


class Found(enum.Enum):
    """State of an interrupted attempt in storage."""

    COMPLETE = "complete"
    """All receipts are in storage: it can be committed."""
    COMMIT = "commit"
    """COMMIT is decided, but ``.metadata`` isn't replaced yet."""
    ABORT = "abort"
    """ABORT is decided, but not all of its objects are removed."""
    UNDECIDED = "undecided"
    """Receipts are missing."""
    DAMAGED = "damaged"
    """A damaged record makes the state unknown."""


class End(enum.Enum):
    """State of an attempt after :func:`finish_attempt`."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    REMOVED = "removed"
    """The checkpoint was removed meanwhile."""
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interrupted:
    """An attempt that isn't finished."""

    attempt: str
    found: Found
    members: tuple[tuple[int, str], ...] = ()
    """Ranks and their hosts, from the manifest."""
    missing: tuple[int, ...] = ()
    """Ranks without a receipt."""
    planned: bool = True
    """It has a manifest, without which it can't be committed."""
    problem: str = ""
    """Human-readable description of the damage."""
    modified: float = 0
    """Time of its newest object, by the store's clock; Unix time, seconds."""
    manifest: ManifestRecord | None = field(default=None, compare=False, repr=False)
    receipts: Sequence[records_pb2.Receipt] = field(default=(), compare=False, repr=False)
    """Those that are in storage."""


@dataclass(frozen=True)
class Outcome:
    """Result for an interrupted attempt."""

    attempt: Interrupted
    end: End
    reason: str = ""
    """Human-readable reason why it is undecided or aborted."""


async def find_interrupted(
    store: Store,
    objects: Iterable[ObjectInfo] | None = None,
    *,
    wanted: Callable[[str], bool] = lambda attempt: True,
) -> list[Interrupted]:
    """The interrupted attempts of one checkpoint, oldest first. Raises StorageError.

    Args:
        objects: a listing of the checkpoint, which may be some minutes old; None: it is listed here.
        wanted: whether to examine an attempt.
    """
    if objects is None:
        objects = by_checkpoint(await store.list()).get("", [])
    attempts: dict[str, list[ObjectInfo]] = {}
    metadata = None
    for info in objects:
        attempt = object_names.attempt_of(info.key)
        if attempt:
            attempts.setdefault(attempt, []).append(info)
        elif info.key == object_names.METADATA:
            metadata = info
    finished = _finished(attempts, metadata)
    unclear = {name: attempts[name] for name in attempts if name not in finished and wanted(name)}
    decisions = await read_decisions(store, (info for items in unclear.values() for info in items))
    standing = CurrentMetadata(store)
    found = []
    for name in sorted(unclear, key=object_names.Attempt.parse):
        try:
            interrupted = await diagnose_attempt(store, name, unclear[name], decisions, standing)
        except _DAMAGED as error:
            interrupted = Interrupted(name, Found.DAMAGED, problem=str(error))
        if interrupted is not None:
            found.append(interrupted)
    return found


def _finished(
    attempts: Mapping[str, Sequence[ObjectInfo]], metadata: ObjectInfo | None
) -> set[str]:
    """Attempts that a listing alone shows to be finished."""
    found = set()
    for attempt, items in attempts.items():
        keys = {info.key: info for info in items}
        if object_names.decision(attempt) not in keys:
            continue
        # After an abort, and at the end of a removal, only the decision is left of an attempt.
        over = len(items) == 1 or object_names.superseded_mark(attempt) in keys
        candidate = keys.get(object_names.metadata_candidate(attempt))
        stands = (
            metadata is not None
            and candidate is not None
            and metadata.crc32c is not None
            and (metadata.size, metadata.crc32c) == (candidate.size, candidate.crc32c)
        )
        if over or stands:
            found.add(attempt)
    return found


class CurrentMetadata:
    """The attempt of ``.metadata``, looked up once, after the decisions of the attempts were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: tuple[ObjectInfo | None, object_names.Attempt | None] | None = None

    async def find(self) -> tuple[ObjectInfo | None, object_names.Attempt | None]:
        """See :func:`pannier.attempts.metadata_swap.find_standing`."""
        if self._found is None:
            self._found = await find_standing(self._store)
        return self._found


async def diagnose_attempt(
    store: Store,
    attempt: str,
    items: Sequence[ObjectInfo],
    decisions: Decisions,
    current: CurrentMetadata,
) -> Interrupted | None:
    """State of an attempt; None when it is finished.

    Args:
        items: its objects.
        decisions: at least its own, if it has one.
        current: shared by all attempts.

    Raises StorageError, and IntegrityError when a record is damaged.
    """
    key = object_names.decision(attempt)
    if key in decisions.damaged:
        raise decisions.damaged[key]
    decision = decisions.known.get(attempt)
    if decision is None and (info := await store.stat(key)) is not None:
        # Decided since the listing.
        decision, items = await read_decision(store, attempt), [*items, info]
    modified = max(info.modified for info in items)
    if decision is not None and decision.outcome == records_pb2.OUTCOME_ABORT:
        left = any(info.key != key for info in items)
        return Interrupted(attempt, Found.ABORT, modified=modified) if left else None
    if decision is not None:
        if any(info.key == object_names.removal_mark(attempt) for info in items):
            return None
        metadata, standing = await current.find()
        decided = next(info.modified for info in items if info.key == key)
        ended = (
            # Another writer has replaced the checkpoint since.
            metadata is not None and metadata.modified > decided
            if standing is None
            else standing >= object_names.Attempt.of(decision)
        )
        return None if ended else Interrupted(attempt, Found.COMMIT, modified=modified)
    if object_names.is_remains(attempt, {info.key for info in items}):
        return None
    manifest = await read_manifest(store, attempt, ManifestRecord)
    if manifest is None:
        return Interrupted(attempt, Found.UNDECIDED, planned=False, modified=modified)
    # By name, without a listing: the attempt may be aborted for ranks that are missing here.
    receipts = await find_receipts(store, attempt, manifest.ranks, unlisted=True)
    there = {receipt.rank for receipt in receipts}
    missing = tuple(rank for rank in manifest.ranks if rank not in there)
    members = tuple((member.rank, member.host) for member in manifest.header.members)
    return Interrupted(
        attempt,
        Found.UNDECIDED if missing else Found.COMPLETE,
        members,
        missing,
        modified=modified,
        manifest=manifest,
        receipts=receipts,
    )


async def finish_attempt(
    store: Store,
    interrupted: Interrupted,
    *,
    build: Build,
    host: str,
    abort: bool,
    why: str = "given up",
) -> Outcome:
    """Commits or aborts an attempt, as far as its state in storage allows.

    Args:
        build: makes the candidate of ``.metadata``, if there is none.
        host: recorded in decisions.
        abort: also aborts it when receipts are missing, which gives up these ranks' spools.
        why: reason of such an abort.

    Raises StorageError.
    """
    name = interrupted.attempt
    try:
        if interrupted.found is Found.COMPLETE:
            try:
                decision = await _commit(store, interrupted, build, host)
            except PannierError as error:
                if not _forbids_commit(error, abort):
                    raise
                return await _abort(store, interrupted, host, str(error))
        elif interrupted.found is Found.DAMAGED:
            return Outcome(interrupted, End.UNDECIDED, interrupted.problem)
        elif interrupted.found is Found.UNDECIDED:
            if not abort:
                return Outcome(interrupted, End.UNDECIDED, lacks(interrupted))
            return await _abort(store, interrupted, host, f"{why}: {lacks(interrupted)}")
        else:
            standing = await read_decision(store, name)
            if standing is None:
                return Outcome(interrupted, End.REMOVED, "it was removed meanwhile")
            decision = standing
        await carry_out(store, decision)
    except (RemovedError, OccupiedError) as error:
        return Outcome(interrupted, End.REMOVED, str(error))
    except (*_DAMAGED, ConfigurationError, NotFoundError) as error:
        # A required record is missing: the attempt is being removed, or damaged.
        return Outcome(interrupted, End.UNDECIDED, str(error))
    return _ended(interrupted, decision)


async def predict_outcome(store: Store, interrupted: Interrupted, *, abort: bool) -> Outcome:
    """Expected result of :func:`finish_attempt` of this attempt alone, without concurrent changes.

    Reads as that does and writes nothing; ``.metadata`` isn't built. Raises StorageError.
    """
    if interrupted.found is Found.ABORT:
        return Outcome(interrupted, End.ABORTED)
    if interrupted.found is Found.DAMAGED:
        return Outcome(interrupted, End.UNDECIDED, interrupted.problem)
    if interrupted.found is Found.UNDECIDED:
        return Outcome(interrupted, End.ABORTED if abort else End.UNDECIDED, lacks(interrupted))
    complete = interrupted.found is Found.COMPLETE
    try:
        await (_check_commit if complete else _check_decided)(store, interrupted)
    except PannierError as error:
        if complete and _forbids_commit(error, abort):
            return Outcome(interrupted, End.ABORTED, str(error))
        if isinstance(error, (RemovedError, OccupiedError)):
            return Outcome(interrupted, End.REMOVED, str(error))
        if isinstance(error, (*_DAMAGED, NotFoundError)):
            return Outcome(interrupted, End.UNDECIDED, str(error))
        raise
    return Outcome(interrupted, End.COMMITTED)


def _forbids_commit(error: PannierError, abort: bool) -> bool:
    """Whether an attempt with all receipts is aborted for this error of its commit."""
    return isinstance(error, (SupersededError, OccupiedError, ExtraFilesError)) or (
        abort and isinstance(error, _DAMAGED)
    )


async def _check_commit(store: Store, interrupted: Interrupted) -> None:
    """What :func:`_commit` checks before it writes. Raises the same errors, except ``build``'s."""
    manifest = interrupted.manifest
    assert manifest is not None
    await _read_candidate(store, interrupted)
    extra, header = collect(interrupted.receipts), manifest.header
    await check_commit(
        store,
        save=header.save,
        attempt=object_names.Attempt.of(header),
        overwrite=header.overwrite,
        extra=extra,
    )


async def _check_decided(store: Store, interrupted: Interrupted) -> None:
    """What carrying out a COMMIT checks before it writes. Raises the same errors."""
    decision = await read_decision(store, interrupted.attempt)
    if decision is None or await is_removed(store, interrupted.attempt):
        raise RemovedError("it was removed meanwhile")
    # A hold on .metadata prevents its replacement.
    await find_newer(store, object_names.Attempt.of(decision))
    await check_free(
        store, save=decision.save, attempt=decision.attempt, overwrite=decision.overwrite
    )


async def _commit(
    store: Store, interrupted: Interrupted, build: Build, host: str
) -> records_pb2.Decision:
    manifest, receipts = interrupted.manifest, interrupted.receipts
    assert manifest is not None
    metadata = await _read_candidate(store, interrupted)
    if metadata is None:
        metadata = await build(manifest.data, receipts)
    proposal = await prepare_commit(
        store,
        save=manifest.header.save,
        attempt=object_names.Attempt.of(manifest.header),
        plan_id=manifest.plan_id,
        metadata=metadata,
        receipts=receipts,
        host=host,
        overwrite=manifest.header.overwrite,
    )
    return await decide(store, proposal)


async def decide_abort(
    store: Store, interrupted: Interrupted, host: str, why: str
) -> records_pb2.Decision:
    """Decides ABORT unless there is a decision; returns the stored one."""
    manifest, attempt = interrupted.manifest, object_names.Attempt.parse(interrupted.attempt)
    if manifest is not None:
        attempt = object_names.Attempt.of(manifest.header)
    hosts = dict(interrupted.members)
    failures = [
        save_pb2.Failure(rank=rank, host=hosts[rank], kind=save_pb2.FAILURE_KIND_LOST, message=why)
        for rank in interrupted.missing
    ] or [save_pb2.Failure(rank=-1, kind=save_pb2.FAILURE_KIND_LOST, message=why)]
    return await decide(
        store,
        new_decision(
            records_pb2.OUTCOME_ABORT,
            save=manifest.header.save if manifest is not None else attempt.save,
            attempt=attempt,
            host=host,
            failures=failures,
        ),
    )


async def _read_candidate(store: Store, interrupted: Interrupted) -> bytes | None:
    """The candidate of ``.metadata``, if a coordinator stored one after it had checked the receipts.

    Raises IntegrityError when it doesn't fit them.
    """
    attempt = interrupted.attempt
    try:
        metadata = await store.read_whole(object_names.metadata_candidate(attempt), MOST_METADATA)
    except NotFoundError:
        return None
    await asyncio.to_thread(_check_candidate, store, attempt, metadata, interrupted.receipts)
    return metadata


def _check_candidate(
    store: Store, attempt: str, metadata: bytes, receipts: Sequence[records_pb2.Receipt]
) -> None:
    """Raises IntegrityError unless all files that ``metadata`` refers to are durable."""
    where = f"{store.url}/{object_names.metadata_candidate(attempt)}"
    durable = {file.name for receipt in receipts for file in receipt.files}
    if lacking := referenced_files(metadata, where) - durable:
        raise IntegrityError(f"{where} needs {sorted(lacking)[:4]}, which no receipt names")


async def _abort(store: Store, interrupted: Interrupted, host: str, why: str) -> Outcome:
    decision = await decide_abort(store, interrupted, host, why)
    await carry_out(store, decision)
    return _ended(interrupted, decision, why)


def _ended(interrupted: Interrupted, decision: records_pb2.Decision, why: str = "") -> Outcome:
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        return Outcome(interrupted, End.COMMITTED)
    causes = "; ".join(dict.fromkeys(failure.message for failure in decision.failures))
    return Outcome(interrupted, End.ABORTED, causes or why)


def lacks(interrupted: Interrupted) -> str:
    """What an undecided attempt lacks for its commit, human-readable."""
    if not interrupted.planned:
        return "it has no plan manifest, so that it can't be committed"
    by_host: dict[str, list[int]] = {}
    hosts = dict(interrupted.members)
    for rank in interrupted.missing:
        by_host.setdefault(hosts[rank], []).append(rank)
    where = "; ".join(f"host {host}: {ranks_text(ranks)}" for host, ranks in by_host.items())
    return f"receipts are missing of {where}"
