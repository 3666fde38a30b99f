"""What ``async_save`` returns: a future of the commit, with the save's status.

In: statuses and outcomes, through a :class:`Resolver`, from background threads. Out: results and
errors for the caller. Thread-safe. A handle refers to no arena, no connection, and no object that
refers to it: it is freed with its last reference, without the garbage collector (which trainers
switch off).
"""

import asyncio
import concurrent.futures
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from pannier.client.engine import engine
from pannier.client.interrupts import Condition, SafeFuture
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.user_errors import add_note, description, without_frames
from pannier.wire.errors import (
    CommitCallbackError,
    Failure,
    InDoubtError,
    PannierError,
    SaveAbortedError,
    failure_messages,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """A committed save."""

    checkpoint_id: str
    attempt: str
    """Name of the attempt; part of the names of its objects."""
    bytes: int
    """What this rank wrote."""
    total_bytes: int
    """What all ranks wrote."""
    seconds: Mapping[str, float]
    """By phase, on this rank: ``plan``, ``stage``, ``ingest``, ``commit``; after ``stage`` also
    ``copy``, if staging was overlapped and deferred copies from a device."""

    def metadata(self) -> Metadata:
        """Reads the checkpoint's ``.metadata``, as it is in storage now."""
        metadata: Metadata = StorageReader(self.checkpoint_id).read_metadata()
        return metadata


@dataclass(frozen=True)
class SaveStatus:
    """How far a save is. ``str()`` of it is one human-readable line."""

    id: str
    """As ``pannier status`` takes it: job/incarnation/group/number."""
    checkpoint_id: str
    attempt: str
    state: str
    """``PLANNING``, ``STAGING``, ``INGESTED``, ``UPLOADING``, ``COMMITTED``, ``ABORTED``, ``IN_DOUBT`` or ``SKIPPED``."""
    bytes: int
    """What this rank staged."""
    bytes_ingested: int
    """Of these, what its sidecar holds."""
    total_bytes: int
    """What all ranks write, as far as it is known."""
    waiting_on: str
    """What the save waits for; empty for nothing."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """By rank."""
    transport: str = ""
    """How this rank's bytes reach its sidecar: ``mapped``, or ``streamed`` and why; empty until
    they are staged."""
    staging: str = ""
    """How bytes came from devices: ``pinned`` (straight to the arena), or ``bounced`` (by way of a
    pinned buffer) and why; empty when none did."""
    bytes_uploaded: int = 0
    """Of this rank's bytes, what its sidecar has sent to storage."""

    @property
    def percent(self) -> int:
        """How much of this rank's bytes is in storage; 100 when the save is committed, not before."""
        if self.state == "COMMITTED":
            return 100
        return min(99, 100 * self.bytes_uploaded // self.bytes) if self.bytes else 0

    def __str__(self) -> str:
        waiting = f", waiting for {self.waiting_on}" if self.waiting_on else ""
        part = f" {self.percent}%" if 0 < self.percent < 100 else ""
        return f"save {self.id} to {self.checkpoint_id}: {self.state}{part}{waiting}"


class Outcome:
    """A save's error, and whether the caller has retrieved the outcome. Thread-safe."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._retrieved = False

    @property
    def error(self) -> Exception | None:
        """Why the save failed; None: it has not."""
        return self._error

    @property
    def retrieved(self) -> bool:
        """Whether the caller knows the outcome."""
        return self._retrieved

    def fail(self, error: Exception) -> None:
        """The save has failed."""
        self._error = error

    def mark_retrieved(self) -> None:
        """The caller knows the outcome."""
        self._retrieved = True


class UnretrievedErrors:
    """Errors of saves until the caller retrieves them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """A save has ended with this outcome."""
        if outcome.error is not None and not outcome.retrieved:
            with self._lock:
                self._failed.append(outcome)

    def __bool__(self) -> bool:
        """Whether there are some."""
        with self._lock:
            return any(not outcome.retrieved for outcome in self._failed)

    def raise_all(self) -> None:
        """Raises the errors that were not retrieved, each once; several are joined in one error."""
        _raise(self._take())

    @contextmanager
    def deferred(self, note: str) -> Iterator[None]:
        """Raises the errors from before this block after it, with ``note``: so they don't cost what it does.

        If the block itself raises, they stay for the next call.
        """
        failed = self._take()
        try:
            yield
        except BaseException:
            with self._lock:
                self._failed[:0] = failed
            raise
        try:
            _raise(failed)
        except PannierError as error:
            add_note(error, note)
            raise

    def _take(self) -> list[Outcome]:
        with self._lock:
            failed, self._failed = self._failed, []
            return failed


def _raise(failed: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in failed if outcome.error and not outcome.retrieved]
    if not errors:
        return
    for outcome in failed:
        outcome.mark_retrieved()
    raised = [_of_earlier_save(error) for error in errors]
    if len(raised) == 1:
        raise raised[0]
    # By rank, the cause of the earliest save counts.
    failures = [f for error in reversed(raised) for f in failure_messages(error)]
    # A save in doubt must not be raised as an aborted one, and the error of a commit callback, whose save
    # is committed, must not hide either.
    order = (InDoubtError, SaveAbortedError)
    first = next((e for kind in order for e in raised if isinstance(e, kind)), raised[0])
    kind = InDoubtError if isinstance(first, InDoubtError) else type(first)
    raise kind("; and ".join(map(str, raised)), failures)


class CommitCallbacks:
    """Users' functions that run after commits, each in a thread of its own, in the order of the commits.

    Thread-safe.

    Args:
        errors: gets what they raise.
    """

    def __init__(self, errors: UnretrievedErrors) -> None:
        self._errors = errors
        self._changed = Condition()
        self._running: set[threading.Thread] = set()
        self._last = threading.Event()
        """Set when the last callback has ended."""
        self._last.set()

    def start(self, callback: Callable[[SaveResult], object], result: SaveResult) -> None:
        """Calls ``callback`` in a thread, for which an ending interpreter waits, after the earlier ones."""
        ended = threading.Event()

        def run() -> None:
            try:
                before.wait()
                self._run(thread, callback, result)
            finally:
                ended.set()

        thread = threading.Thread(target=run, name="pannier-commit", daemon=False)
        with self._changed:
            before, self._last = self._last, ended
            self._running.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no threads
            run()

    def wait(self, timeout: float | None) -> bool:
        """Waits until no callback runs; False after ``timeout`` seconds.

        For a callback that calls this, only later ones are left: it doesn't wait for these.
        """
        own, running = threading.current_thread(), self._running
        with self._changed:
            return self._changed.wait_for(lambda: not running or own in running, timeout)

    def _run(
        self, thread: threading.Thread, callback: Callable[[SaveResult], object], result: SaveResult
    ) -> None:
        try:
            callback(result)
        except Exception as error:  # noqa: BLE001 - the user's code: its error is the next call's
            name = getattr(callback, "__qualname__", type(callback).__name__)
            failed = CommitCallbackError(
                f"the commit callback {name} of {result.checkpoint_id}, which is committed, failed: "
                f"{description(error)}"
            )
            # Logged, but not chained as its cause: the frames would keep the callback's objects alive.
            _log.error("%s", failed, exc_info=error)
            outcome = Outcome()
            outcome.fail(failed)
            self._errors.add(outcome)
        finally:
            with self._changed:
                self._running.discard(thread)
                self._changed.notify_all()


def _of_earlier_save(error: Exception) -> PannierError:
    """The error as a later call raises it: it must not look like an exception of that call itself."""
    if isinstance(error, PannierError):
        return copy.copy(error)
    return SaveAbortedError(f"a save failed on this rank: {description(error)}")


class OutcomeFuture(SafeFuture[T], Generic[T]):
    """A future that marks its outcome as retrieved when the caller gets it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """The result; raises the error. See :class:`concurrent.futures.Future`."""
        try:
            return super().result(timeout)
        except Exception as error:
            if not self.done() or super().exception() is not error:
                raise  # the wait timed out
            # A copy: a traceback on the kept error would reference the caller's frame, and so
            # the handle itself.
            error.__traceback__ = None
            fresh = without_frames(error)
        finally:
            self._mark_retrieved()
            del self
        raise fresh

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, if any. See :class:`concurrent.futures.Future`."""
        try:
            return super().exception(timeout)
        finally:
            self._mark_retrieved()

    def _mark_retrieved(self) -> None:
        if self.done():
            self._outcome.mark_retrieved()


class MilestoneFuture(OutcomeFuture[None]):
    """A future that may be done before the save has ended: only its error is the save's outcome."""

    def _mark_retrieved(self) -> None:
        if self.done() and super(OutcomeFuture, self).exception() is not None:
            self._outcome.mark_retrieved()


class SaveHandle(OutcomeFuture[SaveResult], AsyncSaveResponse):
    """One save under way: a :class:`concurrent.futures.Future` and torch's ``AsyncSaveResponse``.

    ``result()`` returns when the checkpoint is committed, and raises when it
    won't be. The save can't be cancelled: other ranks take part in it.

    A function given to ``add_done_callback``, here or on another future of the save, runs on a thread that
    all saves of the process need, and must return soon: there, a wait for all saves, another save and
    ``close()`` raise InvalidRequestError. :meth:`add_commit_callback` has no such limit.
    """

    # AsyncSaveResponse is a dataclass: it compares by value and isn't hashable.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, save_id: str, checkpoint_id: str) -> None:
        outcome = Outcome()
        OutcomeFuture.__init__(self, outcome)
        self._upload: OutcomeFuture[None] = OutcomeFuture(outcome)
        self._staging: Future[None] = SafeFuture()
        self._staging.set_running_or_notify_cancel()
        self._ingest = MilestoneFuture(outcome)
        self._callbacks = CommitCallbacks(UnretrievedErrors())
        self._status = SaveStatus(save_id, checkpoint_id, "", "PLANNING", 0, 0, 0, "")
        self._staged: Mapping[str, Any] = {}
        """Fields of the status that the caller's thread has set, and the engine's loop not taken over yet."""

    @property
    def staging_completion(self) -> Future[None]:  # type: ignore[override]
        """Done when the state dict may change: when ``async_save`` returns, or later if overlapped.

        Raises the save's error if the state could not be copied.
        """
        return self._staging

    @property
    def ingest_completion(self) -> Future[None]:
        """Done when this rank is ingested: the save no longer needs its trainer, which may be killed.

        By then all its bytes are in the sidecar's spool and journalled, and its plan is confirmed. The save
        is committed once every rank is ingested. Raises what :meth:`result` raises if the save fails
        before. Embedded daemons in a container or a batch job end with the trainer: there, wait for
        :meth:`result`.
        """
        return self._ingest

    @property
    def upload_completion(self) -> Future[None]:  # type: ignore[override]
        """Done when the checkpoint is committed; raises what :meth:`result` raises."""
        return self._upload

    @property
    def outcome(self) -> Outcome:
        """Whether it has failed, and whether the caller knows that."""
        return self._outcome

    def add_commit_callback(self, callback: Callable[[SaveResult], object]) -> None:
        """Calls ``callback`` once with the result when the checkpoint is committed; never if it isn't.

        The callback runs in a thread of its own, at once if the checkpoint is committed already, but after
        those of earlier commits.
        ``wait_all()`` waits for it, and an ending process waits for one that is running. An exception
        from it doesn't fail the save: it is logged, and the next call on the client raises it as a
        CommitCallbackError. If the process ends before the commit, the callback isn't called: for files
        that must exist with the checkpoint use ``async_save(extra_files=...)``.
        """
        # ``start`` must not reference the handle, which would then keep itself alive.
        callbacks = self._callbacks

        def start(done: "Future[SaveResult]") -> None:
            if super(OutcomeFuture, cast("SaveHandle", done)).exception() is None:
                callbacks.start(callback, super(OutcomeFuture, cast("SaveHandle", done)).result())

        self.add_done_callback(start)

    def status(self) -> SaveStatus:
        """How far the save is, by the last status update."""
        # In this order: the loop takes them over before it forgets them.
        staged, status = self._staged, self._status
        return dataclasses.replace(status, **staged) if staged else status

    def __repr__(self) -> str:
        status = self.status()
        return (
            f"<SaveHandle {status.id} to {status.checkpoint_id}: {status.state}, {status.percent}%>"
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has succeeded or failed; False when ``timeout`` seconds pass first."""
        try:
            super(OutcomeFuture, self).exception(timeout)
        except (TimeoutError, concurrent.futures.TimeoutError):
            return self.done()
        return True


class Resolver:
    """The end of a handle that its save writes. One call at a time."""

    def __init__(self, handle: SaveHandle) -> None:
        self.handle = handle
        self.waits = dict.fromkeys(("sidecar", "copies", "room", "report"), "")
        """What the save waits for: the first that isn't empty counts, so that what this process knows itself goes
        before the sidecar's report."""
        self._turn = asyncio.Lock()
        self._is_staged = False
        self._is_ingested = False
        self._is_ended = False

    def use_callbacks(self, callbacks: CommitCallbacks) -> None:
        """Sets the callbacks that the client waits for; to be called before the caller has the handle."""
        self.handle._callbacks = callbacks

    def show(self, **changes: Any) -> None:
        """Changes these fields of the handle's status. On the loop."""
        handle = self.handle
        staged = handle._staged
        handle._status = dataclasses.replace(handle._status, **{**staged, **changes})
        if staged:
            handle._staged = {}

    def show_staged(self, **fields: Any) -> None:
        """The same for what the caller has staged: shown when its call returns. Once, on its thread."""
        self.handle._staged = fields

    def wait_for(self, what: str, text: str) -> None:
        """What the save waits for, human-readable; empty: no longer."""
        self.waits[what] = text
        self.show(waiting_on=next(filter(None, self.waits.values()), ""))

    async def in_worker(self, step: Callable[[], object]) -> None:
        """Takes a step in a worker, since it runs the user's callbacks; one after the other. On the loop."""
        async with self._turn:
            try:
                await engine().in_thread(step)
            except RuntimeError:  # a limit of threads
                step()

    def staged(self) -> None:
        """The state dict may change. No effect when the save has failed meanwhile."""
        if not (self._is_ended or self._is_staged):
            self._is_staged = True
            self.handle._staging.set_result(None)

    def ingested(self) -> None:
        """The save no longer needs this rank's trainer. Idempotent; no effect when the save has ended."""
        if not (self._is_ended or self._is_ingested):
            self._is_ingested = True
            self.handle._ingest.set_result(None)

    def resolve(self, result: SaveResult) -> None:
        """The save is committed."""
        self.ingested()
        self._is_ended = True
        self.handle._upload.set_result(None)
        self.handle.set_result(result)

    def fail(
        self,
        error: Exception,
        *,
        quietly: bool = False,
        unretrieved: UnretrievedErrors | None = None,
    ) -> None:
        """The save has failed.

        Args:
            error: what ``result()`` raises.
            quietly: the caller knows already; no later call raises it.
            unretrieved: gets the error before anybody can see that the save has failed.
        """
        kept = without_frames(error)
        self._is_ended = True
        self.handle.outcome.fail(kept)
        if quietly:
            self.handle.outcome.mark_retrieved()
        if unretrieved is not None:
            unretrieved.add(self.handle.outcome)
        if not self._is_staged:
            self.handle._staging.set_exception(kept)
        if not self._is_ingested:
            self.handle._ingest.set_exception(kept)
        self.handle._upload.set_exception(kept)
        self.handle.set_exception(kept)
