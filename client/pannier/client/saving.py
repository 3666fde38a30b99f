"""One save of this rank: from its number to its end.

In: what was staged, and the statuses that the sidecar pushes. Out: a handle that
ends. A :class:`Saving` lives as long as its save is under way; its own thread
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

from pannier.client.arena import Arena
from pannier.client.handle import Resolver, SaveHandle, SaveResult
from pannier.client.lent import LentMapping
from pannier.client.rest import Rest
from pannier.client.session import Session
from pannier.client.slots import Fate, Slot
from pannier.client.streaming import Deadline, MemoryInUseError, StagedFile, Stop, StoppedError
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors, identity, tracing
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)

_ABORT_NEWS_S: Final = 30.0
"""After giving up: how long until our own error stands in for the news of the abort."""
_CAUSES_S: Final = 2.0
"""The same when we were told that the save is over: the news only bring all its causes."""
_GRACE_S: Final = 30.0
"""After the save's deadline: how long the coordinator has to say how it ended."""
_BUSY_PAUSE_S: Final = 0.5
_EXIT_S: Final = 60.0
"""While the interpreter is ending: how long a full spool is waited for without any progress."""
_KINDS: Final[tuple[tuple[type[BaseException], save_pb2.FailureKind], ...]] = (
    (SaveSkippedError, save_pb2.FAILURE_KIND_SKIPPED),
    (errors.IntegrityError, save_pb2.FAILURE_KIND_INTEGRITY),
    (errors.StorageError, save_pb2.FAILURE_KIND_STORAGE),
    (DeadlineError, save_pb2.FAILURE_KIND_DEADLINE),
    (BusyError, save_pb2.FAILURE_KIND_SPOOL),
)


class Staged(Protocol):
    """What staging leaves (see ``pannier.client.staging``)."""

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
    def rest(self) -> Rest | None:
        """Copies from devices that are still under way."""

    @property
    def how(self) -> str:
        """By which way bytes came from devices, for people."""


class Agreement(Protocol):
    """What a plan from the cache still lacks (see ``pannier.client.cached``)."""

    def settle(self, context: sidecar_pb2.SaveContext) -> str:
        """Waits until all ranks go by one plan; returns its id."""

    def become(self, number: int, staged: Any) -> "tuple[str, Staged]":
        """The attempt and what is staged, if this were the group's ``number``-th save."""

    def failed(self) -> None:
        """The save that went by the plan has failed."""


class Saving:
    """One save under way. Thread-safe."""

    def __init__(
        self,
        session: Session,
        context: sidecar_pb2.SaveContext,
        *,
        on_busy: str,
        metrics: Mapping[str, float] | None = None,
        deadline: Deadline,
        ended: Callable[["Saving"], None],
    ) -> None:
        self.session = session
        self.context = context
        self.text = identity.save_text(context.save)
        self.deadline = deadline
        self.stop = Stop()
        self.handle = SaveHandle(self.text, context.checkpoint_id)
        self.resolver = Resolver(self.handle)
        self._on_busy = on_busy
        self._metrics = metrics
        self._ended = ended
        self._plan = ("", "")
        self._agreement: Agreement | None = None
        self._staged: Staged | None = None
        self._bytes = 0
        self._lock = threading.Lock()
        self._over = False
        """It has ended for this process."""
        self._traced = False
        self._slot: Slot | None = None
        """Holds the arena while nobody but the sidecar needs it."""
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
        session.watch(context, self._hear, self._hear_silence)
        self._timer = session.alarm(deadline.remaining() + _GRACE_S, self._expire)

    def planned(self, attempt: str, plan_id: str, agreement: Agreement | None = None) -> None:
        """The plan is known, and agreed but for what ``agreement`` still has to settle."""
        self._plan = (attempt, plan_id)
        self._agreement = agreement
        self._phase_over("plan")
        self.resolver.update(
            lambda status: dataclasses.replace(status, attempt=attempt, state="STAGING")
        )

    def staged(self, staged: Staged) -> None:
        """The state dict may change, but for what is still copied."""
        self._staged = staged
        self._bytes = staged.bytes
        if staged.bytes and not staged.arena.streams_because and not self._lent():
            staged.arena.streams_because = "all of it is serialised, so that no size was planned"
        self._phase_over("stage")
        self.resolver.update(
            lambda status: dataclasses.replace(
                status, bytes=staged.bytes, transport=_transport(staged), staging=staged.how
            )
        )
        if staged.rest is None:
            self.resolver.staged()

    def carry(self, slot: Slot) -> None:
        """Brings what is staged to the sidecar. Runs in a thread.

        Args:
            slot: freed when its arena is needed no more: at the end of this, or, when the sidecar
                uploads from it, at the end of the save.
        """
        fate = Fate.UNUSED
        try:
            self._finish_staging()
            self._settle()
            self._ingest()
            self._phase_over("ingest")
        except StoppedError:
            pass
        except PannierError as error:
            if isinstance(error, MemoryInUseError):
                fate = Fate.READ_HERE
            self.give_up(error)
        except Exception as error:  # noqa: BLE001 - a thread's end: it becomes the save's failure
            self.give_up(PannierError(f"{type(error).__name__} while sending: {error}"))
        finally:
            lent = self._lent()
            self._staged = None
            with self._lock:
                kept = bool(lent) and fate is Fate.UNUSED and not self._over
                self._slot = slot if kept else None
            if kept:
                slot.settle()
            else:
                slot.free(fate)

    def _finish_staging(self) -> None:
        """Waits for the copies that outlast the call."""
        rest = self._staged.rest if self._staged is not None else None
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

    def _settle(self) -> None:
        """Waits until all ranks go by the plan that this one staged by."""
        while self._agreement is not None:
            try:
                self._plan = (self._plan[0], self._agreement.settle(self.context))
                return
            except SaveAbortedError as error:
                if error.resume_at <= self.context.save.number:
                    raise
                # This rank didn't call saves that the others did: it joins them again.
                _log.warning("%s", error)
                self._become(self._agreement, error.resume_at)

    def _become(self, agreement: Agreement, number: int) -> None:
        """Goes on as another save of the group; of the one that it was nobody has heard."""
        self.session.unwatch(self.context.save)
        context = sidecar_pb2.SaveContext()
        context.CopyFrom(self.context)
        context.save.number = number
        attempt, self._staged = agreement.become(number, self._staged)
        self.context, self._plan = context, (attempt, "")
        self.text = identity.save_text(context.save)
        self.session.watch(context, self._hear, self._hear_silence)
        self.resolver.update(
            lambda status: dataclasses.replace(status, id=self.text, attempt=attempt)
        )

    def give_up(self, error: PannierError) -> None:
        """This rank can't go on: says so, and fails the handle if no news of the abort comes."""
        self.stop.set()
        self._timer.cancel()
        patience = _CAUSES_S
        if not isinstance(error, SaveAbortedError):
            self.report(error)
            patience = _ABORT_NEWS_S
            error = type(error)(f"{error}; {self._in_doubt()}", error.failures.values())
        self._timer = self.session.alarm(patience, lambda: self._fail(error))

    def report(self, error: BaseException) -> None:
        """Tells the other ranks why this save is over.

        When the sidecar can't be told it finds out by itself; ``error`` is raised anyway.
        """
        try:
            self.session.fail(fail_request(self.context, error))
        except PannierError as problem:
            waiting = f"the sidecar, to be told of a failure ({problem})"
            self.resolver.update(lambda s: dataclasses.replace(s, waiting_on=waiting))

    def forget(self) -> None:
        """The call raises: nobody gets the handle, and the caller knows."""
        self.resolver.verdict.asked = True
        self._fail(SaveAbortedError(f"save {self.text} was given up"), quietly=True)

    def _phase_over(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = now - self._phase_began
        self._phase_began = now

    def _lent(self) -> dict[str, LentMapping]:
        """By name, the files that were staged into the sidecar's own memory."""
        if self._staged is None:
            return {}
        lent = {}
        for file in self._staged.files:
            mapping = getattr(file.keepalive, "mapping", None)
            if isinstance(mapping, LentMapping):
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
        self._staged.arena.streams_because = f"it was mapped, but {error}"
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
                    reason=self._staged.arena.streams_because if self._staged is not None else "",
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
        self, files: Sequence[records_pb2.DataFile], mapped: Mapping[str, LentMapping]
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
                sidecar_pb2.MappedFile(name=name, slab=mapping.slab)
                for name, mapping in mapped.items()
            ],
            # The call has returned after that, or is about to.
            stalled_s=self._seconds.get("plan", 0.0) + self._seconds.get("stage", 0.0),
            metrics=self._metrics,
        )
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
            self._leave(Fate.UNUSED)
            self._fail(aborted(news, self._waiting() if self._no_room else ""))

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
        self._leave(Fate.UNUSED)
        self.trace()
        self.resolver.resolve(result)
        self._ended(self)

    def _fail(self, error: PannierError, *, quietly: bool = False) -> None:
        if self._agreement is not None:
            # Before anybody hears of it, and saves again.
            self._agreement.failed()
        # Nobody knows how it ended: the sidecar may still be at its files.
        self._leave(Fate.READ_BY_SIDECAR)
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
            parts.append(tracing.Stretch(phase, begin, begin + seconds))
            begin += seconds
        about: tracing.Attributes = {
            "pannier.checkpoint": self.context.checkpoint_id,
            "pannier.rank": self.context.rank,
            "pannier.host": self.context.host,
            "pannier.bytes": self._bytes,
        }
        own = tracing.Stretch("async_save", self._began, time.monotonic(), about, error)
        tracing.tell_rank(self.context.save, self.context.rank, own, parts)

    def _leave(self, fate: Fate) -> None:
        self.session.unwatch(self.context.save)
        self._timer.cancel()
        with self._lock:
            self._over = True
            slot, self._slot = self._slot, None
        if slot is not None:
            slot.free(fate)

    def _expire(self) -> None:
        self.stop.set()
        self._fail(DeadlineError(f"{self.handle.status()}: {self._in_doubt()}"))

    def _in_doubt(self) -> str:
        """What to say when the news of the save's end don't come: others may have decided it."""
        root, _ = identity.split_checkpoint_id(self.context.checkpoint_id)
        return (
            "nothing was heard of the save's end, so it may still be committed: "
            f"ask `pannier status {self.text}` or `pannier ls {root}`"
        )


def _transport(staged: Staged) -> str:
    reason = staged.arena.streams_because
    return f"streamed: {reason}" if reason else "mapped"


def fail_request(context: sidecar_pb2.SaveContext, error: BaseException) -> sidecar_pb2.FailRequest:
    """The message that ends a save on all ranks because of ``error`` on this one."""
    kind = next(
        (kind for types, kind in _KINDS if isinstance(error, types)), save_pb2.FAILURE_KIND_CLIENT
    )
    text = str(error) if isinstance(error, PannierError) else f"{type(error).__name__}: {error}"
    failure = save_pb2.Failure(rank=context.rank, host=context.host, kind=kind, message=text)
    return sidecar_pb2.FailRequest(context=context, failure=failure)


def aborted(news: save_pb2.SaveStatus, waiting: str = "") -> SaveAbortedError:
    """The error of an aborted save: who failed, and why.

    Args:
        waiting: what this rank waited for when the news came.
    """
    causes = [
        (f"rank {cause.rank} ({cause.host}): " if cause.rank >= 0 else "") + cause.message
        for cause in news.failures
    ]
    skipped = any(cause.kind == save_pb2.FAILURE_KIND_SKIPPED for cause in news.failures)
    cls = SaveSkippedError if skipped else SaveAbortedError
    what = "was skipped" if skipped else "was aborted"
    text = "; ".join(causes[:4]) or "no cause was told"
    more = f"; and {len(causes) - 4} more" if len(causes) > 4 else ""
    more += f"; this rank was waiting for {waiting}" if waiting else ""
    return cls(
        f"save {identity.save_text(news.save)} to {news.checkpoint_id} {what}: {text}{more}",
        list(news.failures),
    )
