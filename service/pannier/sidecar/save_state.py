"""One save on this host: the state of each of its ranks, and how it ended.

In: changes from :class:`pannier.sidecar.save_registry.SaveRegistry`. Out: fields to read. Every change is
a method here; impossible moves raise. On the event loop.
"""

import asyncio
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pannier.common import observer_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import (
    InDoubtError,
    InvalidRequestError,
    PannierError,
)
from pannier.wire.failures import aborted_error
from pannier.wire.object_names import save_text


class Phase(enum.Enum):
    """How far one rank is in one save."""

    PLANNING = enum.auto()
    PLANNED = enum.auto()
    STREAMING = enum.auto()
    HANDED_OVER = enum.auto()
    """As INGESTED, but its cached-plan claim isn't confirmed yet."""
    INGESTED = enum.auto()
    DURABLE = enum.auto()
    FAILED = enum.auto()
    REJECTED = enum.auto()
    """The coordinator refused the rank's plan because the save had failed: there is nothing to report."""

    @property
    def wire(self) -> "save_pb2.RankPhase":
        """The phase in messages."""
        return _WIRE[self]


_WIRE: Final[dict[Phase, "save_pb2.RankPhase"]] = {
    Phase.PLANNING: save_pb2.RANK_PHASE_MISSING,
    Phase.PLANNED: save_pb2.RANK_PHASE_PLANNED,
    Phase.STREAMING: save_pb2.RANK_PHASE_STREAMING,
    Phase.HANDED_OVER: save_pb2.RANK_PHASE_HANDED_OVER,
    Phase.INGESTED: save_pb2.RANK_PHASE_INGESTED,
    Phase.DURABLE: save_pb2.RANK_PHASE_DURABLE,
    Phase.FAILED: save_pb2.RANK_PHASE_FAILED,
    Phase.REJECTED: save_pb2.RANK_PHASE_FAILED,
}
# In a save that torch plans, only one rank calls Begin: the others appear when they stream or hand
# over. After a restart of the sidecar, any rank may appear so.
_MOVES: Final = {
    Phase.PLANNING: {
        Phase.PLANNED,
        Phase.STREAMING,
        Phase.HANDED_OVER,
        Phase.INGESTED,
        Phase.FAILED,
        Phase.REJECTED,
    },
    Phase.PLANNED: {Phase.STREAMING, Phase.INGESTED, Phase.FAILED},
    Phase.STREAMING: {Phase.HANDED_OVER, Phase.INGESTED, Phase.FAILED},
    Phase.HANDED_OVER: {Phase.INGESTED, Phase.FAILED},
    Phase.INGESTED: {Phase.DURABLE, Phase.FAILED},
    Phase.DURABLE: set[Phase](),
    Phase.FAILED: set[Phase](),
    Phase.REJECTED: set[Phase](),
}
BEFORE_HAND_OVER: Final = (Phase.PLANNING, Phase.PLANNED, Phase.STREAMING)
FAILED: Final = (Phase.FAILED, Phase.REJECTED)


@dataclass(frozen=True)
class RankPlan:
    """What the rank is to write."""

    id: str = ""
    sizes: dict[str, int] | None = None
    """Sizes of the planned files by name, 0 where unknown; None when torch made the plan."""


@dataclass
class Deadlines:
    """Deadlines on the monotonic clock; 0: not known."""

    plan: float = 0.0
    save: float = 0.0

    def shorten(self, plan_s: float, save_s: float) -> None:
        """Takes seconds from now, 0 for unknown. The earliest counts: a retried call may carry the first
        call's time-out.
        """
        self.plan = _earlier(self.plan, plan_s)
        self.save = _earlier(self.save, save_s)


@dataclass
class Transfer:
    """How the rank's bytes reach the spool and storage, for status and metrics."""

    transport: str = ""
    """How the bytes come into the spool, human-readable."""
    stalled_s: float = 0.0
    """How long the save blocked the rank's training loop; known from the hand-over on."""
    retries: int = 0
    """Retried requests of the rank's uploads."""
    last_error: str = ""
    """Why the last request was retried."""
    replica_host: str = ""
    """The host that gets a copy of the rank's files."""
    replicated: int = 0
    """Bytes of the copy that this host has confirmed."""

    def retry(self, reason: str) -> None:
        """Counts a retry."""
        self.retries += 1
        self.last_error = reason


def with_checksums(
    receipt: records_pb2.Receipt, files: Mapping[str, DataFile]
) -> records_pb2.Receipt:
    """A receipt with the checksums of those files that were read, by name."""
    found = records_pb2.Receipt()
    found.CopyFrom(receipt)
    for each in found.files:
        file = files.get(each.name)
        if file is not None and file.is_checked:
            if not each.HasField("crc32c"):
                each.crc32c = file.checksums.whole
            each.block_bytes, each.block_crc32c = file.checksums.columns()
    return found


class RankSave:
    """The state of one rank in one save."""

    def __init__(self, save: "Save", context: sidecar_pb2.SaveContext) -> None:
        self.save = save
        self.context = context
        self.phase = Phase.PLANNING
        self.reached: dict[int, float] = {}
        """When it reached each phase (as in messages), on the monotonic clock, since this start."""
        self.attempt = ""
        self.plan = RankPlan()
        self.claim: sidecar_pb2.CachedPlanClaim | None = None
        """Its claim of its part of the last plan, if it uses that; confirmed once ``plan`` has an id."""
        self.deadlines = Deadlines()
        self.files: dict[str, DataFile] = {}
        """By name; they stay here after their spool files were freed."""
        self.receipt: records_pb2.Receipt | None = None
        self.failure: save_pb2.Failure | None = None
        self.last_seen = observer_clock.now()
        """When the trainer last sent something, a ping at least."""
        self.transfer = Transfer()
        self.replica = False
        """It ran on another host, and this host has a copy of its files (:mod:`pannier.sidecar.replicas`)."""
        self.opening = asyncio.Lock()
        """Held by :mod:`pannier.sidecar.ingest` while a file is opened: reserving space may take long."""

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.context.rank

    @property
    def host(self) -> str:
        """The rank's host."""
        return self.context.host

    @property
    def label(self) -> str:
        """Save, rank and host, for errors and logs."""
        return f"save {self.save.key} to {self.save.checkpoint_id}, rank {self.rank} on {self.host}"

    @property
    def unconfirmed(self) -> sidecar_pb2.CachedPlanClaim | None:
        """Its claim, while it isn't confirmed."""
        return None if self.plan.id else self.claim

    @property
    def needs_trainer(self) -> bool:
        """Whether the save fails with the rank's trainer: bytes are missing, or its local plan."""
        status = self.save.coordinator_status
        plan_requested = status is not None and status.plan.full_plan_requested
        return self.phase in BEFORE_HAND_OVER or (
            self.phase is Phase.HANDED_OVER and plan_requested
        )

    @property
    def log_fields(self) -> dict[str, str | int]:
        """Fields of its log records (:mod:`pannier.daemon.logging`)."""
        return {**self.save.log_fields, "attempt": self.attempt, "rank": self.rank}

    @property
    def opened_bytes(self) -> int:
        """Bytes of the files that it has opened."""
        return sum(file.size for file in self.files.values())

    def check(self) -> None:
        """Raises SaveAbortedError, InDoubtError or InvalidRequestError when the rank or save has ended."""
        if self.save.outcome is not None:
            raise self.save.ended_error()
        if self.phase not in FAILED:
            return
        failures = [self.failure] if self.failure is not None else []
        if self.receipt is not None:
            # Its receipt may be in storage all the same, and the save committed by it.
            why = "; ".join(failure.message for failure in failures)
            raise InDoubtError(f"{self.label} failed after it was ingested: {why}", failures)
        raise aborted_error(self.save.key, self.save.checkpoint_id, failures)

    def see(self) -> None:
        """Notes that the trainer was seen now."""
        self.last_seen = observer_clock.now()

    def enter(self, phase: Phase) -> None:
        """Moves on to ``phase``. Raises InvalidRequestError when it can't follow."""
        if phase not in _MOVES[self.phase]:
            raise InvalidRequestError(
                f"{self.label} is {self.phase.name}: it can't become {phase.name}"
            )
        self.phase = phase
        self.reached[phase.wire] = time.monotonic()

    def join_attempt(self, attempt: str) -> None:
        """Sets its attempt. Raises InvalidRequestError when it has another one."""
        if self.attempt and attempt != self.attempt:
            raise InvalidRequestError(
                f"{self.label} belongs to attempt {self.attempt}, not {attempt!r}"
            )
        self.attempt = attempt

    def set_plan(self, plan_id: str, sizes: dict[str, int] | None) -> None:
        """Takes the plan that was made for it."""
        self.plan = RankPlan(plan_id, sizes)
        if self.phase is Phase.PLANNING:
            self.enter(Phase.PLANNED)

    def claim_plan(
        self, claim: sidecar_pb2.CachedPlanClaim, attempt: str, sizes: dict[str, int] | None
    ) -> bool:
        """Claims its part of the last plan, with the sizes of its files if they are known; False: it was
        claimed before.

        Raises InvalidRequestError when the rank has another plan, or claimed another part.
        """
        self.join_attempt(attempt)
        if self.claim == claim:
            return False
        if self.claim is not None or self.phase is not Phase.PLANNING:
            raise InvalidRequestError(
                f"{self.label} claims part {claim.part[:12]}, after it claimed or got another one"
            )
        self.claim = claim
        self.plan = RankPlan(sizes=sizes)
        return True

    def confirm_plan(self, plan_id: str) -> None:
        """Its claim is confirmed: the save's plan has the claimed part."""
        self.plan = RankPlan(plan_id, self.plan.sizes)
        if self.phase is Phase.PLANNING:
            self.enter(Phase.PLANNED)
        elif self.phase is Phase.HANDED_OVER:
            self._set_receipt_plan()
            self.enter(Phase.INGESTED)

    def _set_receipt_plan(self) -> None:
        assert self.receipt is not None
        receipt = records_pb2.Receipt()
        receipt.CopyFrom(self.receipt)
        receipt.plan_id = self.plan.id
        self.receipt = receipt

    def add_file(self, attempt: str, file: DataFile) -> None:
        """The rank streams ``file``, or has staged it into the spool."""
        self.check()
        self.join_attempt(attempt)
        if self.phase is not Phase.STREAMING:
            self.enter(Phase.STREAMING)
        self.restore_file(file)

    def restore_file(self, file: DataFile) -> None:
        """Adds a file that the journal has recorded."""
        self.files[file.name] = file

    def hand_over(self, receipt: records_pb2.Receipt) -> None:
        """All its bytes are in the spool; ``receipt`` has no plan id while its claim isn't confirmed."""
        self.check()
        self.join_attempt(receipt.attempt)
        self.receipt = receipt
        if self.claim is None:
            self.plan = RankPlan(receipt.plan_id, self.plan.sizes)
        elif self.plan.id:
            # It may have been confirmed while this was journalled.
            self._set_receipt_plan()
        self.enter(Phase.INGESTED if self.unconfirmed is None else Phase.HANDED_OVER)

    def complete_receipt(self) -> records_pb2.Receipt:
        """Its receipt, with the checksums that are known by now; once it is handed over."""
        assert self.receipt is not None
        self.receipt = with_checksums(self.receipt, self.files)
        return self.receipt

    def fail(self, kind: "save_pb2.FailureKind", message: str) -> bool:
        """Fails the rank; False when it has ended, or when it only lost a trainer that it no longer needs."""
        over = self.save.outcome is not None or Phase.FAILED not in _MOVES[self.phase]
        safe = kind == save_pb2.FAILURE_KIND_LOST and not self.needs_trainer
        if over or safe:
            return False
        self.enter(Phase.FAILED)
        self.failure = save_pb2.Failure(rank=self.rank, host=self.host, kind=kind, message=message)
        return True

    def restore(
        self,
        phase: Phase,
        attempt: str,
        plan: RankPlan,
        *,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
        save_timeout_s: float = 0.0,
        receipt: records_pb2.Receipt | None = None,
        failure: save_pb2.Failure | None = None,
    ) -> None:
        """Sets what the journal says of it, before its first call; files follow by
        :meth:`restore_file`.
        """
        self.phase, self.attempt, self.plan, self.claim = phase, attempt, plan, claim
        self.receipt, self.failure = receipt, failure
        self.deadlines.shorten(0, save_timeout_s)


class Save:
    """A save that ranks of this host take part in."""

    def __init__(self, context: sidecar_pb2.SaveContext, created_at: float | None = None) -> None:
        self.id = context.save
        self.key = save_text(context.save)
        self.checkpoint_id = context.checkpoint_id
        self.created_at = time.time() if created_at is None else created_at
        self.start = time.monotonic()
        self.ranks: dict[int, RankSave] = {}
        self.coordinator_status: save_pb2.SaveStatus | None = None
        """The coordinator's latest status of it."""
        self.outcome: save_pb2.SaveStatus | None = None
        """The coordinator's final status; nothing changes afterwards."""
        self.ended_at = 0.0
        """When the outcome came, on the monotonic clock."""
        self.memory = 0
        """Bytes of this process's memory that the ended save takes, estimated."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of its log records."""
        return {"job": self.id.job, "save": self.key, "checkpoint": self.checkpoint_id}

    def add_rank(self, context: sidecar_pb2.SaveContext) -> RankSave:
        """Adds a rank, in its first phase."""
        rank = self.ranks[context.rank] = RankSave(self, context)
        return rank

    def take_status(self, status: save_pb2.SaveStatus) -> bool:
        """Takes a status update of the coordinator; returns whether it is more than progress."""
        before, self.coordinator_status = self.coordinator_status, status
        return (
            before is None
            or before.state != status.state
            or before.plan != status.plan
            or len(before.failures) != len(status.failures)
        )

    def end(self, outcome: save_pb2.SaveStatus) -> None:
        """Takes the final status."""
        self.outcome = outcome
        self.ended_at = time.monotonic()
        ranks = self.ranks.values()
        blocks = sum(1 + file.size // BLOCK_BYTES for rank in ranks for file in rank.files.values())
        varying = sum(len(rank.receipt.varying) for rank in ranks if rank.receipt is not None)
        # Per rank its status, per block its checksum in file and receipt, per varying item its place.
        self.memory = 220 * len(outcome.ranks) + 44 * blocks + 110 * varying

    def ended_error(self) -> PannierError:
        """The error for late calls of this save."""
        assert self.outcome is not None
        if self.outcome.state == save_pb2.SAVE_STATE_COMMITTED:
            return InvalidRequestError(f"save {self.key} to {self.checkpoint_id} is committed")
        return aborted_error(self.key, self.checkpoint_id, self.outcome.failures)


def _earlier(known: float, seconds: float) -> float:
    """The earlier of a deadline and now + ``seconds``; 0 stands for none."""
    if not seconds:
        return known
    end = time.monotonic() + seconds
    return min(known, end) if known else end
