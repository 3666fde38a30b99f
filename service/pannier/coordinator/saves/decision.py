"""How a save's attempt ends: the decision is written, then applied.

In: a :class:`Save` that is complete or failing. Out: its decision and the end of the save, in storage and
in its state. Order of writes: candidate of ``.metadata``, decision, ``.metadata``; nothing is deleted
before ABORT is durable. One :class:`AttemptEnd` per save. Event loop; what is CPU-bound runs in a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import decide, decider, new_decision
from pannier.attempts.manifests import exists, publish
from pannier.attempts.metadata_swap import OccupiedError, RemovedError
from pannier.attempts.receipts import LostError, check_shared_directory, find_lost
from pannier.common import timeouts
from pannier.common.deadline import Deadline, within
from pannier.common.retry import RetryPolicy
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata import build_candidate
from pannier.coordinator.commit.receipt_check import check_external_metadata
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.plan_cache import PlanCache
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.states import AttemptState, State
from pannier.coordinator.stores import Stores
from pannier.storage import DeniedError, HeldError, NotFoundError, StorageError, Store
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

REFUSED: Final = (DeniedError, NotFoundError)
"""Errors with which storage has answered, so that nothing was written."""


@dataclass(frozen=True)
class Services:
    """What the tasks of all saves share.

    Args:
        host: recorded in decisions.
        threads: for planning and for the metadata.
        spawn: runs a coroutine in a separate task that ends with the coordinator.
        on_newest: called with each new save whose incarnation is the job's newest below the root.
    """

    stores: Stores
    planners: Planners
    host: str
    threads: Executor
    sweeper: Sweeper
    retention: Retention
    cache: PlanCache
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    on_newest: Callable[[sidecar_pb2.SaveContext, object_names.Attempt], None]

    async def in_thread(self, function: Callable[[], _Answer]) -> _Answer:
        """Runs CPU-bound work."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)


class AttemptEnd:
    """Ends the attempt of one save."""

    def __init__(self, save: Save, services: Services) -> None:
        self._save = save
        self._services = services

    async def publish_manifest(self, store: Store, manifest: Manifest) -> Manifest:
        """Writes the manifest, unless storage refuses it; returns the one that is in storage."""
        save, before = self._save, self._save.records.state
        save.mark_written()
        try:
            return await publish(store, manifest)
        except REFUSED:
            save.move_attempt(before)
            raise

    async def decide_commit(self, store: Store) -> records_pb2.Decision:
        """Decides the commit of a save whose ranks are all durable; returns the decision in storage.

        Waits for storage as long as that takes: whatever this process can't do now, the job's next coordinator
        could.
        """
        save = self._save
        save.wait_for_storage()
        proposal = await self._retry_until_answered(lambda: self._propose_commit(store), store)
        save.move_attempt(AttemptState.DECIDING)
        return await retry_until_known(save, lambda: decide(store, proposal))

    async def _propose_commit(self, store: Store) -> records_pb2.Decision:
        """Checks that the save can be committed, and publishes what the COMMIT needs. Idempotent."""
        save = self._save
        assert save.attempt is not None
        attempt = save.attempt
        receipts = save.participants.receipts
        await check_shared_directory(
            store, attempt.name, save.participants.hosts, here=self._services.host
        )
        manifest = save.manifest
        if manifest is None:
            manifest = await self._publish_external(store)
        data = await self._services.in_thread(
            lambda: build_candidate(manifest, receipts, checkpoint_id=save.context.checkpoint_id)
        )
        return await prepare_commit(
            store,
            save=save.context.save,
            attempt=attempt,
            plan_id=manifest.plan_id,
            metadata=data,
            receipts=receipts.values(),
            host=self._services.host,
            overwrite=manifest.header.overwrite,
        )

    async def _retry_until_answered(
        self, step: Callable[[], Awaitable[_Answer]], store: Store
    ) -> _Answer:
        """Runs a step until storage answers. Raises the errors with which it has."""
        save = self._save
        shown_by: Deadline | None = None

        def is_retriable(error: BaseException) -> bool:
            nonlocal shown_by
            if isinstance(error, LostError):
                shown_by = shown_by or Deadline(timeouts.DIRECTORY_CACHED_S)
                return store.host_local and not shown_by.passed
            return isinstance(error, StorageError) and not isinstance(error, (*REFUSED, HeldError))

        def note(error: BaseException) -> None:
            _log.warning("%s: its commit waits for storage: %s", save.label, error)
            save.wait_for_storage(error)

        return await _policy(is_retriable, note).run(step)

    async def _publish_external(self, store: Store) -> Manifest:
        """Publishes the manifest of torch's plan, once its metadata and all receipts have arrived."""
        save, metadata = self._save, self._save.external_plan.metadata
        assert save.attempt is not None
        assert metadata is not None
        attempt, receipts = save.attempt, save.participants.receipts
        hosts = save.participants.hosts
        await self._services.in_thread(lambda: check_external_metadata(metadata, receipts))
        # The attempt has had no manifest, whose absence would show that it was removed meanwhile.
        if lost := await find_lost(store, attempt.name, receipts.values()):
            raise LostError(
                f"files or receipts of ranks {lost} are no longer in {store.url}: "
                f"{attempt.name} was given up and removed before it could be committed"
            )
        made = await self._services.in_thread(
            lambda: Manifest.make_external(
                save.context, attempt, hosts, metadata, timeout_s=save.deadlines.left_s
            )
        )
        manifest = await self.publish_manifest(store, made)
        save.set_manifest(manifest)
        return manifest

    async def apply(self, store: Store, decision: records_pb2.Decision) -> None:
        """Ends the save as the decision says; any coordinator may have written it."""
        save = self._save
        save.move_attempt(AttemptState.DECIDING)
        self._note_decider(decision)
        if decision.outcome == records_pb2.OUTCOME_COMMIT:
            await self._apply_commit(store, decision)
        else:
            await self._apply_abort(store, decision)

    async def _apply_commit(self, store: Store, decision: records_pb2.Decision) -> None:
        save, services = self._save, self._services
        try:
            await retry_until_known(save, lambda: carry_out(store, decision))
        except (RemovedError, OccupiedError) as error:
            occupied = isinstance(error, OccupiedError)
            kind = save_pb2.FAILURE_KIND_EXISTS if occupied else save_pb2.FAILURE_KIND_STORAGE
            save.fail(kind, str(error))
            save.move(State.ABORTED)
            return
        save.commit()
        checkpoint_id = save.context.checkpoint_id
        services.sweeper.committed(checkpoint_id)
        services.retention.committed(checkpoint_id, save.context.save.job, decision.attempt)

    async def _apply_abort(self, store: Store, decision: records_pb2.Decision) -> None:
        save = self._save
        save.fail_ranks(decision.failures)
        if not save.outcome.failures:
            save.fail(save_pb2.FAILURE_KIND_INTERNAL, f"decided by {decision.decided_by}")
        save.move(State.ABORTED)
        try:
            await carry_out(store, decision)
        except StorageError as error:
            _log.warning("objects of %s are left behind: %s", save.label, error)
        self._services.spawn(self._remove_again(decision), save.key)

    def _note_decider(self, decision: records_pb2.Decision) -> None:
        """Sets the save's note if another process has written the decision."""
        save = self._save
        if decision.decided_by.startswith(decider(self._services.host)):
            return
        what = "COMMIT" if decision.outcome == records_pb2.OUTCOME_COMMIT else "ABORT"
        save.set_note(
            f"{what} was decided by another coordinator or an earlier process of this one, "
            f"{decision.decided_by}"
        )
        here = f" (here: {save.outcome.text()})" if save.outcome.failures else ""
        _log.warning("%s: %s; this coordinator follows%s", save.label, save.note, here)

    async def _remove_again(self, decision: records_pb2.Decision) -> None:
        """Removes objects that uploads still running at the abort have written since."""
        checkpoint_id = self._save.context.checkpoint_id
        for pause in timeouts.REMOVE_AGAIN_S:
            await asyncio.sleep(pause)
            store = self._services.stores.open(checkpoint_id)
            try:
                await carry_out(store, decision)
            except StorageError as error:
                _log.warning(
                    "objects of %s may be left in %s: %s", decision.attempt, checkpoint_id, error
                )
            finally:
                await store.close()

    async def abort(self) -> None:
        """Aborts the failing save; nothing is deleted before the decision is durable."""
        save, services = self._save, self._services
        if save.resumed:
            # Another process of a coordinator may have committed it: only storage shows that.
            save.mark_written()
            if save.attempt is None:
                await self._find_attempt()
        await self.check_written()
        if save.attempt is None or not (save.written or save.external):
            save.move(State.ABORTED)
            return
        proposal = new_decision(
            records_pb2.OUTCOME_ABORT,
            save=save.context.save,
            attempt=save.attempt,
            host=services.host,
            failures=list(save.outcome.failures.values()),
        )
        store = services.stores.open(save.context.checkpoint_id)
        try:
            decision = await retry_until_known(
                save,
                lambda: decide(store, proposal),
                final=() if save.written else REFUSED,
            )
        except REFUSED as error:
            # Without a manifest no coordinator can commit it either.
            _log.warning("%s is aborted without a record: %s", save.label, error)
            save.move(State.ABORTED)
        else:
            await self.apply(store, decision)
        finally:
            await store.close()

    async def _find_attempt(self) -> None:
        save, stores = self._save, self._services.stores

        async def ask() -> object_names.Attempt:
            try:
                return await stores.attempt(save.context)
            except (InvalidRequestError, ConfigurationError, UnavailableError) as error:
                # An earlier process may have planned it, when --allow was wider.
                raise StorageError(f"what became of it can't be read: {error}") from error

        try:
            save.set_attempt(await retry_until_known(save, ask))
        except SupersededError as error:
            # Its incarnation has no number, so no attempt below the root: nothing is there.
            _log.warning("%s has no attempt in storage: %s", save.label, error)

    async def check_written(self) -> bool:
        """Whether something of the attempt may be in storage; reads the manifest if need be."""
        save = self._save
        kinds = {failure.kind for failure in save.outcome.failures.values()}
        if save.written or save.external or save_pb2.FAILURE_KIND_STORAGE in kinds:
            return save.written
        try:
            await within(timeouts.MANIFEST_SHOWN_S, self._find_manifest())
        except (PannierError, asyncio.TimeoutError) as error:
            _log.warning("%s: whether it was planned can't be read: %s", save.label, error)
        return save.written

    async def _find_manifest(self) -> None:
        save, stores = self._save, self._services.stores
        store = stores.open(save.context.checkpoint_id)
        try:
            # An incarnation without a number has planned nothing, and gets none for an abort.
            save.set_attempt(await stores.find_attempt(save.context))
            if save.attempt is not None and await exists(store, save.attempt.name):
                save.mark_written()
        finally:
            await store.close()


async def retry_until_known(
    save: Save,
    step: Callable[[], Awaitable[_Answer]],
    *,
    final: tuple[type[StorageError], ...] = (),
) -> _Answer:
    """Runs a step until storage shows its outcome; the save is in doubt meanwhile.

    Args:
        final: errors that are an outcome, too: they are raised at once.
    """

    def doubt(error: BaseException) -> None:
        save.move(State.IN_DOUBT)
        _log.warning("the decision of %s is in doubt: %s", save.label, error)
        save.wait_for_storage(error)

    def is_retriable(error: BaseException) -> bool:
        return isinstance(error, (StorageError, IntegrityError)) and not isinstance(error, final)

    answer = await _policy(is_retriable, doubt).run(step)
    save.storage_answered()
    return answer


def _policy(
    retriable: Callable[[BaseException], bool], on_retry: Callable[[BaseException], None]
) -> RetryPolicy:
    return RetryPolicy(
        retriable=retriable,
        first_s=timeouts.STEP_AGAIN_S,
        longest_s=timeouts.STEP_LONGEST_AGAIN_S,
        on_retry=on_retry,
    )
