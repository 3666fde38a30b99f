"""Attempts that nobody has brought to their end, found and ended from the bucket alone.

In: a store. Out: what each interrupted attempt lacks; and, on request, its end, by the same steps
as a coordinator's. A save that is under way looks the same: ending it twice does no harm. Async.
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

Raises IntegrityError when they don't fit each other, ConfigurationError where it can't be done.
"""


class Found(enum.Enum):
    """What storage says of an attempt that isn't at its end."""

    COMPLETE = "complete"
    """All receipts are there: it can be committed."""
    COMMIT = "commit"
    """COMMIT is decided, but ``.metadata`` isn't this attempt's yet."""
    ABORT = "abort"
    """ABORT is decided, but not all of its objects are removed."""
    UNDECIDED = "undecided"
    """Receipts are missing."""
    DAMAGED = "damaged"
    """A record is not what was written, so that it can't be told."""


class End(enum.Enum):
    """How an attempt is, after all that could be done."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    REMOVED = "removed"
    """The checkpoint was removed meanwhile."""
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interrupted:
    """An attempt that isn't at its end."""

    attempt: str
    found: Found
    members: tuple[tuple[int, str], ...] = ()
    """Ranks and their hosts, as the manifest has them."""
    missing: tuple[int, ...] = ()
    """Ranks whose receipt isn't there."""
    planned: bool = True
    """There is a manifest; without one nobody can commit it."""
    problem: str = ""
    """What is damaged, for people."""
    modified: float = 0
    """When its newest object was written, by the store's clock; Unix time, seconds."""


@dataclass(frozen=True)
class Outcome:
    """What became of an interrupted attempt."""

    attempt: Interrupted
    end: End
    reason: str = ""
    """Why it is undecided or aborted, for people."""


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
    """Whose ``.metadata`` stands, looked up once, after the decisions of the attempts were read."""

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
    standing_there: CurrentMetadata,
) -> Interrupted | None:
    """What an attempt lacks; None when it is at its end.

    Args:
        items: its objects.
        decisions: at least its own, if it has one.
        standing_there: shared by all attempts.

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
        metadata, standing = await standing_there.find()
        decided = next(info.modified for info in items if info.key == key)
        ended = (
            # A plain writer saved to this place since.
            metadata is not None and metadata.modified > decided
            if standing is None
            else standing >= object_names.Attempt.parse(attempt)
        )
        return None if ended else Interrupted(attempt, Found.COMMIT, modified=modified)
    manifest = await read_manifest(store, attempt, ManifestRecord)
    if manifest is None:
        return Interrupted(attempt, Found.UNDECIDED, planned=False, modified=modified)
    # What is missing here may be given up.
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
    """Brings an attempt to its end, as far as storage tells how.

    Args:
        build: makes the candidate of ``.metadata``, where nobody has yet.
        host: signs decisions.
        abort: also where receipts are missing: what these ranks hold is given up.

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
        # A record that should be there is gone: somebody removes the attempt, or it is damaged.
        if abort and interrupted.found is Found.COMPLETE and isinstance(error, IntegrityError):
            return await _abort(store, interrupted, host, str(error))
        return Outcome(interrupted, End.UNDECIDED, str(error))
    return _ended(interrupted, decision)


def predict_outcome(interrupted: Interrupted, *, abort: bool) -> Outcome:
    """What :func:`finish_attempt` would come to, if nobody else and no newer save comes in between."""
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
        raise IntegrityError(f"{store.url}: the manifest of {attempt} is gone")
    receipts = await find_receipts(store, attempt, manifest.ranks, unlisted=True)
    try:
        # Of a coordinator that had checked the receipts.
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
    """Decides ABORT, unless something was decided already; returns what stands."""
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
    """Raises IntegrityError unless all files that it needs are durable."""
    where = f"{store.url}/{object_names.metadata_candidate(attempt)}"
    durable = {file.name for receipt in receipts for file in receipt.files}
    if lacking := referenced_files(metadata, where) - durable:
        raise IntegrityError(f"{where} needs {sorted(lacking)[:4]}, of which no receipt tells")


async def _abort(store: Store, interrupted: Interrupted, host: str, why: str) -> Outcome:
    decision = await decide_abort(store, interrupted, host, why)
    await carry_out(store, decision)
    return _ended(interrupted, decision, why)


def _ended(interrupted: Interrupted, decision: records_pb2.Decision, why: str = "") -> Outcome:
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        return Outcome(interrupted, End.COMMITTED)
    told = "; ".join(dict.fromkeys(failure.message for failure in decision.failures))
    return Outcome(interrupted, End.ABORTED, told or why)


def _lacks(interrupted: Interrupted) -> str:
    if not interrupted.planned:
        return "its plan was never agreed, so that nobody can commit it"
    by_host: dict[str, list[int]] = {}
    hosts = dict(interrupted.members)
    for rank in interrupted.missing:
        by_host.setdefault(hosts[rank], []).append(rank)
    where = "; ".join(f"host {host}: {ranks_text(ranks)}" for host, ranks in by_host.items())
    return f"receipts are missing of {where}"
