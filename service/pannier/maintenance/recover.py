"""Interrupted attempts, found and finished from the bucket alone: ``pannier recover``.

In: a store. Out: what each interrupted attempt lacks and, on request, its end, by the coordinator's steps. A
save in progress looks the same: these steps are idempotent, so finishing it twice does no harm. Async.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import (
    Decisions,
    decide,
    new_decision,
    read_decision,
    read_decisions,
)
from pannier.attempts.manifests import ManifestRecord, read_manifest
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import OccupiedError, RemovedError, find_standing
from pannier.attempts.receipts import find_receipts
from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import ConfigurationError, IntegrityError
from pannier.wire.failures import ranks_text

Build = Callable[[bytes, Sequence[records_pb2.Receipt]], Awaitable[bytes]]
"""From a manifest and the receipts of all ranks to the bytes of ``.metadata``.

Raises IntegrityError when they contradict each other, ConfigurationError when torch is missing.
"""


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


@dataclass(frozen=True)
class Outcome:
    """Result for an interrupted attempt."""

    attempt: Interrupted
    end: End
    reason: str = ""
    """Human-readable reason why it is undecided or aborted."""


async def find_interrupted(store: Store) -> list[Interrupted]:
    """The interrupted attempts of one checkpoint, oldest first. Raises StorageError."""
    attempts: dict[str, list[ObjectInfo]] = {}
    for prefix in (object_names.attempts_prefix(), object_names.data_prefix("")[:-1]):
        for info in await store.list(prefix):
            attempt = object_names.attempt_of(info.key)
            if attempt:
                attempts.setdefault(attempt, []).append(info)
    decisions = await read_decisions(store, (info for items in attempts.values() for info in items))
    standing = CurrentMetadata(store)
    found = []
    for name in sorted(attempts, key=object_names.Attempt.parse):
        try:
            interrupted = await diagnose_attempt(store, name, attempts[name], decisions, standing)
        except IntegrityError as error:
            interrupted = Interrupted(name, Found.DAMAGED, problem=str(error))
        if interrupted is not None:
            found.append(interrupted)
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
    modified = max(info.modified for info in items)
    if key in decisions.damaged:
        raise decisions.damaged[key]
    decision = decisions.known.get(attempt)
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
            else standing >= object_names.Attempt.parse(attempt)
        )
        return None if ended else Interrupted(attempt, Found.COMMIT, modified=modified)
    manifest = await read_manifest(store, attempt, ManifestRecord)
    if manifest is None:
        return Interrupted(attempt, Found.UNDECIDED, planned=False, modified=modified)
    # The ranks that are missing here may be aborted.
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
    )


async def finish_attempt(
    store: Store, interrupted: Interrupted, *, build: Build, host: str, abort: bool
) -> Outcome:
    """Commits or aborts an attempt, as far as its state in storage allows.

    Args:
        build: makes the candidate of ``.metadata``, if there is none.
        host: recorded in decisions.
        abort: also aborts it when receipts are missing, which gives up these ranks' spools.

    Raises StorageError.
    """
    name = interrupted.attempt
    try:
        if interrupted.found is Found.COMPLETE:
            try:
                decision = await _commit(store, name, build, host)
            except (SupersededError, OccupiedError) as error:
                return await _abort(store, interrupted, host, str(error))
        elif interrupted.found is Found.DAMAGED:
            return Outcome(interrupted, End.UNDECIDED, interrupted.problem)
        elif interrupted.found is Found.UNDECIDED:
            if not abort:
                return Outcome(interrupted, End.UNDECIDED, _lacks(interrupted))
            return await _abort(store, interrupted, host, f"given up: {_lacks(interrupted)}")
        else:
            standing = await read_decision(store, name)
            if standing is None:
                return Outcome(interrupted, End.REMOVED, "it was removed meanwhile")
            decision = standing
        await carry_out(store, decision)
    except (RemovedError, OccupiedError) as error:
        return Outcome(interrupted, End.REMOVED, str(error))
    except (IntegrityError, ConfigurationError, NotFoundError) as error:
        # A required record is missing: the attempt is being removed, or damaged.
        if abort and interrupted.found is Found.COMPLETE and isinstance(error, IntegrityError):
            return await _abort(store, interrupted, host, str(error))
        return Outcome(interrupted, End.UNDECIDED, str(error))
    return _ended(interrupted, decision)


def predict_outcome(interrupted: Interrupted, *, abort: bool) -> Outcome:
    """Expected result of :func:`finish_attempt`, without concurrent changes."""
    if interrupted.found in (Found.COMPLETE, Found.COMMIT):
        return Outcome(interrupted, End.COMMITTED)
    if interrupted.found is Found.ABORT:
        return Outcome(interrupted, End.ABORTED)
    if interrupted.found is Found.DAMAGED:
        return Outcome(interrupted, End.UNDECIDED, interrupted.problem)
    return Outcome(interrupted, End.ABORTED if abort else End.UNDECIDED, _lacks(interrupted))


async def _commit(store: Store, attempt: str, build: Build, host: str) -> records_pb2.Decision:
    manifest = await read_manifest(store, attempt, ManifestRecord)
    if manifest is None:
        raise IntegrityError(f"{store.url}: the manifest of {attempt} does not exist")
    receipts = await find_receipts(store, attempt, manifest.ranks, unlisted=True)
    try:
        # Written by a coordinator that had checked the receipts.
        metadata = await store.read(object_names.metadata_candidate(attempt))
    except NotFoundError:
        metadata = await build(manifest.data, receipts)
    else:
        await asyncio.to_thread(_check_candidate, store, attempt, metadata, receipts)
    proposal = await prepare_commit(
        store,
        save=manifest.header.save,
        attempt=object_names.Attempt.parse(attempt),
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
    manifest = await read_manifest(store, interrupted.attempt, ManifestRecord)
    attempt = object_names.Attempt.parse(interrupted.attempt)
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


def _lacks(interrupted: Interrupted) -> str:
    if not interrupted.planned:
        return "it has no plan manifest, so that it can't be committed"
    by_host: dict[str, list[int]] = {}
    hosts = dict(interrupted.members)
    for rank in interrupted.missing:
        by_host.setdefault(hosts[rank], []).append(rank)
    where = "; ".join(f"host {host}: {ranks_text(ranks)}" for host, ranks in by_host.items())
    return f"receipts are missing of {where}"
