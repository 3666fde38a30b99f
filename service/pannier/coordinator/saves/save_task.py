"""One save, from its first message to its end: what happens when.

In: a :class:`Save` that ranks and sidecars fill. Out: its end, in storage and in its
state. One task per save; it alone writes to storage for it. Event loop; what is CPU-bound
runs in a thread.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import decide, decider, new_decision
from pannier.attempts.manifests import exists, publish
from pannier.attempts.metadata_swap import OccupiedError, RemovedError, check_free
from pannier.attempts.receipts import find_lost
from pannier.common.deadline import within
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.commit.manifest import Manifest, agree
from pannier.coordinator.commit.metadata import build_candidate
from pannier.coordinator.commit.receipt_check import check_external_metadata
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.plan_cache import AgreedPlans
from pannier.coordinator.saves.failures import blame, check_told, raise_lost, raise_missed
from pannier.coordinator.saves.plan_choice import check_attempts, choose, kept_assignments
from pannier.coordinator.saves.resume import Looks, adopt, go_by, take_up
from pannier.coordinator.saves.retry_until_known import ask, insist
from pannier.coordinator.saves.save import Save, State
from pannier.coordinator.stores import Places
from pannier.daemon.logging import bind
from pannier.maintenance.retention_policy import Policy
from pannier.storage import DeniedError, NotFoundError, StorageError, Store
from pannier.storage.base import limited
from pannier.v1 import records_pb2, save_pb2
from pannier.wire.errors import (
    ConfigurationError,
    InvalidRequestError,
    PannierError,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

REMOVE_AGAIN_S: Final = (3.0, 30.0)
"""Pauses after an abort until its objects are looked for once more."""
_REFUSED: Final = (DeniedError, NotFoundError)
"""Storage has answered, and has written nothing."""
_CANCEL_S: Final = 0.5
_TRACES_S: Final = 10.0
"""For storage to say whether a save that nobody will commit has left anything."""


class Conductor:
    """Sets saves in motion.

    Args:
        host: signs decisions.
        threads: for planning and for the metadata.
        sweeper, retention: told of commits. Default: those of their own, which keep all.
        plans: told of the plans that are agreed, which later saves go by. Default: none so far.
    """

    def __init__(
        self,
        places: Places,
        planners: Planners,
        *,
        host: str,
        threads: Executor,
        sweeper: Sweeper | None = None,
        retention: Retention | None = None,
        plans: AgreedPlans | None = None,
    ) -> None:
        self._places = places
        self._sweeper = sweeper or Sweeper(places)
        self._retention = retention or Retention(places, Policy(), host=host)
        self._planners = planners
        self._host = host
        self._threads = threads
        self._plans = plans or AgreedPlans()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, save: Save) -> None:
        """Starts the save's task."""
        self._spawn(self._conduct(save), save.key)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Drops all saves as they are: another coordinator can go on from storage."""
        await self._sweeper.stop()
        await self._retention.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _conduct(self, save: Save) -> None:
        bind(lambda: save.about)
        doomed = asyncio.get_running_loop().create_task(save.doomed.wait())
        work = asyncio.get_running_loop().create_task(self._work(save))
        try:
            await self._until_doomed(save, work, doomed)
            if not save.ended and await self._is_elsewhere(save):
                save.revive()
                doomed = asyncio.get_running_loop().create_task(save.doomed.wait())
                work = asyncio.get_running_loop().create_task(self._work(save))
                await self._until_doomed(save, work, doomed)
            if not save.ended:
                await self._abort(save)
        except Exception as error:  # noqa: BLE001 - top of the task: becomes the save's state
            _log.exception("the end of %s failed", save.label)
            save.problem = f"the coordinator ({type(error).__name__}: {error})"
            if not save.ended:
                save.move(State.IN_DOUBT)
        finally:
            # The daemon stops: both end here.
            await _cancel(doomed)
            await _cancel(work)

    async def _until_doomed(
        self, save: Save, work: "asyncio.Task[None]", doomed: "asyncio.Task[Any]"
    ) -> None:
        """Returns when the work has ended, or was given up."""
        await asyncio.wait({work, doomed}, return_when=asyncio.FIRST_COMPLETED)
        if not save.deciding:
            await _cancel(work)
        await asyncio.wait({work})
        if not work.cancelled() and (error := work.exception()) is not None:
            blame(save, error)

    async def _is_elsewhere(self, save: Save) -> bool:
        """Whether ranks only fell silent here because another coordinator planned the save.

        It may commit, so that this one must not abort: it follows.
        """
        if save.state is not State.PLANNING or save.failures.keys() - save.concluded:
            return False
        if save.touched or not await self._find_traces(save):
            return False
        _log.warning(
            "%s: another coordinator has planned it; this one stops planning and goes on from "
            "storage (here: %s)",
            save.label,
            save.reason(),
        )
        return True

    async def _work(self, save: Save) -> None:
        """Up to the commit. What it raises aborts the save; it is cancelled when it is doomed."""
        if save.doomed.is_set():
            # The first rank came to say that it failed, perhaps over the checkpoint id itself.
            return
        try:
            store = self._places.open(save.context.checkpoint_id)
        except (InvalidRequestError, ConfigurationError) as error:
            raise StorageError(str(error)) from error
        try:
            # What is decided is carried out however long that takes; all before has a deadline.
            with limited(until=lambda: save.next_deadline, retried=lambda why: _retried(save, why)):
                decision = await self._prepare(save, store)
            if save.state is State.PREPARED:
                return
            if decision is None:
                decision = await self._commit(save, store)
            await self._obey(save, store, decision)
        finally:
            await store.close()

    # Steps, in order.

    async def _prepare(self, save: Save, store: Store) -> records_pb2.Decision | None:
        """Up to the point at which it can be committed; the decision, if it has been ended."""
        if not save.external and not save.resumed:
            await self._reach(save, lambda: self._places.contact(save.context))
            # The incarnation takes its number after this: the last words of processes that were
            # killed would make theirs newer than the one that was started since.
            await self._gather(save)
        await self._find_attempt(save)
        if not (save.resumed or save.preparing):
            await self._check_place(save, store)
        if not save.resumed:
            # One that is resumed was planned before: what is ingested may be finished.
            await self._check_newest(save)
        decision = None
        if save.resumed:
            decision = await ask(save, lambda: take_up(save, store))
        if decision is None and not save.external and save.manifest is None:
            ours = await self._plan(save, store)
            if not ours:
                _log.warning("%s: another coordinator has planned it before", save.label)
                save.resumed = True
                decision = await ask(save, lambda: take_up(save, store))
        if save.manifest is not None and not save.external:
            self._plans.keep(save.context, save.manifest.plan)
        if decision is None and save.state is not State.PREPARED:
            save.move(State.STAGING)
            save.progress()
            decision = await self._await_ranks(save, store)
        return decision

    async def _find_attempt(self, save: Save) -> None:
        if save.attempt is None:
            save.attempt = await self._reach(save, lambda: self._places.attempt(save.context))
            save.ring()

    async def _reach(self, save: Save, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer of the save's root, in time. Raises StorageError."""
        save.problem = f"storage at {save.context.checkpoint_id}"
        try:
            answer = await within(math.inf, ask(save, question), sooner=lambda: save.next_deadline)
        except asyncio.TimeoutError:
            raise StorageError(
                f"{save.problem} did not answer within {save.next_deadline - save.start:.0f} s; can "
                "this coordinator reach it?"
            ) from None
        save.problem = ""
        return answer

    async def _check_place(self, save: Save, store: Store) -> None:
        """Raises OccupiedError early; the commit looks once more, at what it replaces."""
        assert save.attempt is not None
        save.problem = f"storage at {save.context.checkpoint_id}"
        await check_free(
            store,
            save=save.context.save,
            attempt=save.attempt.name,
            overwrite=save.context.overwrite,
        )
        save.problem = ""

    async def _check_newest(self, save: Save) -> None:
        """Raises SupersededError when a newer incarnation of the job has begun to save."""
        assert save.attempt is not None
        context, attempt = save.context, save.attempt
        save.problem = f"storage at {context.checkpoint_id}"
        await ask(save, lambda: self._places.check_newest(context, attempt))
        save.problem = ""

    async def _gather(self, save: Save) -> None:
        """Returns when all plans are here, or a rank turns out to have been answered before."""
        if await save.until(
            lambda: save.gathering.complete or save.resumed or save.external,
            lambda: save.plan_deadline,
        ):
            return
        raise_missed(save, "async_save was not called there", save.plan_deadline)

    async def _plan(self, save: Save, store: Store) -> bool:
        """Finds or makes the plan, and publishes it; False when another coordinator was first."""
        assert save.attempt is not None
        context, attempt = save.context, save.attempt
        check_attempts(save, attempt)
        plan = choose(self._plans, save)
        if plan is None and save.gathering.unread:
            save.touched = await exists(store, attempt.name)
            if save.touched:
                return False
            await self._want_plans(save)
        if save.resumed:
            return False
        if plan is None:
            plans, kept = save.gathering.plans, kept_assignments(self._plans, save)
            plan = await self._in_thread(
                lambda: agree(plans, self._planners.make(plans, attempt.name, kept))
            )
        if save.preparing:
            self._plans.keep(context, plan)
            save.plan_id = plan.plan_id
            save.move(State.PREPARED)
            return True
        hosts = {rank: part.host for rank, part in save.parts.items()}
        agreed = plan
        made = await self._in_thread(lambda: Manifest.of(agreed, context, attempt, hosts))
        save.problem = f"storage at {context.checkpoint_id}"
        standing = await self._publish(save, store, made)
        save.problem = ""
        if standing is made:
            go_by(save, made)
            return True
        await self._in_thread(lambda: standing.plan)
        adopt(save, standing)
        return False

    async def _want_plans(self, save: Save) -> None:
        """Returns when the ranks that go by a plan which doesn't do have handed theirs in, too."""
        save.want_plans()
        if await save.until(
            lambda: not save.gathering.unplanned or save.resumed, lambda: save.plan_deadline
        ):
            return
        raise_missed(save, "its local plan was wanted", save.plan_deadline)

    async def _publish(self, save: Save, store: Store, made: Manifest) -> Manifest:
        """Writes the manifest, unless the place refuses it; returns the one that stands there."""
        before, save.touched = save.touched, True
        try:
            return await publish(store, made)
        except _REFUSED:
            save.touched = before
            raise

    async def _await_ranks(self, save: Save, store: Store) -> records_pb2.Decision | None:
        """Until every rank is durable with a receipt that fits the plan.

        Returns the decision, if another coordinator was first.
        """
        checked: set[int] = set()
        # Some may have come before the plan was known again.
        save.unchecked = [part.receipt for part in save.parts.values() if part.receipt is not None]
        looks = Looks(save)

        def complete() -> bool:
            # Asked after each of thousands of reports.
            while save.unchecked:
                receipt = save.unchecked.pop()
                check_told(save, receipt)
                checked.add(receipt.rank)
            return len(checked) == len(save.parts) and (
                not save.external or save.metadata is not None
            )

        while True:
            await save.until(
                lambda: complete() or save.unseen or bool(save.suspects),
                lambda: min(save.deadline, looks.due()),
            )
            if complete():
                return None
            decision = await looks.look(store)
            save.problem = ""
            if decision is not None or complete():
                return decision
            if save.suspects:
                raise_lost(save)
            if time.monotonic() >= save.deadline:
                raise_missed(save, "its part was not durable in time", save.deadline)

    async def _commit(self, save: Save, store: Store) -> records_pb2.Decision:
        assert save.attempt is not None
        context, attempt = save.context, save.attempt
        save.problem = f"storage at {context.checkpoint_id}"
        receipts = {
            rank: part.receipt for rank, part in save.parts.items() if part.receipt is not None
        }
        if save.external and save.manifest is None:
            assert save.metadata is not None
            metadata = save.metadata
            await self._in_thread(lambda: check_external_metadata(metadata, receipts))
            # It has no manifest so far, whose absence would say that it was removed meanwhile.
            if lost := await find_lost(store, attempt.name, receipts.values()):
                raise StorageError(
                    f"files or receipts of ranks {lost} are no longer in {store.url}: "
                    f"{attempt.name} was given up and removed before it could be committed"
                )
            hosts = {rank: part.host for rank, part in save.parts.items()}
            made = await self._in_thread(
                lambda: Manifest.make_external(context, attempt, hosts, metadata)
            )
            save.manifest = await self._publish(save, store, made)
        agreed = save.manifest
        assert agreed is not None
        data = await self._in_thread(
            lambda: build_candidate(agreed, receipts, checkpoint_id=context.checkpoint_id)
        )
        proposal = await prepare_commit(
            store,
            save=context.save,
            attempt=attempt,
            plan_id=agreed.plan_id,
            metadata=data,
            receipts=receipts.values(),
            host=self._host,
            overwrite=agreed.header.overwrite,
        )
        save.deciding = True
        return await insist(save, lambda: decide(store, proposal))

    async def _obey(self, save: Save, store: Store, decision: records_pb2.Decision) -> None:
        """Brings the save to the end that was decided."""
        save.deciding = True
        self._tell_whose(save, decision)
        if decision.outcome == records_pb2.OUTCOME_COMMIT:
            try:
                await insist(save, lambda: carry_out(store, decision))
            except RemovedError as error:
                save.fail(save_pb2.FAILURE_KIND_STORAGE, str(error))
                save.move(State.ABORTED)
                return
            except OccupiedError as error:
                save.fail(save_pb2.FAILURE_KIND_EXISTS, str(error))
                save.move(State.ABORTED)
                return
            save.failures.clear()
            for part in save.parts.values():
                part.phase = save_pb2.RANK_PHASE_DURABLE
            save.move(State.COMMITTED)
            self._sweeper.committed(save.context.checkpoint_id)
            self._retention.committed(
                save.context.checkpoint_id, save.context.save.job, decision.attempt
            )
            return
        for failure in decision.failures:
            save.failures.setdefault(failure.rank, failure)
        if not save.failures:
            save.fail(save_pb2.FAILURE_KIND_INTERNAL, f"decided by {decision.decided_by}")
        save.move(State.ABORTED)
        try:
            await carry_out(store, decision)
        except StorageError as error:
            _log.warning("objects of %s are left behind: %s", save.label, error)
        self._spawn(self._remove_again(save.context.checkpoint_id, decision), save.key)

    def _tell_whose(self, save: Save, decision: records_pb2.Decision) -> None:
        """Whoever lost says so."""
        if decision.decided_by.startswith(decider(self._host)):
            return
        what = "COMMIT" if decision.outcome == records_pb2.OUTCOME_COMMIT else "ABORT"
        save.note = (
            f"{what} was decided by another coordinator or an earlier life of this one, "
            f"{decision.decided_by}"
        )
        here = f" (here: {save.reason()})" if save.failures else ""
        _log.warning("%s: %s; this coordinator follows%s", save.label, save.note, here)

    async def _remove_again(self, checkpoint_id: str, decision: records_pb2.Decision) -> None:
        """An upload that was on its way to storage when its save was aborted arrives late."""
        for pause in REMOVE_AGAIN_S:
            await asyncio.sleep(pause)
            store = self._places.open(checkpoint_id)
            try:
                await carry_out(store, decision)
            except StorageError as error:
                _log.warning(
                    "objects of %s may be left in %s: %s", decision.attempt, checkpoint_id, error
                )
            finally:
                await store.close()

    async def _abort(self, save: Save) -> None:
        """Ends a doomed save; nothing may be deleted before the decision is durable."""
        if save.resumed:
            # Another life of the coordinator may have committed it: only storage can tell.
            save.touched = True
        if save.resumed and save.attempt is None:
            try:
                save.attempt = await insist(save, lambda: self._places.attempt(save.context))
            except SupersededError as error:
                # Its incarnation has no number and no attempt below the root: nothing is there.
                _log.warning("%s has no attempt in storage: %s", save.label, error)
        await self._find_traces(save)
        if save.attempt is None or not (save.touched or save.external):
            save.move(State.ABORTED)
            return
        proposal = new_decision(
            records_pb2.OUTCOME_ABORT,
            save=save.context.save,
            attempt=save.attempt,
            host=self._host,
            failures=list(save.failures.values()),
        )
        store = self._places.open(save.context.checkpoint_id)
        try:
            decision = await insist(
                save,
                lambda: decide(store, proposal),
                final=() if save.touched else _REFUSED,
            )
        except _REFUSED as error:
            # Without a manifest nobody can commit it either.
            _log.warning("%s is aborted without a record: %s", save.label, error)
            save.move(State.ABORTED)
        else:
            await self._obey(save, store, decision)
        finally:
            await store.close()

    async def _find_traces(self, save: Save) -> bool:
        """Looks whether another coordinator, or life of this one, has planned this attempt."""
        kinds = {failure.kind for failure in save.failures.values()}
        if save.touched or save.external or save_pb2.FAILURE_KIND_STORAGE in kinds:
            return save.touched
        try:
            await asyncio.wait_for(self._ask_traces(save), _TRACES_S)
        except (PannierError, asyncio.TimeoutError) as error:
            _log.warning("%s: storage doesn't tell whether it was planned: %s", save.label, error)
        return save.touched

    async def _ask_traces(self, save: Save) -> None:
        context = save.context
        store = self._places.open(context.checkpoint_id)
        try:
            # An incarnation without a number has planned nothing, and gets none for an abort.
            save.attempt = await self._places.find_attempt(context)
            save.touched = save.attempt is not None and await exists(store, save.attempt.name)
        finally:
            await store.close()

    async def _in_thread(self, function: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _retried(save: Save, why: str) -> None:
    save.problem = f"storage at {save.context.checkpoint_id} ({why})"
    save.ring()


async def _cancel(task: "asyncio.Task[Any]") -> None:
    """Cancels until it has ended: before Python 3.12 a wait_for on the way may lose it."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
