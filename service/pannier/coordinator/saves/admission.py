"""A rank takes part in a save: by its local plan, or by a plan that it was given before.

In: what a rank says, by a call or by its sidecar's report. Out: a save that gathers it, or that is
doomed because it can't be. Event loop only; no I/O.
"""

from typing import Final

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.saves.participants import DisagreementError, Proposal
from pannier.coordinator.saves.save import Save
from pannier.coordinator.stores import Places
from pannier.v1 import save_pb2
from pannier.wire.errors import ConfigurationError, InvalidRequestError

_KINDS: Final = {True: "prepares its plan only", False: "saves"}


def check_place(save: Save, places: Places, rank: int) -> None:
    """Raises what the save's place is refused with, which dooms the save."""
    if save.place_allowed:
        return
    try:
        places.check(save.context.checkpoint_id)
        save.place_allowed = True
    except (InvalidRequestError, ConfigurationError) as error:
        save.fail(save_pb2.FAILURE_KIND_STORAGE, str(error), rank)
        raise


def join(save: Save, said: RankPlan | Proposal, *, preparing: bool = False) -> None:
    """Takes in what the rank says; once more is no news. Who calls this rings.

    Raises:
        SaveAbortedError: the save is doomed, perhaps by this.
        InvalidRequestError: the save takes none any more.
    """
    if save.doomed.is_set():
        raise save.error()
    if not said.digest:
        raise InvalidRequestError(f"the plan of rank {said.rank} has no digest")
    if save.external:
        raise InvalidRequestError(f"{save.label} was opened with Begin: torch plans it")
    if save.preparing is None:
        save.preparing = preparing
    try:
        if save.preparing is not preparing:
            raise DisagreementError(
                f"rank {said.rank} {_KINDS[preparing]}, the others call it save number "
                f"{save.context.save.number} and do otherwise: every rank must make the same calls",
                (said.rank, said.host),
            )
        if save.manifest is not None:
            _check_again(save, save.manifest, said)
        elif isinstance(said, RankPlan):
            save.gathering.add(said)
        else:
            save.gathering.propose(said)
    except DisagreementError as error:
        save.doom(error.failures.values())
        raise save.error() from error


def _check_again(save: Save, manifest: Manifest, said: RankPlan | Proposal) -> None:
    """The answer got lost and is asked for again."""
    known = manifest.plan.digests.get(said.rank) == said.digest
    if known and isinstance(said, Proposal):
        # It may go by another plan in which it writes the same: that was found when it said so.
        known = said.attempt == manifest.header.attempt and (
            said.plan_id == manifest.plan_id or said in save.gathering.proposals
        )
    if not known:
        raise DisagreementError(
            f"rank {said.rank} on host {said.host} handed in another plan after the plan was "
            "agreed; do two processes run as this rank?",
            (said.rank, said.host),
        )
