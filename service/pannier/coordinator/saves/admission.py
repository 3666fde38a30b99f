"""Admits a rank to a save: with its local plan, or with a claim to use a cached plan.

In: a rank's plan or claim, from its call or its sidecar's report. Out: a save that has recorded it, or that
fails because of it. Event loop only; no I/O.
"""

from typing import Final

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.saves.participants import CachedPlanClaim
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.coordinator.saves.states import PlanMode
from pannier.coordinator.stores import Stores
from pannier.v1 import save_pb2
from pannier.wire.errors import ConfigurationError, InvalidRequestError, failure_messages

_CALLS: Final = {PlanMode.PREPARE: "prepare", PlanMode.SAVE: "async_save"}
"""The client's functions."""


def check_destination(save: Save, stores: Stores, rank: int) -> None:
    """Raises InvalidRequestError or ConfigurationError, and fails the save, for a refused destination."""
    try:
        stores.check(save.context.checkpoint_id)
    except (InvalidRequestError, ConfigurationError) as error:
        save.fail(save_pb2.FAILURE_KIND_STORAGE, str(error), rank)
        raise


def admit(save: Save, given: RankPlan | CachedPlanClaim, *, mode: PlanMode = PlanMode.SAVE) -> None:
    """Records the rank's plan or cached-plan claim. Idempotent. The caller must notify waiters.

    Args:
        mode: SAVE or PREPARE, as the rank called.

    Raises:
        SaveAbortedError: the save is failing, perhaps because of this plan or claim.
        InvalidRequestError: the save takes no plans.
    """
    if save.failing:
        raise save.error()
    if not given.digest:
        raise InvalidRequestError(f"the plan of rank {given.rank} has no digest")
    if save.external:
        raise InvalidRequestError(f"{save.label} was opened with Begin: torch plans it")
    if save.mode is PlanMode.UNDECLARED:
        save.declare_mode(mode)
    try:
        if save.mode is not mode:
            raise DisagreementError(
                f"rank {given.rank} calls {_CALLS[mode]} where the other ranks call "
                f"{_CALLS[save.mode]} (save number {save.context.save.number}): every rank must make "
                "the same calls in the same order",
                (given.rank, given.host),
            )
        if save.manifest is not None:
            _check_late(save.manifest, given)
        if isinstance(given, CachedPlanClaim):
            save.plans.add_claim(given)
        elif save.manifest is None:
            save.plans.add(given)
    except DisagreementError as error:
        save.fail_ranks(failure_messages(error))
        raise save.error() from error


def _check_late(manifest: Manifest, given: RankPlan | CachedPlanClaim) -> None:
    """Checks a plan or claim that arrives after the plan was agreed, as when an answer was lost."""
    if isinstance(given, CachedPlanClaim):
        known = (
            manifest.plan.has_part(given.rank, given.digest, given.part)
            and given.attempt == manifest.header.attempt
        )
    else:
        known = manifest.plan.digests.get(given.rank) == given.digest
    if not known:
        raise DisagreementError(
            f"rank {given.rank} on host {given.host} handed in another plan after the plan was "
            "agreed; do two processes run as this rank?",
            (given.rank, given.host),
        )
