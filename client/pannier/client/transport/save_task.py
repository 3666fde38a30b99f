"""One save of this rank: from its number to its end.

In: what was staged, and the statuses that the sidecar pushes. Out: a handle that
ends. A :class:`SaveTask` lives as long as its save is under way; its own thread
carries the bytes to the sidecar, the session's threads bring the news.
"""

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Protocol

from pannier.client.handle import Resolver, SaveHandle, SaveResult
from pannier.client.staging.arena import Arena
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.in_flight import ArenaUse, InFlightSave
from pannier.client.transport.file_stream import (
    MemoryInUseError,
    StagedFile,
    Stop,
    StoppedError,
)
from pannier.client.transport.shared_memory import SpoolMapping
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import description, name_save
from pannier.common import tracing
from pannier.common.deadline import Deadline
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    InDoubtError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)
from pannier.wire.failures import aborted_error, failure_kind

_log = logging.getLogger(__name__)

_ABORT_NEWS_S: Final = 30.0
"""How long to wait for the coordinator's ABORT before the handle fails with InDoubtError, once this
rank has failed and may have been ingested."""
_CAUSES_S: Final = 2.0
"""How long to wait for the causes of all ranks before the handle fails with the local error, of a
save that can't be committed."""
_GRACE_S: Final = 5.0
"""How long to wait for the coordinator's decision after the save's deadline."""
_BUSY_PAUSE_S: Final = 0.5
_EXIT_S: Final = 60.0
"""While the interpreter is ending: how long a full spool is waited for without any progress."""


class Staged(Protocol):
    """What staging leaves (see ``pannier.client.staging.stager``)."""

    @property
    def files(self) -> Sequence[StagedFile]:
        """Data files in host memory."""

    @property
    def arena(self) -> Arena:
        """Whose memory that is."""

    @property
    def varying(self) -> Sequence[records_pb2.VaryingItem]:
        """Places that the plan didn't know."""

    @property
    def bytes(self) -> int:
        """Sum of the files' sizes."""

    @property
    def deferred(self) -> DeferredCopies | None:
        """Copies from devices that are still under way."""

    @property
    def copy_description(self) -> str:
        """By which way bytes came from devices, for people."""


class PlanConfirmation(Protocol):
    """See :class:`pannier.client.planning.plan_confirmation.PlanConfirmation`."""

    def confirm(self, context: sidecar_pb2.SaveContext) -> str:
        """The id of the plan that all ranks go by; blocks until every rank has claimed it."""

    def renumber(self, number: int, staged: Any) -> "tuple[str, Staged]":
        """Attempt and staged files under the name of the group's ``number``-th save."""

    def save_failed(self) -> None:
        """Drops the plan that the save was staged by."""


class SaveTask:
    """One save under way. Thread-safe."""

    def __init__(
        self,
        session: SidecarClient,
        context: sidecar_pb2.SaveContext,
        *,
        on_busy: str,
        metrics: Mapping[str, float] | None = None,
        deadline: Deadline,
        ended: Callable[["SaveTask"], None],
    ) -> None:
        self.session = session
        self.context = context
        self.text = object_names.save_text(context.save)
        self.deadline = deadline
        self.stop = Stop()
        self.handle = SaveHandle(self.text, context.checkpoint_id)
        self.resolver = Resolver(self.handle)
        self._on_busy = on_busy
        self._metrics = metrics
        self._ended = ended
        self._plan = ("", "")
        self._confirmation: PlanConfirmation | None = None
        self._staged: Staged | None = None
        self._bytes = 0
        self._lock = threading.Lock()
        self._handed_over = False
        """The sidecar was asked to ingest this rank's part, and may have done so."""
        self.carried = False
        """A thread of its own brings it to the sidecar."""
        self.carrying = True
        """The sidecar doesn't have all of it."""
        self._raised: Exception | None = None
        """What ended the save on this rank, where it isn't an error of Pannier's."""
        self._traced = False
        self._slot: InFlightSave | None = None
        """Holds the arena; set when :meth:`carry` begins."""
        self._end: ArenaUse | None = None
        """What the save's end says of the arena; None: it has not ended for this process."""
        self._gave_files = False
        """The sidecar may have been given mapped files."""
        self._lacked: list[int] = []
        """Bytes of each file that the sidecar didn't hold when they were last sent."""
        self._told_waiting = ""
        """Whom the save waits for, as the sidecar told."""
        self._silent = ""
        """The sidecar itself, when it isn't heard of."""
        self._copying = ""
        """The devices that still copy to the arena."""
        self._no_room: dict[str, BusyError] = {}
        """Files that the spool has no room for now, by name."""
        self._moved = time.monotonic()
        """When bytes last moved; or, before the interpreter's end, when that was last asked."""
        self._seconds: dict[str, float] = {}
        self._began = self._phase_began = time.monotonic()
        session.watch(context, self._hear, self._hear_silence, deadline)
        self._timer = session.timer(deadline.remaining() + _GRACE_S, self._expire)

    def planned(
        self, attempt: str, plan_id: str, confirmation: PlanConfirmation | None = None
    ) -> None:
        """The plan is known; ``confirmation`` confirms a cached one."""
        self._plan = (attempt, plan_id)
        self._confirmation = confirmation
        self._phase_over("plan")
        self.resolver.update(
            lambda status: dataclasses.replace(status, attempt=attempt, state="STAGING")
        )

    def staged(self, staged: Staged) -> None:
        """The state dict may change, but for what is still copied."""
        self._staged = staged
        self._bytes = staged.bytes
        if staged.bytes and not staged.arena.streaming_reason and not self._lent():
            staged.arena.streaming_reason = "all of it is serialised, so that no size was planned"
        self._phase_over("stage")
        self.resolver.update(
            lambda status: dataclasses.replace(
                status,
                bytes=staged.bytes,
                transport=_transport(staged),
                staging=staged.copy_description,
            )
        )
        if staged.deferred is None:
            self.resolver.staged()

    def carry(self, slot: InFlightSave) -> None:
        """Brings what is staged to the sidecar. Runs in a thread.

        Args:
            slot: is given back when its arena is needed no more: at the end of this, or, when the
                sidecar uploads from it, at the end of the save.
        """
        if not slot.begin_sending():
            self._staged = None
            return
        with self._lock:
            self._slot = slot
            end = self._end
        if end is not None:
            slot.ended(end)
        # An interrupt may leave threads that send.
        fate = ArenaUse.READ_LOCALLY
        try:
            self._finish_staging()
            self._send_to_sidecar()
            self._phase_over("ingest")
            fate = ArenaUse.UNUSED
        except StoppedError:
            fate = ArenaUse.UNUSED
        except Exception as error:  # noqa: BLE001 - a thread's end: it becomes the save's failure
            fate = ArenaUse.READ_LOCALLY if isinstance(error, MemoryInUseError) else ArenaUse.UNUSED
            self.give_up(error)
        finally:
            self.carrying = False
            self._staged = None
            slot.sent(fate, handed_over=self._gave_files)

    def _finish_staging(self) -> None:
        """Waits for the copies that outlast the call."""
        rest = self._staged.deferred if self._staged is not None else None
        if rest is None:
            return
        self._copying = f"copies from {rest.devices}"
        self._show_waiting()
        try:
            rest.finish(stop=lambda: self.stop.is_set)
        finally:
            self._copying = ""
            self._show_waiting()
        if self.stop.is_set:
            raise StoppedError
        self._phase_over("copy")
        self.resolver.staged()

    def _send_to_sidecar(self) -> None:
        try:
            self._confirm_plan()
            self._ingest()
        except (PannierError, StoppedError):
            raise
        except Exception as error:
            raise PannierError(f"{type(error).__name__} while sending: {error}") from error

    def _confirm_plan(self) -> None:
        """Waits until all ranks go by the plan that this one staged by."""
        while self._confirmation is not None:
            try:
                self._plan = (self._plan[0], self._confirmation.confirm(self.context))
                return
            except SaveAbortedError as error:
                if error.resume_at <= self.context.save.number:
                    raise
                # This rank didn't call saves that the others did: it joins them again.
                _log.warning("%s", error)
                self._become(self._confirmation, error.resume_at)

    def _become(self, confirmation: PlanConfirmation, number: int) -> None:
        """Goes on as another save of the group; of the one that it was nobody has heard."""
        self.session.unwatch(self.context.save)
        context = sidecar_pb2.SaveContext()
        context.CopyFrom(self.context)
        context.save.number = number
        attempt, self._staged = confirmation.renumber(number, self._staged)
        self.context, self._plan = context, (attempt, "")
        self.text = object_names.save_text(context.save)
        self.session.watch(context, self._hear, self._hear_silence, self.deadline)
        self.resolver.update(
            lambda status: dataclasses.replace(status, id=self.text, attempt=attempt)
        )

    def give_up(self, error: Exception) -> None:
        """Reports that this rank can't go on; fails the handle unless the decision comes soon.

        What isn't Pannier's own error, such as a device's, is what the handle raises on this rank,
        unless the save may be committed all the same.
        """
        self.stop.set()
        self._timer.cancel()
        end = self._end_without_decision(error)
        in_doubt = isinstance(end, InDoubtError)
        left = self.deadline.remaining() + _GRACE_S
        patience = min(_ABORT_NEWS_S, left) if in_doubt else _CAUSES_S
        self._timer = self.session.timer(patience, lambda: self._fail(end))
        if not isinstance(error, SaveAbortedError):
            request = fail_request(self.context, error)
            if not isinstance(error, PannierError):
                # Before the ABORT can come.
                name_save(error, self.text, self.context.checkpoint_id)
                self._raised = error
            self._send_failure(request)

    def _end_without_decision(self, error: Exception) -> Exception:
        """What the handle raises while the coordinator's decision isn't known.

        A rank that has not been handed over can't be part of a commit: no decision but ABORT is
        left. Of one that was, or may have been, this process can't tell. To be called once no hand-over
        can begin any more (``stop`` is set).
        """
        if isinstance(error, SaveAbortedError):
            return error
        with self._lock:
            handed_over = self._handed_over
        if handed_over:
            return self._in_doubt(str(error))
        if not isinstance(error, PannierError):
            return error
        failures = error.failures or {-1: fail_request(self.context, error).failure}
        return SaveAbortedError(
            f"save {self.text} to {self.context.checkpoint_id} can't be committed, because the "
            f"part of rank {self.context.rank} was not handed over: {error}",
            failures.values(),
        )

    def report(self, error: BaseException) -> None:
        """Tells the other ranks why this save is over.

        When the sidecar can't be told it finds out by itself; ``error`` is raised anyway.
        """
        self._send_failure(fail_request(self.context, error))

    def _send_failure(self, request: sidecar_pb2.FailRequest) -> None:
        try:
            self.session.fail(request)
        except PannierError as problem:
            waiting = f"the sidecar, to be told of a failure ({problem})"
            self.resolver.update(lambda s: dataclasses.replace(s, waiting_on=waiting))

    def forget(self) -> None:
        """The call raises: nobody gets the handle, and the caller knows."""
        self.resolver.outcome.retrieved = True
        self._fail(SaveAbortedError(f"save {self.text} was given up"), quietly=True)

    def _phase_over(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = now - self._phase_began
        self._phase_began = now

    def _lent(self) -> dict[str, SpoolMapping]:
        """By name, the files that were staged into the sidecar's own memory."""
        if self._staged is None:
            return {}
        lent = {}
        for file in self._staged.files:
            mapping = getattr(file.keepalive, "mapping", None)
            if isinstance(mapping, SpoolMapping):
                lent[file.name] = mapping
        return lent

    def _ingest(self) -> None:
        mapped = self._lent()
        for mapping in mapped.values():
            mapping.seal()
        files = self._send_all(mapped)
        while True:
            try:
                self._hand_over(files, mapped)
                return
            except InvalidRequestError as error:
                # A sidecar that was started anew may have forgotten what its predecessor held, and
                # knows none of its loans. Of what it holds, nothing is sent twice.
                if mapped:
                    self._refuse_mapped(error)
                mapped = {}
                files = self._send_all(mapped)
                if not sum(self._lacked):
                    raise
                _log.warning(
                    "save %s: the %s had lost %d bytes and got them once more",
                    *(self.text, self.session.peer, sum(self._lacked)),
                )
                _log.debug("what it said: %s", error)

    def _refuse_mapped(self, error: PannierError) -> None:
        """What was staged into the spool must be streamed all the same."""
        assert self._staged is not None
        self._staged.arena.streaming_reason = f"it was mapped, but {error}"
        transport = _transport(self._staged)
        self.resolver.update(lambda status: dataclasses.replace(status, transport=transport))

    def _send_all(self, mapped: Container[str]) -> list[records_pb2.DataFile]:
        assert self._staged is not None
        todo = deque(file for file in self._staged.files if file.name not in mapped)
        held: dict[str, int] = {}
        crcs: dict[str, int] = {}
        problems: list[Exception] = []
        self._lacked = []

        def progress(name: str, size: int, committed: int) -> None:
            if name not in held:
                self._lacked.append(size - committed)
            held[name] = committed
            total = sum(held.values())
            self._moved = time.monotonic()
            self.resolver.update(lambda s: dataclasses.replace(s, bytes_ingested=total))

        def work() -> None:
            try:
                while not problems and not self.stop.is_set:
                    try:
                        file = todo.popleft()
                    except IndexError:
                        return
                    crcs[file.name] = self._send(
                        file, functools.partial(progress, file.name, file.size)
                    )
            except Exception as error:  # noqa: BLE001 - raised below, in the save's own thread
                problems.append(error)

        helpers = [
            threading.Thread(target=work, name=f"pannier-send-{self.text}-{index}")
            for index in range(1, min(len(todo), self.session.most_streams))
        ]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        # Before anything else: it decides whether the memory is used again.
        for problem in problems:
            if isinstance(problem, MemoryInUseError):
                raise problem
        if self.stop.is_set:
            raise StoppedError
        if problems:
            raise problems[0]
        return [
            records_pb2.DataFile(name=file.name, size=file.size, crc32c=crcs.get(file.name, 0))
            for file in self._staged.files
        ]

    def _send(self, file: StagedFile, progress: Callable[[int], None]) -> int:
        def taken(committed: int) -> None:
            if self._no_room.pop(file.name, None) is not None:
                self._show_waiting()
            progress(committed)

        while True:
            try:
                return self.session.send(
                    self.context,
                    self._plan[0],
                    file,
                    reason=self._staged.arena.streaming_reason if self._staged is not None else "",
                    timeout=self.deadline.remaining(),
                    progress=taken,
                    stop=self.stop,
                )
            except BusyError as error:
                if self._on_busy == "skip":
                    skipped = SaveSkippedError(str(error))
                    self.report(skipped)
                    raise skipped from error
                self._no_room.pop(file.name, None)
                # So early that the other ranks hear this reason, and not that a deadline passed.
                if self._on_busy == "raise" or self.deadline.remaining() <= 2 * _BUSY_PAUSE_S:
                    raise
                if self._stuck_at_exit():
                    _log.error(
                        "save %s to %s is given up, for the process is ending: %s",
                        self.text,
                        self.context.checkpoint_id,
                        error,
                    )
                    raise
                self._no_room[file.name] = error
                self._show_waiting()
                if self.stop.wait(_BUSY_PAUSE_S):
                    raise StoppedError from error

    def _stuck_at_exit(self) -> bool:
        """Whether the interpreter is ending, and waits for us, and nothing has moved for a while."""
        if threading.main_thread().is_alive():
            self._moved = time.monotonic()
        return time.monotonic() - self._moved >= _EXIT_S

    def _waiting(self) -> str:
        """Whom or what the save waits for: what is known here goes before what the sidecar told."""
        if self._silent or self._copying:
            return self._silent or self._copying
        full = next(iter(list(self._no_room.values())), None)
        return f"room ({full})" if full is not None else self._told_waiting

    def _show_waiting(self) -> None:
        self.resolver.update(lambda s: dataclasses.replace(s, waiting_on=self._waiting()))

    def _hand_over(
        self, files: Sequence[records_pb2.DataFile], mapped: Mapping[str, SpoolMapping]
    ) -> None:
        assert self._staged is not None
        attempt, plan_id = self._plan
        request = sidecar_pb2.HandOverRequest(
            context=self.context,
            attempt=attempt,
            plan_id=plan_id,
            files=files,
            varying=self._staged.varying,
            mapped=[
                sidecar_pb2.MappedFile(name=name, slab=mapping.slab, stamp=mapping.stamp)
                for name, mapping in mapped.items()
            ],
            # The call has returned after that, or is about to.
            stalled_s=self._seconds.get("plan", 0.0) + self._seconds.get("stage", 0.0),
            metrics=self._metrics,
        )
        with self._lock:
            if self.stop.is_set:
                raise StoppedError
            self._handed_over = True
        # Whatever the answer: an earlier try may have arrived, and one that is given up may later.
        self._gave_files = self._gave_files or bool(mapped)
        self.session.hand_over(request, self.deadline.remaining())
        if mapped:
            held = self._staged.bytes
            self.resolver.update(lambda s: dataclasses.replace(s, bytes_ingested=held))

    def _hear_silence(self, text: str) -> None:
        self._silent = text
        self._show_waiting()

    def _hear(self, news: save_pb2.SaveStatus) -> None:
        state = save_pb2.SaveState.Name(news.state).removeprefix("SAVE_STATE_")
        self._told_waiting = news.waiting_on.text
        self._silent = ""
        self.resolver.update(
            lambda status: dataclasses.replace(
                status,
                attempt=news.attempt or status.attempt,
                state=state,
                total_bytes=news.bytes_total or status.total_bytes,
                waiting_on=self._waiting(),
                failures={failure.rank: failure for failure in news.failures},
            )
        )
        if news.state == save_pb2.SAVE_STATE_COMMITTED:
            self._commit(news)
        elif news.state == save_pb2.SAVE_STATE_ABORTED:
            self.stop.set()
            error = self._raised or aborted(news, self._waiting() if self._no_room else "")
            self._fail(error, ArenaUse.UNUSED)

    def _commit(self, news: save_pb2.SaveStatus) -> None:
        if "ingest" not in self._seconds:
            # The news were faster than the answer to our hand-over.
            self._phase_over("ingest")
        self._phase_over("commit")
        own = self._bytes
        result = SaveResult(
            checkpoint_id=self.context.checkpoint_id,
            attempt=news.attempt,
            bytes=own,
            total_bytes=news.bytes_total or own,
            seconds=dict(self._seconds),
        )
        self._leave(ArenaUse.UNUSED)
        self.trace()
        self.resolver.resolve(result)
        self._ended(self)

    def _fail(
        self, error: Exception, end: ArenaUse = ArenaUse.READ_BY_SIDECAR, *, quietly: bool = False
    ) -> None:
        """``end``: UNUSED where the sidecar has reported the save's end.

        Else that is not known: the sidecar may still read its files, or begin to.
        """
        if self._confirmation is not None:
            # Before anybody hears of it, and saves again.
            self._confirmation.save_failed()
        self._leave(end)
        skipped = isinstance(error, SaveSkippedError) and self._on_busy == "skip"
        self.trace(str(error))
        self.resolver.fail(error, quietly=quietly or skipped)
        self._ended(self)

    def trace(self, error: str = "") -> None:
        """Tells the spans of this rank's part so far, if anybody wants them; only once."""
        with self._lock:
            told, self._traced = self._traced, True
        if told:
            return
        parts, begin = [], self._began
        for phase, seconds in self._seconds.items():
            parts.append(tracing.Interval(phase, begin, begin + seconds))
            begin += seconds
        about: tracing.Attributes = {
            "pannier.checkpoint": self.context.checkpoint_id,
            "pannier.rank": self.context.rank,
            "pannier.host": self.context.host,
            "pannier.bytes": self._bytes,
        }
        own = tracing.Interval("async_save", self._began, time.monotonic(), about, error)
        tracing.export_rank(self.context.save, self.context.rank, own, parts)

    def _leave(self, fate: ArenaUse) -> None:
        self.session.unwatch(self.context.save)
        self._timer.cancel()
        with self._lock:
            # A later report of the sidecar's doesn't say more than the first.
            self._end = fate if self._end is None else max(self._end, fate)
            slot, end = self._slot, self._end
        if slot is not None:
            slot.ended(end)

    def _expire(self) -> None:
        self.stop.set()
        error = DeadlineError(f"{self.handle.status()} when its deadline passed")
        self._fail(self._end_without_decision(error))

    def _in_doubt(self, why: str) -> InDoubtError:
        return in_doubt(self.context, why)


def _transport(staged: Staged) -> str:
    reason = staged.arena.streaming_reason
    return f"streamed: {reason}" if reason else "mapped"


def fail_request(context: sidecar_pb2.SaveContext, error: BaseException) -> sidecar_pb2.FailRequest:
    """The message that ends a save on all ranks because of ``error`` on this one."""
    failure = save_pb2.Failure(
        rank=context.rank,
        host=context.host,
        kind=failure_kind(error, other=save_pb2.FAILURE_KIND_CLIENT),
        message=description(error),
    )
    return sidecar_pb2.FailRequest(context=context, failure=failure)


def in_doubt(context: sidecar_pb2.SaveContext, why: str) -> InDoubtError:
    """The error of a save that others may have decided, or may yet decide."""
    text = object_names.save_text(context.save)
    root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
    return InDoubtError(
        f"save {text} to {context.checkpoint_id} is in doubt: {why}. It may still be committed: "
        f"don't use or delete this checkpoint id before its end is known, by `pannier status {text}`, "
        f"`pannier ls {root}` or client.latest({root!r})"
    )


def aborted(status: save_pb2.SaveStatus, waiting: str = "") -> SaveAbortedError:
    """The error of the aborted save that ``status`` describes; ``waiting`` as in aborted_error."""
    key = object_names.save_text(status.save)
    return aborted_error(key, status.checkpoint_id, status.failures, waiting=waiting)
