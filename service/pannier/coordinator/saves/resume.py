"""Resumes a save from storage: what another coordinator, or another process of this one, left there.

In: a :class:`Save` and its store. Out: the save with the manifest and the receipts that are in storage, or
the decision that has ended it; and the plans of earlier saves that its ranks claim. Writes nothing. Event
loop only.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from pannier.attempts.decisions import read_decision
from pannier.attempts.manifests import read_manifest
from pannier.attempts.receipts import find_receipts
from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.common.retry import RetryPolicy
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.plan_cache import PlanCache
from pannier.coordinator.saves.participants import CachedPlanClaim
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.coordinator.saves.states import PlanMode
from pannier.storage import StorageError, Store
from pannier.storage.base import unlimited
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_MOST_SOURCES: Final = 4
"""Manifests of earlier saves that are read for one save."""


class UnansweredError(Exception):
    """What storage holds of the save could not be read."""


class StorageChecks:
    """Reads decision and receipts of a save from storage, at growing intervals."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._last = time.monotonic()
        self._pause = timeouts.RESUME_CHECK_S
        self._sidecars_checked = 0.0
        self._sidecars_live = False

    def due(self) -> float:
        """When the next check is due, on the monotonic clock."""
        now = time.monotonic()
        if now >= self._sidecars_checked + timeouts.SIDECARS_CACHED_S:
            self._sidecars_checked = now
            self._sidecars_live = all(
                state.receipt is not None or state.has_live_sidecar
                for state in self._save.ranks.values()
            )
        return self._last + (
            timeouts.RESUME_LONGEST_CHECK_S if self._sidecars_live else self._pause
        )

    async def check(self, store: Store, *, last: bool) -> records_pb2.Decision | None:
        """Adds receipts that no sidecar has reported; returns the decision, if there is one.

        Args:
            last: the save fails unless its receipts are found: in a directory each is requested by
                name, as a listing may be stale (NFS).

        Raises UnansweredError, after a pause, when storage can't be read: the save must not fail for that.
        """
        save = self._save
        save.begin_storage_check()
        assert save.attempt is not None
        attempt = save.attempt.name
        missing = [rank for rank, state in save.ranks.items() if state.receipt is None]
        unlisted = last and store.host_local
        seconds = timeouts.RECEIPTS_S + len(missing) * timeouts.RECEIPT_S

        async def read() -> tuple[records_pb2.Decision | None, list[records_pb2.Receipt]]:
            # The last check comes when the save's own deadline has passed.
            with unlimited():
                return await asyncio.gather(
                    read_decision(store, attempt, save.context.save),
                    find_receipts(store, attempt, missing, unlisted=unlisted),
                )

        try:
            decision, found = await within(seconds, read())
        except IntegrityError as error:
            _log.warning("%s: its decision is damaged: %s", save.label, error)
            return None
        except (StorageError, asyncio.TimeoutError) as error:
            why = error if str(error) else f"no answer for {seconds:.0f} s"
            _log.warning("%s: receipts in storage can't be read: %s", save.label, why)
            save.wait_for_storage(why)
            await asyncio.sleep(timeouts.STEP_AGAIN_S)
            raise UnansweredError from error
        finally:
            self._last = time.monotonic()
            self._pause = min(2 * self._pause, timeouts.RESUME_LONGEST_CHECK_S)
        save.storage_answered()
        if found:
            ranks = [receipt.rank for receipt in found]
            _log.info("%s: receipts of ranks %s are in storage", save.label, ranks)
        _add_receipts(save, found)
        save.progress()
        return decision


async def read_with_retries(save: Save, step: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Runs a step that reads what a save needs before anything is decided.

    Only storage shows what became of a resumed save: the step is retried until storage answers. For any
    other save the step's first error is raised.
    """

    def note(error: BaseException) -> None:
        _log.warning("%s: what storage holds of it can't be read: %s", save.label, error)
        save.wait_for_storage(error)

    policy = RetryPolicy(
        retriable=lambda error: isinstance(error, StorageError) and save.resumed,
        first_s=timeouts.STEP_AGAIN_S,
        longest_s=timeouts.STEP_LONGEST_AGAIN_S,
        on_retry=note,
    )
    return await policy.run(step)


async def resume_save(save: Save, store: Store) -> records_pb2.Decision | None:
    """Adds what is in storage of the save's attempt; returns the decision, if it has ended.

    Raises StorageError, IntegrityError, DisagreementError.
    """
    assert save.attempt is not None
    save.mark_written()
    name = save.attempt.name
    decision = await read_decision(store, name, save.context.save)
    if decision is not None:
        return decision
    manifest = await read_manifest(store, name, Manifest, save.context.save)
    if manifest is None:
        # No rank gets a plan of Pannier's before its manifest is written, so torch makes this one.
        save.declare_mode(PlanMode.EXTERNAL)
        receipts = await find_receipts(store, name, save.context.ranks)
    else:
        external = manifest.header.external
        save.declare_mode(PlanMode.EXTERNAL if external else PlanMode.SAVE)
        await asyncio.to_thread(lambda: manifest.plan.make_parts())
        adopt_manifest(save, manifest)
        receipts = await find_receipts(store, name, manifest.ranks)
        if external:
            save.set_external_metadata(manifest.message.metadata)
    what = "receipts" if manifest is None else "its manifest and receipts"
    save.note_recovered(
        f"resumed from {what} in storage: {len(receipts)} of {len(save.ranks)} ranks were durable "
        "by then"
    )
    _log.info("%s is %s", save.label, save.note)
    _add_receipts(save, receipts)
    return None


def adopt_manifest(save: Save, manifest: Manifest) -> None:
    """Sets the manifest in storage as the save's.

    Raises DisagreementError unless it was made of the plans that ranks have handed in here, and has the parts
    that they claim.
    """
    for plan in save.plans.plans:
        _check_member(manifest, plan)
    for claim in save.plans.claims:
        _check_member(manifest, claim)
    save.set_manifest(manifest)


def _check_member(manifest: Manifest, given: RankPlan | CachedPlanClaim) -> None:
    digest = manifest.plan.digests.get(given.rank, "none")
    attempt = manifest.header.attempt
    if digest != given.digest:
        raise DisagreementError(
            f"rank {given.rank} (host {given.host}) planned digest {given.digest[:12]}, but attempt "
            f"{attempt} was planned before with {digest[:12]}",
            (given.rank, given.host),
        )
    if isinstance(given, CachedPlanClaim) and (
        given.attempt != attempt or manifest.plan.part(given.rank) != given.part
    ):
        raise DisagreementError(
            f"rank {given.rank} (host {given.host}) has staged part {given.part[:12]} as attempt "
            f"{given.attempt}, but the save was planned before as attempt {attempt} with part "
            f"{manifest.plan.part(given.rank)[:12]}",
            (given.rank, given.host),
        )


async def read_claimed_parts(
    save: Save, cache: PlanCache, open_store: Callable[[str], Store]
) -> None:
    """Adds to the cache the plans with claimed parts that another process of a coordinator made.

    A part that can't be read stays unknown: the local plan of its rank is requested.
    """
    unknown: dict[tuple[str, str], CachedPlanClaim] = {}
    for claim in save.plans.claims:
        if cache.find_part(save.context, claim.rank, claim.digest, claim.part) is None:
            unknown.setdefault((claim.source_checkpoint, claim.source_attempt), claim)
    for claim in list(unknown.values())[:_MOST_SOURCES]:
        try:
            manifest = await _read_source(save, claim, open_store)
        except PannierError as error:
            _log.warning(
                "%s: the plan by which rank %d has staged can't be read, its local plan is needed: %s",
                *(save.label, claim.rank, error),
                extra=save.log_fields,
            )
        else:
            number = object_names.Attempt.parse(claim.source_attempt).number
            cache.keep(save.context, manifest.plan, number=number)
            _log.info("%s: read the plan %s of an earlier save", save.label, manifest.plan_id[:12])


async def _read_source(
    save: Save, claim: CachedPlanClaim, open_store: Callable[[str], Store]
) -> Manifest:
    """The manifest of the attempt that the claim names. Raises PannierError."""
    own, source = claim.source_checkpoint, claim.source_attempt
    if not source:
        raise InvalidRequestError("the claim names no attempt")
    roots = [
        object_names.split_checkpoint_id(each)[0] for each in (own, save.context.checkpoint_id)
    ]
    if roots[0] != roots[1]:
        raise InvalidRequestError(f"{own} is not below {roots[1]}")
    expected = save_pb2.SaveId()
    expected.CopyFrom(save.context.save)
    expected.number = object_names.Attempt.parse(source).number
    store = open_store(own)
    try:
        manifest = await read_manifest(store, source, Manifest, expected)
    finally:
        await store.close()
    if manifest is not None:
        await asyncio.to_thread(lambda: manifest.plan.make_parts())
    if manifest is None or not manifest.plan.has_part(claim.rank, claim.digest, claim.part):
        raise IntegrityError(f"{own} has no such part as attempt {source}")
    return manifest


def _add_receipts(save: Save, receipts: Iterable[records_pb2.Receipt]) -> None:
    for receipt in receipts:
        if receipt.rank in save.ranks:
            save.add_receipt(receipt)
