"""One save, from its first message to its end: what happens when.

In: a :class:`Save` that ranks and sidecars fill. Out: its end, in storage and in its
state. One task per save; it alone writes to storage for it. Event loop; what is CPU-bound
runs in a thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

import tenacity

from pannier.coordinator.blame import (
    SupersededError,
    blame,
    check_told,
    raise_lost,
    raise_missed,
)
from pannier.coordinator.commit import pickle_metadata
from pannier.coordinator.gather import DisagreementError
from pannier.coordinator.manifest import Manifest
from pannier.coordinator.places import Places
from pannier.coordinator.planners import Planners
from pannier.coordinator.receipts import (
    check_external_metadata,
    complete_metadata,
)
from pannier.coordinator.saves import Save, State
from pannier.records import decisions, installing, manifests
from pannier.records.receipts import find_receipts
from pannier.records.removing import remove_attempt
from pannier.storage import DeniedError, NotFoundError, StorageError, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire.errors import (
    ConfigurationError,
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_LONGEST_BACKOFF_S: Final = 5.0
"""Between two tries of a step whose outcome is in doubt."""
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
    """

    def __init__(self, places: Places, planners: Planners, *, host: str, threads: Executor) -> None:
        self._places = places
        self._planners = planners
        self._host = host
        self._threads = threads
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, save: Save) -> None:
        """Starts the save's task."""
        task = asyncio.get_running_loop().create_task(self._conduct(save), name=save.key)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Drops all saves as they are: another coordinator can go on from storage."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _conduct(self, save: Save) -> None:
        work = asyncio.get_running_loop().create_task(self._work(save))
        doomed = asyncio.get_running_loop().create_task(save.doomed.wait())
        try:
            await asyncio.wait({work, doomed}, return_when=asyncio.FIRST_COMPLETED)
            if not save.deciding:
                await _cancel(work)
            await asyncio.wait({work})
            if not work.cancelled() and (error := work.exception()) is not None:
                blame(save, error)
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
            await self._find_attempt(save)
            if not save.external and not save.resumed:
                await self._gather(save)
            if save.resumed and await self._resume(save, store):
                return
            if not save.external and save.manifest is None:
                ours = await self._plan(save, store)
                if not ours and await self._resume(save, store):
                    return
            save.move(State.STAGING)
            save.progress()
            await self._await_ranks(save, store)
            await self._commit(save, store)
        finally:
            await store.close()

    # Steps, in order.

    async def _find_attempt(self, save: Save) -> None:
        context = save.context
        save.problem = f"storage at {context.checkpoint_id}"
        try:
            save.attempt = await asyncio.wait_for(
                self._places.attempt(context.save, context.checkpoint_id),
                save.plan_deadline - time.monotonic(),
            )
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"storage at {context.checkpoint_id} did not answer within "
                f"{save.plan_deadline - save.start:.0f} s; can this coordinator reach it?"
            ) from None
        save.problem = ""
        save.ring()

    async def _gather(self, save: Save) -> None:
        """Returns when all plans are here, or a rank turns out to have been answered before."""
        if await save.until(
            lambda: save.gathering.complete or save.resumed or save.external,
            lambda: save.plan_deadline,
        ):
            return
        raise_missed(save, "async_save was not called there", save.plan_deadline)

    async def _plan(self, save: Save, store: Store) -> bool:
        """Makes and publishes the plan; False when another coordinator was first."""
        assert save.attempt is not None
        plans = save.gathering.plans
        context, attempt = save.context, save.attempt

        def make() -> Manifest:
            return Manifest.make(context, attempt, plans, self._planners.make(plans, attempt.name))

        made = await self._in_thread(make)
        save.problem = f"storage at {context.checkpoint_id}"
        standing = await self._publish(save, store, made)
        save.problem = ""
        await self._adopt(save, standing)
        return standing is made

    async def _publish(self, save: Save, store: Store, made: Manifest) -> Manifest:
        """Writes the manifest, unless the place refuses it; returns the one that stands there."""
        before, save.touched = save.touched, True
        try:
            return await manifests.publish(store, made)
        except _REFUSED:
            save.touched = before
            raise

    async def _adopt(self, save: Save, standing: Manifest) -> None:
        """Takes the manifest that stands in storage; it must be of the plans we know."""
        await self._in_thread(lambda: standing.share(-1))
        digests = {member.rank: member.digest for member in standing.message.members}
        for plan in save.gathering.plans:
            if digests.get(plan.rank) != plan.digest:
                raise DisagreementError(
                    f"rank {plan.rank} (host {plan.host}) planned digest {plan.digest[:12]}, but "
                    f"attempt {standing.message.attempt} was planned before with "
                    f"{digests.get(plan.rank, 'none')[:12]}",
                    (plan.rank, plan.host),
                )
        save.manifest = standing

    async def _resume(self, save: Save, store: Store) -> bool:
        """Goes on from what another life of the coordinator left; True when the save has ended."""
        assert save.attempt is not None
        save.touched = True
        decision = await decisions.read_decision(store, save.attempt.name)
        if decision is not None:
            await self._obey(save, store, decision)
            return True
        found = await manifests.read_manifest(store, save.attempt.name, Manifest)
        if found is None:
            # Without a manifest nobody was answered a plan: torch makes this one.
            save.external = True
            found_receipts = await find_receipts(store, save.attempt.name, save.context.ranks)
        else:
            save.external = found.message.external
            await self._adopt(save, found)
            found_receipts = await find_receipts(store, save.attempt.name, found.ranks)
            if save.external:
                save.metadata = found.message.metadata
        _log.info("%s is taken up again, with %d receipts", save.label, len(found_receipts))
        self._take_receipts(save, found_receipts)
        return False

    def _take_receipts(self, save: Save, receipts: Iterable[records_pb2.Receipt]) -> None:
        for receipt in receipts:
            part = save.parts.get(receipt.rank)
            if part is not None and part.receipt is None:
                part.receipt = receipt
                part.host = part.host or receipt.host
                part.advance(save_pb2.RANK_PHASE_DURABLE)
            save.suspects.pop(receipt.rank, None)

    async def _await_ranks(self, save: Save, store: Store) -> None:
        """Until every rank is durable with a receipt that fits the plan."""
        checked: set[int] = set()

        def complete() -> bool:
            for rank, part in save.parts.items():
                if part.receipt is not None and rank not in checked:
                    check_told(save, part.receipt)
                    checked.add(rank)
            return len(checked) == len(save.parts) and (
                not save.external or save.metadata is not None
            )

        while not complete():
            in_time = await save.until(
                lambda: complete() or bool(save.suspects), lambda: save.deadline
            )
            if complete():
                return
            await self._find_durable(save, store)
            if complete():
                return
            if save.suspects:
                raise_lost(save)
            if not in_time:
                raise_missed(save, "its part was not durable in time", save.deadline)

    async def _find_durable(self, save: Save, store: Store) -> None:
        """Looks for receipts that no sidecar has lived to report."""
        assert save.attempt is not None
        missing = [rank for rank, part in save.parts.items() if part.receipt is None]
        try:
            found = await asyncio.wait_for(
                find_receipts(store, save.attempt.name, missing), _TRACES_S
            )
        except (StorageError, asyncio.TimeoutError) as error:
            _log.warning("%s: storage doesn't tell who is durable: %s", save.label, error)
            return
        self._take_receipts(save, found)
        save.progress()

    async def _commit(self, save: Save, store: Store) -> None:
        assert save.attempt is not None
        context, attempt = save.context, save.attempt
        receipts = {
            rank: part.receipt for rank, part in save.parts.items() if part.receipt is not None
        }
        if save.external and save.manifest is None:
            assert save.metadata is not None
            metadata = save.metadata
            await self._in_thread(lambda: check_external_metadata(metadata, receipts))
            hosts = {rank: part.host for rank, part in save.parts.items()}
            made = await self._in_thread(
                lambda: Manifest.make_external(context, attempt, hosts, metadata)
            )
            save.manifest = await self._publish(save, store, made)
        agreed = save.manifest
        assert agreed is not None
        data = await self._in_thread(
            lambda: pickle_metadata(
                complete_metadata(agreed, receipts),
                checkpoint_id=context.checkpoint_id,
                attempt=attempt.name,
            )
        )
        data = await installing.publish_candidate(store, attempt.name, data)
        newer = await installing.find_newer(store, attempt)
        if newer is not None:
            raise SupersededError(
                f"a newer save, {newer.name}, was committed to {context.checkpoint_id} meanwhile"
            )
        proposal = decisions.propose(
            records_pb2.OUTCOME_COMMIT,
            save=context.save,
            attempt=attempt,
            host=self._host,
            plan_id=agreed.plan_id,
            metadata=data,
        )
        save.deciding = True
        decision = await self._insist(save, lambda: decisions.decide(store, proposal))
        await self._obey(save, store, decision)

    async def _obey(self, save: Save, store: Store, decision: records_pb2.Decision) -> None:
        """Brings the save to the end that was decided."""
        assert save.attempt is not None
        save.deciding = True
        if decision.outcome == records_pb2.OUTCOME_COMMIT:
            await self._insist(save, lambda: installing.install(store, decision))
            save.failures.clear()
            for part in save.parts.values():
                part.phase = save_pb2.RANK_PHASE_DURABLE
            save.move(State.COMMITTED)
            return
        for failure in decision.failures:
            save.failures.setdefault(failure.rank, failure)
        if not save.failures:
            save.fail(save_pb2.FAILURE_KIND_INTERNAL, f"decided by {decision.decided_by}")
        save.move(State.ABORTED)
        try:
            await remove_attempt(store, save.attempt.name)
        except StorageError as error:
            _log.warning("objects of %s are left behind: %s", save.label, error)

    async def _abort(self, save: Save) -> None:
        """Ends a doomed save; nothing may be deleted before the decision is durable."""
        if save.resumed and save.attempt is None:
            # Another life of the coordinator may have committed it: only storage can tell.
            save.touched = True
            save.attempt = await self._insist(
                save, lambda: self._places.attempt(save.context.save, save.context.checkpoint_id)
            )
        await self._find_traces(save)
        if save.attempt is None or not (save.touched or save.external):
            save.move(State.ABORTED)
            return
        proposal = decisions.propose(
            records_pb2.OUTCOME_ABORT,
            save=save.context.save,
            attempt=save.attempt,
            host=self._host,
            failures=list(save.failures.values()),
        )
        store = self._places.open(save.context.checkpoint_id)
        try:
            decision = await self._insist(
                save,
                lambda: decisions.decide(store, proposal),
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

    async def _find_traces(self, save: Save) -> None:
        """Looks whether another life of the coordinator has planned this attempt."""
        kinds = {failure.kind for failure in save.failures.values()}
        if save.touched or save.external or save_pb2.FAILURE_KIND_STORAGE in kinds:
            return
        try:
            await asyncio.wait_for(self._ask_traces(save), _TRACES_S)
        except (PannierError, asyncio.TimeoutError) as error:
            _log.warning("%s: storage doesn't tell whether it was planned: %s", save.label, error)

    async def _ask_traces(self, save: Save) -> None:
        context = save.context
        store = self._places.open(context.checkpoint_id)
        try:
            save.attempt = await self._places.attempt(context.save, context.checkpoint_id)
            save.touched = await manifests.exists(store, save.attempt.name)
        finally:
            await store.close()

    async def _insist(
        self,
        save: Save,
        step: Callable[[], Awaitable[_Answer]],
        *,
        final: tuple[type[StorageError], ...] = (),
    ) -> _Answer:
        """Runs a step again until its outcome is known; the save is in doubt meanwhile.

        Args:
            final: errors that are an outcome, too.
        """

        def doubt(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            save.problem = f"storage at {save.context.checkpoint_id} ({error})"
            save.move(State.IN_DOUBT)
            _log.warning("the decision of %s is in doubt: %s", save.label, error)
            save.ring()

        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: (
                    isinstance(error, (StorageError, IntegrityError))
                    and not isinstance(error, final)
                )
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=_LONGEST_BACKOFF_S),
            before_sleep=doubt,
        )

        async def once() -> _Answer:
            return await step()

        answer: _Answer = await tries(once)
        save.problem = ""
        return answer

    async def _in_thread(self, function: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


async def _cancel(task: "asyncio.Task[Any]") -> None:
    """Cancels until it has ended: before Python 3.12 a wait_for on the way may lose it."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
