"""The ranks of a save: how far each has come, and the local plans that they handed in.

In: reports of sidecars, calls of ranks, local plans or claims to use a cached plan. Out: the state of
each rank, the plans in the order of ranks, or an error that names the ranks that contradict each
other. Event loop only; no I/O.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pannier.common import observer_clock, timeouts
from pannier.common.wait_text import Awaited
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.daemon.rank_phase import has_reached
from pannier.v1 import coordinator_pb2, plan_pb2, records_pb2, save_pb2, sidecar_pb2


class SidecarPeer:
    """A sidecar process, as its streams show it.

    Times are of :mod:`pannier.common.observer_clock`, except ``since``, which is monotonic.
    """

    def __init__(self, host: str, job: str = "") -> None:
        self.host = host
        self.job = job
        """The only job that it serves; empty: any."""
        self.since = time.monotonic()
        self.last_seen = observer_clock.now()
        self.streams = 0
        """Open streams; none when it is disconnected."""
        self.trainer_seen: float | None = None
        """When it last reported a connected trainer; None: never."""
        self.copies = coordinator_pb2.HeldCopies()
        """The local copies that it has for loads, as last reported."""
        self.attached_at = self.last_seen
        """When its newest stream was opened."""
        self.failure_domain = ""
        """Of its host; empty: it takes no part in the exchange of replicas."""
        self.replica_host = ""
        """The host that gets the replicas of its ranks, as last reported."""
        self.replicas: set[tuple[str, int]] = set()
        """Ranks of other hosts of which it has all files, by save key and rank."""
        self.waits: list[tuple[str, save_pb2.TrainingWait]] = []
        """By job, the calls in which its trainers wait, as last reported."""

    def note_message(self, *, trainer: bool) -> None:
        """Records that a message arrived.

        Args:
            trainer: the message reports a connected trainer.
        """
        self.last_seen = observer_clock.now()
        if trainer:
            self.trainer_seen = self.last_seen


@dataclass
class RankPlace:
    """Where a rank runs, as all saves of its incarnation show it."""

    host: str = ""
    seen: float = 0.0
    """When it last took part in a save, on the monotonic clock."""
    sidecar: SidecarPeer | None = None
    """The sidecar that last reported its trainer."""


@dataclass
class RankState:
    """One rank's part in a save."""

    rank: int
    host: str = ""
    phase: "save_pb2.RankPhase" = save_pb2.RANK_PHASE_MISSING
    last_seen: float | None = None
    """Time of the trainer's last heartbeat (:mod:`pannier.common.observer_clock`); None: none yet."""
    sidecar: SidecarPeer | None = None
    reported: save_pb2.RankStatus = field(default_factory=save_pb2.RankStatus)
    """The sidecar's last report."""
    receipt: records_pb2.Receipt | None = None
    reached: dict[int, float] = field(default_factory=dict)
    """When it reached each phase, on the monotonic clock."""
    replicas: set[SidecarPeer] = field(default_factory=set)
    """Sidecars of other hosts that have all its files, or had them when the save ended."""

    @property
    def has_live_sidecar(self) -> bool:
        """Whether the sidecar that reported the rank is attached."""
        return self.sidecar is not None and self.sidecar.streams > 0

    @property
    def lost_sidecar(self) -> bool:
        """Whether the sidecar that reported the rank disconnected before it reported a receipt."""
        return self.receipt is None and self.sidecar is not None and not self.has_live_sidecar

    @property
    def replica_holder(self) -> SidecarPeer | None:
        """A sidecar of another host that has all its files, and is attached or was just now."""
        after = observer_clock.now() - timeouts.SIDECAR_RETURN_S
        found = [each for each in self.replicas if each.streams or each.last_seen > after]
        return min(found, key=lambda each: each.host, default=None)

    def advance(self, phase: "save_pb2.RankPhase") -> None:
        """Moves to a later phase; an earlier one has no effect."""
        if not has_reached(self.phase, phase):
            self.phase = phase
            self.reached[phase] = time.monotonic()

    def note_trainer(self, sidecar: SidecarPeer, age_s: float) -> None:
        """Records the trainer's last heartbeat, as the sidecar on its host reports it."""
        self.host = self.host or sidecar.host
        seen = observer_clock.now() - age_s
        self.last_seen = seen if self.last_seen is None else max(self.last_seen, seen)
        self.reported.seconds_since_seen = age_s

    def seconds_since_seen(self, suspect_after_s: float) -> float | None:
        """Seconds since the last heartbeat; None: none yet.

        A sidecar's messages count for its ranks, unless it reports that the trainer is unresponsive.
        """
        now = observer_clock.now()
        if self.sidecar is not None and has_reached(self.phase, save_pb2.RANK_PHASE_HANDED_OVER):
            # The sidecar holds all the rank's data, and watches the trainer if that is still needed.
            return now - self.sidecar.last_seen
        if self.last_seen is None:
            return None
        own = now - self.last_seen
        if self.sidecar is not None and self.reported.seconds_since_seen < suspect_after_s:
            return min(own, now - self.sidecar.last_seen)
        return own


class Participants:
    """All ranks of a save.

    Args:
        places: the ranks' places as far as they are known, by rank.
    """

    def __init__(
        self, ranks: Iterable[int], *, places: Mapping[int, RankPlace], suspect_after_s: float
    ) -> None:
        self.by_rank = {rank: RankState(rank) for rank in ranks}
        self.joined: set[int] = set()
        """Ranks that sent this save's context themselves."""
        self.upload_begun = False
        self._places = places
        self._suspect_after_s = suspect_after_s
        self._in_order = list(self.by_rank.values())
        self._reached = 0
        """All ranks before this one, in order, have reached the phase that is waited for."""
        self._unchecked: list[records_pb2.Receipt] = []

    def join(self, rank: int, host: str) -> bool:
        """Records that a rank takes part; returns whether it is the first time."""
        state = self.by_rank.get(rank)
        if state is None:
            return False
        state.host = host or state.host
        new = rank not in self.joined
        self.joined.add(rank)
        return new

    def apply_report(self, rank: int, sidecar: SidecarPeer, status: save_pb2.RankStatus) -> None:
        """Applies what the rank's sidecar reports, except for its phase."""
        state = self.by_rank[rank]
        state.sidecar, state.reported = sidecar, status
        state.last_seen = observer_clock.now() - status.seconds_since_seen
        self.upload_begun = self.upload_begun or status.bytes_uploaded > 0

    def note_replica(self, rank: int, holder: SidecarPeer, host: str, *, held: bool) -> bool:
        """Records whether another host has all files of a rank; returns whether that is new."""
        state = self.by_rank[rank]
        if held == (holder in state.replicas):
            return False
        if not held:
            state.replicas.discard(holder)
            return True
        state.replicas.add(holder)
        state.host = state.host or host
        # A rank is sent to another host only after it is ingested.
        state.advance(save_pb2.RANK_PHASE_INGESTED)
        return True

    def add_receipt(self, receipt: records_pb2.Receipt) -> None:
        """Records that a rank is durable; its first receipt counts."""
        state = self.by_rank[receipt.rank]
        if state.receipt is None:
            state.receipt = receipt
            state.host = state.host or receipt.host
            self._unchecked.append(receipt)
        state.advance(save_pb2.RANK_PHASE_DURABLE)
        self.upload_begun = True

    def pop_unchecked(self) -> list[records_pb2.Receipt]:
        """Receipts that were added since the last call."""
        receipts, self._unchecked = self._unchecked, []
        return receipts

    @property
    def receipts(self) -> dict[int, records_pb2.Receipt]:
        """All receipts, by rank."""
        return {
            rank: state.receipt for rank, state in self.by_rank.items() if state.receipt is not None
        }

    @property
    def hosts(self) -> dict[int, str]:
        """Hosts by rank; empty where none is known."""
        return {rank: state.host for rank, state in self.by_rank.items()}

    def all_reached(self, phase: "save_pb2.RankPhase") -> bool:
        """Whether all ranks have reached the phase; continues where the last call stopped."""
        while self._reached < len(self._in_order) and has_reached(
            self._in_order[self._reached].phase, phase
        ):
            self._reached += 1
        return self._reached == len(self._in_order)

    def expect_next_phase(self) -> None:
        """Has the next :meth:`all_reached` check all ranks again, for a later phase."""
        self._reached = 0

    def mark_failed(self, rank: int) -> None:
        """Records that a rank failed; -1: none of the ranks."""
        if rank in self.by_rank:
            self.by_rank[rank].phase = save_pb2.RANK_PHASE_FAILED

    def note_call(self, rank: int) -> None:
        """Records a call of the rank's trainer as a heartbeat."""
        self.by_rank[rank].last_seen = observer_clock.now()

    def restore_failed(self) -> None:
        """Makes failed ranks missing again."""
        for state in self._in_order:
            if state.phase == save_pb2.RANK_PHASE_FAILED:
                state.phase = save_pb2.RANK_PHASE_MISSING
        self._reached = 0

    def set_all_durable(self) -> None:
        """Marks all ranks of a committed save: a COMMIT is decided only with the receipts of all ranks."""
        for state in self._in_order:
            state.phase = save_pb2.RANK_PHASE_DURABLE

    def drop_receipts(self) -> None:
        """Frees what the status of an ended save doesn't need."""
        self._unchecked.clear()
        for state in self._in_order:
            state.receipt = None

    def late(self) -> list[int]:
        """Ranks that are behind: not ingested, or not durable once all are ingested."""
        for phase in (save_pb2.RANK_PHASE_INGESTED, save_pb2.RANK_PHASE_DURABLE):
            late = [each.rank for each in self._in_order if not has_reached(each.phase, phase)]
            if late:
                return late
        return []

    def seen(self, rank: int) -> Awaited:
        """A rank's host and the seconds since its last heartbeat, as far as they are known."""
        state = self.by_rank[rank]
        seconds = state.seconds_since_seen(self._suspect_after_s)
        holder = None if state.has_live_sidecar else state.replica_holder
        replica = "" if holder is None else holder.host
        place = self._places.get(rank, RankPlace())
        peers = [each for each in (state.sidecar, place.sidecar) if each is not None]
        sidecar = max(peers, key=lambda each: each.last_seen, default=None)
        missed_s = 0.0 if sidecar is None else observer_clock.now() - sidecar.last_seen
        no_sidecar = missed_s > self._suspect_after_s
        if seconds is None and place.host:
            seconds = time.monotonic() - place.seen
        return Awaited(rank, state.host or place.host, seconds, replica, no_sidecar)


@dataclass
class ExternalPlan:
    """What the rank that opened a save with Begin has sent."""

    finisher: sidecar_pb2.SaveContext | None = None
    metadata: plan_pb2.GlobalMetadata | None = None


@dataclass(frozen=True)
class CachedPlanClaim:
    """A rank's claim that it writes its part of the plan of its group's last save."""

    rank: int
    host: str
    digest: str
    """Of its local plan."""
    part: str
    attempt: str
    """Of this save, as the rank derived it for the names of its files."""
    source_checkpoint: str = ""
    source_attempt: str = ""
    """An attempt whose manifest has the claimed part; empty: none is known."""


class LocalPlans:
    """The local plans and cached-plan claims of one save."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._plans: dict[int, RankPlan] = {}
        self._claims: dict[int, CachedPlanClaim] = {}
        self._requested: list[int] = []
        """Ranks with a claim that are to hand in their full plans."""

    def add(self, plan: RankPlan) -> None:
        """Adds a rank's plan. Idempotent.

        Raises DisagreementError when the rank handed in another plan, or planner options differ.
        """
        known = self._plans.get(plan.rank)
        if known is None:
            self._check_digest(plan)
            for other in self._plans.values():
                check_options([other, plan])
                break
            self._plans[plan.rank] = plan
        elif known.digest != plan.digest:
            raise _two_plans(known, plan)

    def add_claim(self, claim: CachedPlanClaim) -> None:
        """Adds a rank's claim. Idempotent, also after the rank's full plan.

        Raises DisagreementError when the rank made another claim.
        """
        self._check_digest(claim)
        known = self._claims.setdefault(claim.rank, claim)
        if (known.part, known.attempt) != (claim.part, claim.attempt):
            raise _two_plans(known, claim)

    def _check_digest(self, given: "RankPlan | CachedPlanClaim") -> None:
        for known in (self._plans.get(given.rank), self._claims.get(given.rank)):
            if known is not None and known.digest != given.digest:
                raise _two_plans(known, given)

    def request_full(self, ranks: Sequence[int]) -> None:
        """Requests the full plans of ranks that made a claim."""
        self._requested = list(ranks)

    @property
    def full_requested(self) -> bool:
        """Whether full plans of ranks with a claim are requested."""
        return bool(self._requested)

    def drop_plans(self) -> None:
        """Frees the full plans: the agreed plan keeps what is needed."""
        self._plans.clear()

    @property
    def any(self) -> bool:
        """Whether any rank handed in a plan or a claim."""
        return bool(self._plans or self._claims)

    @property
    def missing(self) -> list[int]:
        """Ranks without a plan and without a claim, ascending."""
        return [
            rank for rank in self._ranks if rank not in self._plans and rank not in self._claims
        ]

    @property
    def requested(self) -> list[int]:
        """Ranks whose full plans are requested and haven't come, ascending."""
        return [rank for rank in self._requested if rank not in self._plans]

    @property
    def complete(self) -> bool:
        """Whether every rank has handed in its plan or a claim."""
        # A rank may have sent both.
        enough = len(self._plans) + len(self._claims) >= len(self._ranks)
        return enough and len(self._plans.keys() | self._claims.keys()) == len(self._ranks)

    @property
    def plans(self) -> list[RankPlan]:
        """Full plans in the order of ranks."""
        return [self._plans[rank] for rank in self._ranks if rank in self._plans]

    @property
    def claims(self) -> list[CachedPlanClaim]:
        """Claims in the order of ranks, also of ranks that handed in a full plan later."""
        return [self._claims[rank] for rank in self._ranks if rank in self._claims]

    @property
    def unconfirmed(self) -> list[CachedPlanClaim]:
        """Claims of ranks without a full plan."""
        return [claim for claim in self.claims if claim.rank not in self._plans]

    @property
    def digests(self) -> Mapping[int, str]:
        """Digests of the local plans, by rank."""
        return {
            rank: known[rank].digest
            for rank in self._ranks
            for known in (self._plans, self._claims)
            if rank in known
        }


def _two_plans(
    known: "RankPlan | CachedPlanClaim", other: "RankPlan | CachedPlanClaim"
) -> DisagreementError:
    return DisagreementError(
        f"rank {other.rank} handed in two plans for one save: digest {known.digest[:12]} from host "
        f"{known.host}, {other.digest[:12]} from host {other.host}; do two processes run as this "
        "rank?",
        (other.rank, other.host),
    )


def check_options(plans: Sequence[RankPlan]) -> None:
    """Raises DisagreementError naming two ranks whose planner options differ."""
    one = plans[0].plan.options
    for other in plans[1:]:
        if other.plan.options != one:
            raise _other_options(plans[0], other)


def _other_options(first: RankPlan, other: RankPlan) -> DisagreementError:
    one, two = first.plan.options, other.plan.options
    differing = [
        field.name
        for field in plan_pb2.PlannerOptions.DESCRIPTOR.fields
        if getattr(one, field.name) != getattr(two, field.name)
    ]
    text = ", ".join(
        f"{name} is {getattr(one, name)!r} on rank {first.rank} and {getattr(two, name)!r} on "
        f"rank {other.rank}"
        for name in differing
    )
    return DisagreementError(
        f"the planners differ: {text}; pass the same planner on every rank",
        (first.rank, first.host),
        (other.rank, other.host),
    )
