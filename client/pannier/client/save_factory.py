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
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client import exit_hooks, fork_hooks
from pannier.client.config import Settings
from pannier.client.engine import engine
from pannier.client.handle import SaveHandle
from pannier.client.identity import World
from pannier.client.interrupts import aside, shielded
from pannier.client.messages import console, save_line, wait_log
from pannier.client.options import checkpoint_path, reported_path
from pannier.client.planning import stage_plan
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.plan_cache import PlanCache
from pannier.client.process_group import check_single_process, is_alone
from pannier.client.save_call import SaveCall, request_final_plan
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.in_flight import InFlightSaves
from pannier.client.staging.stager import add_extra_files
from pannier.client.transport.membership import Membership
from pannier.client.transport.save_errors import needs_new_plan
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.saves_in_progress import SavesInProgress, check_may_wait
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.common.save_interval import SaveCost
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import DeadlineError, InvalidRequestError, PannierError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _plan() -> str:
    return "the plans of all ranks"


class _Frame:
    """Belongs to the stack frame of one call of :meth:`SaveFactory.save`, and is freed with it."""


class SaveFactory:
    """See the module. The sidecar is looked for (or started) by the first save, not here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.saves = SavesInProgress(self._disconnect_if_done)
        self.slots = InFlightSaves(settings.max_in_flight, self.saves.__str__)
        """Staging memory of the saves in flight."""
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
        body: Callable[[SaveCall], _T],
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
            try:
                return body(call)
            except BaseException as error:
                if call.resumes_after(error):
                    continue
                call.fail(error)
                raise

    def open_save(
        self,
        checkpoint_id: str,
        process_group: Any = None,
        no_dist: bool = False,
        overwrite: bool | None = None,
    ) -> tuple[SidecarClient, sidecar_pb2.SaveContext]:
        """Takes the next number of a group, for a save whose RPCs the caller makes.

        Raises:
            InvalidRequestError: this rank is not in the group, or the id is not valid.
        """

        def open_(call: SaveCall) -> tuple[SidecarClient, sidecar_pb2.SaveContext]:
            self.check_open()
            call.accept(checkpoint_path(checkpoint_id), overwrite)
            sidecar = call.member.sidecar()
            return sidecar, call.context(sidecar)

        return self.run(process_group, no_dist, reported_path(checkpoint_id), open_)

    def save(
        self,
        call: SaveCall,
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        *,
        on_busy: str,
        metrics: Mapping[str, float],
        extra_files: Mapping[str, bytes],
        deadline: Deadline,
        devices: DeviceCopies,
        on_deferred: Callable[[DeferredCopies], None],
    ) -> SaveHandle:
        """Plans and stages a save on the caller's thread; a separate thread sends it.

        Args:
            devices: makes the copies from devices.
            on_deferred: called with copies that outlast this call.
        """
        began = time.monotonic()
        wait = wait_log.Wait(
            f"async_save to {call.checkpoint_id}",
            self._sidecar,
            of=("async_save", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        )
        try:
            planned = call.plan_ahead(state_dict, planner)
            sidecar = call.member.sidecar()
            context = call.context(sidecar)
            wait.change(
                lambda: f"room, which PANNIER_MAX_IN_FLIGHT earlier saves hold: {self.saves}",
                save_pb2.WAIT_REASON_ROOM,
            )
            slot = self.slots.admit(on_busy, deadline.remaining())
        except BaseException:
            wait.end()
            raise
        waited_s = time.monotonic() - began
        rest: DeferredCopies | None = None

        def begin() -> SaveTask:
            task = SaveTask(
                sidecar,
                context,
                on_busy=on_busy,
                metrics=metrics,
                deadline=deadline,
                plan_timeout_s=self.settings.plan_timeout,
                resume_after=lambda number: call.member.world.resume(call.group, number + 1),
                on_ended=self.saves.end,
                on_committed=self.log_committed,
            )
            task.status.times.waited_s = waited_s
            self.saves.add(task)
            call.begin(task)
            # Again: a close() that has begun since the call did doesn't wait for it.
            self.check_open()
            return task

        def drop() -> None:
            if not call.drop():
                return  # The task's thread ends the save, and releases the slot.
            if rest is not None:
                # The arena must not be reused before these copies have ended.
                rest.finish(stop=lambda: True)
            call.forget()
            slot.free()

        # Runs ``drop`` even if a signal handler raises again during the clean-up below.
        frame = _Frame()
        engine().when_freed(frame, drop)
        try:
            task = aside(begin)
            handle = task.handle
            wait.change(lambda: handle.status().waiting_on or _plan(), save_pb2.WAIT_REASON_PLAN)
            spec = planned or stage_plan.save_spec(context, state_dict, planner)

            def request_plan(run: PlannerRun) -> plan_pb2.FinalPlan:
                if deadline.passed:
                    raise DeadlineError(f"save {task.status.text} was not planned in time")
                call.mark_planned()
                wait_s = min(self.settings.plan_timeout, deadline.remaining())
                return request_final_plan(
                    sidecar,
                    context,
                    run,
                    wait_s,
                    deadline.remaining(),
                    check_tensors=self.settings.check_replicas,
                    storage_wait_s=timeouts.SKIP_STORAGE_S if on_busy == "skip" else 0.0,
                )

            plan = stage_plan.resolve_plan(self._plans, spec, request_plan)
            # Without the spec and the plan, which have the state: it may be freed once it is staged.
            scope, part = spec.scope, plan.part

            def drop_part(error: BaseException) -> None:
                if needs_new_plan(error):
                    self._plans.drop(scope, part)

            unconfirmed = None if plan.is_confirmed else plan.part
            task.planned(plan.attempt, plan.plan_id, unconfirmed, drop_part)
            wait.change(
                lambda: f"memory for staging; saves in progress: {self.saves}",
                save_pb2.WAIT_REASON_ROOM,
            )
            arena = self.slots.stage(
                slot,
                lambda: sidecar.arena(self.slots.pool, plan.sizes),
                on_busy,
                deadline.remaining(),
            )
            wait.end()
            staged = plan.stage(arena, devices)
            rest = staged.deferred
            task.staged(add_extra_files(staged, context.rank, extra_files))
            if rest is not None:
                on_deferred(rest)
            # No daemon: a normal exit waits until the rank is ingested.
            sender = threading.Thread(
                target=task.send, args=(slot,), name=f"pannier-save-{call.number}"
            )
            aside(lambda: call.detach(sender.start))
        except BaseException:
            aside(drop)
            raise
        finally:
            wait.end()
        return handle

    def log_committed(self, context: sidecar_pb2.SaveContext, size: int, cost: SaveCost) -> None:
        """Logs a committed save of ``size`` bytes and remembers what it took."""
        self.saves.costs.add(tuple(context.ranks), cost)
        save_line.log_committed(context, size, cost.durable_s, cost.stalled_s)

    def prepare(
        self, call: SaveCall, state_dict: Mapping[str, Any], planner: SavePlanner | None
    ) -> None:
        """Plans and reserves memory for saves to come."""
        timeout_s = self.settings.plan_timeout
        pool = self.slots.pool
        with wait_log.logged(
            f"prepare for {call.checkpoint_id}",
            self._sidecar,
            of=("prepare", call.checkpoint_id),
            why=save_pb2.WAIT_REASON_SIDECAR,
        ) as wait:
            planned = call.plan_ahead(state_dict, planner)
            sidecar = call.member.sidecar()
            wait.change(_plan, save_pb2.WAIT_REASON_PLAN)
            context = call.context(sidecar)
            spec = planned or stage_plan.save_spec(context, state_dict, planner)
            call.mark_planned()
            stage_plan.prepare(
                self._plans,
                spec,
                lambda run: request_final_plan(
                    sidecar,
                    context,
                    run,
                    timeout_s,
                    timeout_s,
                    check_tensors=self.settings.check_replicas,
                    prepare=True,
                ),
                functools.partial(sidecar.arena, pool),
                pool.release,
                self.slots.idle,
            )

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
            if not self.slots.close(timeout):
                raise DeadlineError(
                    f"timed out after {timeout:g} s; not yet ingested: {self.saves}"
                )
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

    def log_exit(self) -> None:
        """The interpreter is about to wait for threads that send: logs it when that takes long."""
        if self.is_own_process and self.saves:
            self._exit = wait_log.Wait("the exit", self.saves.unsent)

    def close_at_exit(self) -> None:
        """The interpreter is ending: waits as :meth:`close` does, and writes errors to stderr."""
        # The interpreter has waited for the threads that send, which are not daemon threads.
        if not self.is_own_process:
            return
        try:
            self._close_at_exit()
        finally:
            if self._exit is not None:
                self._exit.end()

    def _close_at_exit(self) -> None:
        self.saves.drop_interrupted()
        # Unless it was interrupted, the interpreter has waited until all are sent.
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
