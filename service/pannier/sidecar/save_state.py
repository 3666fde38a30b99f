"""Where each rank of this host is in each save: the one place that changes it.

In: what trainers hand in (threads), what uploads achieve and what the
coordinator decides (event loop). Out: to listeners, that something changed.
Thread-safe; listeners are called by whoever made the change, outside the lock.
"""

import enum
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pannier.common import observer_clock
from pannier.daemon.status_registry import TERMINAL
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import (
    InDoubtError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    UnavailableError,
)
from pannier.wire.failures import aborted_error
from pannier.wire.limits import check_room
from pannier.wire.object_names import data_prefix, save_text

_log = logging.getLogger(__name__)

_ENDED_KEPT: Final = 500
"""Saves remembered after their end: for status, reconnecting clients and late messages."""
_PLANS_KEPT: Final = 1024
"""Plans of single ranks whose sizes are remembered: for ranks that go by them again."""


class Phase(enum.Enum):
    """How far one rank is in one save."""

    PLANNING = save_pb2.RANK_PHASE_MISSING
    PLANNED = save_pb2.RANK_PHASE_PLANNED
    STREAMING = save_pb2.RANK_PHASE_STREAMING
    INGESTED = save_pb2.RANK_PHASE_INGESTED
    DURABLE = save_pb2.RANK_PHASE_DURABLE
    FAILED = save_pb2.RANK_PHASE_FAILED


# A rank of a save that torch plans (Begin, by one rank) is first heard of when it streams or hands
# over; after a restart of the sidecar that may be true of any rank.
_MOVES: Final = {
    Phase.PLANNING: {Phase.PLANNED, Phase.STREAMING, Phase.INGESTED, Phase.FAILED},
    Phase.PLANNED: {Phase.STREAMING, Phase.INGESTED, Phase.FAILED},
    Phase.STREAMING: {Phase.INGESTED, Phase.FAILED},
    Phase.INGESTED: {Phase.DURABLE, Phase.FAILED},
    Phase.DURABLE: set[Phase](),
    Phase.FAILED: set[Phase](),
}
BEFORE_INGESTION: Final = (Phase.PLANNING, Phase.PLANNED, Phase.STREAMING)


@dataclass(frozen=True)
class Proposal:
    """The rank goes by a plan that it was given for an earlier save, if all others do."""

    plan_id: str
    digest: str
    """Of its local plan."""
    attempt: str


class RankSave:
    """One rank's part in one save. Changed by :class:`Saves` only, unless a field says otherwise."""

    def __init__(self, save: "Save", context: sidecar_pb2.SaveContext) -> None:
        self.save = save
        self.context = context
        self.rank = context.rank
        self.host = context.host
        self.phase = Phase.PLANNING
        self.attempt = ""
        self.plan_id = ""
        self.proposal: Proposal | None = None
        """What it waits for an answer to; None again when the coordinator wants its local plan."""
        self.plan_deadline = 0.0
        """On the monotonic clock; 0: not known."""
        self.deadline = 0.0
        """Of the whole save."""
        self.planned: dict[str, int] | None = None
        """Sizes of the planned files by name; None when torch made the plan."""
        self.files: dict[str, DataFile] = {}
        """Names stay after the spool was freed."""
        self.receipt: records_pb2.Receipt | None = None
        self.failure: save_pb2.Failure | None = None
        self.refused = False
        """The coordinator itself said that the save is over."""
        self.heard = observer_clock.now()
        """When the trainer last sent something, a ping at least; whoever receives it sets this."""
        self.reached: dict[int, float] = {}
        """When it came to each phase, in this life of the sidecar, on the monotonic clock."""
        self.stalled_s = 0.0
        """How long the save held its training loop up; set when it is handed over."""
        self.transport = ""
        """How its bytes come into the spool, for people."""
        self.retries = 0
        """Of uploads; set on the loop."""
        self.last_error = ""
        """Why; set on the loop."""
        self.opening = threading.Lock()
        """Held while a file is opened: it reserves space, which may take long."""

    @property
    def label(self) -> str:
        """Save, rank and host, for errors and logs."""
        return f"save {self.save.key} to {self.save.checkpoint_id}, rank {self.rank} on {self.host}"

    @property
    def about(self) -> dict[str, str | int]:
        """What log records of it carry (:mod:`pannier.daemon.logging`)."""
        return {**self.save.about, "attempt": self.attempt, "rank": self.rank}

    def _move(self, phase: Phase) -> None:
        if phase not in _MOVES[self.phase]:
            raise InvalidRequestError(
                f"{self.label} is {self.phase.name}: it can't become {phase.name}"
            )
        self.phase = phase
        self.reached[phase.value] = time.monotonic()


class Save:
    """A save that ranks of this host take part in."""

    def __init__(self, context: sidecar_pb2.SaveContext) -> None:
        self.id = context.save
        self.key = save_text(context.save)
        self.checkpoint_id = context.checkpoint_id
        self.created_at = time.time()
        self.start = time.monotonic()
        self.ranks: dict[int, RankSave] = {}
        self.coordinator: save_pb2.SaveStatus | None = None
        """What the coordinator last said of it."""
        self.verdict: save_pb2.SaveStatus | None = None
        """How it ended; nothing changes afterwards."""

    @property
    def about(self) -> dict[str, str]:
        """What log records of it carry."""
        return {"job": self.id.job, "save": self.key, "checkpoint": self.checkpoint_id}

    def end_error(self) -> PannierError:
        """What a late message of this save is told."""
        assert self.verdict is not None
        if self.verdict.state == save_pb2.SAVE_STATE_COMMITTED:
            return InvalidRequestError(f"save {self.key} to {self.checkpoint_id} is committed")
        return aborted_error(self.key, self.checkpoint_id, self.verdict.failures)


Listener = Callable[[Save, RankSave | None, bool], None]
"""Called with the save, the rank that changed (None: the save itself), and whether it is more than progress."""


class Saves:
    """All saves that this sidecar knows of."""

    def __init__(self) -> None:
        self.draining = False
        """New saves are refused; set once."""
        self._lock = threading.Lock()
        self._saves: OrderedDict[str, Save] = OrderedDict()
        self._ended: OrderedDict[str, Save] = OrderedDict()
        self._listeners: list[Listener] = []
        self._forget_listeners: list[Callable[[Save], None]] = []
        self._idle_since = time.monotonic()
        self._changes = threading.Condition()
        """Notified after each change; taken after the lock was let go, never before."""
        self._sizes: OrderedDict[tuple[str, str, int, str], dict[str, int]] = OrderedDict()
        """Of planned files, by rank and plan; names without the attempt's."""

    def listen(self, listener: Listener) -> None:
        """Adds a listener; before the first save."""
        self._listeners.append(listener)

    def listen_forgotten(self, listener: Callable[[Save], None]) -> None:
        """Adds a listener for saves that are no longer remembered; before the first save."""
        self._forget_listeners.append(listener)

    # What trainers say.

    def enter(self, context: sidecar_pb2.SaveContext, *, failing: bool = False) -> RankSave:
        """The rank's part in the save, which begins now if it wasn't known.

        Args:
            context: checked by the caller.
            failing: the rank only wants to say that it failed.

        Raises:
            UnavailableError: a new save, while draining or above the limits.
            SaveAbortedError: the save, or this rank's part, has failed.
            InvalidRequestError: the rank said otherwise before.
        """
        key = save_text(context.save)
        with self._lock:
            save = self._saves.get(key) or self._ended.get(key)
            if save is None:
                if self.draining and not failing:
                    raise UnavailableError(
                        f"the sidecar on this host is draining and takes no new saves ({key})"
                    )
                check_room([each.id for each in self._saves.values()], context.save)
                save = self._saves[key] = Save(context)
            rank = save.ranks.get(context.rank)
            fresh = rank is None
            if rank is None:
                if save.verdict is not None:
                    raise save.end_error()
                rank = save.ranks[context.rank] = RankSave(save, context)
            elif (
                rank.context.checkpoint_id != context.checkpoint_id
                or rank.context.ranks != context.ranks
            ):
                raise InvalidRequestError(
                    f"{rank.label}: now called to {context.checkpoint_id} with ranks "
                    f"{list(context.ranks)}, before with ranks {list(rank.context.ranks)}"
                )
            rank.heard = observer_clock.now()
        if fresh:
            self._tell(rank.save, None, True)
        return rank

    def restore(
        self,
        context: sidecar_pb2.SaveContext,
        phase: Phase,
        *,
        created_at: float,
        save_timeout_s: float = 0.0,
        attempt: str,
        plan_id: str = "",
        planned: dict[str, int] | None = None,
        receipt: records_pb2.Receipt | None = None,
        failure: save_pb2.Failure | None = None,
        verdict: save_pb2.SaveStatus | None = None,
    ) -> RankSave:
        """A rank's part in a save, as a former life of this sidecar left it; before the first call.

        The files are the caller's to add.

        Args:
            save_timeout_s: what is left until the save's deadline; 0: not known.
            verdict: how the save had ended; the same for all its ranks.
        """
        key = save_text(context.save)
        with self._lock:
            save = self._saves.get(key) or self._ended.get(key)
            if save is None:
                save = Save(context)
                save.created_at = created_at
                save.verdict = verdict
                (self._saves if verdict is None else self._ended)[key] = save
            rank = save.ranks[context.rank] = RankSave(save, context)
            rank.phase, rank.attempt, rank.plan_id = phase, attempt, plan_id
            rank.planned, rank.receipt, rank.failure = planned, receipt, failure
            rank.deadline = _earlier(0.0, save_timeout_s)
        if verdict is None:
            self._tell(save, None, True)
        return rank

    def check(self, rank: RankSave) -> None:
        """Raises SaveAbortedError or InvalidRequestError when the rank's part is over."""
        with self._lock:
            self._check(rank)

    def planned(self, rank: RankSave, plan: plan_pb2.FinalPlan) -> None:
        """The coordinator answered the rank's plan."""
        with self._lock:
            self._adopt(rank, plan.attempt)
            rank.plan_id = plan.plan_id
            rank.planned = {file.name: file.size for file in plan.files}
            prefix = data_prefix(plan.attempt)
            sizes = {name.removeprefix(prefix): size for name, size in rank.planned.items()}
            self._remember(rank, sizes)
            if rank.phase is Phase.PLANNING:
                rank._move(Phase.PLANNED)
        self._tell(rank.save, rank, True)

    def timed(self, rank: RankSave, timeout_s: float, save_timeout_s: float) -> None:
        """The trainer says how long its plan and the whole save may take; 0: not known.

        The earliest deadline counts: a call that is made again may carry the time of the first.
        """
        rank.plan_deadline = _earlier(rank.plan_deadline, timeout_s)
        rank.deadline = _earlier(rank.deadline, save_timeout_s)

    def proposed(self, rank: RankSave, proposal: Proposal) -> None:
        """The trainer goes by an earlier plan; no news when that was agreed already.

        Raises InvalidRequestError when it went by another one before.
        """
        with self._lock:
            self._check(rank)
            known = rank.proposal
            if known not in (None, proposal) or rank.attempt not in ("", proposal.attempt):
                raise InvalidRequestError(
                    f"{rank.label} goes by plan {proposal.plan_id[:12]} as attempt "
                    f"{proposal.attempt}, it was told otherwise before"
                )
            if rank.phase is Phase.PLANNING:
                rank.proposal = proposal
        self._tell(rank.save, rank, True)

    def withdrawn(self, rank: RankSave) -> bool:
        """Takes the rank's proposal back if the coordinator wants its local plan; whether it did."""
        with self._lock:
            status = rank.save.coordinator
            if rank.phase is not Phase.PLANNING or status is None or not status.plan_wanted:
                return False
            rank.proposal = None
            return True

    def _agree(self, save: Save, status: save_pb2.SaveStatus) -> list[RankSave]:
        """Ranks whose proposals are agreed by what the coordinator says; with the lock held."""
        agreed = []
        for rank in save.ranks.values() if status.plan_id else ():
            proposal = rank.proposal
            if proposal is None or rank.phase is not Phase.PLANNING:
                continue
            self._adopt(rank, proposal.attempt)
            # Another one in which it writes the same may have been chosen.
            rank.plan_id = status.plan_id
            sizes = self._sizes.get(_plan_key(rank, proposal.plan_id))
            if sizes is not None:
                self._remember(rank, sizes)
                prefix = data_prefix(proposal.attempt)
                rank.planned = {prefix + name: size for name, size in sizes.items()}
            rank._move(Phase.PLANNED)
            agreed.append(rank)
        return agreed

    def _remember(self, rank: RankSave, sizes: dict[str, int]) -> None:
        key = _plan_key(rank, rank.plan_id)
        self._sizes[key] = sizes
        self._sizes.move_to_end(key)
        while len(self._sizes) > _PLANS_KEPT:
            self._sizes.popitem(last=False)

    def until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Waits for ``ready()``, asked after each change; False when it isn't at ``deadline``.

        Args:
            deadline: on the monotonic clock.
        """
        with self._changes:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changes.wait(left)
        return True

    def wake(self) -> None:
        """Whoever waits in :meth:`until` looks again."""
        with self._changes:
            self._changes.notify_all()

    def begun(self, rank: RankSave, attempt: str) -> None:
        """The coordinator opened a save that torch plans."""
        with self._lock:
            self._adopt(rank, attempt)
            if rank.phase is Phase.PLANNING:
                rank._move(Phase.PLANNED)
        self._tell(rank.save, rank, True)

    def streaming(self, rank: RankSave, attempt: str, file: DataFile) -> None:
        """The rank opened a data file. Raises when the rank's part is over."""
        with self._lock:
            self._check(rank)
            self._adopt(rank, attempt)
            if rank.phase is not Phase.STREAMING:
                rank._move(Phase.STREAMING)
            rank.files[file.name] = file
        self._tell(rank.save, rank, True)

    def received(self, rank: RankSave) -> None:
        """Some MiB came in."""
        rank.heard = observer_clock.now()
        self.progressed(rank)

    def progressed(self, rank: RankSave) -> None:
        """Bytes came in or went out."""
        self._tell(rank.save, rank, False)

    def ingested(self, rank: RankSave, receipt: records_pb2.Receipt) -> None:
        """All bytes of the rank are in the spool, their checksums agree: the trainer may die now.

        The caller has recorded that before.
        """
        with self._lock:
            self._check(rank)
            rank._move(Phase.INGESTED)
            self._adopt(rank, receipt.attempt)
            rank.plan_id = receipt.plan_id
            rank.receipt = receipt
        size = sum(file.size for file in receipt.files)
        _log.info("%s is ingested: %d bytes", rank.label, size, extra=rank.about)
        self._tell(rank.save, rank, True)

    # What becomes of it.

    def durable(self, rank: RankSave) -> None:
        """All data files and the receipt are in storage, confirmed."""
        with self._lock:
            if rank.phase is not Phase.INGESTED:
                return
            rank._move(Phase.DURABLE)
        _log.info("%s is durable", rank.label, extra=rank.about)
        self._tell(rank.save, rank, True)

    def fail(self, rank: RankSave, kind: "save_pb2.FailureKind", message: str) -> bool:
        """The rank can't go on; False when its part was over, or safe, already."""
        with self._lock:
            over = rank.save.verdict is not None or Phase.FAILED not in _MOVES[rank.phase]
            lost = kind == save_pb2.FAILURE_KIND_LOST and rank.phase not in BEFORE_INGESTION
            if over or lost:
                return False
            rank._move(Phase.FAILED)
            rank.failure = save_pb2.Failure(
                rank=rank.rank, host=rank.host, kind=kind, message=message
            )
        _log.error("%s failed: %s", rank.label, message, extra=rank.about)
        self._tell(rank.save, rank, True)
        return True

    def refused(self, rank: RankSave, error: SaveAbortedError) -> None:
        """The coordinator answered a plan with the save's end."""
        with self._lock:
            if rank.save.verdict is not None or rank.phase is not Phase.PLANNING:
                return
            rank._move(Phase.FAILED)
            rank.refused = True
            # Nothing of it can be in storage: this host's other ranks would have been planned.
            over = all(each.refused for each in rank.save.ranks.values())
        self._tell(rank.save, rank, True)
        if over:
            status = save_pb2.SaveStatus(
                save=rank.save.id,
                state=save_pb2.SAVE_STATE_ABORTED,
                failures=error.failures.values(),
            )
            self.heard(status)

    def heard(self, status: save_pb2.SaveStatus) -> None:
        """The coordinator told how a save is; a terminal state is final."""
        key = save_text(status.save)
        with self._lock:
            save = self._saves.get(key)
            if save is None:
                return
            before, save.coordinator = save.coordinator, status
            news = (
                before is None
                or before.state != status.state
                or len(before.failures) != len(status.failures)
            )
            ended = status.state in TERMINAL
            news = news or (before is not None and before.plan_wanted != status.plan_wanted)
            agreed = [] if ended else self._agree(save, status)
            forgotten = []
            if ended:
                save.verdict = status
                del self._saves[key]
                self._ended[key] = save
                while len(self._ended) > _ENDED_KEPT:
                    forgotten.append(self._ended.popitem(last=False)[1])
                if not self._saves:
                    self._idle_since = time.monotonic()
        if ended:
            _log.info(
                "save %s to %s is %s",
                key,
                save.checkpoint_id,
                save_pb2.SaveState.Name(status.state).removeprefix("SAVE_STATE_"),
                extra=save.about,
            )
        for rank in agreed:
            # The coordinator has just said so: it needn't hear of it at once.
            self._tell(save, rank, False)
        self._tell(save, None, news)
        for old in forgotten:
            for listener in self._forget_listeners:
                listener(old)

    # Questions.

    def undecided(self) -> list[Save]:
        """Saves without a verdict, oldest first."""
        with self._lock:
            return list(self._saves.values())

    def find(self, context: sidecar_pb2.SaveContext) -> RankSave | None:
        """The rank's part in the save, if it is known."""
        key = save_text(context.save)
        with self._lock:
            save = self._saves.get(key) or self._ended.get(key)
            return save.ranks.get(context.rank) if save is not None else None

    def holds(self, context: sidecar_pb2.SaveContext) -> bool:
        """Whether the rank's part in the save is more than a call that waits."""
        rank = self.find(context)
        return rank is not None and rank.phase is not Phase.PLANNING

    def of_rank(self, job: str, incarnation: str, rank: int) -> list[RankSave]:
        """The parts of one rank of one incarnation, those of ended saves first."""
        with self._lock:
            return [
                save.ranks[rank]
                for save in (*self._ended.values(), *self._saves.values())
                if (save.id.job, save.id.incarnation) == (job, incarnation) and rank in save.ranks
            ]

    def idle_s(self) -> float | None:
        """Seconds since the last save was decided; None while one isn't."""
        with self._lock:
            return None if self._saves else time.monotonic() - self._idle_since

    def pending(self) -> list[RankSave]:
        """Ranks that aren't durable yet and may still become so."""
        return [
            rank
            for save in self.undecided()
            for rank in list(save.ranks.values())
            if rank.phase not in (Phase.DURABLE, Phase.FAILED)
        ]

    def _check(self, rank: RankSave) -> None:
        if rank.save.verdict is not None:
            raise rank.save.end_error()
        if rank.phase is Phase.FAILED:
            failures = [rank.failure] if rank.failure is not None else []
            if rank.receipt is not None:
                # Its receipt may be in storage all the same, and the save committed by it.
                raise InDoubtError(
                    f"{rank.label} failed after it was ingested: {_text(failures)}", failures
                )
            raise aborted_error(rank.save.key, rank.save.checkpoint_id, failures)

    def _adopt(self, rank: RankSave, attempt: str) -> None:
        if rank.attempt and attempt != rank.attempt:
            raise InvalidRequestError(
                f"{rank.label} belongs to attempt {rank.attempt}, not {attempt!r}"
            )
        rank.attempt = attempt

    def _tell(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        for listener in self._listeners:
            listener(save, rank, urgent)
        self.wake()


def _text(failures: list[save_pb2.Failure]) -> str:
    return "; ".join(failure.message for failure in failures)


def _earlier(known: float, seconds: float) -> float:
    """The earlier of a deadline and now + ``seconds``; 0 stands for none."""
    if not seconds:
        return known
    end = time.monotonic() + seconds
    return min(known, end) if known else end


def _plan_key(rank: RankSave, plan_id: str) -> tuple[str, str, int, str]:
    return (rank.save.id.job, rank.save.id.incarnation, rank.rank, plan_id)


__all__ = ["BEFORE_INGESTION", "Phase", "Proposal", "RankSave", "Save", "Saves"]
