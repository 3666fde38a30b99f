"""The outcome of one save on this rank: follows its status at the sidecar and ends its handle.

In: the statuses that the sidecar pushes, this rank's own failures, and the deadline. Out: a handle
that resolves or fails, exactly once. Owned by a save task. Thread-safe: statuses arrive on
threads of the sidecar client, failures on the task's own.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from pannier.client.handle import Resolver, SaveHandle, SaveResult
from pannier.client.staging.in_flight import ArenaUse, InFlightSave
from pannier.client.transport.file_stream import Cancellation, StoppedError
from pannier.client.transport.plan_claim import PlanClaim
from pannier.client.transport.save_errors import aborted, fail_request, in_doubt, not_handed_over
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.common import timeouts, tracing
from pannier.common.deadline import Deadline
from pannier.common.save_interval import SaveCost
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    Failure,
    InDoubtError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)

_NEED_NO_TRAINER: Final = (save_pb2.RANK_PHASE_INGESTED, save_pb2.RANK_PHASE_DURABLE)


class PhaseTimes:
    """How long each phase of a save took on this rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._began = self._phase_began = time.monotonic()
        self._traced = False
        self.waited_s = 0.0
        """How long the trainer's call took before: for the sidecar, and for free staging memory."""

    def end(self, phase: str) -> None:
        """``phase`` ends now, and the next one begins."""
        with self._lock:
            now = time.monotonic()
            self._seconds[phase] = now - self._phase_began
            self._phase_began = now

    def seconds(self) -> dict[str, float]:
        """By phase, in order."""
        with self._lock:
            return dict(self._seconds)

    @property
    def stalled_s(self) -> float:
        """How long the trainer's call took: the phases after that run in the background."""
        seconds = self.seconds()
        return self.waited_s + seconds.get("plan", 0.0) + seconds.get("stage", 0.0)

    def cost(self, ranks: Iterable[save_pb2.RankStatus]) -> SaveCost:
        """What the save took until now, when it is committed; ``ranks``: what all ranks reported."""
        durable_s = self.waited_s + time.monotonic() - self._began
        return SaveCost(
            stalled_s=max(self.stalled_s, *(rank.stalled_s for rank in ranks), 0.0),
            ingested_s=durable_s - self.seconds()["commit"],
            durable_s=durable_s,
        )

    def trace(self, context: sidecar_pb2.SaveContext, size: int, error: str) -> None:
        """Exports the spans of this rank's part, if tracing is on; only once."""
        with self._lock:
            traced, self._traced = self._traced, True
        if traced:
            return
        parts, begin = [], self._began
        for phase, seconds in self.seconds().items():
            parts.append(tracing.Interval(phase, begin, begin + seconds))
            begin += seconds
        attributes: tracing.Attributes = {
            "pannier.checkpoint": context.checkpoint_id,
            "pannier.rank": context.rank,
            "pannier.host": context.host,
            "pannier.bytes": size,
        }
        own = tracing.Interval("async_save", self._began, time.monotonic(), attributes, error)
        tracing.export_rank(context.save, context.rank, own, parts)


OnCommitted = Callable[[sidecar_pb2.SaveContext, int, SaveCost], None]
"""Called with the save's context, the bytes of all ranks, and the save's cost."""


class WaitingOn:
    """What a save waits for, as the handle's status shows it.

    What this process knows itself takes precedence over the sidecar's report.
    """

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._reported = ""
        self._unresponsive = ""
        self._copies = ""
        self._no_room: dict[str, BusyError] = {}

    @property
    def text(self) -> str:
        """Empty: for nothing."""
        return self._unresponsive or self._copies or self.room or self._reported

    @property
    def room(self) -> str:
        """Why files wait for room in the spool; empty: none does."""
        error = next(iter(list(self._no_room.values())), None)
        return "" if error is None else f"room ({error})"

    def status_arrived(self, reported: str) -> None:
        """The sidecar reported what the save waits for. The caller updates the handle."""
        self._reported = reported
        self._unresponsive = ""

    def set_unresponsive(self, text: str) -> None:
        """The sidecar doesn't respond; empty: it does again."""
        self._unresponsive = text
        self._show()

    def set_copies(self, text: str) -> None:
        """Copies from devices are not complete; empty: they are."""
        self._copies = text
        self._show()

    def set_no_room(self, file: str, error: BusyError) -> None:
        """The spool has no room for ``file``."""
        self._no_room[file] = error
        self._show()

    def clear_no_room(self, file: str) -> None:
        """The spool has taken ``file``, or the save gives it up."""
        if self._no_room.pop(file, None) is not None:
            self._show()

    def set_report_failed(self, problem: PannierError) -> None:
        """The sidecar could not be sent this rank's failure."""
        text = f"the sidecar, to which a failure could not be reported ({problem})"
        self._resolver.update(lambda status: dataclasses.replace(status, waiting_on=text))

    def _show(self) -> None:
        self._resolver.update(lambda status: dataclasses.replace(status, waiting_on=self.text))


class ArenaRelease:
    """Releases the arena of a save of ``group``, and decides whether its memory can be used again.

    Thread-safe.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._slot: InFlightSave | None = None
        self._fate: ArenaUse | None = None

    def begin(self, slot: InFlightSave) -> None:
        """``slot`` holds the arena that is being sent."""
        with self._lock:
            self._slot = slot
            fate = self._fate
        if fate is not None:
            slot.ended(fate, self._group)

    def save_ended(self, fate: ArenaUse) -> None:
        """The save has ended for this process; of several calls the worst fate counts."""
        with self._lock:
            self._fate = fate if self._fate is None else max(self._fate, fate)
            slot, worst = self._slot, self._fate
        if slot is not None:
            slot.ended(worst, self._group)


class StatusFollower:
    """See the module.

    Args:
        sidecar: reports the status of the save.
        context: of the save.
        deadline: of the save.
        expects_skip: the caller chose ``on_busy="skip"``, so that its error needn't be retrieved.
        on_ended: called once, with this, when the handle has its outcome.
        on_committed: called before that, when the save is committed.
    """

    def __init__(
        self,
        sidecar: SidecarClient,
        context: sidecar_pb2.SaveContext,
        deadline: Deadline,
        *,
        expects_skip: bool,
        on_ended: Callable[["StatusFollower"], None],
        on_committed: OnCommitted = lambda *_: None,
    ) -> None:
        self.deadline = deadline
        self.stop = Cancellation()
        """Set when this rank has nothing more to send."""
        self.times = PhaseTimes()
        text = object_names.save_text(context.save)
        self.resolver = Resolver(SaveHandle(text, context.checkpoint_id))
        self.waiting = WaitingOn(self.resolver)
        self.arena = ArenaRelease(context.save.group)
        self._sidecar = sidecar
        self._context = context
        self._expects_skip = expects_skip
        self._on_ended = on_ended
        self._on_committed = on_committed
        self._on_failure: Callable[[BaseException], None] = lambda _: None
        self._claim: PlanClaim | None = None
        self._lock = threading.Lock()
        self._handed_over = False
        """The sidecar received the request to ingest this rank's part, or may have."""
        self._local_error: Exception | None = None
        """The error that failed the save on this rank, unless it is a PannierError."""
        self._is_ended = False
        self._timer = sidecar.timer(deadline.remaining() + timeouts.DECISION_S, self._expire)
        self._follow()

    @property
    def handle(self) -> SaveHandle:
        """What the caller gets."""
        return self.resolver.handle

    @property
    def context(self) -> sidecar_pb2.SaveContext:
        """Of the save."""
        return self._context

    @property
    def text(self) -> str:
        """The save's id."""
        return object_names.save_text(self._context.save)

    @property
    def claim(self) -> PlanClaim | None:
        """The save's claim to use a cached plan; None: its plan was confirmed before."""
        return self._claim

    def set_attempt(
        self,
        attempt: str,
        claim: PlanClaim | None = None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """The plan is known, and staging begins.

        Args:
            claim: of this rank's part of the last plan; None: the plan is confirmed.
            on_failure: called with the error before the handle fails.
        """
        self._claim = claim
        self._on_failure = on_failure
        self.times.end("plan")
        self.resolver.update(
            lambda status: dataclasses.replace(status, attempt=attempt, state="STAGING")
        )

    def fail_behind(self, error: SaveAbortedError, number: int) -> None:
        """This rank missed saves: its own has ended, and the group's ``number``-th fails on all ranks."""
        request = fail_request(self._context, error)
        request.context.save.number = number
        self._send(request)
        self._fail(error, ArenaUse.UNUSED)

    def settle_abort(self) -> None:
        """Nothing is left to be sent: applies a deferred ABORT, and later ones at once."""
        with self._lock:
            claim, self._claim = self._claim, None
        if claim is not None and claim.aborted is not None and not self.handle.done():
            self._abort(claim.aborted)

    def begin_hand_over(self) -> None:
        """From now on the sidecar may have ingested this rank. Raises StoppedError: the save was stopped."""
        with self._lock:
            if self.stop.is_set:
                raise StoppedError
            self._handed_over = True

    def give_up(self, error: Exception) -> None:
        """Reports that this rank failed; fails the handle unless the decision comes soon.

        On this rank the handle raises an exception of the user's code or a device itself, unless
        the save may still be committed.
        """
        self.stop.set()
        self._timer.cancel()
        outcome = self._error_without_decision(error)
        is_in_doubt = isinstance(outcome, InDoubtError)
        left = self.deadline.remaining() + timeouts.DECISION_S
        patience = min(timeouts.ABORT_S, left) if is_in_doubt else timeouts.CAUSES_S
        if not self._is_ended:
            self._timer = self._sidecar.timer(patience, lambda: self._fail(outcome))
        if not isinstance(error, SaveAbortedError):
            request = fail_request(self._context, error)
            if not isinstance(error, PannierError):
                # Before the ABORT can arrive.
                name_save(error, self.text, self._context.checkpoint_id)
                self._local_error = error
            self._send(request)

    def report(self, error: BaseException) -> None:
        """Reports this rank's failure, which aborts the save on all ranks."""
        self._send(fail_request(self._context, error))

    def forget(self) -> None:
        """The call raises: the caller gets no handle, and knows the error."""
        self.resolver.outcome.mark_retrieved()
        self._fail(SaveAbortedError(f"save {self.text} was given up"), quietly=True)

    def trace(self, error: str = "") -> None:
        """Exports the spans of this rank's part so far."""
        self.times.trace(self._context, self.handle.status().bytes, error)

    def _follow(self) -> None:
        self._sidecar.followed.follow(
            self._context, self._on_status, self.waiting.set_unresponsive, self.deadline
        )

    def _send(self, request: sidecar_pb2.FailRequest) -> None:
        try:
            self._sidecar.fail(request)
        except PannierError as problem:
            # The sidecar will detect the failure by itself.
            self.waiting.set_report_failed(problem)

    def _error_without_decision(self, error: Exception) -> Exception:
        """What the handle raises while the coordinator's decision isn't known.

        If this rank was not handed over, the save can't be committed: only ABORT is possible. If it
        was, or may have been, this process can't know the decision. To be called once no hand-over
        can begin any more (``stop`` is set).
        """
        if isinstance(error, SaveAbortedError):
            return error
        with self._lock:
            handed_over = self._handed_over
        if handed_over:
            return in_doubt(self._context, str(error))
        if not isinstance(error, PannierError):
            return error
        return not_handed_over(self._context, error)

    def _on_status(self, update: save_pb2.SaveStatus) -> None:
        self.waiting.status_arrived(update.waiting_on.text)
        claim = self._claim
        if claim is not None:
            claim.on_status(update)
        own = [rank for rank in update.ranks if rank.rank == self._context.rank]
        uploaded = sum(rank.bytes_uploaded for rank in own)
        committed = update.state == save_pb2.SAVE_STATE_COMMITTED
        # The response to the hand-over may come later.
        ingested = committed or any(rank.phase in _NEED_NO_TRAINER for rank in own)
        self.resolver.update(
            lambda status: dataclasses.replace(
                status,
                attempt=update.attempt or status.attempt,
                state=save_pb2.SaveState.Name(update.state).removeprefix("SAVE_STATE_"),
                total_bytes=update.bytes_total or status.total_bytes,
                bytes_ingested=status.bytes if ingested else status.bytes_ingested,
                bytes_uploaded=max(status.bytes_uploaded, uploaded),
                waiting_on=self.waiting.text,
                failures={failure.rank: Failure.of(failure) for failure in update.failures},
            )
        )
        if ingested:
            # The plan may be confirmed after this rank's wait for it has timed out.
            self.resolver.ingested()
        if committed:
            self._commit(update)
        elif update.state == save_pb2.SAVE_STATE_ABORTED:
            with self._lock:
                claim = self._claim
                behind = update.checkpoint_id != self._context.checkpoint_id
                if claim is not None and behind:
                    # Deferred until it is known whether this rank missed saves.
                    claim.aborted = update
            self.stop.set()
            if claim is None or not behind:
                self._abort(update)

    def _abort(self, update: save_pb2.SaveStatus) -> None:
        waiting = self.waiting.text if self.waiting.room else ""
        self._fail(self._local_error or aborted(update, waiting), ArenaUse.UNUSED)

    def _commit(self, update: save_pb2.SaveStatus) -> None:
        if "ingest" not in self.times.seconds():
            # The status arrived before the response to the hand-over.
            self.times.end("ingest")
        self.times.end("commit")
        own = self.handle.status().bytes
        result = SaveResult(
            checkpoint_id=self._context.checkpoint_id,
            attempt=update.attempt,
            bytes=own,
            total_bytes=update.bytes_total or own,
            seconds=self.times.seconds(),
        )
        cost = self.times.cost(update.ranks)
        if not self._begin_end():
            return
        with self._resolving(lambda: self.resolver.resolve(result)):
            self._end(ArenaUse.LOCAL_COPY)
            self.trace()
            self._on_committed(self._context, result.total_bytes, cost)

    def _fail(
        self, error: Exception, fate: ArenaUse = ArenaUse.READ_BY_SIDECAR, *, quietly: bool = False
    ) -> None:
        """``fate``: UNUSED where the sidecar has reported the save's outcome.

        Otherwise the sidecar may still read its files, or begin to.
        """
        is_expected = isinstance(error, SaveSkippedError) and self._expects_skip
        if not self._begin_end():
            return
        if isinstance(error, SaveSkippedError):
            self.resolver.update(lambda status: dataclasses.replace(status, state="SKIPPED"))
        with self._resolving(lambda: self.resolver.fail(error, quietly=quietly or is_expected)):
            # Before the caller can see the failure, and save again.
            self._on_failure(error)
            self._end(fate)
            self.trace(str(error))

    def _begin_end(self) -> bool:
        """Whether the caller is to end the save: timers and statuses, on several threads, may try to."""
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
            return is_first

    @contextmanager
    def _resolving(self, resolve: Callable[[], object]) -> Iterator[None]:
        """Resolves the handle after this block, even if it raises: the program's logging or tracing may."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - who waits for the save must learn its outcome
            with suppress(Exception):
                _log.warning("%s: after its end: %r", self.handle.status().id, error)
        finally:
            resolve()
            self._on_ended(self)

    def _end(self, fate: ArenaUse) -> None:
        self._sidecar.followed.unfollow(self._context.save)
        self._timer.cancel()
        self.arena.save_ended(fate)

    def _expire(self) -> None:
        self.stop.set()
        error = DeadlineError(
            f"the save's deadline passed: {self.handle.status()}; a longer timeout, or "
            "PANNIER_SAVE_TIMEOUT, gives slow storage more time"
        )
        self._fail(self._error_without_decision(error))
