"""What the coordinator knows of a save: its state, its ranks, and why it failed.

In: what ranks, sidecars and the conductor say. Out: the status that everybody sees. States
change here only. Event loop only; no I/O.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from pannier.common import observer_clock
from pannier.common.wait_text import Awaited, set_times, waiting_on, waiting_text
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.saves.participants import Gathering
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError
from pannier.wire.failures import aborted_error, failures_text

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 3600.0
"""For a save of which no rank has said how long it may take."""
RESUMED_S: Final = 60.0
"""A resumed save has at least so long once storage has answered what it holds of it: its sidecars
report again, and finish uploads that went on meanwhile."""
_SHOWN: Final = 4
"""Failures spelled out in an error's message."""


class State(enum.Enum):
    """States of a save."""

    PLANNING = save_pb2.SAVE_STATE_PLANNING
    STAGING = save_pb2.SAVE_STATE_STAGING
    INGESTED = save_pb2.SAVE_STATE_INGESTED
    UPLOADING = save_pb2.SAVE_STATE_UPLOADING
    COMMITTED = save_pb2.SAVE_STATE_COMMITTED
    ABORTED = save_pb2.SAVE_STATE_ABORTED
    IN_DOUBT = save_pb2.SAVE_STATE_IN_DOUBT
    PREPARED = save_pb2.SAVE_STATE_PREPARED


# After a restart a save may be found to have ended while it still seems to be planned.
_MOVES: Final = {
    State.PLANNING: {
        State.STAGING,
        State.COMMITTED,
        State.ABORTED,
        State.IN_DOUBT,
        State.PREPARED,
    },
    State.STAGING: {State.INGESTED, State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.INGESTED: {State.UPLOADING, State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.UPLOADING: {State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.IN_DOUBT: {State.COMMITTED, State.ABORTED},
    State.COMMITTED: set[State](),
    State.ABORTED: set[State](),
    State.PREPARED: set[State](),
}
TERMINAL: Final = (State.COMMITTED, State.ABORTED, State.PREPARED)


class Presence:
    """Something that speaks for ranks: when it was last seen (:mod:`pannier.common.observer_clock`)."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.since = time.monotonic()
        self.heard = observer_clock.now()
        self.streams = 0
        """Of a sidecar: how many are open; none when it is gone."""
        self.attended: float | None = None
        """Of a sidecar: when it last reported a connected trainer; None: never."""


@dataclass
class Part:
    """One rank's part in a save."""

    rank: int
    host: str = ""
    phase: "save_pb2.RankPhase" = save_pb2.RANK_PHASE_MISSING
    heard: float | None = None
    """When the rank's trainer was last seen (:mod:`pannier.common.observer_clock`); None: never."""
    sidecar: Presence | None = None
    told: save_pb2.RankStatus = field(default_factory=save_pb2.RankStatus)
    """As its sidecar last reported it."""
    receipt: records_pb2.Receipt | None = None
    reached: dict[int, float] = field(default_factory=dict)
    """When it came to each phase, on the monotonic clock."""

    @property
    def spoken_for(self) -> bool:
        """Whether a sidecar that is attached now speaks for it."""
        return self.sidecar is not None and self.sidecar.streams > 0

    @property
    def orphaned(self) -> bool:
        """Whether the sidecar that spoke for it is gone, with its receipt untold."""
        return self.receipt is None and self.sidecar is not None and not self.spoken_for

    def advance(self, phase: "save_pb2.RankPhase") -> None:
        """Moves on; an older report moves nothing back."""
        if phase > self.phase:
            self.phase = phase
            self.reached[phase] = time.monotonic()

    def silence(self, suspect_after_s: float) -> float | None:
        """Seconds since it was last seen; a quiet trainer's sidecar speaks for it."""
        now = observer_clock.now()
        if self.sidecar is not None and self.phase >= save_pb2.RANK_PHASE_INGESTED:
            # Its trainer may be gone: the sidecar has everything.
            return now - self.sidecar.heard
        if self.heard is None:
            return None
        own = now - self.heard
        if self.sidecar is not None and self.told.seconds_since_heard < suspect_after_s:
            return min(own, now - self.sidecar.heard)
        return own


class Save:
    """One save. ``changed`` is called after every change."""

    def __init__(
        self,
        context: sidecar_pb2.SaveContext,
        *,
        changed: Callable[["Save"], None],
        recall: Callable[[int], tuple[str, float] | None],
        suspect_after_s: float,
    ) -> None:
        """``recall`` gives a rank's host and when it was heard, as earlier saves told."""
        self.context = context
        """As the first rank said it."""
        self.key = object_names.save_text(context.save)
        self.life = (context.save.job, context.save.incarnation)
        """Job and incarnation."""
        self.state = State.PLANNING
        self.attempt: object_names.Attempt | None = None
        self.place_allowed = False
        """It was found that the save may go where it is to go."""
        self.external = False
        """torch makes the global plan."""
        self.resumed = False
        """A rank already has a plan: another life of the coordinator answered it."""
        self.touched = False
        """Something of the attempt may be in storage, so that only a decision ends it."""
        self.deciding = False
        """A COMMIT is on its way to storage: it is too late to change one's mind."""
        self.joined: set[int] = set()
        """Ranks that have spoken of this save."""
        self.gathering = Gathering(context.ranks)
        self.preparing: bool | None = None
        """Only its plan is wanted; None: nobody has said yet."""
        self.plan_wanted = False
        """Ranks go by a plan that isn't known here: they are to hand theirs in."""
        self.plan_id = ""
        """Of the plan that its ranks go by."""
        self.manifest: Manifest | None = None
        self.metadata: plan_pb2.GlobalMetadata | None = None
        """What Finish brought."""
        self.finisher: sidecar_pb2.SaveContext | None = None
        """Who opened the save with Begin."""
        self.uploading = False
        """A rank has begun to."""
        self.unchecked: list[records_pb2.Receipt] = []
        """Receipts that came in and weren't held against the plan yet."""
        self.failures: dict[int, save_pb2.Failure] = {}
        self.suspects: dict[int, save_pb2.Failure] = {}
        """By rank: why its data is lost, unless its receipt is in storage."""
        self.parts = {rank: Part(rank) for rank in context.ranks}
        self._in_order = list(self.parts.values())
        self.created_at = time.time()
        self.start = time.monotonic()
        self.known_since = observer_clock.now()
        """The same by the clock that silence is measured by."""
        self.plan_deadline = self.start + DEFAULT_TIMEOUT_S
        """For the plan to be agreed by this coordinator; of no effect on a resumed save."""
        self._deadline = self.start + DEFAULT_TIMEOUT_S
        self._timed: dict[str, set[int]] = {"plan": set(), "save": set()}
        """Ranks that have reported how long it may take."""
        self._recovered_at: float | None = None
        """When storage had answered what it holds of a resumed save."""
        self.doomed = asyncio.Event()
        self._planned = asyncio.Event()
        """Set while there is something to tell those who wait for the plan."""
        self._behind = 0
        """All parts before this one, in their order, have reached the phase that is waited for."""
        self.concluded: set[int] = set()
        """Ranks of which nobody said that they failed: they weren't heard of any more."""
        self.unseen = False
        """Storage is to be asked at once: it may know more of the ranks than anybody says."""
        self.problem = ""
        """What of storage the save waits for, for people."""
        self.note = ""
        """What else an operator should know, for people."""
        self.seconds: dict[State, float] = {}
        """Until each state was entered, from the first message on."""
        self._durable_s = 0.0
        self._changed = changed
        self._recall = recall
        self._suspect_after_s = suspect_after_s
        self._bells: set[asyncio.Event] = set()

    @property
    def label(self) -> str:
        """Id and place, for errors and logs."""
        return f"save {self.key} to {self.context.checkpoint_id}"

    @property
    def about(self) -> dict[str, str]:
        """What log records of it carry (:mod:`pannier.daemon.logging`)."""
        return {
            "job": self.context.save.job,
            "save": self.key,
            "checkpoint": self.context.checkpoint_id,
            "attempt": self.attempt.name if self.attempt is not None else "",
        }

    @property
    def ended(self) -> bool:
        """Whether its state is terminal."""
        return self.state in TERMINAL

    # Changes.

    def move(self, state: State) -> None:
        """Changes the state. Raises RuntimeError for an impossible move: a bug."""
        if state is self.state:
            return
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"{self.label} is {self.state.name}: it can't become {state.name}")
        self.state = state
        self.seconds.setdefault(state, time.monotonic() - self.start)
        why = f": {self.reason()}" if state is State.ABORTED else ""
        level = logging.WARNING if state in (State.ABORTED, State.IN_DOUBT) else logging.INFO
        _log.log(level, "%s is %s%s", self.label, state.name, why, extra=self.about)
        if self.ended:
            # Status needs little of it; plans and metadata may be large.
            self.gathering = Gathering(())
            self.manifest = self.metadata = None
            self.unchecked.clear()
            for part in self.parts.values():
                part.receipt = None
        self.ring()

    def doom(self, failures: Iterable[save_pb2.Failure], *, concluded: bool = False) -> None:
        """The save can't be: it is to be aborted. The first failure of a rank counts.

        Args:
            concluded: from silence; nobody has said so.
        """
        if self.ended:
            return
        for failure in failures:
            if concluded and failure.rank not in self.failures:
                self.concluded.add(failure.rank)
            self.failures.setdefault(failure.rank, failure)
            part = self.parts.get(failure.rank)
            if part is not None and failure.kind != save_pb2.FAILURE_KIND_DEADLINE:
                part.phase = save_pb2.RANK_PHASE_FAILED
        self.doomed.set()
        self.ring()

    def fail(
        self,
        kind: "save_pb2.FailureKind",
        message: str,
        rank: int = -1,
        *,
        concluded: bool = False,
    ) -> None:
        """Dooms the save for one reason."""
        host = self.parts[rank].host if rank in self.parts else ""
        failure = save_pb2.Failure(rank=rank, host=host, kind=kind, message=message)
        self.doom([failure], concluded=concluded)

    def revive(self) -> None:
        """What doomed it was concluded from silence alone, and wrong: another coordinator has it."""
        self.failures.clear()
        self.concluded.clear()
        self.doomed.clear()
        for part in self.parts.values():
            if part.phase == save_pb2.RANK_PHASE_FAILED:
                part.phase = save_pb2.RANK_PHASE_MISSING
        self._behind = 0
        self.resumed = True
        self.ring()

    def suspect(self, failure: save_pb2.Failure) -> None:
        """The rank's data is lost unless it became durable before anybody could say so."""
        if not (self.ended or self.deciding or self.doomed.is_set()):
            self.suspects.setdefault(failure.rank, failure)
            self.ring()

    def take_receipt(self, receipt: records_pb2.Receipt) -> None:
        """What its rank has written is durable; another receipt of the rank is no news."""
        part = self.parts[receipt.rank]
        if part.receipt is None:
            part.receipt = receipt
            self.unchecked.append(receipt)
        part.advance(save_pb2.RANK_PHASE_DURABLE)
        self.uploading = True

    def ask_storage(self) -> None:
        """Somebody who spoke for ranks is gone: what they left in storage counts at once."""
        self.unseen = True
        self.ring()

    def set_deadlines(self, rank: int, plan_s: float, save_s: float) -> None:
        """Records how long a rank waits, in seconds from now; 0: not known.

        The earliest deadline of all ranks counts, in whatever order they report. A rank's first
        report counts: what it repeats after a reconnect differs by delays alone.
        """
        now = time.monotonic()
        self.plan_deadline = self._earliest("plan", rank, plan_s, self.plan_deadline, now)
        self._deadline = self._earliest("save", rank, save_s, self._deadline, now)

    def _earliest(self, what: str, rank: int, seconds: float, known: float, now: float) -> float:
        timed = self._timed[what]
        if not seconds or rank in timed:
            return known
        first = not timed
        timed.add(rank)
        return now + seconds if first else min(known, now + seconds)

    def shorten(self, deadline: float) -> None:
        """The whole save must be committed by then, on the monotonic clock."""
        self._deadline = min(self._deadline, deadline)

    def recovered(self) -> None:
        """Storage has answered what it holds of a resumed save."""
        if self._recovered_at is None:
            self._recovered_at = time.monotonic()

    def resume(self) -> None:
        """Another life of the coordinator has answered it: there is a manifest to go on from."""
        if self.state is State.PLANNING and not self.resumed and self.manifest is None:
            self.resumed = True
            self.ring()

    def progress(self) -> None:
        """Moves to the state that its ranks have reached, on the way to the commit."""
        if self.doomed.is_set():
            self.ring()
            return
        if self.state is State.STAGING and self._all_are(save_pb2.RANK_PHASE_INGESTED):
            self.move(State.INGESTED)
            self._behind = 0
        if self.state is State.INGESTED and self.uploading:
            self.move(State.UPLOADING)
        if (
            self.state is State.UPLOADING
            and not self._durable_s
            and self._all_are(save_pb2.RANK_PHASE_DURABLE)
        ):
            self._durable_s = time.monotonic() - self.start
        self.ring()

    def _all_are(self, phase: "save_pb2.RankPhase") -> bool:
        """Whether all ranks have come so far. They are looked at from where that ended before."""
        parts = self._in_order
        while self._behind < len(parts) and parts[self._behind].phase >= phase:
            self._behind += 1
        return self._behind == len(parts)

    def want_plans(self) -> None:
        """Ranks that go by an earlier plan are to hand theirs in."""
        self.plan_wanted = True
        self._planned.set()
        self.ring()

    def ring(self) -> None:
        """Says that something changed."""
        if self.doomed.is_set() or self.state is not State.PLANNING:
            self._planned.set()
        for bell in self._bells:
            bell.set()
        self._changed(self)

    # Waiting.

    async def until_planned(self, *, proposing: bool) -> None:
        """Waits until the plan is agreed or the save is doomed.

        All ranks wait here, so they aren't woken by each other's plans.

        Args:
            proposing: the wait also ends when the ranks' local plans are wanted.
        """
        while self.state is State.PLANNING and not self.doomed.is_set():
            if proposing and self.plan_wanted:
                return
            self._planned.clear()
            await self._planned.wait()

    async def until(
        self, ready: Callable[[], bool], deadline: Callable[[], float] | None = None
    ) -> bool:
        """Waits for ``ready()``, asked after each change; False when it isn't at ``deadline()``.

        Args:
            deadline: on the monotonic clock, asked after each change; None: without end.
        """
        bell = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._bells.add(bell)
        try:
            while not ready():
                bell.clear()
                # Not wait_for: before Python 3.12 it loses a cancellation that comes with a ring.
                timer = None
                if deadline is not None:
                    left = deadline() - time.monotonic()
                    if left <= 0:
                        return False
                    timer = loop.call_later(left, bell.set)
                try:
                    await bell.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
        finally:
            self._bells.discard(bell)
        return True

    def awaited(self) -> list[Awaited]:
        """The ranks that the save waits for, in its state."""
        if self.state is State.PLANNING:
            late = self.gathering.unplanned if self.plan_wanted else self.gathering.missing
            return [self._awaited(rank) for rank in late]
        if self.ended or self.state is State.IN_DOUBT:
            return []
        phases = [part.phase for part in self.parts.values()]
        wanted = (
            save_pb2.RANK_PHASE_INGESTED
            if min(phases) < save_pb2.RANK_PHASE_INGESTED
            else save_pb2.RANK_PHASE_DURABLE
        )
        behind = [self._awaited(part.rank) for part in self.parts.values() if part.phase < wanted]
        if not behind and self.external and self.metadata is None and self.finisher is not None:
            return [self._awaited(self.finisher.rank)]
        return behind

    def _awaited(self, rank: int) -> Awaited:
        part = self.parts[rank]
        silence = part.silence(self._suspect_after_s)
        if silence is None and (known := self._recall(rank)) is not None:
            return Awaited(rank, known[0], time.monotonic() - known[1])
        return Awaited(rank, part.host, silence)

    def waiting_text(self) -> str:
        """Whom or what the save waits for, for people."""
        return waiting_text(self.awaited()) or self.problem

    # What others see.

    def reason(self) -> str:
        """Why it failed, for people."""
        return failures_text(self.failures.values())

    def error(self) -> PannierError:
        """What a caller is told when the save was aborted."""
        return aborted_error(self.key, self.context.checkpoint_id, self.failures.values())

    def status(self, *, ranks: bool = True) -> save_pb2.SaveStatus:
        """The status now; ``ranks``: with every rank's."""
        waiting = waiting_on(
            self.awaited(), deadline_s=max(0.0, self.next_deadline - time.monotonic())
        )
        if not waiting.text and not self.ended:
            waiting.text = self.problem
            if self.problem and self.state is not State.IN_DOUBT:
                waiting.deadline_s = max(0.0, self.next_deadline - time.monotonic())
        return save_pb2.SaveStatus(
            save=self.context.save,
            id=self.key,
            checkpoint_id=self.context.checkpoint_id,
            attempt=self.attempt.name if self.attempt is not None and self.touched else "",
            state=self.state.value,
            ranks=[self._rank_status(part) for part in self.parts.values()] if ranks else (),
            failures=self.failures.values(),
            waiting_on=waiting,
            created_at=self.created_at,
            planned_s=self.seconds.get(State.STAGING, 0),
            ingested_s=self.seconds.get(State.INGESTED, 0),
            durable_s=self._durable_s,
            committed_s=self.seconds.get(State.COMMITTED, 0),
            note=self.note,
            plan_id=self.plan_id,
            plan_wanted=self.plan_wanted and self.state is State.PLANNING,
            bytes_total=sum(
                max(part.told.bytes_staged, part.told.bytes_ingested, part.told.bytes_durable)
                for part in self.parts.values()
            ),
        )

    @property
    def deadline(self) -> float:
        """Until when it must be committed, on the monotonic clock.

        A resumed save may be past the deadline of its ranks and durable all the same, which only
        storage tells: it has RESUMED_S from storage's answer on, and no deadline before.
        """
        if not self.resumed:
            return self._deadline
        since = time.monotonic() if self._recovered_at is None else self._recovered_at
        return max(self._deadline, since + RESUMED_S)

    @property
    def next_deadline(self) -> float:
        """Until when its state may last, on the monotonic clock."""
        planning = self.state is State.PLANNING and not self.resumed
        return self.plan_deadline if planning else self.deadline

    def _rank_status(self, part: Part) -> save_pb2.RankStatus:
        out = save_pb2.RankStatus()
        out.CopyFrom(part.told)
        out.rank, out.phase = part.rank, part.phase
        out.host = part.host
        silence = part.silence(self._suspect_after_s)
        if silence is None and (known := self._recall(part.rank)) is not None:
            out.host = out.host or known[0]
            silence = time.monotonic() - known[1]
        if silence is not None:
            out.seconds_since_heard = silence
        set_times(out, part.reached, self.start)
        failure = self.failures.get(part.rank)
        if failure is not None:
            out.last_error = failure.message
        return out
