"""Sends one save of this rank: streams its files, hands them over, waits until its plan is confirmed.

In: a plan, and what was staged by it. Out: an ingested rank, or a failure that ends the save. A
:class:`SaveTask` lives as long as its save is in progress. Sending runs in a separate thread;
the outcome is for :class:`pannier.client.transport.save_status.StatusFollower`.
"""

import dataclasses
import enum
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence

from pannier.client.handle import SaveHandle
from pannier.client.staging.in_flight import InFlightSave
from pannier.client.staging.stager import Staged, in_attempt
from pannier.client.transport.file_stream import StagedFile, StoppedError
from pannier.client.transport.plan_claim import CachedPlan, PlanClaim
from pannier.client.transport.save_errors import fail_request
from pannier.client.transport.save_status import OnCommitted, StatusFollower
from pannier.client.transport.shared_memory import SpoolMapping
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import records_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)


class _State(enum.Enum):
    IN_CALL = enum.auto()
    """The save ends with the call that stages it."""
    DETACHED = enum.auto()
    """A separate thread sends, independent of the call."""
    SENT = enum.auto()
    """The sidecar has all of it, or the save has ended."""


class SaveTask:
    """One save in progress. Thread-safe.

    Args:
        sidecar: gets the save.
        context: of the save.
        on_busy: what a full spool does: ``"wait"``, ``"skip"`` or ``"raise"``.
        metrics: numbers that go with the save.
        deadline: of the save.
        plan_timeout_s: longest wait for the confirmation of a cached plan, seconds.
        resume_after: makes the number after this one the group's next.
        on_ended: called once, with :attr:`status`, when the handle has its outcome.
        on_committed: called before that, when the save is committed.
    """

    def __init__(
        self,
        sidecar: SidecarClient,
        context: sidecar_pb2.SaveContext,
        *,
        on_busy: str,
        metrics: Mapping[str, float] | None = None,
        deadline: Deadline,
        plan_timeout_s: float = timeouts.DEFAULT_SAVE_S,
        resume_after: Callable[[int], None] = lambda _: None,
        on_ended: Callable[[StatusFollower], None] = lambda _: None,
        on_committed: OnCommitted = lambda *_: None,
    ) -> None:
        self.sidecar = sidecar
        self.status = StatusFollower(
            sidecar,
            context,
            deadline,
            expects_skip=on_busy == "skip",
            on_ended=on_ended,
            on_committed=on_committed,
        )
        self._on_busy = on_busy
        self._metrics = metrics
        self._attempt = ""
        self._plan_id = ""
        self._plan_timeout_s = plan_timeout_s
        self._resume_after = resume_after
        self._staged: Staged | None = None
        self._state = _State.IN_CALL
        self._gave_files = False
        """The sidecar may have been given mapped files."""
        self._lacked: list[int] = []
        """Bytes of each file that the sidecar didn't hold when they were last sent."""
        self._last_progress = time.monotonic()
        """When bytes were last sent; while the main thread lives, each check for a stall sets it to now."""

    @property
    def handle(self) -> SaveHandle:
        """What the caller gets."""
        return self.status.handle

    @property
    def is_detached(self) -> bool:
        """Whether the save no longer depends on the call that began it."""
        return self._state is not _State.IN_CALL

    @property
    def is_sent(self) -> bool:
        """Whether there is nothing more to send."""
        return self._state is _State.SENT

    def detach(self, start: Callable[[], None]) -> None:
        """Runs ``start``, which starts a thread that calls :meth:`send`, independent of the save's call."""
        self._state = _State.DETACHED
        try:
            start()
        except RuntimeError:  # no thread can be started
            self._state = _State.IN_CALL
            raise

    def planned(
        self,
        attempt: str,
        plan_id: str,
        unconfirmed: CachedPlan | None = None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """The plan is known.

        Args:
            unconfirmed: this rank's part of the last plan, if the save uses that; the coordinator has yet
                to confirm it.
            on_failure: called with the error before the handle fails.
        """
        self._attempt, self._plan_id = attempt, plan_id
        claim: PlanClaim | None = None
        if unconfirmed is not None:
            claim = PlanClaim(
                unconfirmed,
                self.sidecar,
                self.status.context,
                deadline=self.status.deadline,
                wait_s=self._plan_timeout_s,
                stop=self.status.stop,
            )
        self.status.set_attempt(attempt, claim, on_failure)

    def staged(self, staged: Staged) -> None:
        """The state dict may change, except for incomplete copies from devices."""
        self._staged = staged
        if staged.bytes and not staged.arena.streaming_reason and not self._mapped():
            staged.arena.streaming_reason = "all of it is serialised, so that no size was planned"
        self.status.times.end("stage")
        self.status.resolver.update(
            lambda status: dataclasses.replace(
                status,
                bytes=staged.bytes,
                transport=_transport(staged),
                staging=staged.copy_description,
            )
        )
        if staged.deferred is None:
            self.status.resolver.staged()

    def send(self, slot: InFlightSave) -> None:
        """Sends what is staged and hands it over. Blocking; runs in a thread.

        Args:
            slot: is released when its arena isn't needed any more: at the end of this call, or,
                when the sidecar uploads from it, at the end of the save.
        """
        if not slot.begin_sending():
            self._staged = None
            return
        self.status.arena.begin(slot)
        try:
            self._finish_staging()
            self._send_to_sidecar()
            self.status.times.end("ingest")
        except StoppedError:
            pass
        except Exception as error:  # noqa: BLE001 - a thread's end: it becomes the save's failure
            self.status.give_up(error)
        finally:
            self.status.settle_abort()
            self._state = _State.SENT
            self._staged = None
            slot.sent(handed_over=self._gave_files)

    def _finish_staging(self) -> None:
        """Waits for copies from devices that outlast the call."""
        rest = self._staged.deferred if self._staged is not None else None
        if rest is None:
            return
        self.status.waiting.set_copies(f"copies from {rest.devices}")
        try:
            rest.finish(stop=lambda: self.status.stop.is_set)
        finally:
            self.status.waiting.set_copies("")
        if self.status.stop.is_set:
            raise StoppedError
        self.status.times.end("copy")
        self.status.resolver.staged()

    def _send_to_sidecar(self) -> None:
        try:
            self._ingest()
        except (SaveAbortedError, StoppedError) as error:
            if self.status.claim is not None:
                self._check_step(self.status.claim, error)
            raise
        except PannierError:
            raise
        except Exception as error:
            raise PannierError(f"{type(error).__name__} while sending: {error}") from error

    def _check_step(self, claim: PlanClaim, error: SaveAbortedError | StoppedError) -> None:
        """Raises why the save of a claim has ended, if it isn't ``error``.

        A rank that missed saves of the others learns it only now, if it saved by a claim: it ends the save
        that they are at, so that the next one is in step again.
        """
        number = claim.find_current_save(error)
        if not number:
            return
        context = self.status.context
        missed = SaveAbortedError(
            f"rank {context.rank} (host {context.host}) missed save calls of the other ranks: it was at save "
            f"number {context.save.number} and they at {number}. That one fails, too; the next is in step "
            f"again, with number {number + 1}",
            [fail_request(context, PannierError("this rank missed save calls")).failure],
        )
        self._resume_after(number)
        self.status.fail_behind(missed, number)
        raise missed

    def _mapped(self) -> dict[str, SpoolMapping]:
        """By name, the files that were staged into the sidecar's spool."""
        if self._staged is None:
            return {}
        mapped = {}
        for file in self._staged.files:
            mapping = getattr(file.keepalive, "mapping", None)
            if isinstance(mapping, SpoolMapping):
                mapped[file.name] = mapping
        return mapped

    def _ingest(self) -> None:
        mapped = self._mapped()
        for mapping in mapped.values():
            mapping.seal()
        files = self._send_all(mapped)
        while True:
            try:
                self._hand_over(files, mapped)
                self._await_plan()
                return
            except InvalidRequestError as error:
                # A restarted sidecar may lack files that it had taken before, and knows no leases.
                # What it does hold isn't sent twice.
                if mapped:
                    self._stream_instead(error)
                mapped = {}
                files = self._send_all(mapped)
                if not sum(self._lacked):
                    raise
                _log.warning(
                    "save %s: the %s had lost %d bytes, which were sent again",
                    *(self.status.text, self.sidecar.peer, sum(self._lacked)),
                )
                _log.debug("its error: %s", error)

    def _await_plan(self) -> None:
        """Waits, after the hand-over, until the save has a plan, which has the part that this rank staged by.

        The save can end without this wait, unless the coordinator requests the local plan.
        """
        claim = self.status.claim
        if claim is None:
            self.status.resolver.ingested()
            return
        if claim.wait():
            self.sidecar.followed.mark_handed_over(self.status.context.save)
            self.status.resolver.ingested()
        elif self.status.stop.is_set:
            raise StoppedError

    def _open_claim(self) -> sidecar_pb2.CachedPlanClaim | None:
        claim = self.status.claim
        return None if claim is None or claim.plan_id else claim.message()

    def _stream_instead(self, error: PannierError) -> None:
        """The hand-over of mapped files was refused."""
        assert self._staged is not None
        self._staged.arena.streaming_reason = f"it was mapped, but {error}"
        transport = _transport(self._staged)
        self.status.resolver.update(lambda status: dataclasses.replace(status, transport=transport))

    def _send_all(self, mapped: Container[str]) -> list[records_pb2.DataFile]:
        """Streams all files but the ``mapped`` ones, two at a time."""
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
            self._last_progress = time.monotonic()
            self.status.resolver.update(lambda s: dataclasses.replace(s, bytes_ingested=total))

        def work() -> None:
            try:
                while not problems and not self.status.stop.is_set:
                    try:
                        file = todo.popleft()
                    except IndexError:
                        return
                    crcs[file.name] = self._send_file(
                        file, functools.partial(progress, file.name, file.size)
                    )
            except Exception as error:  # noqa: BLE001 - raised below, in the task's own thread
                problems.append(error)

        helper = threading.Thread(target=work, name=f"pannier-send-{self.status.text}")
        try:
            if len(todo) > 1:
                helper.start()
        except RuntimeError as error:  # a limit of threads
            _log.debug("%s: one file is sent after the other: %s", self.status.text, error)
        work()
        if helper.ident is not None:
            helper.join()
        if self.status.stop.is_set:
            raise StoppedError
        if problems:
            raise problems[0]
        return [
            records_pb2.DataFile(
                name=object_names.data_prefix(self._attempt) + file.name,
                size=file.size,
                crc32c=crcs.get(file.name, 0),
            )
            for file in self._staged.files
        ]

    def _send_file(self, file: StagedFile, progress: Callable[[int], None]) -> int:
        """Sends a file; returns its crc32c. Waits for room in the spool if ``on_busy`` is ``"wait"``."""
        waiting, deadline = self.status.waiting, self.status.deadline

        def accepted(committed: int) -> None:
            waiting.clear_no_room(file.name)
            progress(committed)

        while True:
            try:
                return self.sidecar.send(
                    self.status.context,
                    self._attempt,
                    file,
                    reason=self._staged.arena.streaming_reason if self._staged is not None else "",
                    claim=self._open_claim(),
                    timeout=deadline.remaining(),
                    progress=accepted,
                    stop=self.status.stop,
                )
            except BusyError as error:
                if self._on_busy == "skip":
                    self.status.report(skipped := SaveSkippedError(str(error)))
                    raise skipped from error
                # Early enough for the other ranks to get this reason, not a passed deadline.
                if self._on_busy == "raise" or deadline.remaining() <= 2 * timeouts.BUSY_AGAIN_S:
                    waiting.clear_no_room(file.name)
                    raise
                if self._is_stuck_at_exit():
                    _log.error(
                        "save %s to %s is given up, because the process is ending: %s",
                        *(self.status.text, self.status.context.checkpoint_id, error),
                    )
                    waiting.clear_no_room(file.name)
                    raise
                waiting.set_no_room(file.name, error)
                if self.status.stop.wait(timeouts.BUSY_AGAIN_S):
                    raise StoppedError from error

    def _is_stuck_at_exit(self) -> bool:
        """Whether the ending interpreter has waited for this thread too long without progress."""
        if threading.main_thread().is_alive():
            self._last_progress = time.monotonic()
        return time.monotonic() - self._last_progress >= timeouts.EXIT_S

    def _hand_over(
        self, files: Sequence[records_pb2.DataFile], mapped: Mapping[str, SpoolMapping]
    ) -> None:
        assert self._staged is not None
        prefix = object_names.data_prefix(self._attempt)
        claim = self._open_claim()
        confirmed = self.status.claim.plan_id if self.status.claim is not None else self._plan_id
        request = sidecar_pb2.HandOverRequest(
            context=self.status.context,
            attempt=self._attempt,
            plan_id="" if claim is not None else confirmed,
            claim=claim,
            files=files,
            varying=in_attempt(self._staged.varying, prefix),
            extra_files=in_attempt(self._staged.extra, prefix),
            mapped=[
                sidecar_pb2.MappedFile(
                    name=prefix + name, spool_file=mapping.file, stamp=mapping.stamp
                )
                for name, mapping in mapped.items()
            ],
            stalled_s=self.status.times.stalled_s,
            metrics=self._metrics,
        )
        self.status.begin_hand_over()
        # Stays set after an error: a try that failed or timed out may have arrived, or may arrive later.
        self._gave_files = self._gave_files or bool(mapped)
        self.sidecar.hand_over(request, self.status.deadline.remaining())
        if mapped:
            held = self._staged.bytes
            self.status.resolver.update(lambda s: dataclasses.replace(s, bytes_ingested=held))


def _transport(staged: Staged) -> str:
    reason = staged.arena.streaming_reason
    return f"streamed: {reason}" if reason else "mapped"
