"""What the caller's thread does for its saves: their numbers, plans, staging memory and staging.

In: checked arguments and state dicts. Out: handles of saves that the engine sends, or saves that a storage writer
carries on. Owned by a client. Thread-safe.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client import console
from pannier.client.config import Settings
from pannier.client.engine import engine
from pannier.client.handle import SaveHandle
from pannier.client.identity import Group
from pannier.client.planning import plan_cache
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.plan_cache import PlanCache
from pannier.client.saves.call import SaveCall
from pannier.client.saves.save import Save
from pannier.client.saves.saves import Saves
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import add_extra_files
from pannier.client.transport.membership import Membership
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.common import timeouts
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import DeadlineError, SaveAbortedError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Caller:
    """See the module.

    Args:
        settings: of the client.
        saves: those of the client.
        check_open: raises once the client was closed.
    """

    def __init__(self, settings: Settings, saves: Saves, check_open: Callable[[], None]) -> None:
        self._settings = settings
        self._saves = saves
        self._check_open = check_open
        self._plans = PlanCache()

    def numbered(
        self, member: Membership, group: Group, checkpoint_id: str, body: Callable[[Save], _T]
    ) -> _T:
        """Runs ``body`` as the group's next save.

        On a rank that missed saves of the others, ``body`` runs again, as their next save. An
        exception from ``body`` ends the save on all ranks.
        """
        while True:
            call = SaveCall(member, group, checkpoint_id)
            save = Save(call, self._saves)
            try:
                return body(save)
            except BaseException as error:
                if isinstance(error, SaveAbortedError) and error.resume_at > call.number:
                    _log.warning("%s", error)
                    save.end_call()
                    member.world.resume(group, error.resume_at)
                    continue
                save.end_call(error)
                # Afterwards: the report names the save anyway.
                name_save(error, call.text, call.checkpoint_id)
                raise

    def save(
        self,
        save: Save,
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        *,
        extra_files: Mapping[str, bytes],
        devices: DeviceCopies,
        on_deferred: Callable[[DeferredCopies], None],
    ) -> SaveHandle:
        """Plans and stages an accepted save on the caller's thread; the engine sends it.

        Args:
            devices: makes the copies from devices.
            on_deferred: called with copies that outlast this call.
        """
        call, options = save.call, save.options
        frame = engine().at_end_of_call(partial(save.drop, None))  # noqa: F841 - freed with this call
        with console.logged(
            f"async_save to {call.checkpoint_id}",
            self._sidecar,
            of=("async_save", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        ) as wait:
            planned = _plan_ahead(call, state_dict, planner)
            sidecar = call.member.sidecar()
            context = call.context(sidecar)
            save.connected(sidecar, context, self._check_open)

            def open_save() -> None:
                wait.change(
                    lambda: f"room, which PANNIER_MAX_IN_FLIGHT earlier saves hold: {self._saves}",
                    save_pb2.WAIT_REASON_ROOM,
                )
                engine().call(save.open)
                wait.change(lambda: save.waiting_on or _plan(), save_pb2.WAIT_REASON_PLAN)

            if not self._saves.idle:
                # Before a `state_dict()` is called, whose copies a save that waits, or is skipped, needn't hold.
                open_save()
            spec = planned or plan_cache.save_spec(context, state_dict, planner)

            def request_plan(run: PlannerRun) -> plan_pb2.FinalPlan:
                open_save()
                if options.deadline.passed:
                    raise DeadlineError(f"save {call.text} was not planned in time")
                call.is_requested = True
                return self._request_plan(
                    sidecar,
                    context,
                    run,
                    min(options.plan_timeout_s, options.deadline.remaining()),
                    options.deadline.remaining(),
                    storage_wait_s=timeouts.SKIP_STORAGE_S if options.on_busy == "skip" else 0.0,
                )

            plan = plan_cache.resolve_plan(self._plans, spec, request_plan)
            # Without the spec and the plan, which have the state: it may be freed once it is staged.
            scope, part, sizes = spec.scope, plan.part, plan.sizes
            attempt, plan_id = plan.attempt, plan.plan_id
            unconfirmed = None if plan.is_confirmed else part

            def drop_part() -> None:
                self._plans.drop(scope, part)

            wait.change(
                lambda: f"memory for staging; saves in progress: {self._saves}",
                save_pb2.WAIT_REASON_ROOM,
            )
            arena = engine().call(
                lambda: save.acquire(attempt, plan_id, sizes, unconfirmed, drop_part)
            )
        staged = plan.stage(arena, devices)
        save.deferred = staged.deferred
        staged = add_extra_files(staged, context.rank, extra_files)
        if staged.deferred is not None:
            on_deferred(staged.deferred)
        save.staged(staged)
        return save.handle

    def forget_plans(self) -> None:
        """The world was replaced: the saves of the new one are planned."""
        self._plans.clear()

    def prepare(
        self, call: SaveCall, state_dict: Mapping[str, Any], planner: SavePlanner | None
    ) -> None:
        """Plans and reserves memory for saves to come."""
        timeout_s = self._settings.plan_timeout
        with console.logged(
            f"prepare for {call.checkpoint_id}",
            self._sidecar,
            of=("prepare", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        ) as wait:
            planned = _plan_ahead(call, state_dict, planner)
            sidecar = call.member.sidecar()
            wait.change(_plan, save_pb2.WAIT_REASON_PLAN)
            context = call.context(sidecar)
            spec = planned or plan_cache.save_spec(context, state_dict, planner)
            call.is_requested = True
            plan_cache.prepare(
                self._plans,
                spec,
                lambda run: self._request_plan(
                    sidecar, context, run, timeout_s, timeout_s, prepare=True
                ),
                partial(sidecar.arena, self._saves.pool),
                self._saves.pool.release,
                self._saves.idle,
            )

    def _request_plan(
        self,
        sidecar: SidecarClient,
        context: sidecar_pb2.SaveContext,
        run: PlannerRun,
        wait_s: float,
        save_timeout_s: float,
        *,
        prepare: bool = False,
        storage_wait_s: float = 0.0,
    ) -> plan_pb2.FinalPlan:
        """The final plan for a local plan, once every rank's has arrived.

        Args:
            storage_wait_s: storage may delay it for so long after that; 0: without limit.
        """
        check_tensors = self._settings.check_replicas
        has_others = len(context.ranks) > 1
        request = sidecar_pb2.PlanRequest(
            context=context,
            plan=run.message,
            digest=run.digest,
            timeout_s=wait_s,
            save_timeout_s=save_timeout_s,
            prepare=prepare,
            value_hashes=run.value_hashes(tensors=check_tensors) if has_others else None,
            storage_wait_s=storage_wait_s,
        )
        answer = engine().call(lambda: sidecar.plan(request, wait_s))
        if answer.warning and context.rank == context.ranks[0]:
            _log.warning("%s: %s", context.checkpoint_id, answer.warning)
        return answer.plan

    def _sidecar(self) -> str:
        if self._settings.embedded:
            return "the daemons of this host, which the first save starts"
        return f"the sidecar at {self._settings.sidecar}"


def _plan_ahead(
    call: SaveCall, state_dict: Mapping[str, Any], planner: SavePlanner | None
) -> plan_cache.SaveSpec | None:
    """Runs the planner while another thread finds or starts the sidecar.

    Returns None without planning if the sidecar is known: then the plan may be cached.
    """
    if not call.member.open_ahead():
        return None
    return plan_cache.plan_ahead(call.context(), state_dict, planner)


def _plan() -> str:
    return "the plans of all ranks"
