"""Which plan a save goes by when ranks go by earlier ones: the same again, or as much of it as does.

In: a save whose ranks have all said what they go by, and the plans that are kept. Out: one of these
that fits all ranks; else what of them must stay as it is. Event loop only; no I/O.
"""

from collections.abc import Mapping

from pannier.coordinator.planning.plan_cache import AgreedPlan, AgreedPlans, Share
from pannier.coordinator.saves.participants import DisagreementError
from pannier.coordinator.saves.save import Save
from pannier.wire import object_names


def check_attempts(save: Save, attempt: object_names.Attempt) -> None:
    """Raises DisagreementError naming ranks that have named their files for another attempt."""
    name = attempt.name
    wrong = [each for each in save.gathering.proposals if each.attempt != name]
    if wrong:
        raise DisagreementError(
            f"its attempt is {attempt.name}, but rank {wrong[0].rank} (host {wrong[0].host}) goes by "
            f"a plan of attempts like {wrong[0].attempt}: was the root emptied while the job ran?",
            *((each.rank, each.host) for each in wrong),
        )


def choose(plans: AgreedPlans, save: Save) -> AgreedPlan | None:
    """A kept plan that was made of the same local plans; None when there is none.

    Each rank that has staged by an earlier plan writes the same in it.
    """
    digests = save.gathering.digests
    staged = {}
    known = _known(plans, save)
    for each in save.gathering.proposals:
        own = known[each.plan_id]
        if own is None or own.digests.get(each.rank) != each.digest:
            return None
        staged[each.rank] = own
    for plan in (*dict.fromkeys(staged.values()), *plans.alike(save.context, digests)):
        if plan.digests == digests and all(
            own.writes_same(plan, rank) for rank, own in staged.items()
        ):
            return plan
    return None


def kept_assignments(plans: AgreedPlans, save: Save) -> Mapping[int, Share]:
    """What ranks write that have staged by an earlier plan, by rank: it can't be changed any more.

    Of a plan that isn't kept nobody knows; such a rank gives up when it is answered otherwise.
    """
    kept = {}
    known = _known(plans, save)
    for each in save.gathering.proposals:
        own = known[each.plan_id]
        if own is not None and own.digests.get(each.rank) == each.digest:
            kept[each.rank] = own.share(each.rank)
    return kept


def _known(plans: AgreedPlans, save: Save) -> Mapping[str, AgreedPlan | None]:
    """The plans that its ranks go by, by id: thousands of ranks go by the same."""
    ids = {each.plan_id for each in save.gathering.proposals}
    return {plan_id: plans.find(save.context, plan_id) for plan_id in ids}
