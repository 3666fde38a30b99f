"""One save, from its first message to its end: which step comes when.

In: a :class:`Save` that ranks and sidecars fill. Out: its end, in storage and in its state. One task
per save; it alone writes to storage for it. Event loop; what is CPU-bound runs in a thread.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from pannier.attempts.manifests import exists
from pannier.attempts.metadata_swap import check_free
from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.commit.manifest import Manifest, agree
from pannier.coordinator.planning.custom_planners import Planners, in_own_thread
from pannier.coordinator.planning.plan_cache import AgreedPlan, KeptLocalPlans, PlanCache
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.decision import AttemptEnd, Services
from pannier.coordinator.saves.failures import (
    check_rank_receipt,
    deadline_error,
    failures_of,
    loss_error,
)
from pannier.coordinator.saves.participants import check_options
from pannier.coordinator.saves.plan_choice import (
    PlanBasisReader,
    check_attempts,
    check_parts,
    choose_kept_plan,
    unknown_claims,
)
from pannier.coordinator.saves.resume import (
    StorageChecks,
    UnansweredError,
    adopt_manifest,
    read_claimed_parts,
    read_with_retries,
    resume_save,
)
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.states import PlanMode, State
from pannier.coordinator.stores import Stores
from pannier.daemon.logging import bind
from pannier.maintenance.retention_policy import Policy
from pannier.storage import StorageError, Store
from pannier.storage.base import limited
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class SaveTasks:
    """The tasks of all saves.

    Args:
        host: recorded in decisions.
        threads: for planning and for the metadata.
        sweeper, retention: notified of commits. Default: the usual grace period, and a policy without rules.
        cache: receives the agreed plans, which later saves may use. Default: an empty one.
        on_newest: called with each new save whose incarnation is the job's newest below the root.
    """

    def __init__(
        self,
        stores: Stores,
        planners: Planners,
        *,
        host: str,
        threads: Executor,
        sweeper: Sweeper | None = None,
        retention: Retention | None = None,
        cache: PlanCache | None = None,
        on_newest: Callable[[sidecar_pb2.SaveContext, object_names.Attempt], None] = (
            lambda context, attempt: None
        ),
    ) -> None:
        self._services = Services(
            stores,
            planners,
            host,
            threads,
            sweeper or Sweeper(stores),
            retention or Retention(stores, Policy(), host=host),
            cache or PlanCache(),
            self._spawn,
            on_newest,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, save: Save) -> None:
        """Starts the save's task."""
        self._spawn(SaveTask(save, self._services).run(), save.key)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancels all tasks: another coordinator can resume their saves from storage."""
        # The saves first: one that commits begins a sweep, a check of retention, or a task of its own.
        while self._tasks:
            # Not left to the tasks' callbacks: since Python 3.12 a gather of tasks that have all ended returns
            # without letting the loop run them (https://github.com/python/cpython/pull/104138).
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._services.sweeper.stop()
        await self._services.retention.stop()


class SaveTask:
    """The steps of one save."""

    def __init__(self, save: Save, services: Services) -> None:
        self._save = save
        self._services = services
        self._end = AttemptEnd(save, services)

    async def run(self) -> None:
        """Runs the save to its end."""
        save = self._save
        bind(lambda: save.log_fields)
        try:
            await self._run_until_failing()
            if not save.ended and await self._is_planned_elsewhere():
                save.follow()
                await self._run_until_failing()
            if not save.ended:
                await self._end.abort()
        except Exception as error:  # noqa: BLE001 - top of the task: becomes the save's state
            left = "; it is left IN_DOUBT: restart the coordinator, or run `pannier recover`"
            _log.exception(
                "internal error while %s was run%s", save.label, "" if save.ended else left
            )
            save.note_internal_error(error)

    async def _run_until_failing(self) -> None:
        """Runs the steps; they are cancelled when the save fails before it is decided."""
        loop = asyncio.get_running_loop()
        steps = loop.create_task(self._run_steps())
        failing = loop.create_task(self._save.outcome.failing.wait())
        limit = loop.create_task(self._limit_storage_wait())
        try:
            await asyncio.wait({steps, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not self._save.deciding:
                await _cancel(steps)
            await asyncio.wait({steps})
            if not steps.cancelled() and (error := steps.exception()) is not None:
                self._save.fail_ranks(
                    failures_of(error, self._save.label),
                    timed_out=isinstance(error, DeadlineError),
                )
        finally:
            # Also when the daemon stops.
            await _cancel(limit)
            await _cancel(failing)
            await _cancel(steps)

    async def _limit_storage_wait(self) -> None:
        """Skips the save when a rank waits for its plan that storage delays, and skips saves for such waits."""
        save = self._save
        await save.wait_until(lambda: save.plans.complete and save.deadlines.storage_wait_s > 0)
        await asyncio.sleep(save.deadlines.storage_wait_s)
        while save.state is State.PLANNING and not (save.resumed or save.external):
            if save.storage_wait:
                save.fail(
                    save_pb2.FAILURE_KIND_SKIPPED,
                    f"its plan waits for {save.storage_wait}, for more than "
                    f"{save.deadlines.storage_wait_s:g} s",
                )
                return
            await asyncio.sleep(timeouts.STORAGE_WAIT_CHECK_S)

    async def _is_planned_elsewhere(self) -> bool:
        """Whether ranks timed out here because another coordinator planned the save.

        That coordinator may commit the save, so this one must not abort it, but resumes it.
        """
        save = self._save
        if save.state is not State.PLANNING or not save.outcome.only_timed_out:
            return False
        if save.written or not await self._end.check_written():
            return False
        _log.warning(
            "%s: another coordinator has planned it; this one stops planning and resumes it from "
            "storage (here: %s)",
            *(save.label, save.outcome.text()),
        )
        return True

    # Steps, in order.

    async def _run_steps(self) -> None:
        """All steps up to the applied decision. What they raise fails the save."""
        save = self._save
        if save.failing:
            # The first message reported a failure, perhaps about the checkpoint id itself.
            return
        try:
            store = self._services.stores.open(save.context.checkpoint_id)
        except (InvalidRequestError, ConfigurationError) as error:
            raise StorageError(str(error)) from error
        try:
            # The steps before the commit have a deadline; a decision is applied however long that takes.
            with limited(until=lambda: save.next_deadline, retried=save.wait_for_storage):
                decision = await self._prepare(store)
            if save.state is State.PREPARED:
                return
            if decision is None:
                decision = await self._end.decide_commit(store)
            await self._end.apply(store, decision)
        finally:
            await store.close()

    async def _prepare(self, store: Store) -> records_pb2.Decision | None:
        """Runs the steps before the commit; returns the decision if the save has ended already."""
        save, stores = self._save, self._services.stores
        if not save.external and not save.resumed:
            await self._ask_root(lambda: stores.contact(save.context))
            # The incarnation gets its number only after this: else a delayed message of killed processes
            # would make their incarnation newer than the one that was started since.
            await self._collect_plans()
        if save.attempt is None:
            save.set_attempt(await self._ask_root(lambda: stores.attempt(save.context)))
        if not (save.resumed or save.mode is PlanMode.PREPARE):
            await self._check_destination(store)
        if not save.resumed:
            # A resumed save was planned before, and may be finished from what is ingested.
            await self._check_newest_incarnation()
        decision = None
        if save.resumed:
            decision = await self._resume(store)
        if decision is None and not save.external and save.manifest is None:
            own = await self._plan(store)
            if not own:
                _log.warning("%s: another coordinator has planned it before", save.label)
                save.yield_planning()
                decision = await self._resume(store)
        if save.manifest is not None and not save.external:
            self._services.cache.keep(save.context, save.manifest.plan)
        if decision is None and save.state is not State.PREPARED:
            save.move(State.STAGING)
            save.progress()
            decision = await self._await_ranks(store)
        return decision

    async def _resume(self, store: Store) -> records_pb2.Decision | None:
        """See :func:`resume_save`."""
        save = self._save
        save.wait_for_storage()
        decision = await read_with_retries(save, lambda: resume_save(save, store))
        save.storage_answered()
        return decision

    async def _ask_root(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer of the save's root. Raises StorageError when the deadline passes."""
        save = self._save
        save.wait_for_storage()
        try:
            answer = await within(
                math.inf, read_with_retries(save, question), sooner=lambda: save.next_deadline
            )
        except asyncio.TimeoutError:
            seconds = save.next_deadline - save.deadlines.start
            raise StorageError(
                f"{save.storage_wait} did not answer within {seconds:.0f} s; can this coordinator "
                "reach it?"
            ) from None
        except (InvalidRequestError, UnavailableError) as error:
            raise StorageError(str(error)) from error
        save.storage_answered()
        return answer

    async def _check_destination(self, store: Store) -> None:
        """Raises OccupiedError early; the commit checks again what it replaces."""
        save = self._save
        assert save.attempt is not None
        save.wait_for_storage()
        await check_free(
            store,
            save=save.context.save,
            attempt=save.attempt.name,
            overwrite=save.context.overwrite,
        )
        save.storage_answered()

    async def _check_newest_incarnation(self) -> None:
        """Raises SupersededError when a newer incarnation of the job has begun to save."""
        save, stores = self._save, self._services.stores
        assert save.attempt is not None
        attempt = save.attempt
        save.wait_for_storage()
        await read_with_retries(save, lambda: stores.check_newest(save.context, attempt))
        save.storage_answered()
        self._services.on_newest(save.context, attempt)

    async def _collect_plans(self) -> None:
        """Returns when all ranks have handed in plans or claims, or the save turns out to be resumed."""
        save = self._save
        if not await save.wait_until(
            lambda: save.plans.complete or save.resumed or save.external,
            lambda: save.deadlines.plan,
        ):
            raise self._missed("async_save was not called there", save.deadlines.plan)

    async def _plan(self, store: Store) -> bool:
        """Chooses or makes the plan, and publishes it; False when another coordinator was first."""
        save, cache = self._save, self._services.cache
        assert save.attempt is not None
        attempt = save.attempt
        check_attempts(save, attempt)
        await read_claimed_parts(save, cache, self._services.stores.open)
        plan, local = choose_kept_plan(cache, save), None
        if plan is None and (unknown := unknown_claims(cache, save)):
            if await exists(store, attempt.name):
                save.mark_written()
                return False
            await self._collect_full_plans(unknown)
        if save.resumed:
            return False
        if plan is None:
            plan, local = await self._make_plan(attempt.name)
            check_parts(plan, save)
        if save.mode is PlanMode.PREPARE:
            cache.keep(save.context, plan, local)
            save.set_prepared(plan.plan_id)
            return True
        hosts, agreed = save.participants.hosts, plan
        made = await self._services.in_thread(
            lambda: Manifest.of(
                agreed, save.context, attempt, hosts, timeout_s=save.deadlines.left_s
            )
        )
        save.wait_for_storage()
        manifest = await self._end.publish_manifest(store, made)
        save.storage_answered()
        if manifest is made:
            cache.keep(save.context, plan, local)
            save.set_manifest(made)
            return True
        await self._services.in_thread(lambda: manifest.plan.make_parts())
        adopt_manifest(save, manifest)
        return False

    async def _make_plan(self, attempt: str) -> tuple[AgreedPlan, KeptLocalPlans]:
        """A new plan, with the parts that ranks have staged, and the local plans that came with this save."""
        services = self._services
        basis = await services.in_thread(PlanBasisReader(services.cache, self._save).read)
        check_options(basis.plans)

        def make() -> AgreedPlan:
            plan = services.planners.make(
                basis.plans, attempt, staged=basis.staged, before=basis.before
            )
            return agree(basis.plans, plan)

        options, deadlines = basis.plans[0].plan.options, self._save.deadlines
        if not options.custom_global_plan:
            return await services.in_thread(make), basis.handed_in
        try:
            made = await within(deadlines.plan - time.monotonic(), in_own_thread(make))
        except asyncio.TimeoutError as error:
            raise DeadlineError(
                f"the planner {options.planner} had made no global plan after "
                f"{deadlines.plan - deadlines.start:.0f} s; it runs in the coordinator, on {services.host}"
            ) from error
        return made, basis.handed_in

    async def _collect_full_plans(self, ranks: Sequence[int]) -> None:
        """Returns when these ranks, which have made claims, have handed in their full plans."""
        save = self._save
        save.request_full_plans(ranks)
        if not await save.wait_until(
            lambda: not save.plans.requested or save.resumed, lambda: save.deadlines.plan
        ):
            raise self._missed("its full plan was requested", save.deadlines.plan)

    async def _await_ranks(self, store: Store) -> records_pb2.Decision | None:
        """Returns when every rank is durable with a receipt that fits the plan.

        Returns the decision, if another coordinator was first.
        """
        save = self._save
        # Receipts may have arrived before a resumed save's plan was read.
        checked: set[int] = set()
        save.participants.pop_unchecked()
        unchecked = list(save.participants.receipts.values())
        checks = StorageChecks(save)

        def complete() -> bool:
            # Called after each of thousands of reports.
            unchecked.extend(save.participants.pop_unchecked())
            while unchecked:
                self._check_receipt(receipt := unchecked.pop())
                checked.add(receipt.rank)
            return len(checked) == len(save.ranks) and (
                not save.external or save.external_plan.metadata is not None
            )

        while True:
            await save.wait_until(
                lambda: (
                    complete() or save.records.check_requested or bool(save.outcome.possible_losses)
                ),
                lambda: min(save.deadline, checks.due()),
            )
            if complete():
                return None
            lost = dict(save.outcome.possible_losses)
            late = time.monotonic() >= save.deadline
            try:
                decision = await checks.check(store, last=bool(lost) or late)
            except UnansweredError:
                continue
            if decision is not None or complete():
                return decision
            if lost := {
                rank: why for rank, why in lost.items() if rank in save.outcome.possible_losses
            }:
                raise loss_error(lost.values())
            if late:
                raise self._missed("its part was not durable in time", save.deadline)

    def _check_receipt(self, receipt: records_pb2.Receipt) -> None:
        save = self._save
        assert save.attempt is not None
        check_rank_receipt(receipt, save.attempt.name, None if save.external else save.manifest)

    def _missed(self, what: str, deadline: float) -> DeadlineError:
        save = self._save
        seconds = deadline - save.deadlines.start
        late = save_view.awaited(save)
        return deadline_error(what, save_view.awaited_text(save), seconds, late)


async def _cancel(task: "asyncio.Task[Any]") -> None:
    """Cancels the task until it has ended: before Python 3.12 a wait_for in it may lose a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=timeouts.TASK_CANCEL_S)
