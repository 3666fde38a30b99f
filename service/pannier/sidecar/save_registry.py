"""All saves of this host, and every change of them.

In: what trainers hand in, what uploads achieve and what the coordinator decides. Out: notifications to
listeners and waiters. On the event loop.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from pannier.common.units import size_text
from pannier.daemon.status_registry import TERMINAL
from pannier.sidecar.save_state import (
    FAILED,
    Phase,
    RankPlan,
    RankSave,
    Save,
)
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import (
    InvalidRequestError,
    SaveAbortedError,
    UnavailableError,
    failure_messages,
)
from pannier.wire.limits import check_room
from pannier.wire.object_names import data_prefix, save_text

_log = logging.getLogger(__name__)

_ENDED_KEPT: Final = 500
"""Most ended saves that are remembered: for status, reconnecting clients and late calls."""
_ENDED_LEAST: Final = 16
"""Number of ended saves that are remembered in any case."""
_ENDED_MEMORY: Final = 32 << 20
"""Bytes that more than _ENDED_LEAST of them may take: large saves would take more memory than all else."""
_PLANS_KEPT: Final = 1024
"""Parts of plans whose sizes are remembered, for ranks that claim them again."""

Listener = Callable[[Save, RankSave | None, bool], None]
"""Called with the save, the rank that changed (None: the save itself), and whether it is more than progress."""


class SaveRegistry:
    """All saves that this sidecar knows."""

    def __init__(self) -> None:
        self.draining = False
        """New saves are refused."""
        self._undecided: OrderedDict[str, Save] = OrderedDict()
        self._ended: OrderedDict[str, Save] = OrderedDict()
        self._listeners: list[Listener] = []
        self._eviction_listeners: list[Callable[[Save], None]] = []
        self._idle_since = time.monotonic()
        self._sizes: OrderedDict[tuple[str, str, int, str], dict[str, int]] = OrderedDict()
        """Sizes of planned files by rank and plan; names without the attempt's prefix."""

    def add_listener(self, listener: Listener) -> None:
        """Adds a listener; before the first save."""
        self._listeners.append(listener)

    def add_eviction_listener(self, listener: Callable[[Save], None]) -> None:
        """Adds a listener for ended saves that are no longer remembered; before the first save."""
        self._eviction_listeners.append(listener)

    def start_draining(self) -> None:
        """Refuses new saves from now on."""
        self.draining = True

    # Calls of trainers.

    def enter(self, context: sidecar_pb2.SaveContext, *, failing: bool = False) -> RankSave:
        """The rank in its save, which begins now if it is new.

        Args:
            context: checked by the caller.
            failing: the rank only reports that it failed.

        Raises:
            UnavailableError: a new save, while draining or above the limits.
            SaveAbortedError: the save, or this rank, has failed.
            InvalidRequestError: the rank's earlier calls contradict ``context``.
        """
        key = save_text(context.save)
        save = self._undecided.get(key) or self._ended.get(key)
        if save is None:
            if self.draining and not failing:
                raise UnavailableError(
                    f"the sidecar on this host is draining and takes no new saves ({key})"
                )
            check_room([each.id for each in self._undecided.values()], context.save)
            save = self._undecided[key] = Save(context)
        rank = save.ranks.get(context.rank)
        fresh = rank is None
        if rank is None:
            if save.outcome is not None:
                raise save.ended_error()
            rank = save.add_rank(context)
        elif (
            rank.context.checkpoint_id != context.checkpoint_id
            or rank.context.ranks != context.ranks
        ):
            raise InvalidRequestError(
                f"{rank.label}: now called to {context.checkpoint_id} with ranks "
                f"{list(context.ranks)}, before with ranks {list(rank.context.ranks)}"
            )
        rank.see()
        if fresh:
            self._notify(rank.save, None, True)
        return rank

    def restore(
        self,
        context: sidecar_pb2.SaveContext,
        phase: Phase,
        *,
        created_at: float,
        save_timeout_s: float = 0.0,
        attempt: str,
        plan: RankPlan,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
        receipt: records_pb2.Receipt | None = None,
        failure: save_pb2.Failure | None = None,
        outcome: save_pb2.SaveStatus | None = None,
        replica: bool = False,
    ) -> RankSave:
        """Adds a rank as the journal recorded it, or as a lost host had ingested it; before its first call.

        The caller adds the rank's files.

        Args:
            save_timeout_s: seconds until the save's deadline; 0: not known.
            outcome: how the save had ended; the same for all its ranks.
            replica: the rank is taken over from another host.
        """
        key = save_text(context.save)
        save = self._undecided.get(key) or self._ended.get(key)
        if save is None:
            save = Save(context, created_at)
            if outcome is not None:
                save.end(outcome)
            (self._undecided if outcome is None else self._ended)[key] = save
        rank = save.add_rank(context)
        rank.replica = replica
        rank.restore(
            phase,
            attempt,
            plan,
            claim=claim,
            save_timeout_s=save_timeout_s,
            receipt=receipt,
            failure=failure,
        )
        if outcome is None:
            self._notify(save, None, True)
        return rank

    def check(self, rank: RankSave) -> None:
        """Raises SaveAbortedError, InDoubtError or InvalidRequestError when the rank or save has ended."""
        rank.check()

    def limit_time(self, rank: RankSave, plan_s: float, save_s: float) -> None:
        """Sets how long the trainer waits for its plan and for the whole save; 0: not known."""
        rank.deadlines.shorten(plan_s, save_s)

    def set_plan(self, rank: RankSave, plan: plan_pb2.FinalPlan) -> None:
        """The coordinator has planned the rank."""
        rank.join_attempt(plan.attempt)
        sizes = {file.name: file.size for file in plan.files}
        rank.set_plan(plan.plan_id, sizes)
        prefix = data_prefix(plan.attempt)
        self._remember(
            rank, plan.part, {name.removeprefix(prefix): size for name, size in sizes.items()}
        )
        self._notify(rank.save, rank, True)

    def claim_plan(self, rank: RankSave, claim: sidecar_pb2.CachedPlanClaim, attempt: str) -> None:
        """Records that the trainer uses its part of the last plan, which isn't confirmed yet; idempotent.

        Raises InvalidRequestError when the rank has another plan, or claimed another part.
        """
        kept = sidecar_pb2.CachedPlanClaim()
        kept.CopyFrom(claim)
        kept.ClearField("timeout_s")
        sizes = self._sizes.get(_part_key(rank, claim.part))
        prefix = data_prefix(attempt)
        named = None
        if sizes is not None:
            named = {prefix + name: size for name, size in sizes.items()}
            self._remember(rank, claim.part, sizes)
        if rank.claim_plan(kept, attempt, named):
            self.limit_time(rank, claim.timeout_s, 0)
            self._notify(rank.save, rank, True)

    def confirm_plan(self, rank: RankSave, plan_id: str) -> None:
        """Confirms the rank's claim: the save's plan has the claimed part."""
        was_handed_over = rank.phase is Phase.HANDED_OVER
        rank.confirm_plan(plan_id)
        if was_handed_over:
            self._log_arrival(rank)
        self._notify(rank.save, rank, True)

    def set_attempt(self, rank: RankSave, attempt: str) -> None:
        """The coordinator opened a save that torch plans."""
        rank.join_attempt(attempt)
        rank.set_plan(rank.plan.id, rank.plan.sizes)
        self._notify(rank.save, rank, True)

    def add_file(self, rank: RankSave, attempt: str, file: DataFile) -> None:
        """The rank opened a data file. Raises when the rank or save has ended."""
        rank.add_file(attempt, file)
        self._notify(rank.save, rank, True)

    def set_transport(self, rank: RankSave, transport: str) -> None:
        """How the rank's bytes come into the spool, human-readable."""
        rank.transfer.transport = transport

    def set_stall(self, rank: RankSave, stalled_s: float) -> None:
        """How long the save blocked the rank's training loop."""
        rank.transfer.stalled_s = stalled_s

    def record_arrival(self, rank: RankSave) -> None:
        """Some MiB arrived from the trainer."""
        rank.see()
        self.record_progress(rank)

    def hand_over(self, rank: RankSave, receipt: records_pb2.Receipt) -> None:
        """All bytes of the rank are in the spool and their checksums match: the trainer may die now.

        The caller has recorded that in the journal.
        """
        rank.hand_over(receipt)
        self._log_arrival(rank)
        self._notify(rank.save, rank, True)

    @staticmethod
    def _log_arrival(rank: RankSave) -> None:
        assert rank.receipt is not None
        size = sum(file.size for file in rank.receipt.files)
        what = "handed over" if rank.phase is Phase.HANDED_OVER else "ingested"
        _log.info("%s is %s: %s", rank.label, what, size_text(size), extra=rank.log_fields)

    # Uploads, failures and the coordinator's decisions.

    def record_progress(self, rank: RankSave) -> None:
        """Bytes came in or went out."""
        self._notify(rank.save, rank, False)

    def refresh(self) -> None:
        """Notifies listeners of all undecided ranks: the peers that they wait for may have changed."""
        for save in self.undecided():
            for rank in save.ranks.values():
                self.record_progress(rank)

    def record_replicated(self, rank: RankSave, host: str, count: int) -> None:
        """Records how many bytes of the rank another host's spool has, too."""
        rank.transfer.replica_host, rank.transfer.replicated = host, count
        if rank.save.outcome is None:
            self.record_progress(rank)

    def record_retry(self, rank: RankSave, reason: str) -> None:
        """A request of one of its uploads is retried."""
        rank.transfer.retry(reason)
        self.record_progress(rank)

    def mark_durable(self, rank: RankSave) -> None:
        """All data files and the receipt are in storage, confirmed."""
        if rank.phase is not Phase.INGESTED:
            return
        rank.enter(Phase.DURABLE)
        self._idle_since = time.monotonic()
        _log.info("%s is durable", rank.label, extra=rank.log_fields)
        self._notify(rank.save, rank, True)

    def fail(self, rank: RankSave, kind: "save_pb2.FailureKind", message: str) -> bool:
        """Fails the rank; False when it has ended, or when it only lost a trainer that it no longer needs."""
        if not rank.fail(kind, message):
            return False
        self._idle_since = time.monotonic()
        _log.error("%s failed: %s", rank.label, message, extra=rank.log_fields)
        self._notify(rank.save, rank, True)
        return True

    def reject(self, rank: RankSave, error: SaveAbortedError) -> None:
        """The coordinator answered the rank's plan with the save's failure."""
        if rank.save.outcome is not None or rank.phase is not Phase.PLANNING:
            return
        rank.enter(Phase.REJECTED)
        # Nothing is in storage if all ranks of this host were rejected: none of them was planned.
        ended = all(each.phase is Phase.REJECTED for each in rank.save.ranks.values())
        self._notify(rank.save, rank, True)
        if ended:
            status = save_pb2.SaveStatus(
                save=rank.save.id,
                state=save_pb2.SAVE_STATE_ABORTED,
                failures=failure_messages(error),
            )
            self.apply_status(status)

    def apply_status(self, status: save_pb2.SaveStatus) -> None:
        """Takes a status update of the coordinator; a terminal state is final."""
        key = save_text(status.save)
        save = self._undecided.get(key)
        if save is None:
            return
        urgent = save.take_status(status)
        ended = status.state in TERMINAL
        if not ended:
            self._confirm_claims(save, status)
        evicted = self._end(save, status) if ended else []
        if ended:
            _log.info(
                "save %s to %s is %s",
                key,
                save.checkpoint_id,
                save_pb2.SaveState.Name(status.state).removeprefix("SAVE_STATE_"),
                extra=save.log_fields,
            )
        self._notify(save, None, urgent)
        for old in evicted:
            for listener in self._eviction_listeners:
                listener(old)

    # Queries.

    def undecided(self) -> list[Save]:
        """Saves without an outcome, oldest first."""
        return list(self._undecided.values())

    def rests(self) -> bool:
        """Whether saves have ended here, and none is under way. Thread-safe."""
        return bool(self._ended) and not self._undecided

    def find(self, context: sidecar_pb2.SaveContext) -> RankSave | None:
        """The rank in its save, if it is known."""
        key = save_text(context.save)
        save = self._undecided.get(key) or self._ended.get(key)
        return save.ranks.get(context.rank) if save is not None else None

    def has_ended(self, save: save_pb2.SaveId) -> bool:
        """Whether the save is remembered as ended."""
        return save_text(save) in self._ended

    def holds(self, context: sidecar_pb2.SaveContext) -> bool:
        """Whether the rank has got further than a call that waits for its plan."""
        rank = self.find(context)
        return rank is not None and rank.phase is not Phase.PLANNING

    def of_rank(self, job: str, incarnation: str, rank: int) -> list[RankSave]:
        """One rank of one incarnation in each of its saves, ended saves first."""
        return [
            save.ranks[rank]
            for save in (*self._ended.values(), *self._undecided.values())
            if (save.id.job, save.id.incarnation) == (job, incarnation) and rank in save.ranks
        ]

    def idle_s(self, detached_s: float) -> float:
        """Seconds for which nothing was left to do.

        A save whose ranks are durable or have failed only waits for its outcome.

        Args:
            detached_s: seconds without a coordinator that could report outcomes. Without one, durable
                saves are finished from storage.
        """
        if self.pending():
            return 0.0
        idle_s = time.monotonic() - self._idle_since
        return min(idle_s, detached_s) if self._undecided else idle_s

    def pending(self) -> list[RankSave]:
        """Ranks that aren't durable yet and may still become so."""
        return [
            rank
            for save in self.undecided()
            for rank in save.ranks.values()
            if rank.phase not in (Phase.DURABLE, *FAILED)
        ]

    def _confirm_claims(self, save: Save, status: save_pb2.SaveStatus) -> None:
        """Confirms the claims of the ranks: the save's plan has their parts."""
        for rank in save.ranks.values() if status.plan.id else ():
            if rank.unconfirmed is not None and rank.phase not in FAILED:
                self.confirm_plan(rank, status.plan.id)

    def _end(self, save: Save, outcome: save_pb2.SaveStatus) -> list[Save]:
        """Ends a save; returns the ended saves that are no longer remembered."""
        save.end(outcome)
        del self._undecided[save.key]
        self._ended[save.key] = save
        self._idle_since = time.monotonic()
        evicted = []
        memory = sum(each.memory for each in self._ended.values())
        while len(self._ended) > _ENDED_KEPT or (
            len(self._ended) > _ENDED_LEAST and memory > _ENDED_MEMORY
        ):
            evicted.append(self._ended.popitem(last=False)[1])
            memory -= evicted[-1].memory
        return evicted

    def _remember(self, rank: RankSave, part: str, sizes: dict[str, int]) -> None:
        key = _part_key(rank, part)
        self._sizes[key] = sizes
        self._sizes.move_to_end(key)
        while len(self._sizes) > _PLANS_KEPT:
            self._sizes.popitem(last=False)

    def _notify(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        for listener in self._listeners:
            listener(save, rank, urgent)


def _part_key(rank: RankSave, part: str) -> tuple[str, str, int, str]:
    return (rank.save.id.job, rank.save.id.incarnation, rank.rank, part)
