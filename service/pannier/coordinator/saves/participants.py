"""Collecting the local plans of a save's ranks, and noticing when they contradict each other.

In: contexts and plans as ranks say them, or the plan of an earlier save that a rank goes by. Out:
all of them in the order of ranks, or an error that tells who said what. Event loop only; no I/O.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pannier.coordinator.planning.columns import RankPlan
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError
from pannier.wire.failures import rank_list, rank_text

"""Ranks spelled out in an error."""
OVERWRITES: Final = {
    save_pb2.OVERWRITE_UNSPECIFIED: "its own job's checkpoint (overwrite=None)",
    save_pb2.OVERWRITE_NEVER: "no checkpoint (overwrite=False)",
    save_pb2.OVERWRITE_ANY: "any checkpoint (overwrite=True)",
}


class DisagreementError(PannierError):
    """Two ranks contradict each other; ``failures`` holds both."""

    def __init__(self, message: str, *speakers: tuple[int, str]) -> None:
        super().__init__(
            message,
            [
                save_pb2.Failure(
                    rank=rank,
                    host=host,
                    kind=save_pb2.FAILURE_KIND_DISAGREEMENT,
                    message=message,
                )
                for rank, host in speakers
            ],
        )


_FACTS: Final[Sequence[tuple[str, Callable[[sidecar_pb2.SaveContext], Any]]]] = (
    ("saves to", lambda context: context.checkpoint_id),
    ("has a world size of", lambda context: context.world_size),
    ("saves together with ranks", lambda context: list(context.ranks)),
    ("overwrites", lambda context: OVERWRITES[context.overwrite]),
)


def check_agreement(first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext) -> None:
    """Raises DisagreementError when two ranks of one save don't mean the same."""
    for verb, fact in _FACTS:
        one, two = fact(first), fact(other)
        if one != two:
            one, two = (rank_list(each) if isinstance(each, list) else each for each in (one, two))
            raise DisagreementError(
                f"{who(first)} {verb} {one}, {who(other)} {verb} {two}: every rank must call "
                f"save number {first.save.number} of its group with the same arguments",
                (first.rank, first.host),
                (other.rank, other.host),
            )


def says_same(
    first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext, *, brief: bool = False
) -> bool:
    """Whether two ranks of a save mean the same by it: a quick look, at each of many messages.

    Args:
        brief: the other's group was told before.
    """
    return (
        first.checkpoint_id == other.checkpoint_id
        and first.world_size == other.world_size
        and first.overwrite == other.overwrite
        # Looked at last: of a large group this takes longer than all else.
        and (brief or _same_but_speaker(first, other))
    )


def _same_but_speaker(first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext) -> bool:
    # Messages are compared in C, columns of them with an object per number.
    own = (other.rank, other.host, _seen_of(other))
    _speak_as(other, first.rank, first.host, _seen_of(first))
    same: bool = other == first
    _speak_as(other, *own)
    return same


def _seen_of(context: sidecar_pb2.SaveContext) -> int | None:
    return context.seen_incarnation if context.HasField("seen_incarnation") else None


def _speak_as(context: sidecar_pb2.SaveContext, rank: int, host: str, seen: int | None) -> None:
    context.rank, context.host = rank, host
    if seen is None:
        context.ClearField("seen_incarnation")
    else:
        context.seen_incarnation = seen


def who(context: sidecar_pb2.SaveContext) -> str:
    """The speaker, for people."""
    return rank_text(context.rank, context.host)


@dataclass(frozen=True)
class Proposal:
    """A rank goes by its part of a plan that it was given for an earlier save."""

    rank: int
    host: str
    digest: str
    plan_id: str
    attempt: str
    """Its save's, as the rank named its files."""


class Gathering:
    """The local plans of one save, and what stands for them, as they come in."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._plans: dict[int, RankPlan] = {}
        self._proposals: dict[int, Proposal] = {}

    def add(self, plan: RankPlan) -> None:
        """Takes a rank's plan; the same one again is no news.

        Raises DisagreementError when the rank, or the planners' options, say otherwise.
        """
        known = self._plans.get(plan.rank)
        if known is None:
            self._check_digest(plan)
            for other in self._plans.values():
                _check_options(other, plan)
                break
            self._plans[plan.rank] = plan
        elif known.digest != plan.digest:
            raise _two_plans(known, plan)

    def propose(self, proposal: Proposal) -> None:
        """Takes what stands for a rank's plan; once more, or with the plan, is no news.

        Raises DisagreementError when the rank said otherwise.
        """
        self._check_digest(proposal)
        known = self._proposals.setdefault(proposal.rank, proposal)
        if (known.plan_id, known.attempt) != (proposal.plan_id, proposal.attempt):
            raise _two_plans(known, proposal)

    def _check_digest(self, said: "RankPlan | Proposal") -> None:
        for known in (self._plans.get(said.rank), self._proposals.get(said.rank)):
            if known is not None and known.digest != said.digest:
                raise _two_plans(known, said)

    def forget_plans(self) -> None:
        """The plan is agreed: nobody needs those of the ranks any more."""
        self._plans.clear()

    @property
    def missing(self) -> list[int]:
        """Ranks of which neither is here, ascending."""
        return [
            rank for rank in self._ranks if rank not in self._plans and rank not in self._proposals
        ]

    @property
    def unplanned(self) -> list[int]:
        """Ranks whose plan isn't here, ascending."""
        return [rank for rank in self._ranks if rank not in self._plans]

    @property
    def complete(self) -> bool:
        """Whether every rank's plan is here, or what stands for it."""
        # A rank may have sent both.
        enough = len(self._plans) + len(self._proposals) >= len(self._ranks)
        return enough and len(self._plans.keys() | self._proposals.keys()) == len(self._ranks)

    @property
    def plans(self) -> list[RankPlan]:
        """Those that are here, in the order of ranks."""
        return [self._plans[rank] for rank in self._ranks if rank in self._plans]

    @property
    def proposals(self) -> list[Proposal]:
        """Those that are here, in the order of ranks; also of ranks whose plans came after."""
        return [self._proposals[rank] for rank in self._ranks if rank in self._proposals]

    @property
    def unread(self) -> list[Proposal]:
        """Those of ranks whose plans aren't here."""
        return [each for each in self.proposals if each.rank not in self._plans]

    @property
    def digests(self) -> dict[int, str]:
        """Of the ranks' local plans, by rank."""
        return {
            rank: said[rank].digest
            for rank in self._ranks
            for said in (self._plans, self._proposals)
            if rank in said
        }


def _two_plans(known: "RankPlan | Proposal", other: "RankPlan | Proposal") -> DisagreementError:
    return DisagreementError(
        f"rank {other.rank} handed in two plans for one save: digest {known.digest[:12]} from host "
        f"{known.host}, {other.digest[:12]} from host {other.host}; do two processes run as this "
        "rank?",
        (other.rank, other.host),
    )


def _check_options(first: RankPlan, other: RankPlan) -> None:
    one, two = first.plan.options, other.plan.options
    if one == two:
        return
    differing = [
        field.name
        for field in plan_pb2.PlannerOptions.DESCRIPTOR.fields
        if getattr(one, field.name) != getattr(two, field.name)
    ]
    said = ", ".join(
        f"{name} is {getattr(one, name)!r} on rank {first.rank} and {getattr(two, name)!r} on "
        f"rank {other.rank}"
        for name in differing
    )
    raise DisagreementError(
        f"the planners differ: {said}; pass the same planner on every rank",
        (first.rank, first.host),
        (other.rank, other.host),
    )
