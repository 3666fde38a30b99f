"""The client: what a trainer calls.

In: state dicts. Out: handles of saves under way. It numbers the saves of each
group, plans and stages them on the caller's thread, and leaves the rest to
:mod:`pannier.client.transport.save_task`. Thread-safe; one per process is enough.
"""

import atexit
import builtins
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client import wait_log
from pannier.client.config import Settings, check_metrics, check_timeout, load_settings
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.embedded import launcher
from pannier.client.handle import SaveHandle, SaveResult, UnretrievedErrors, skipped
from pannier.client.identity import World, check_single_process, is_alone
from pannier.client.interrupts import Condition, aside, clean_up_after, shielded
from pannier.client.loading import catalog
from pannier.client.loading.load import load as load_checkpoint
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.options import (
    check_on_busy,
    check_overwrite,
    check_staging,
    check_torch_only,
    checkpoint_path,
    prepared_path,
    told_path,
)
from pannier.client.planning import stage_plan
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.plan_cache import PlanCache
from pannier.client.planning.plan_confirmation import PlanConfirmation
from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.in_flight import InFlightSaves
from pannier.client.staging.optimizer_guard import Guard, Guards
from pannier.client.transport.channel import keep_in_children
from pannier.client.transport.membership import Entry, Membership
from pannier.client.transport.save_errors import fail_request
from pannier.client.transport.save_status import StatusFollower
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)


def _sidecar() -> str:
    return "the sidecar on this host"


def _plan() -> str:
    return "the plan that all ranks agree on"


class _Call:
    """One call of async_save: gone when its frame is."""


class Client:
    """Saves and loads checkpoints of this process. A context manager: leaving it closes it.

    The sidecar is looked for (or started) by the first save, not here.

    Args:
        settings: default: from the environment.

    Raises:
        ConfigurationError: a variable is not valid.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        self._lock = Condition()
        self._memberships: dict[bool, Membership] = {}
        self._old_memberships: list[Membership] = []
        self._slots = InFlightSaves(self.settings.max_in_flight, self._under_way)
        self._plans = PlanCache()
        self._pending: dict[StatusFollower, SaveTask] = {}
        self._unretrieved = UnretrievedErrors()
        self._guards = Guards()
        self._closed = False
        self._pid = os.getpid()
        keep_in_children(self)
        _clients.add(self)

    # SaveTask.

    def async_save(
        self,
        state_dict: Mapping[str, Any],
        storage_writer: Any = None,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        planner: SavePlanner | None = None,
        process_group: Any = None,
        async_checkpointer_type: Any = None,
        async_stager: Any = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        on_busy: str = "wait",
        timeout: float | None = None,
        staging: str = "blocking",
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool | None = None,
    ) -> SaveHandle:
        """Saves ``state_dict``; returns when it is staged, and may be changed.

        All ranks of the group call it, in the same order.

        Args:
            state_dict: what ``torch.distributed.checkpoint.async_save`` takes.
            checkpoint_id: directory: a path, or a URL such as ``gs://bucket/run/step-100``.
            storage_writer: a :class:`pannier.client.StorageWriter`, for its path, process
                group, ``no_dist``, timeout and metrics where they aren't given here. It may be given
                by position.
            planner: ``DefaultSavePlanner`` or a subclass; for tensors of torch_xla also its
                ``SPMDSavePlanner``, though none is needed.
            process_group: the ranks that save together. Default: all.
            async_checkpointer_type, async_stager, use_collectives: as in torch;
                what Pannier can't honour is refused.
            no_dist: this process saves by itself.
            on_busy: when ``max_in_flight`` saves hold their staging memory, or the
                spool is full: ``"wait"``, ``"skip"`` this save (on all ranks;
                the handle raises SaveSkippedError), or ``"raise"`` BusyError.
            timeout: seconds until the save must be committed, up to 7 days; from this
                call on. Default: ``save_timeout``.
            staging: ``"blocking"``, or ``"overlapped"``: returns before the tensors of guarded
                optimizers (:meth:`guard`) are copied from their device. Without a guard, before
                those that require gradients are; then the loop must wait for the handle's
                ``staging_completion`` itself before it steps. All else is staged when it
                returns: buffers, tensors of the host, objects. Where nothing is on a device with
                streams (CUDA, XPU) it is the same as ``"blocking"``: so for torch_xla, whose pending
                work is run first; ``SaveStatus.staging`` says so.
            metrics: numbers that tell how good the state is, by name, for the coordinator's
                retention (``--keep-best``) and for whoever reads the decision. One rank may
                give them alone; where several do, the lowest rank's counts.
            overwrite: what may be replaced where ``checkpoint_id`` holds a checkpoint: None, one
                of this job (``PANNIER_JOB``); True, also another job's, and one that Pannier
                didn't write; False, none. The same on all ranks.

        Raises:
            CheckpointExistsError: there is a checkpoint that may not be replaced (a
                SaveAbortedError, a FileExistsError); from the handle when the plan was known, or
                when that checkpoint came during the save.
            InvalidRequestError: an argument or the state dict can't be accepted (a ValueError).
            SaveAbortedError: another rank can't take part; with failures by rank.
            UnavailableError: the sidecar can't be reached.
            PannierError: an earlier save failed and nobody asked for its result.
            Exception: whatever the planner, a ``state_dict()``, pickling or a copy from a device
                raised on this rank, itself, with a note of the save; the other ranks get a
                SaveAbortedError with this rank and the cause.

        Whatever is raised, this save is over on all ranks and the next is in step.
        """
        if isinstance(storage_writer, StorageWriter):
            process_group = storage_writer.process_group if process_group is None else process_group
            no_dist = no_dist or storage_writer.no_dist
            timeout = storage_writer.timeout if timeout is None else timeout
            metrics = storage_writer.metrics if metrics is None else metrics
            overwrite = storage_writer.overwrite if overwrite is None else overwrite
        member = self._membership(no_dist)
        member.check_process()
        group = member.world.group(process_group)
        deadline: Deadline | None = None
        while True:
            number = member.world.next_number(group)
            entry = Entry(group, number, told_path(checkpoint_id, storage_writer))
            try:
                self._check_open()
                self._unretrieved.raise_all()
                check_on_busy(on_busy)
                check_staging(staging)
                entry.metrics = check_metrics(metrics)
                entry.overwrite = check_overwrite(overwrite)
                check_torch_only(async_checkpointer_type, async_stager, use_collectives)
                entry.checkpoint_id = checkpoint_path(checkpoint_id, storage_writer)
                seconds = self.settings.save_timeout if timeout is None else check_timeout(timeout)
                deadline = deadline or Deadline(seconds)
                entry.checked = True
                devices = self._guards.copies(staging)
                return self._save(member, entry, state_dict, planner, on_busy, deadline, devices)
            except BaseException as error:
                if isinstance(error, SaveAbortedError) and error.resume_at > number:
                    # This rank didn't call saves that the others did: it joins them again.
                    _log.warning("%s", error)
                    member.world.resume(group, error.resume_at)
                    continue
                self._report(member, entry, error)
                name_save(error, entry.text, entry.checkpoint_id)
                if isinstance(error, SaveSkippedError) and on_busy == "skip" and entry.checked:
                    context = entry.context(member, member.session(self.settings))
                    return skipped(
                        object_names.save_text(context.save), context.checkpoint_id, error
                    )
                raise

    def save(
        self, state_dict: Mapping[str, Any], storage_writer: Any = None, **arguments: Any
    ) -> SaveResult:
        """:meth:`async_save`, waiting until the checkpoint is committed."""
        handle = self.async_save(state_dict, storage_writer, **arguments)
        with wait_log.logged(
            f"save to {handle.status().checkpoint_id}", lambda: handle.status().waiting_on
        ):
            return handle.result()

    def prepare(
        self,
        state_dict: Mapping[str, Any],
        checkpoint_root: str | os.PathLike[str],
        *,
        planner: SavePlanner | None = None,
        process_group: Any = None,
        no_dist: bool = False,
    ) -> None:
        """Plans and reserves ahead, so that the first save costs what every save costs.

        All ranks of the group call it, in order with their saves. Nothing is saved, and nothing
        need be called: without it the first save does the same. An optimizer has its state only
        after its first step; with another structure than here, saves are planned anew.

        Args:
            state_dict, planner, process_group, no_dist: as those of the saves to come.
            checkpoint_root: the directory in which their checkpoints will lie.

        Raises: what :meth:`async_save` raises.
        """
        member = self._membership(no_dist)
        member.check_process()
        group = member.world.group(process_group)
        while True:
            number = member.world.next_number(group)
            entry = Entry(group, number, told_path(checkpoint_root, None))
            try:
                self._check_open()
                self._unretrieved.raise_all()
                entry.checkpoint_id = prepared_path(checkpoint_root)
                with wait_log.logged(f"prepare for {entry.checkpoint_id}", _sidecar) as wait:
                    session = member.session(self.settings)
                    wait.reason = _plan
                    context = entry.context(member, session)
                    entry.text = object_names.save_text(context.save)
                    spec = stage_plan.save_spec(context, state_dict, planner)
                    entry.planned = True
                    pool = self._slots.pool
                    stage_plan.prepare(
                        self._plans,
                        spec,
                        functools.partial(self._request_preparation, session, context),
                        functools.partial(session.arena, pool),
                        pool.release,
                        self._slots.idle,
                    )
                return
            except BaseException as error:
                if isinstance(error, SaveAbortedError) and error.resume_at > number:
                    _log.warning("%s", error)
                    member.world.resume(group, error.resume_at)
                    continue
                self._report(member, entry, error)
                name_save(error, entry.text, entry.checkpoint_id)
                raise

    def guard(self, optimizer: torch.optim.Optimizer, *, wait: bool = True) -> Guard:
        """Tells what nothing but ``optimizer`` changes, and makes its steps wait for the copy.

        For ``staging="overlapped"``: its parameters and its state may be copied from their
        device while the next forward and backward pass run. Before each step
        (``register_step_pre_hook``) the training stream waits, on the device, until they are; the
        host doesn't, but where memory can't be pinned (``SaveStatus.staging``).

        Whatever else changes them (``load_state_dict``, weights that are clamped or swapped) has
        to wait for the handle's ``staging_completion``. A change that can be seen fails the save.

        Args:
            optimizer: what the loop steps. Its tensors are looked up at each save.
            wait: False: only to know its tensors; the loop waits for ``staging_completion``.

        Returns:
            A guard, with ``remove()``; also a context manager.

        Raises:
            InvalidRequestError: it isn't an optimizer, or steps inside ``backward()``, which
                leaves no time for a copy. One that is first seen to do so in a step, or in a
                CUDA graph, is refused by the next overlapped save.
        """
        return self._guards.add(optimizer, wait=wait)

    def wait_all(self, timeout: float | None = None) -> None:
        """Waits until every save has ended.

        Raises:
            DeadlineError: some have not after ``timeout`` seconds; names them.
            PannierError: one failed and nobody asked for its result.
        """
        with wait_log.logged("wait_all", self._under_way):
            self._await_ended(timeout)
        self._unretrieved.raise_all()

    # Reading.

    # They raise what nobody asked for, too, in step with the other ranks.

    def load(
        self,
        state_dict: dict[str, Any],
        storage_reader: StorageReader | None = None,
        **arguments: Any,
    ) -> None:
        """Loads a checkpoint into ``state_dict``. See :func:`pannier.client.load`."""
        load_checkpoint(state_dict, storage_reader, before=self._unretrieved.raise_all, **arguments)

    def latest(self, root: str | os.PathLike[str], **arguments: Any) -> str | None:
        """The newest checkpoint directly below ``root``. See :func:`pannier.client.latest`."""
        return catalog.latest(root, before=self._unretrieved.raise_all, **arguments)

    def list(
        self, root: str | os.PathLike[str], **arguments: Any
    ) -> builtins.list[catalog.CheckpointInfo]:
        """The checkpoints directly below ``root``. See :func:`pannier.client.list`."""
        self._unretrieved.raise_all()
        return catalog.list_checkpoints(root, **arguments)

    # For StorageWriter.

    @property
    def pool(self) -> ArenaPool:
        """The client's staging memory."""
        return self._slots.pool

    @property
    def slots(self) -> InFlightSaves:
        """Room to stage into, shared with :meth:`async_save`."""
        return self._slots

    @property
    def session(self) -> SidecarClient:
        """The session of all ranks' world, opened when there is none."""
        return self._membership(no_dist=False).session(self.settings)

    def session_for(
        self, process_group: Any = None, no_dist: bool = False
    ) -> tuple[SidecarClient, Callable[[str], sidecar_pb2.SaveContext]]:
        """The session of a group, and what makes a context for its next save."""
        session = self._membership(no_dist).session(self.settings)
        return session, lambda checkpoint_id: self.open_save(checkpoint_id, process_group, no_dist)

    def open_save(
        self,
        checkpoint_id: str,
        process_group: Any = None,
        no_dist: bool = False,
        overwrite: bool | None = None,
    ) -> sidecar_pb2.SaveContext:
        """Takes the next number of a group, for a save whose calls the caller makes.

        Raises:
            InvalidRequestError: this rank is not in the group, or the id isn't one.
        """
        member = self._membership(no_dist)
        group = member.world.group(process_group)
        entry = Entry(group, member.world.next_number(group), told_path(checkpoint_id, None))
        entry.overwrite = overwrite
        try:
            self._check_open()
            entry.checkpoint_id = checkpoint_path(checkpoint_id, None)
            return entry.context(member, member.session(self.settings))
        except BaseException as error:
            self._report(member, entry, error)
            raise

    # Ending.

    def close(self, timeout: float | None = None) -> None:
        """Waits until the saves under way are ingested, then disconnects; handles still resolve.

        When it returns the process may die, and what it saved is committed all the same.

        With embedded daemons that can't outlive the trainer (in a container or a
        Slurm step) it waits until they are committed, and where other hosts use this one's
        coordinator, until theirs are.

        A trainer that ends without it does the same, but the exit status of a process
        can't be changed that late: an error that nobody asked for is handed to
        ``sys.excepthook``, which prints it. Call ``close()``, or leave the client's
        context, to fail by it.

        Args:
            timeout: seconds to wait at most. Default: until the saves' own deadlines.

        Raises:
            PannierError: a save failed and nobody asked for its result.
            DeadlineError: some are not ingested after ``timeout`` seconds; names them. They go on
                as long as the process does.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = None if timeout is None else Deadline(timeout)
        with wait_log.logged("close", lambda: self._under_way() or "saves of other hosts"):
            if not self._slots.close(timeout):
                raise DeadlineError(f"after {timeout:g} s not ingested: {self._under_way()}")
            if self._must_wait():
                self._await_ended(None if deadline is None else deadline.remaining(), timeout)
                self._await_others(None if deadline is None else deadline.remaining(), timeout)
        self._hang_up(announce=True)
        self._unretrieved.raise_all()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except PannierError as later:
            # The block's own error goes first; this one is not lost.
            _log.error("while leaving after %s: %s", type(error).__name__, later)

    # Inside.

    def _save(
        self,
        member: Membership,
        entry: Entry,
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        on_busy: str,
        deadline: Deadline,
        devices: DeviceCopies,
    ) -> SaveHandle:
        with wait_log.logged(f"async_save to {entry.checkpoint_id}", _sidecar) as wait:
            session = member.session(self.settings)
            context = entry.context(member, session)
            entry.text = object_names.save_text(context.save)
            wait.reason = lambda: f"staging memory, held by {self._under_way()}"
            slot = self._slots.admit(on_busy, deadline.remaining())
        rest: DeferredCopies | None = None

        def begin() -> SaveTask:
            begun = entry.saving = SaveTask(
                session,
                context,
                on_busy=on_busy,
                metrics=entry.metrics,
                deadline=deadline,
                on_ended=self._ended,
            )
            with self._lock:
                self._pending[begun.status] = begun
            if entry.dropped:
                begun.status.forget()
            return begun

        def drop() -> None:
            if not entry.drop():
                return  # The save was handed to its thread: that ends it, and frees the slot.
            if rest is not None:
                # The arena must not be used again before.
                rest.finish(stop=lambda: True)
            if entry.saving is not None:
                entry.saving.status.forget()
            slot.free()

        # Also where a second exception of a handler ends the clean-up below.
        call = _Call()
        clean_up_after(call, drop)
        wait = wait_log.Wait(f"async_save to {entry.checkpoint_id}", _plan)
        try:
            saving = aside(begin)
            handle = saving.handle
            wait.reason = lambda: handle.status().waiting_on or _plan()
            spec = stage_plan.save_spec(context, state_dict, planner)
            plan = stage_plan.resolve_plan(
                self._plans, spec, lambda run: self._request_plan(saving, entry, run)
            )
            confirmation, group = None, entry.group
            if plan.unconfirmed is not None:
                confirmation = PlanConfirmation(
                    self._plans,
                    plan.unconfirmed,
                    session.plan,
                    deadline=deadline,
                    wait_s=self.settings.plan_timeout,
                    resume_after=lambda number: member.world.resume(group, number + 1),
                )
            saving.planned(plan.attempt, plan.plan_id, confirmation)
            arena = aside(lambda: slot.hold(session.arena(self._slots.pool, plan.sizes)))
            wait.end()
            staged = plan.stage(arena, devices)
            rest = staged.deferred
            saving.staged(staged)
            if rest is not None:
                self._guards.add_copies(rest)
            # No daemon: a normal exit waits until the rank is ingested.
            carrier = threading.Thread(
                target=saving.send, args=(slot,), name=f"pannier-save-{entry.number}"
            )
            aside(lambda: entry.carry(carrier.start))
        except BaseException:
            aside(drop)
            raise
        finally:
            wait.end()
        return saving.handle

    def _request_preparation(
        self, session: SidecarClient, context: sidecar_pb2.SaveContext, run: PlannerRun
    ) -> plan_pb2.FinalPlan:
        timeout_s = self.settings.plan_timeout
        request = sidecar_pb2.PlanRequest(
            context=context,
            plan=run.message,
            digest=run.digest,
            timeout_s=timeout_s,
            save_timeout_s=timeout_s,
            prepare=True,
        )
        return session.plan(request, timeout_s).plan

    def _request_plan(self, saving: SaveTask, entry: Entry, run: PlannerRun) -> plan_pb2.FinalPlan:
        """The final plan for a local plan, once every rank's has arrived."""
        deadline = saving.status.deadline
        wait_s = min(self.settings.plan_timeout, deadline.remaining())
        if deadline.passed:
            raise DeadlineError(f"save {saving.status.text} was not planned before its timeout")
        request = sidecar_pb2.PlanRequest(
            context=saving.status.context,
            plan=run.message,
            digest=run.digest,
            timeout_s=wait_s,
            save_timeout_s=deadline.remaining(),
        )
        entry.planned = True
        return saving.sidecar.plan(request, wait_s).plan

    def _ended(self, status: StatusFollower) -> None:
        self._unretrieved.add(status.resolver.outcome)
        with self._lock:
            self._pending.pop(status, None)
            self._lock.notify_all()
            hang_up = self._closed and not self._pending
        if hang_up:
            self._hang_up(announce=True)

    @shielded
    def _report(self, member: Membership, entry: Entry, error: BaseException) -> None:
        """Ends the save on the other ranks, unless it has ended there or there are none."""
        if isinstance(error, SaveAbortedError) and entry.planned:
            return
        others = len(entry.group.ranks) > 1
        if not others and not entry.planned:
            return
        try:
            session = member.session(self.settings)
            session.fail(fail_request(entry.context(member, session), error))
        except PannierError as problem:
            if others:
                _log.warning("the other ranks could not be told of %r: %s", error, problem)

    def _membership(self, no_dist: bool) -> Membership:
        check_single_process(no_dist)
        alone = is_alone(no_dist)
        with self._lock:
            member = self._memberships.get(alone)
            if member is None or not member.world.is_current():
                if member is not None:
                    # torch.distributed was set up anew; saves under way still end.
                    self._plans.clear()
                    self._old_memberships.append(member)
                member = self._memberships[alone] = Membership(World(alone=alone))
            return member

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the client is closed: make a new one")

    def _await_ended(self, timeout: float | None, given: float | None = None) -> None:
        with self._lock:
            # None is no endless wait: each save ends, well or not, soon after its own deadline.
            if not self._lock.wait_for(lambda: not self._pending, timeout):
                seconds = timeout if given is None else given
                raise DeadlineError(f"after {seconds:g} s not ended: {self._under_way()}")

    def _under_way(self) -> str:
        with self._lock:
            return "; ".join(str(status.handle.status()) for status in self._pending)

    def _must_wait(self) -> bool:
        return self.settings.embedded and not launcher.outlives_trainer()

    @shielded
    def _await_others(self, timeout: float | None, given: float | None = None) -> None:
        for member in self._members():
            if left := member.await_others(timeout):
                raise DeadlineError(f"after {given:g} s not ended on other hosts: {left}")

    def _members(self) -> builtins.list[Membership]:
        with self._lock:
            return [*self._old_memberships, *self._memberships.values()]

    @shielded
    def _hang_up(self, *, announce: bool = False) -> None:
        members = self._members()
        with self._lock:
            busy = {id(saving.sidecar) for saving in self._pending.values()}
        for member in members:
            member.close(lambda session: id(session) not in busy, announce=announce)

    def _at_exit(self) -> None:
        # Threads of saves that are not ingested have been waited for: they are no daemons.
        if self._pid != os.getpid():
            return
        with self._lock:
            # Of a call that was interrupted nothing is left but what a thread carries.
            self._pending = {
                status: saving for status, saving in self._pending.items() if saving.is_detached
            }
            carrying = [saving for saving in self._pending.values() if not saving.is_sent]
        if carrying:
            # What waits for those threads before this runs was interrupted.
            self._say_given_up(carrying, "not handed over to the sidecar")
        elif self._must_wait():
            if self._pending:
                _log.info("waiting for %d saves to be committed", len(self._pending))
            try:
                self._await_ended(None)
                if not self._closed:
                    self._await_others(None)
            except (KeyboardInterrupt, SystemExit):
                with self._lock:
                    pending = builtins.list(self._pending.values())
                self._say_given_up(pending, "not committed, and the embedded daemons end with it")
        with self._lock:
            self._pending.clear()
        self._hang_up()
        try:
            self._unretrieved.raise_all()
        except PannierError as error:
            _log.error("a save failed and nobody asked for its result: %s", error)
            # Logs may not be read.
            sys.excepthook(type(error), error, error.__traceback__)

    @staticmethod
    def _say_given_up(saves: builtins.list[SaveTask], what: str) -> None:
        # Logs may not be read.
        for saving in saves:
            sys.stderr.write(
                f"pannier: the process ends before {saving.handle.status()} has ended: its wait was "
                f"interrupted; {what}\n"
            )


# The process's own client.

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()
_default: Client | None = None
_default_lock = threading.Lock()
_overrides: dict[str, Any] = {}


def default_client() -> Client:
    """The client that the module's functions use; made when it is first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Client(load_settings(**_overrides))
        return _default


def raise_unretrieved() -> None:
    """Raises the default client's errors that nobody asked for; makes no client."""
    client = _default
    if client is not None and client._pid == os.getpid():
        client._unretrieved.raise_all()


def configure(**settings: Any) -> None:
    """Sets what the environment doesn't say, for the default client; before its first use.

    Args:
        settings: fields of :class:`pannier.client.config.Settings`.

    Raises:
        ConfigurationError: a value is not valid, or the client is in use.
    """
    with _default_lock:
        if _default is not None:
            raise ConfigurationError(
                "configure() comes before the first use of the client; close() it first"
            )
        together = {**_overrides, **settings}
        load_settings(**together)
        _overrides.update(settings)


def close(timeout: float | None = None) -> None:
    """Closes the default client; the next use makes a new one. See :meth:`Client.close`."""
    global _default
    with _default_lock:
        client, _default = _default, None
    if client is not None:
        client.close(timeout)


@atexit.register
def _at_exit() -> None:
    for client in list(_clients):
        client._at_exit()
