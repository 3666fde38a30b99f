"""Makes the saves of this process: what the client and DCP's storage writer share.

In: checked arguments and state dicts. Out: handles, or contexts of saves that the storage writer
drives itself. Owns the memberships, the staging memory, the cached plans and the
saves in progress; closes them at the process's end. Thread-safe.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client import exit_hooks, fork_hooks
from pannier.client.config import Settings
from pannier.client.engine import engine
from pannier.client.handle import SaveHandle
from pannier.client.identity import World
from pannier.client.interrupts import shielded
from pannier.client.messages import console, wait_log
from pannier.client.options import checkpoint_path, reported_path
from pannier.client.planning import stage_plan
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.plan_cache import PlanCache
from pannier.client.process_group import check_single_process, is_alone
from pannier.client.saves.call import Options, SaveCall
from pannier.client.saves.outcome import skipped
from pannier.client.saves.save import Save
from pannier.client.saves.saves import Saves, check_may_wait
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import add_extra_files
from pannier.client.transport.membership import Membership
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import (
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _plan_ahead(
    call: SaveCall, state_dict: Mapping[str, Any], planner: SavePlanner | None
) -> stage_plan.SaveSpec | None:
    """Runs the planner while another thread finds or starts the sidecar.

    Returns None without planning if the sidecar is known: then the plan may be cached.
    """
    if not call.member.open_ahead():
        return None
    return stage_plan.plan_ahead(call.context(), state_dict, planner)


def _plan() -> str:
    return "the plans of all ranks"


class SaveFactory:
    """See the module. The sidecar is looked for (or started) by the first save, not here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.saves = Saves(settings.max_in_flight, self._disconnect_if_done)
        self._lock = threading.Lock()
        self._memberships: dict[bool, Membership] = {}
        self._old_memberships: list[Membership] = []
        self._plans = PlanCache()
        self._refuses_saves = False
        self.is_closed = False
        """Whether a :meth:`close` has waited for everything, without a time-out."""
        self._exit: wait_log.Wait | None = None
        self._pid = os.getpid()
        fork_hooks.keep(self)
        exit_hooks.add(self)

    @property
    def is_own_process(self) -> bool:
        """False in a process forked from the one that made this."""
        return self._pid == os.getpid()

    def check_open(self) -> None:
        """Raises InvalidRequestError once :meth:`close` was called."""
        if self._refuses_saves:
            again = "" if self.is_closed else " after another close(), which has not ended"
            raise InvalidRequestError(f"the client is closed: make a new one{again}")

    def run(
        self,
        process_group: Any,
        no_dist: bool,
        checkpoint_id: str,
        body: Callable[[Save], _T],
    ) -> _T:
        """Runs ``body`` as the group's next save.

        On a rank that missed saves of the others, ``body`` runs again, as their next save. An
        exception from ``body`` ends the save on all ranks.
        """
        check_may_wait("a save")
        member = self._running_job() if no_dist else None
        if member is not None:
            # By itself, it would be an incarnation of its own, which isn't ordered among the job's saves.
            group = member.world.lone_group()
        else:
            member = self.membership(no_dist)
            group = member.world.group(process_group)
        member.check_process()
        while True:
            call = SaveCall(member, group, checkpoint_id)
            save = Save(call, self.saves)
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

    def open_save(
        self,
        checkpoint_id: str,
        process_group: Any = None,
        no_dist: bool = False,
        *,
        timeout_s: float,
        overwrite: bool | None = None,
    ) -> tuple[SidecarClient, Save]:
        """Takes the next number of a group, for a save whose global plan torch makes.

        Raises:
            InvalidRequestError: this rank is not in the group, or the id is not valid.
        """

        def open_(save: Save) -> tuple[SidecarClient, Save]:
            self.check_open()
            options = Options(Deadline(timeout_s), overwrite=overwrite, counts=False)
            save.call.accept(checkpoint_path(checkpoint_id), options)
            return save.call.member.sidecar(), save

        return self.run(process_group, no_dist, reported_path(checkpoint_id), open_)

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
        frame = engine().at_end_of_call(save.end_call)  # noqa: F841 - freed with this call
        with wait_log.logged(
            f"async_save to {call.checkpoint_id}",
            self._sidecar,
            of=("async_save", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        ) as wait:
            planned = _plan_ahead(call, state_dict, planner)
            sidecar = call.member.sidecar()
            context = call.context(sidecar)
            wait.change(
                lambda: f"room, which PANNIER_MAX_IN_FLIGHT earlier saves hold: {self.saves}",
                save_pb2.WAIT_REASON_ROOM,
            )
            handle = engine().call(lambda: save.open(sidecar, context))
            # Again: a close() that has begun since the call did doesn't wait for it.
            self.check_open()
            wait.change(lambda: handle.status().waiting_on or _plan(), save_pb2.WAIT_REASON_PLAN)
            spec = planned or stage_plan.save_spec(context, state_dict, planner)

            def request_plan(run: PlannerRun) -> plan_pb2.FinalPlan:
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

            plan = stage_plan.resolve_plan(self._plans, spec, request_plan)
            # Without the spec and the plan, which have the state: it may be freed once it is staged.
            scope, part, sizes = spec.scope, plan.part, plan.sizes
            attempt, plan_id = plan.attempt, plan.plan_id
            unconfirmed = None if plan.is_confirmed else part

            def drop_part() -> None:
                self._plans.drop(scope, part)

            wait.change(
                lambda: f"memory for staging; saves in progress: {self.saves}",
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
        return handle

    def skipped_handle(self, call: SaveCall, error: SaveSkippedError) -> SaveHandle | None:
        """A handle that raises ``error``; None: the call's arguments were not accepted."""
        if not call.is_accepted:
            return None
        context = call.context(call.member.sidecar())
        return skipped(call.text, context.checkpoint_id, error)

    def prepare(
        self, call: SaveCall, state_dict: Mapping[str, Any], planner: SavePlanner | None
    ) -> None:
        """Plans and reserves memory for saves to come."""
        timeout_s = self.settings.plan_timeout
        pool = self.saves.pool
        with wait_log.logged(
            f"prepare for {call.checkpoint_id}",
            self._sidecar,
            of=("prepare", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        ) as wait:
            planned = _plan_ahead(call, state_dict, planner)
            sidecar = call.member.sidecar()
            wait.change(_plan, save_pb2.WAIT_REASON_PLAN)
            context = call.context(sidecar)
            spec = planned or stage_plan.save_spec(context, state_dict, planner)
            call.is_requested = True
            stage_plan.prepare(
                self._plans,
                spec,
                lambda run: self._request_plan(
                    sidecar, context, run, timeout_s, timeout_s, prepare=True
                ),
                functools.partial(sidecar.arena, pool),
                pool.release,
                self.saves.idle,
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
        check_tensors = self.settings.check_replicas
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

    def _running_job(self) -> Membership | None:
        """The membership of all ranks' world, if it is connected; else a lone save would wait for other ranks."""
        with self._lock:
            member = self._memberships.get(False)
        is_running = member is not None and member.is_connected and member.world.is_current()
        return member if is_running else None

    def membership(self, no_dist: bool) -> Membership:
        """The membership of this process alone, or that of all ranks' world."""
        check_single_process(no_dist)
        alone = is_alone(no_dist)
        with self._lock:
            old = member = self._memberships.get(alone)
            if member is None or not member.world.is_current():
                if old is not None:
                    # torch.distributed was set up again; saves in progress keep the old membership.
                    self._plans.clear()
                    self._old_memberships.append(old)
                member = self._memberships[alone] = Membership(World(alone=alone), self.settings)
        if old not in (None, member):
            self._disconnect(self._old_memberships, announce=True)
        return member

    def close(self, timeout: float | None) -> None:
        """Waits until the saves in progress are ingested, then disconnects; may be repeated after a time-out.

        Raises:
            PannierError: a save failed and its error was not retrieved.
            DeadlineError: some are not ingested after ``timeout`` seconds; names them.
            InvalidRequestError: this thread is needed to end the saves.
        """
        check_may_wait("close()")
        self._refuses_saves = True
        if self.is_closed:
            self.saves.errors.raise_all()
            return
        deadline = None if timeout is None else Deadline(timeout)
        with wait_log.logged("close", lambda: str(self.saves) or "saves of other hosts"):
            if not self.saves.wait_until_sent(timeout):
                raise DeadlineError(
                    f"timed out after {timeout:g} s; not yet ingested: {self.saves}"
                )
            self.saves.pool.close()
            if not self.saves.wait_for_users(None if deadline is None else deadline.remaining()):
                raise DeadlineError(
                    f"timed out after {timeout:g} s: a dcp.save with this client has not ended"
                )
            if self._must_wait():
                self.saves.wait(None if deadline is None else deadline.remaining(), timeout)
                self._wait_for_others(None if deadline is None else deadline.remaining(), timeout)
        self.is_closed = True
        # Errors of saves that fail from now on are printed at the exit.
        exit_hooks.keep(self)
        self._disconnect(self._members(), announce=True)
        try:
            self.saves.errors.raise_all()
        finally:
            self._let_go_if_done()

    def send_at_exit(self) -> None:
        """The interpreter is ending: waits until the sidecar has what was staged, and logs it when that takes long."""
        if not self.is_own_process or not self.saves:
            return
        self._exit = wait_log.Wait("the exit", self.saves.unsent)
        # A second signal ends the wait; then `close_at_exit` names what isn't handed over.
        with suppress(BaseException):
            self.saves.wait_until_detached_are_sent()

    def close_at_exit(self) -> None:
        """The interpreter is ending: waits as :meth:`close` does, and writes errors to stderr."""
        if not self.is_own_process:
            return
        try:
            self._close_at_exit()
        finally:
            if self._exit is not None:
                self._exit.end()

    def _close_at_exit(self) -> None:
        self.saves.drop_interrupted()
        # Unless that was interrupted, `send_at_exit` has waited until all are sent.
        unsent = self.saves.abandon("not handed over to the sidecar", unsent_only=True)
        if not unsent and self._must_wait():
            self._wait_at_exit()
        self.saves.abandon()
        self._disconnect(self._members())
        try:
            self.saves.errors.raise_all()
        except PannierError as error:
            # Not logged as well: the hook may write to the log itself.
            sys.excepthook(type(error), error.with_traceback(None), None)

    def _sidecar(self) -> str:
        if self.settings.embedded:
            return "the daemons of this host, which the first save starts"
        return f"the sidecar at {self.settings.sidecar}"

    def _disconnect_if_done(self) -> None:
        is_done = self._refuses_saves and not self.saves
        self._disconnect(self._members() if is_done else self._old_memberships, announce=True)
        if is_done:
            self._let_go_if_done()

    def _let_go_if_done(self) -> None:
        if not (self.saves or self.saves.errors):
            exit_hooks.let_go(self)

    def _must_wait(self) -> bool:
        """Whether the embedded daemons may end with this process, so that it waits for their commits.

        Logs, once per host, what it waits for, or what it leaves to the daemons.
        """
        daemons = []
        if self.settings.embedded:
            daemons = [found for member in self._members() if (found := member.daemons())]
        ended_by = next((each.ended_by for each in daemons if each.ended_by is not None), None)
        saves, left = self.saves.names(), self.saves.uncommitted_size()
        if left and not self.is_closed and os.environ.get("LOCAL_RANK", "0") == "0":
            names = " and ".join(each.name for each in daemons)
            if ended_by is not None:
                console.info(
                    "waiting until %s are committed: %s may end with this process, by %s",
                    *(left, names, ended_by),
                )
            else:
                console.info(
                    "handed over %s; the daemons%s commit %s",
                    *(" and ".join(saves), f" ({names})" if names else ""),
                    "them" if len(saves) > 1 else "it",
                )
        return ended_by is not None

    @shielded
    def _wait_for_others(self, timeout: float | None, given: float | None = None) -> None:
        for member in self._members():
            if left := member.await_others(timeout):
                raise DeadlineError(
                    f"timed out after {given:g} s; still in progress on other hosts: {left}"
                )

    def _wait_at_exit(self) -> None:
        if self._exit is not None:
            self._exit.reason = lambda: self.saves.uncommitted() or "saves of other hosts"
        try:
            self.saves.wait(None)
            if not self._refuses_saves:
                self._wait_for_others(None)
        except (KeyboardInterrupt, SystemExit):
            self.saves.abandon("not committed, and the embedded daemons may end with it")

    def _members(self) -> list[Membership]:
        with self._lock:
            return [*self._old_memberships, *self._memberships.values()]

    @shielded
    def _disconnect(self, members: list[Membership], *, announce: bool = False) -> None:
        # A copy: another thread may add to it.
        for member in list(members):
            member.close(lambda sidecar: not self.saves.need(sidecar), announce=announce)
