"""One save of this rank, from its call to its end.

    PLANNING -> STAGING -> SENDING -> HANDED_OVER -> INGESTED -> COMMITTED | FAILED

In: a numbered call, what the caller's thread has planned and staged, the statuses of the sidecar, and the deadline.
Out: a handle that resolves or fails, exactly once, after the staging memory is given back. :meth:`Save.run` is the
whole of it, from top to bottom. It belongs to the engine's loop, and what blocks runs in workers; the methods for
the thread of the call are marked.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from pannier.client.engine import engine, first_of
from pannier.client.handle import Resolver, SaveHandle, SaveResult
from pannier.client.planning.plan_cache import CachedPlan
from pannier.client.saves.call import Options, SaveCall
from pannier.client.saves.outcome import (
    DroppedError,
    MissedError,
    failure,
    needs_no_trainer,
    progress,
    result,
)
from pannier.client.saves.phase_times import PhaseTimes
from pannier.client.saves.plan_in_use import PlanInUse
from pannier.client.saves.saves import ArenaUse, Saves
from pannier.client.saves.sending import Sending, end_copies, mapped_files, transport
from pannier.client.staging.arena import Arena
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.stager import Staged
from pannier.client.transport.save_errors import fail_request, needs_new_plan
from pannier.client.transport.sidecar_client import SidecarClient, seconds_left
from pannier.client.user_errors import clear_frames
from pannier.common import timeouts
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)

_DECIDED: Final = (save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED)


class Save:
    """See the module. Made by the thread of the call, before that acquires anything.

    Args:
        call: with the group's next number.
        saves: those of this client.
    """

    def __init__(self, call: SaveCall, saves: Saves) -> None:
        self.call = call
        self.deferred: DeferredCopies | None = None
        """Copies that outlast the call; set by the thread of the call."""
        self.arena: Arena | None = None
        """The staging memory that it holds."""
        self._saves = saves
        self.sidecar: SidecarClient
        """Gets the save; from :meth:`connected` on."""
        self.context: sidecar_pb2.SaveContext
        """What every message of this save carries; from :meth:`connected` on."""
        self._check_open: Callable[[], None] = lambda: None
        self._resolver: Resolver | None = None
        self._times = PhaseTimes()
        self._plan: PlanInUse | None = None
        self._sending: Sending | None = None
        loop = engine().loop
        self._staged: asyncio.Future[bool] = loop.create_future()
        """The call has ended; False: without a handle."""
        self._sent: asyncio.Future[bool] = loop.create_future()
        """Sending has ended; True: all is ingested."""
        self._refused: asyncio.Future[Exception] = loop.create_future()
        """Why the plan that was claimed can't be used."""
        self._decided: asyncio.Future[save_pb2.SaveStatus] = loop.create_future()
        self._reporting: asyncio.Future[None] | None = None
        """A failure on its way to the other ranks."""

    # The thread of the call.

    def connected(
        self,
        sidecar: SidecarClient,
        context: sidecar_pb2.SaveContext,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        """The sidecar is known, to which the call may have waited to be connected.

        Args:
            check_open: raises once a close of the client has begun, which doesn't wait for saves to come.
        """
        self.sidecar, self.context, self._check_open = sidecar, context, check_open
        self._times.begin()

    def end_call(self, error: BaseException | None = None) -> None:
        """See :meth:`drop`."""
        engine().call(lambda: self.drop(error))

    @property
    def handle(self) -> SaveHandle:
        """What the caller gets, once :meth:`open` has returned."""
        return self._handle_end.handle

    @property
    def waiting_on(self) -> str:
        """See :class:`pannier.client.SaveStatus`; empty until it is open."""
        return "" if self._resolver is None else self.handle.status().waiting_on

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to be sent: no part, and no failure."""
        return self._sent.done() and (self._reporting is None or self._reporting.done())

    @property
    def is_detached(self) -> bool:
        """Whether the save no longer depends on the call that began it."""
        return self._staged.done() and not self.is_dropped

    @property
    def is_dropped(self) -> bool:
        """Whether the call has ended without a handle."""
        return self._staged.done() and not self._staged.result()

    # The steps of the call, by `engine().call` and `engine().post`.

    async def open(self) -> None:
        """Admits the save to those that hold staging memory, and follows its status from now on. Idempotent.

        Raises:
            SaveSkippedError, BusyError, DeadlineError: see :meth:`pannier.client.saves.saves.Saves.admit`.
            InvalidRequestError: the client is closed, or about to be.
        """
        if self._resolver is not None:
            return
        began = time.monotonic()
        await self._saves.admit(self)
        try:
            if self.is_dropped:
                raise DroppedError
            self._check_open()
        except Exception:
            self._saves.release(self)
            raise
        self._times.waited(time.monotonic() - began)
        text = object_names.save_text(self.context.save)
        self._resolver = Resolver(SaveHandle(text, self.context.checkpoint_id))
        self._saves.add(self, self._resolver)
        self.sidecar.follow(self)
        engine().start(self.run)

    async def acquire(
        self,
        attempt: str,
        plan_id: str,
        sizes: Sequence[int],
        part: CachedPlan | None = None,
        drop_part: Callable[[], object] = lambda: None,
    ) -> Arena:
        """The plan is known: opens the save, unless it is, and returns memory with a buffer of each size, bytes.

        Args:
            part: this rank's part of the last plan, if the save uses that; the coordinator has yet to confirm it.
            drop_part: called if the save fails such that later ones can't use its part of the plan either.

        Raises:
            SaveSkippedError, BusyError, DeadlineError: see :meth:`pannier.client.saves.saves.Saves.acquire`.
        """
        await self.open()
        confirmed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if part is None:
            confirmed.set_result(plan_id)
        self._plan = PlanInUse(
            attempt,
            part,
            drop_part,
            self.sidecar,
            self.context,
            self.options.deadline,
            self.options.plan_timeout_s,
            confirmed,
            self._refused,
        )
        self._times.end("plan")
        self._handle_end.show(attempt=attempt, state="STAGING")
        arena = await self._saves.acquire(
            self, partial(self.sidecar.arena, self._saves.pool, sizes)
        )
        self.arena = arena
        if self._staged.done():  # The call was interrupted meanwhile.
            await self._saves.give_back(self, ArenaUse.UNUSED)
        return arena

    def staged(self, staged: Staged) -> None:
        """The call returns: the state dict may change, except for incomplete copies from devices. Any thread."""
        if staged.bytes and not staged.arena.streaming_reason and not mapped_files(staged):
            staged.arena.streaming_reason = "all of it is serialised, so that no size was planned"
        self._handle_end.show_staged(
            bytes=staged.bytes, transport=transport(staged), staging=staged.copy_description
        )
        if staged.deferred is None:
            self._handle_end.staged()
        engine().post(self._begin_sending, staged)

    async def drop(self, error: BaseException | None) -> None:
        """The call ends without a handle, and its save with it, on all ranks; returns when they know.

        Args:
            error: what the call raises; None: nothing that the other ranks don't know, or it has returned a handle.
        """
        if error is not None and self._resolver is not None:
            # The caller gets it; a later call must not raise the save's own as well.
            self.handle.outcome.mark_retrieved()
        if not self._staged.done():
            self._staged.set_result(False)
        self._saves.changed()
        if error is not None:
            await self.call.report(error)
        if self.is_dropped:
            await self._saves.until_ended(self)

    async def sent(self) -> bool:
        """Waits until nothing is left to be sent; False: the save has failed, or is about to."""
        await self._saves.until(lambda: self.is_sent, None)
        return self._is_ingested or self._is_committed

    # The save.

    async def run(self) -> None:
        """The save, from its admission to its end. Raises nothing."""
        sending = asyncio.ensure_future(self._send())
        error: BaseException | None = None
        try:
            error = await self._until_decided(sending)
        except Exception as problem:  # noqa: BLE001 - who waits for the save must learn its end
            _log.exception("%s failed in this process", self.handle.status())
            error = problem
        if self._is_committed:
            # The status was faster than the answer to the hand-over.
            await asyncio.wait({sending}, timeout=timeouts.CAUSES_S)
        await self._stop_sending(sending)
        # Nothing reads the arena here any more, once the call has ended, which stages into it.
        await self._staged
        if self.deferred is not None:
            await end_copies(self.deferred)
        outcome = self._outcome(error)
        await self._saves.give_back(self, self._use())
        await self._end(outcome)
        if self._reporting is not None:
            await asyncio.wait({self._reporting})
        self._saves.finish(self)

    async def _until_decided(self, sending: "asyncio.Task[None]") -> BaseException | None:
        """Waits until the save is decided; returns why it failed on this rank, if it did."""
        await first_of(self._left_s, sending, self._decided, self._refused)
        error = self._error_of(sending)
        if sending.done() and error is None and not self._decided.done():
            # The decision is the other ranks' and storage's.
            if not self._gave_files:
                await self._saves.give_back(self, ArenaUse.UNUSED)
            self._sent.set_result(True)
            self._saves.changed()
            await first_of(self._left_s, self._decided, self._refused)
            error = self._error_of(sending)
        if isinstance(error, DroppedError):
            return error
        if (missed := await self._missed_saves(error)) is not None:
            return missed
        if self._decided.done():
            return error
        if error is None:
            return DeadlineError(
                f"the save's deadline passed: {self.handle.status()}; a longer timeout, or "
                "PANNIER_SAVE_TIMEOUT, gives slow storage more time"
            )
        # It failed here: the others learn that, and their causes are waited for.
        if not isinstance(error, SaveAbortedError) or isinstance(error.__cause__, BusyError):
            self._report(error)
        await self._stop_sending(sending)
        patience_s = timeouts.CAUSES_S
        if self._may_be_handed_over:
            patience_s = min(timeouts.ABORT_S, self._left_s)
        await first_of(patience_s, self._decided)
        return error

    async def _stop_sending(self, sending: "asyncio.Task[None]") -> None:
        """Afterwards no thread reads the staging memory, and no hand-over begins."""
        sending.cancel()
        await asyncio.wait({sending})
        error = asyncio.CancelledError() if sending.cancelled() else sending.exception()
        if error is not None:
            clear_frames(error)
        if self._sending is not None:
            self._sending.let_go()
        if not self._sent.done():
            self._sent.set_result(error is None)
        self._saves.changed()

    async def _send(self) -> None:
        if not await asyncio.shield(self._staged):
            raise DroppedError
        assert self._sending is not None
        await self._sending.run()
        if self._plan and self._plan.id:
            self._mark_ingested()

    async def _missed_saves(self, error: BaseException | None) -> SaveAbortedError | None:
        """Why the save failed, if this rank missed save calls of the others; the group's current one fails, too.

        A rank that saves by a claim learns only now that the others are at a later save. So the next one is in
        step again.
        """
        decided = self._decided.result() if self._decided.done() else None
        number = 0 if self._plan is None else await self._plan.current_save(error, decided)
        if number <= self.call.number:
            return None
        missed = MissedError.of(self.context, number)
        self.call.member.world.resume(self.call.group, number + 1)
        self._report(missed, number)
        if self._reporting is not None:
            # Before the caller can go on to the next save.
            await asyncio.wait({self._reporting})
        return missed

    # Statuses, as its connection receives them.

    def on_status(self, update: save_pb2.SaveStatus) -> None:
        """The sidecar's view of the save."""
        if self._plan is not None:
            self._plan.on_status(update.plan)
        self._handle_end.show(**progress(self.handle.status(), update, self.context.rank))
        self._handle_end.wait_for("sidecar", "")
        self._handle_end.wait_for("report", update.waiting_on.text)
        if needs_no_trainer(update, self.context.rank):
            # The plan may be confirmed after this rank's wait for it has timed out.
            self._mark_ingested()
        if update.state in _DECIDED and not self._decided.done():
            self._decided.set_result(update)

    def on_unresponsive(self, problem: str) -> None:
        """The sidecar doesn't respond; empty: it does again."""
        self._handle_end.wait_for("sidecar", problem)

    def pending(self) -> sidecar_pb2.PendingSave:
        """The message by which a restarted sidecar, which may not know the save, learns of it."""
        return sidecar_pb2.PendingSave(
            context=self.context,
            handed_over=self._is_ingested and bool(self._plan and self._plan.id),
            save_timeout_s=seconds_left(self.options.deadline),
        )

    # The end.

    def _outcome(self, error: BaseException | None) -> SaveResult | Exception:
        """What the handle gets, now that no hand-over can begin any more."""
        if self._is_committed and not isinstance(error, MissedError):
            if "ingest" not in self._times.seconds:
                # The status arrived before the answer to the hand-over.
                self._times.end("ingest")
            self._times.end("commit")
            return result(self.handle.status(), self._decided.result(), self._times.seconds)
        return failure(
            self.context,
            error,
            self._decided.result() if self._decided.done() else None,
            may_be_handed_over=self._may_be_handed_over,
            room=self._handle_end.waits["room"],
        )

    async def _end(self, outcome: SaveResult | Exception) -> None:
        self.sidecar.unfollow(self)

        def conclude() -> None:
            """The program's logging and tracing, and what it waits for."""
            try:
                if isinstance(outcome, SaveResult):
                    self.trace()
                    cost = self._times.cost(self._decided.result().ranks)
                    if self.options.counts:
                        self._saves.log_committed(self.context, outcome.total_bytes, cost)
                else:
                    if self._plan is not None and needs_new_plan(outcome):
                        self._plan.drop_part()
                    self.trace(str(outcome))
            except Exception as problem:  # noqa: BLE001 - who waits must learn the outcome
                with suppress(Exception):  # the program's log may be what failed
                    _log.warning("%s, after its end: %r", self.handle.status(), problem)
            if isinstance(outcome, SaveResult):
                self._handle_end.resolve(outcome)
                return
            self._handle_end.fail(
                outcome,
                quietly=self.is_dropped or (is_skipped and self.options.on_busy == "skip"),
                unretrieved=self._saves.errors if self.options.counts else None,
            )

        if is_skipped := isinstance(outcome, SaveSkippedError):
            self._handle_end.show(state="SKIPPED")
        await self._handle_end.in_worker(conclude)
        self._saves.end(self)

    def _use(self) -> ArenaUse:
        """What may still read the staging memory."""
        if not self._gave_files:
            return ArenaUse.UNUSED
        if not self._decided.done():
            return ArenaUse.READ_BY_SIDECAR
        return ArenaUse.LOCAL_COPY if self._is_committed else ArenaUse.UNUSED

    # Reports to the other ranks.

    def _report(self, error: BaseException, number: int = 0) -> None:
        """Reports this rank's failure, in the background; ``number``: of the save that fails, instead of this one."""
        if self._reporting is not None:
            return
        request = fail_request(self.context, error)
        if number:
            request.context.save.number = number

        async def send() -> None:
            try:
                await self.sidecar.fail(request)
            except PannierError as problem:
                # The sidecar will detect the failure by itself.
                text = f"the sidecar, to which a failure could not be reported ({problem})"
                self._handle_end.wait_for("sidecar", text)

        self._reporting = asyncio.ensure_future(send())
        self._reporting.add_done_callback(lambda _: self._saves.changed())

    # Parts of the above.

    def trace(self, error: str = "") -> None:
        """Exports the spans of this rank's part so far. Any thread."""
        self._times.trace(self.context, self.handle.status().bytes, error)

    def _mark_ingested(self) -> None:
        engine().start(lambda: self._handle_end.in_worker(self._handle_end.ingested))

    @property
    def options(self) -> Options:
        """What the caller chose."""
        return self.call.options

    @property
    def _handle_end(self) -> Resolver:
        assert self._resolver is not None
        return self._resolver

    def _begin_sending(self, staged: Staged) -> None:
        if self._staged.done():
            return
        assert self._plan is not None
        self._times.end("stage")
        self._sending = Sending(staged, self._plan, self.options, self._handle_end, self._times)
        self._staged.set_result(True)

    @property
    def _is_ingested(self) -> bool:
        """There is nothing more to send."""
        return self._sent.done() and self._sent.result()

    @property
    def _may_be_handed_over(self) -> bool:
        return self._sending is not None and self._sending.is_handed_over

    @property
    def _gave_files(self) -> bool:
        return self._sending is not None and self._sending.gave_files

    @property
    def _is_committed(self) -> bool:
        decided = self._decided
        return decided.done() and decided.result().state == save_pb2.SAVE_STATE_COMMITTED

    @property
    def _left_s(self) -> float:
        return self.options.deadline.remaining() + timeouts.DECISION_S

    def _error_of(self, sending: "asyncio.Task[None]") -> BaseException | None:
        if self._refused.done():
            return self._refused.result()
        if sending.done() and not sending.cancelled():
            return sending.exception()
        return None
