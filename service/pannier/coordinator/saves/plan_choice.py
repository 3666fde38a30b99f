"""Chooses the cached plan that a save can use, when ranks claim one.

In: a save whose ranks have all handed in plans or claims, and the plan cache. Out: a cached plan that
fits all ranks; else the assignments that a new plan must keep. Event loop only; no I/O.
"""

from collections.abc import Mapping

from pannier.coordinator.planning.plan_cache import AgreedPlan, PlanCache, Share
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.wire import object_names


def check_attempts(save: Save, attempt: object_names.Attempt) -> None:
    """Raises DisagreementError naming ranks that have named their files for another attempt."""
    wrong = [claim for claim in save.plans.claims if claim.attempt != attempt.name]
    if wrong:
        raise DisagreementError(
            f"its attempt is {attempt.name}, but rank {wrong[0].rank} (host {wrong[0].host}) goes by "
            f"a plan of attempts like {wrong[0].attempt}: was the root emptied while the job ran?",
            *((claim.rank, claim.host) for claim in wrong),
        )


def choose_cached_plan(cache: PlanCache, save: Save) -> AgreedPlan | None:
    """A cached plan that was made of the same local plans; None when there is none.

    In this plan, each rank that has staged by a claimed plan writes the same as in the claimed one.
    """
    digests = save.plans.digests
    staged = {}
    known = _claimed_plans(cache, save)
    for claim in save.plans.claims:
        own = known[claim.plan_id]
        if own is None or own.digests.get(claim.rank) != claim.digest:
            return None
        staged[claim.rank] = own
    for plan in (*dict.fromkeys(staged.values()), *cache.find_alike(save.context, digests)):
        if plan.digests == digests and all(
            own.writes_same(plan, rank) for rank, own in staged.items()
        ):
            return plan
    return None


def equal_plans(
    cache: PlanCache, save: Save, plan: AgreedPlan, *, complete: bool
) -> frozenset[str]:
    """Ids of claimed plans by which ranks write the same as by ``plan``.

    Args:
        complete: no more claims can come: only the ranks that have claimed a plan are compared; else
            all ranks whose local plan is the same in both.
    """
    claimants: dict[str, list[int]] = {}
    for claim in save.plans.claims if complete else ():
        claimants.setdefault(claim.plan_id, []).append(claim.rank)
    equal = set()
    for plan_id, own in _claimed_plans(cache, save).items():
        if own is None:
            continue
        same = [rank for rank, digest in own.members if plan.digests.get(rank) == digest]
        ranks = claimants[plan_id] if complete else same
        if set(ranks) <= set(same) and all(own.writes_same(plan, rank) for rank in ranks):
            equal.add(plan_id)
    return frozenset(equal)


def kept_assignments(cache: PlanCache, save: Save) -> Mapping[int, Share]:
    """By rank, the assignments of ranks that have staged by a claimed plan: these can't change any more.

    A rank whose claimed plan isn't cached has none here; it fails if the new plan is another one.
    """
    kept = {}
    known = _claimed_plans(cache, save)
    for claim in save.plans.claims:
        own = known[claim.plan_id]
        if own is not None and own.digests.get(claim.rank) == claim.digest:
            kept[claim.rank] = own.share(claim.rank)
    return kept


def _claimed_plans(cache: PlanCache, save: Save) -> Mapping[str, AgreedPlan | None]:
    """The claimed plans by id, each looked up once: thousands of ranks may claim the same one."""
    return {id_: cache.find(save.context, id_) for id_ in save.plans.claimed_ids}
