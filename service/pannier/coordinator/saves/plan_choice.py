"""Chooses the plan of a save, when ranks claim their parts of the group's last plan.

In: a save whose ranks have all handed in plans or claims, and the plan cache. Out: a kept plan that has these
parts; else what a new plan is made of: the local plans of all ranks, what some of them have staged, and what
the others wrote before. Event loop, except where noted; no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pannier.coordinator.planning.arrays import Ints, read_column
from pannier.coordinator.planning.columns import PlanChangedError, RankPlan
from pannier.coordinator.planning.global_plan import Written
from pannier.coordinator.planning.plan_cache import AgreedPlan, KeptLocalPlans, PlanCache
from pannier.coordinator.saves.participants import CachedPlanClaim
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.v1 import plan_pb2
from pannier.wire import object_names
from pannier.wire.failures import ranks_text


def check_attempts(save: Save, attempt: object_names.Attempt) -> None:
    """Raises DisagreementError naming ranks that have named their files for another attempt."""
    wrong = [claim for claim in save.plans.claims if claim.attempt != attempt.name]
    if wrong:
        raise DisagreementError(
            f"its attempt is {attempt.name}, but rank {wrong[0].rank} (host {wrong[0].host}) goes by "
            f"a plan of attempts like {wrong[0].attempt}: was the root emptied while the job ran?",
            *((claim.rank, claim.host) for claim in wrong),
        )


def choose_kept_plan(cache: PlanCache, save: Save) -> AgreedPlan | None:
    """A kept plan that was made of the same local plans, and has all claimed parts; None: there is none."""
    digests, claims = save.plans.digests, save.plans.claims
    for plan in cache.plans(save.context):
        if plan.digests == digests and all(plan.part(each.rank) == each.part for each in claims):
            return plan
    return None


def unknown_claims(cache: PlanCache, save: Save) -> list[int]:
    """Ranks whose local plan isn't known, or what they have staged: they are to send it."""
    local = cache.local_plans(save.context)
    return [
        claim.rank
        for claim in save.plans.unconfirmed
        if claim.digest not in local or _find_part(cache, save, claim) is None
    ]


def check_parts(plan: AgreedPlan, save: Save) -> None:
    """Raises PlanChangedError naming ranks that have staged other parts than ``plan`` has for them."""
    wrong = [
        claim
        for claim in save.plans.claims
        if not plan.has_part(claim.rank, claim.digest, claim.part)
    ]
    if wrong:
        raise PlanChangedError(
            f"the plan has other items for {ranks_text(claim.rank for claim in wrong)} than these have "
            "staged by the last plan: the plans of other ranks have changed. The next save is planned again",
            [
                RankPlan(claim.rank, claim.host, claim.digest, plan_pb2.LocalPlan())
                for claim in wrong
            ],
        )


@dataclass(frozen=True)
class PlanBasis:
    """What a new plan is made of."""

    plans: list[RankPlan]
    """In the order of ranks."""
    staged: Mapping[int, Ints]
    """By rank that has claimed its part of the last plan: the positions that it has staged."""
    before: Written
    """What the other ranks wrote by the last plan."""
    handed_in: KeptLocalPlans
    """The local plans that came with this save."""


class PlanBasisReader:
    """Reads a :class:`PlanBasis` in another thread than the one that it was made in."""

    def __init__(self, cache: PlanCache, save: Save) -> None:
        self._ranks = save.context.ranks[:]
        self._full = {plan.rank: plan for plan in save.plans.plans}
        self._claims = {claim.rank: claim for claim in save.plans.claims}
        plans = cache.plans(save.context)
        self._last = plans[0] if plans else None
        self._part_of = {
            rank: _find_part(cache, save, claim) for rank, claim in self._claims.items()
        }
        wanted = {claim.digest for claim in self._claims.values()}
        if self._last is not None:
            wanted.update(self._last.digests.values())
        self._kept = cache.local_plans(save.context).select(wanted)

    def read(self) -> PlanBasis:
        """CPU-bound; any thread. Raises InvalidRequestError for a malformed column."""
        handed_in = KeptLocalPlans()
        handed_in.add(self._full.values())
        plans: list[RankPlan] = []
        staged: dict[int, Ints] = {}
        before: dict[int, tuple[RankPlan, Ints]] = {}
        for rank in self._ranks:
            claim, plan = self._claims.get(rank), self._full.get(rank)
            if plan is None:
                assert claim is not None
                local = self._kept.read(claim.digest)
                plan = RankPlan(rank, claim.host, claim.digest, local)
            plans.append(plan)
            if claim is not None:
                known = self._part_of[rank]
                staged[rank] = (
                    read_column(plan.staged_positions)
                    if known is None
                    else known.share(rank).positions
                )
            elif self._last is not None and self._last.digests.get(rank, "") in self._kept:
                old = self._last.digests[rank]
                held = RankPlan(rank, plan.host, old, self._kept.read(old))
                before[rank] = (held, self._last.share(rank).positions)
        return PlanBasis(plans, staged, before, handed_in)


def _find_part(cache: PlanCache, save: Save, claim: CachedPlanClaim) -> AgreedPlan | None:
    return cache.find_part(save.context, claim.rank, claim.digest, claim.part)
