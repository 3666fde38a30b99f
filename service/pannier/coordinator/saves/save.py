"""The state of a save: its spec, its participants, its attempt in storage, its outcome.

In: what ranks and sidecars report, and what the save's task finds out. Out: the state that status,
sidecars and the task read. Only the methods of :class:`Save` change it. Event loop only; no I/O.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.saves.deadlines import Changes, Deadlines
from pannier.coordinator.saves.failures import Outcome
from pannier.coordinator.saves.participants import (
    ExternalPlan,
    LocalPlans,
    Participants,
    RankPlace,
    RankState,
    SidecarPeer,
)
from pannier.coordinator.saves.save_spec import SaveSpec
from pannier.coordinator.saves.states import (
    TERMINAL,
    AttemptState,
    Origin,
    PlanMode,
    State,
    moved,
)
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError
from pannier.wire.failures import aborted_error

_log = logging.getLogger(__name__)


@dataclass
class AttemptRecords:
    """The save's attempt, and what is known of its objects in storage."""

    attempt: object_names.Attempt | None = None
    state: AttemptState = AttemptState.UNWRITTEN
    plan_id: str = ""
    """Of the agreed plan; empty for torch's."""
    manifest: Manifest | None = None
    check_requested: bool = False
    """Receipts in storage are to be read at once: some rank has no live sidecar."""


class Save:
    """One save.

    Args:
        context: of the first rank that sent one.
        changed: called after every change.
        places: where ranks run, from earlier saves, by rank.
        suspect_after_s: age of a trainer's heartbeat, in seconds, from which its sidecar's messages no
            longer count as heartbeats of the rank.
    """

    def __init__(
        self,
        context: sidecar_pb2.SaveContext,
        *,
        changed: Callable[["Save"], None],
        places: Mapping[int, RankPlace],
        suspect_after_s: float,
    ) -> None:
        self.spec = SaveSpec(context)
        self.state = State.PLANNING
        self.mode = PlanMode.UNDECLARED
        self.origin = Origin.NEW
        self.records = AttemptRecords()
        self.participants = Participants(
            context.ranks, places=places, suspect_after_s=suspect_after_s
        )
        self.plans = LocalPlans(context.ranks)
        self.external_plan = ExternalPlan()
        self.outcome = Outcome()
        self.deadlines = Deadlines()
        self.durations: dict[State | str, float] = {}
        """Seconds from the start until each state, and until all ranks were ``durable``."""
        self.changes = Changes(lambda: changed(self))
        self.storage_wait = ""
        """What of storage the save waits for; human-readable."""
        self.note = ""
        """What else an operator should know; human-readable."""

    @property
    def context(self) -> sidecar_pb2.SaveContext:
        """The context of the first rank."""
        return self.spec.context

    @property
    def key(self) -> str:
        """The save's identity as text."""
        return self.spec.key

    @property
    def label(self) -> str:
        """Id and checkpoint id, for errors and logs."""
        return self.spec.label

    @property
    def attempt(self) -> object_names.Attempt | None:
        """Its attempt, once known."""
        return self.records.attempt

    @property
    def manifest(self) -> Manifest | None:
        """The manifest in storage, once known."""
        return self.records.manifest

    @property
    def ranks(self) -> dict[int, RankState]:
        """The state of each rank."""
        return self.participants.by_rank

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of the save's log records (:mod:`pannier.daemon.logging`)."""
        return {
            "job": self.context.save.job,
            "save": self.key,
            "checkpoint": self.context.checkpoint_id,
            "attempt": self.attempt.name if self.attempt is not None else "",
        }

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL

    @property
    def failing(self) -> bool:
        """Whether the save is to be aborted, or was."""
        return self.outcome.failing.is_set()

    @property
    def resumed(self) -> bool:
        """Whether another process of a coordinator has planned it."""
        return self.origin is not Origin.NEW

    @property
    def external(self) -> bool:
        """Whether torch makes the plan."""
        return self.mode is PlanMode.EXTERNAL

    @property
    def written(self) -> bool:
        """Whether something of the attempt may be in storage."""
        return self.records.state is not AttemptState.UNWRITTEN

    @property
    def deciding(self) -> bool:
        """Whether a decision is being written or applied, so that it is too late to abort."""
        return self.records.state is AttemptState.DECIDING

    @property
    def deadline(self) -> float:
        """For the commit, on the monotonic clock."""
        return self.deadlines.resumed_commit if self.resumed else self.deadlines.commit

    @property
    def next_deadline(self) -> float:
        """For the plan while the save is being planned, else for the commit; on the monotonic clock."""
        planning = self.state is State.PLANNING and not self.resumed
        return self.deadlines.plan if planning else self.deadline

    def error(self) -> PannierError:
        """The error of calls for a save that is aborted."""
        return aborted_error(self.key, self.context.checkpoint_id, self.outcome.failures.values())

    # Changes of state.

    def move(self, state: State) -> None:
        """Changes the state. Raises RuntimeError for an impossible move: a bug."""
        if state is self.state:
            return
        self.state = moved(self.state, state, self.label)
        self.durations.setdefault(state, time.monotonic() - self.deadlines.start)
        why = f": {self.outcome.text()}" if state is State.ABORTED else ""
        level = logging.WARNING if state in (State.ABORTED, State.IN_DOUBT) else logging.INFO
        _log.log(level, "%s is %s%s", self.label, state.name, why, extra=self.log_fields)
        if self.ended:
            # Status needs little of an ended save; plans and metadata may be large.
            self.plans = LocalPlans(())
            self.records.manifest = self.external_plan.metadata = None
            self.participants.drop_receipts()
        self.notify()

    def declare_mode(self, mode: PlanMode) -> None:
        """Records who makes the plan."""
        self.mode = moved(self.mode, mode, self.label)

    def resume(self) -> None:
        """Continues from storage: another process of a coordinator has agreed on a plan."""
        if self.state is State.PLANNING and not self.resumed and self.manifest is None:
            self._set_resumed()
            self.notify()

    def _set_resumed(self) -> None:
        if not self.resumed:
            self.origin = moved(self.origin, Origin.RESUMED, self.label)

    def follow(self) -> None:
        """Drops failures by time-out: another coordinator has planned the save, and may commit it."""
        self.outcome.clear()
        self.participants.restore_failed()
        self._set_resumed()
        self.notify()

    def yield_planning(self) -> None:
        """Continues from storage: another coordinator published its manifest first."""
        self._set_resumed()

    def note_recovered(self, note: str) -> None:
        """Records that the state of a resumed save was read from storage."""
        self.origin = moved(self.origin, Origin.RECOVERED, self.label)
        self.deadlines.note_recovered()
        self.note = note

    def set_attempt(self, attempt: object_names.Attempt | None) -> None:
        """Records the save's attempt."""
        self.records.attempt = attempt
        self.notify()

    def move_attempt(self, state: AttemptState) -> None:
        """Records what may be in storage of the attempt."""
        self.records.state = moved(self.records.state, state, self.label)

    def mark_written(self) -> None:
        """Records that something of the attempt may be in storage."""
        if not self.written:
            self.move_attempt(AttemptState.WRITTEN)

    def set_manifest(self, manifest: Manifest) -> None:
        """Records the manifest in storage, which fits what the ranks have handed in."""
        external = manifest.header.external
        # Another coordinator may have begun the attempt.
        self.records.attempt = object_names.Attempt.of(manifest.header)
        self.records.plan_id = "" if external else manifest.plan_id
        self.records.manifest = manifest
        # The manifest has the digests; the plans of a large job are large.
        self.plans.drop_plans()

    def set_prepared(self, plan_id: str) -> None:
        """Ends a save of which only the plan is needed."""
        self.records.plan_id = plan_id
        self.move(State.PREPARED)

    def set_note(self, note: str) -> None:
        """Sets what else status shows an operator."""
        self.note = note

    def note_internal_error(self, error: Exception) -> None:
        """Leaves the save in doubt: its task has failed."""
        self.storage_wait = f"the coordinator ({type(error).__name__}: {error})"
        if not self.ended:
            self.move(State.IN_DOUBT)

    def commit(self) -> None:
        """Ends the save by its durable COMMIT, which a failure that was reported later doesn't change."""
        self.outcome.clear()
        self.participants.set_all_durable()
        self.move(State.COMMITTED)

    def progress(self) -> None:
        """Moves to the state that the ranks have reached, and notifies."""
        if not self.failing:
            if self.state is State.STAGING and self.participants.all_reached(
                save_pb2.RANK_PHASE_INGESTED
            ):
                self.move(State.INGESTED)
                self.participants.expect_next_phase()
            if self.state is State.INGESTED and self.participants.upload_begun:
                self.move(State.UPLOADING)
            if (
                self.state is State.UPLOADING
                and "durable" not in self.durations
                and self.participants.all_reached(save_pb2.RANK_PHASE_DURABLE)
            ):
                self.durations["durable"] = time.monotonic() - self.deadlines.start
        self.notify()

    # Failures.

    def fail_ranks(self, failures: Iterable[save_pb2.Failure], *, timed_out: bool = False) -> None:
        """Fails the save, which is then aborted. The first failure of a rank counts.

        Args:
            timed_out: the ranks failed by time-out rather than by an explicit report.
        """
        if self.ended:
            return
        listed = list(failures)
        self.outcome.add(listed, timed_out=timed_out)
        for failure in listed:
            if failure.kind != save_pb2.FAILURE_KIND_DEADLINE:
                self.participants.mark_failed(failure.rank)
        self.notify()

    def fail(
        self,
        kind: "save_pb2.FailureKind",
        message: str,
        rank: int = -1,
        *,
        timed_out: bool = False,
    ) -> None:
        """Fails the save for one reason."""
        host = self.ranks[rank].host if rank in self.ranks else ""
        failure = save_pb2.Failure(rank=rank, host=host, kind=kind, message=message)
        self.fail_ranks([failure], timed_out=timed_out)

    def report_possible_loss(self, failure: save_pb2.Failure) -> None:
        """Fails the save unless the rank's receipt is found in storage."""
        if not (self.ended or self.deciding or self.failing):
            self.outcome.possible_losses.setdefault(failure.rank, failure)
            self.notify()

    def request_storage_check(self) -> None:
        """Has the receipts in storage read at once: some rank has no live sidecar."""
        self.records.check_requested = True
        self.notify()

    def begin_storage_check(self) -> None:
        """Records that the receipts in storage are being read."""
        self.records.check_requested = False

    # Reports.

    def note_context(self, context: sidecar_pb2.SaveContext) -> bool:
        """Records that a rank takes part; returns whether it is the first time."""
        if context.HasField("seen_incarnation") and not self.context.HasField("seen_incarnation"):
            self.spec = self.spec.with_seen_incarnation(context.seen_incarnation)
        return self.participants.join(context.rank, context.host)

    def apply_report(self, rank: int, sidecar: SidecarPeer, status: save_pb2.RankStatus) -> None:
        """Applies a sidecar's report about one of its ranks, except for the rank's phase."""
        self.participants.apply_report(rank, sidecar, status)
        self.outcome.possible_losses.pop(rank, None)

    def note_replica(self, rank: int, holder: SidecarPeer, host: str, *, held: bool) -> None:
        """Records whether another host's sidecar has all files of a rank, which ran on ``host``."""
        if self.participants.note_replica(rank, holder, host, held=held):
            if held:
                self.outcome.possible_losses.pop(rank, None)
            self.progress()

    def add_receipt(self, receipt: records_pb2.Receipt) -> None:
        """Records that a rank is durable; its first receipt counts."""
        self.participants.add_receipt(receipt)
        self.outcome.possible_losses.pop(receipt.rank, None)

    def resume_external(self) -> None:
        """Continues a save that another process of a coordinator opened for Begin."""
        self._set_resumed()
        self.declare_mode(PlanMode.EXTERNAL)

    def begin_external(self, context: sidecar_pb2.SaveContext) -> None:
        """Records that torch makes the plan, and which rank sends its metadata."""
        self.declare_mode(PlanMode.EXTERNAL)
        self.external_plan.finisher = context

    def set_external_metadata(self, metadata: plan_pb2.GlobalMetadata) -> None:
        """Records torch's metadata."""
        self.external_plan.metadata = metadata

    def request_full_plans(self, ranks: Sequence[int]) -> None:
        """Requests the full plans of ranks that made a claim."""
        self.plans.request_full(ranks)
        self.notify()

    def wait_for_storage(self, error: object = None) -> None:
        """Shows in status that the save waits for storage, and for which error."""
        why = "" if error is None else f" ({error})"
        self.storage_wait = f"storage at {self.context.checkpoint_id}{why}"
        if error is not None:
            self.notify()

    def storage_answered(self) -> None:
        """The save doesn't wait for storage any more."""
        self.storage_wait = ""

    # Waiting.

    def notify(self) -> None:
        """Wakes all that wait for a change."""
        if self.failing or self.state is not State.PLANNING:
            self.changes.planned.set()
        self.changes.notify()

    async def wait_planned(self) -> None:
        """Waits until the plan is agreed or the save fails.

        All ranks wait here, so each one's plan does not wake the others.
        """
        while self.state is State.PLANNING and not self.failing:
            self.changes.planned.clear()
            await self.changes.planned.wait()

    async def wait_until(
        self, ready: Callable[[], bool], deadline: Callable[[], float] | None = None
    ) -> bool:
        """See :meth:`Changes.wait_until`."""
        return await self.changes.wait_until(ready, deadline)
