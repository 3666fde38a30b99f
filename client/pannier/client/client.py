"""The client: what a trainer calls.

In: state dicts. Out: handles of saves in progress. Checks arguments, and owns what its saves share: their numbers
and staging memory (:mod:`pannier.client.saves`), the connections, and how they end. Thread-safe; one per process is
enough.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client import console, fork_hooks, options
from pannier.client.config import Settings, check_metrics, check_timeout, load_settings
from pannier.client.ending import Ending
from pannier.client.handle import SaveHandle, SaveResult
from pannier.client.loading.load import recent_seconds
from pannier.client.options import Destination, OnBusy, Staging
from pannier.client.reading import Reader
from pannier.client.saves.call import Options, SaveCall
from pannier.client.saves.caller import Caller
from pannier.client.saves.outcome import skipped
from pannier.client.saves.save import Save
from pannier.client.saves.saves import Saves, check_may_wait
from pannier.client.staging.optimizer_guard import Guard, Guards
from pannier.client.transport.membership import Memberships
from pannier.client.transport.save_errors import has_plan_changed
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import at_call
from pannier.common import save_interval
from pannier.common.deadline import Deadline
from pannier.common.save_interval import Advice
from pannier.v1 import save_pb2
from pannier.wire.errors import (
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Client(Reader):
    """Saves and loads checkpoints of this process. A context manager: leaving it closes it.

    The sidecar is looked for (or started) by the first save, not here.

    Args:
        settings: default: from the environment.

    Raises:
        ConfigurationError: a variable is not valid.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        """As given, or from the environment."""
        self.saves = Saves(self.settings.max_in_flight, self._disconnect_unused)
        """Those that have not ended; for this package."""
        self.memberships = Memberships(self.settings, self._world_replaced)
        """Its connections; for this package."""
        self._ending = Ending(self.settings, self.saves, self.memberships)
        self._caller = Caller(self.settings, self.saves, self._ending.check_open)
        self._guards = Guards()
        super().__init__(
            lambda: self.settings,
            self.raise_unretrieved,
            lambda no_dist: self.memberships.of(no_dist).sidecar(),
        )
        fork_hooks.keep(self)

    # Saving.

    @at_call
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
        on_busy: OnBusy = "wait",
        timeout: float | None = None,
        staging: Staging = "blocking",
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        on_commit: Callable[[SaveResult], object] | None = None,
        overwrite: bool | None = None,
    ) -> SaveHandle:
        """Saves ``state_dict``; returns when it is staged, and may be changed.

        All ranks of the group call it, in the same order.

        Args:
            state_dict: what ``torch.distributed.checkpoint.async_save`` takes.
            checkpoint_id: directory: a path, or a URL such as ``gs://bucket/run/step-100``.
            storage_writer: a :class:`pannier.client.StorageWriter`, whose path, process group,
                ``no_dist``, timeout, metrics, extra files and ``overwrite`` are used where they
                aren't given here. It may be given by position.
            planner: ``DefaultSavePlanner`` or a subclass; for tensors of torch_xla also its
                ``SPMDSavePlanner``, which isn't required.
            process_group: the ranks that save together. Default: all.
            async_checkpointer_type, async_stager, use_collectives: as in torch;
                what Pannier can't honour is refused.
            no_dist: this process saves by itself.
            on_busy: when ``max_in_flight`` saves hold their staging memory, or the
                spool is full: ``"wait"``, ``"skip"`` this save (on all ranks;
                the handle raises SaveSkippedError), or ``"raise"`` BusyError.
            timeout: seconds until the save must be committed, counted from this call; up to
                7 days. Default: ``save_timeout``.
            staging: ``"blocking"``, or ``"overlapped"``: the call returns before the tensors of
                guarded optimizers (:meth:`guard`) are copied from their device. Without a guard, it
                returns before tensors that require gradients are copied; then the loop itself must
                wait for the handle's ``staging_completion`` before it steps. Everything else is
                staged when the call returns: buffers, host tensors, objects. Without tensors on a
                device with streams (CUDA, XPU) it is the same as ``"blocking"``. That includes
                torch_xla, whose pending work is run first; see ``SaveStatus.staging``.
            metrics: numbers that rate the state, by name, for the coordinator's
                retention (``--keep-best``) and for readers of the decision. A single rank may
                give them; if several do, those of the lowest rank count.
            extra_files: small files to save with the state, by name: each appears at
                ``<checkpoint_id>/<name>`` with the commit, never before. Ranks may give different
                files; a name that several ranks give must have the same content on all of them.
                At most 32 MiB per rank in total.
            overwrite: which checkpoint may be replaced at ``checkpoint_id``. None: one of this job
                (``PANNIER_JOB``). True: also another job's, or one that Pannier didn't write.
                False: none. Must be the same on all ranks.
            on_commit: called with the result once the checkpoint is committed: see
                :meth:`SaveHandle.add_commit_callback`.

        Raises:
            CheckpointExistsError: there is a checkpoint that may not be replaced (a
                SaveAbortedError and a FileExistsError). The handle raises it instead if the plan
                was cached, or if that checkpoint was committed during the save.
            InvalidRequestError: an argument or the state dict can't be accepted (a ValueError).
            SaveAbortedError: another rank can't take part; with failures by rank.
            UnavailableError: the sidecar can't be reached.
            PannierError: an earlier save failed and its error was not retrieved. This save is made
                nevertheless, as on the other ranks; it has no handle then, but :meth:`wait_all` waits for it.
            Exception: the original exception of the planner, a ``state_dict()``, pickling or a copy
                from a device on this rank, with a note that names the save; the other ranks get a
                SaveAbortedError that names this rank and the cause.

        After any other exception this save has ended on all ranks. Their next saves have equal numbers.
        """
        if isinstance(storage_writer, Destination):
            process_group = storage_writer.process_group if process_group is None else process_group
            no_dist = no_dist or storage_writer.no_dist
            timeout = storage_writer.timeout if timeout is None else timeout
            metrics = storage_writer.metrics if metrics is None else metrics
            extra_files = storage_writer.extra_files if extra_files is None else extra_files
            overwrite = storage_writer.overwrite if overwrite is None else overwrite
        deadline: Deadline | None = None
        current: SaveCall | None = None

        def run(save: Save) -> SaveHandle:
            nonlocal deadline, current
            current = save.call
            self._ending.check_open()
            options.check_on_busy(on_busy)
            options.check_staging(staging)
            numbers = check_metrics(metrics)
            extra = options.check_extra_files(extra_files)
            replace = options.check_overwrite(overwrite)
            options.check_on_commit(on_commit)
            options.check_torch_only(async_checkpointer_type, async_stager, use_collectives)
            path = options.checkpoint_path(options.target(checkpoint_id, storage_writer))
            seconds = self.settings.save_timeout if timeout is None else check_timeout(timeout)
            deadline = deadline or Deadline(seconds)
            chosen = Options(deadline, on_busy, numbers, replace, self.settings.plan_timeout)
            save.call.accept(path, chosen)
            return self._caller.save(
                save,
                state_dict,
                planner,
                extra_files=extra,
                devices=self._guards.copies(staging),
                on_deferred=self._guards.add_copies,
            )

        reported = options.reported_target(checkpoint_id, storage_writer)
        with self._raising_earlier():
            try:
                handle = self._numbered(process_group, no_dist, reported, run)
                if on_commit is not None:
                    handle.add_commit_callback(on_commit)
            except SaveSkippedError as error:
                quiet = None
                if on_busy == "skip" and current is not None:
                    quiet = _skipped_handle(current, error)
                if quiet is None:
                    raise
                handle = quiet
        return handle

    @at_call
    def save(
        self,
        state_dict: Mapping[str, Any],
        storage_writer: Any = None,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        planner: SavePlanner | None = None,
        process_group: Any = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        on_busy: OnBusy = "wait",
        timeout: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        on_commit: Callable[[SaveResult], object] | None = None,
        overwrite: bool | None = None,
    ) -> SaveResult:
        """:meth:`async_save`, waiting until the checkpoint is committed.

        If the plans of other ranks have changed so that what this call staged by the last plan makes no
        checkpoint with them, the save is planned again, on all ranks.
        """
        began = time.monotonic()

        def once(timeout: float | None) -> SaveResult:
            handle = self.async_save(
                state_dict,
                storage_writer,
                checkpoint_id=checkpoint_id,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
                use_collectives=use_collectives,
                on_busy=on_busy,
                timeout=timeout,
                metrics=metrics,
                extra_files=extra_files,
                on_commit=on_commit,
                overwrite=overwrite,
            )
            target = handle.status().checkpoint_id
            with console.logged(
                f"save to {target}",
                lambda: handle.status().waiting_on,
                of=("save", target),
                why=save_pb2.WAIT_REASON_COMMIT,
            ):
                return handle.result()

        with self._raising_earlier():
            try:
                return once(timeout)
            except SaveAbortedError as error:
                left_s = None if timeout is None else timeout - (time.monotonic() - began)
                if not has_plan_changed(error) or (left_s is not None and left_s <= 0):
                    raise
                _log.warning("%s; all ranks plan it again now", error)
            return once(left_s)

    @at_call
    def prepare(
        self,
        state_dict: Mapping[str, Any],
        checkpoint_root: str | os.PathLike[str],
        *,
        planner: SavePlanner | None = None,
        process_group: Any = None,
        no_dist: bool = False,
    ) -> None:
        """Plans a save and reserves its memory, so that the first save costs no more than later ones.

        All ranks of the group call it, at the same point among their saves. Nothing is saved. The
        call is optional: without it the first save does this work. An optimizer has its state only
        after its first step; states with another structure are planned again.

        Args:
            state_dict, planner, process_group, no_dist: as for the saves to come.
            checkpoint_root: the directory that will contain their checkpoints.

        Raises: what :meth:`async_save` raises.
        """

        def run(save: Save) -> None:
            self._ending.check_open()
            save.call.accept(options.prepared_path(checkpoint_root), Options(Deadline()))
            self._caller.prepare(save.call, state_dict, planner)

        reported = options.reported_path(checkpoint_root)
        with self._raising_earlier():
            self._numbered(process_group, no_dist, reported, run)

    @at_call
    def guard(self, optimizer: torch.optim.Optimizer, *, wait: bool = True) -> Guard:
        """Declares that only ``optimizer`` changes its tensors, and makes its steps wait for their copies.

        For ``staging="overlapped"``: its parameters and its state may be copied from their
        device while the next forward and backward pass run. Before each step
        (``register_step_pre_hook``) the training stream waits on the device until they are copied.
        The host waits only where memory can't be pinned (see ``SaveStatus.staging``).

        Other code that changes these tensors (``load_state_dict``, weights that are clamped or
        swapped) must wait for the handle's ``staging_completion``. An earlier change that torch's
        version counters show fails the save.

        A client forgets it when it is closed: with the default client, call it again after ``close()``.

        Args:
            optimizer: the one that the loop steps. Its tensors are looked up at each save.
            wait: False: steps don't wait; the loop itself waits for ``staging_completion``.

        Returns:
            A guard, with ``remove()``; also a context manager.

        Raises:
            InvalidRequestError: it isn't an optimizer, or steps inside ``backward()``, which
                leaves no time for a copy. If only a step shows that it runs inside ``backward()``
                or in a CUDA graph, the next overlapped save refuses the optimizer.
        """
        return self._guards.add(optimizer, wait=wait)

    @at_call
    def wait_all(self, timeout: float | None = None) -> None:
        """Waits until every save has ended.

        Raises:
            DeadlineError: some have not after ``timeout`` seconds; names them.
            PannierError: one failed and its error was not retrieved.
        """
        with console.logged(
            "wait_all",
            self.saves.__str__,
            of=("wait_all", ""),
            why=save_pb2.WAIT_REASON_COMMIT,
        ):
            self.saves.wait(timeout)
        self.saves.errors.raise_all()

    @at_call
    def advice(self, *, mtbf: float | timedelta | None = None) -> Advice | None:
        """What saves cost, and how often to save; None before the first commit.

        Computed from this process's last 20 committed saves (of its largest group, where several groups of
        ranks save) and its last 20 loads. ``str()`` of the advice is one line. The interval is the one that
        loses the least time by the estimate of Young (1974) and Daly (2006);
        :mod:`pannier.common.save_interval` has the model. No other rank is asked, so that ranks may get
        different advice: a loop must follow that of one rank. Unlike other calls, this one raises no
        unretrieved errors.

        The cost of a save is how long ``async_save`` kept the training loop on the slowest rank
        (:func:`save` also waits for the commit). Not measured and not counted: slower steps while a save is
        in flight, an optimizer's wait for an overlapped copy, and the time until a failure is noticed and
        processes are started again. Saves by :class:`StorageWriter` aren't counted. Without any load, a
        restore is assumed to take as long as a save takes until it is durable.

        Args:
            mtbf: mean time between failures of the whole job, seconds or a timedelta; for example 45 hours
                for 16 hosts that each fail once in 30 days. None: only the costs are returned.

        Raises:
            InvalidRequestError: ``mtbf`` is below a second, or not finite.
        """
        mtbf_s = mtbf.total_seconds() if isinstance(mtbf, timedelta) else mtbf
        if not isinstance(mtbf_s, float | int | None):
            raise InvalidRequestError(f"mtbf={mtbf!r}: give seconds or a timedelta")
        return save_interval.advise(self.saves.costs.recent(), recent_seconds(), mtbf_s)

    # Ending.

    @at_call
    def close(self, timeout: float | None = None) -> None:
        """Waits until the saves in progress are ingested, then disconnects; handles still resolve.

        When it returns, the process may die: its saves are committed nevertheless.

        With embedded daemons that can't outlive the trainer (in a container or a
        batch job) it waits until the saves are committed and, if other hosts use this host's
        coordinator, until theirs are committed, too.

        A trainer that ends without this call waits in the same way, but can no longer change its
        exit status: an error that was not retrieved is passed to ``sys.excepthook``, which prints
        it. To fail with that error, call ``close()`` or leave the client's context.

        Args:
            timeout: seconds to wait at most. Default: until the saves' own deadlines.

        Raises:
            PannierError: a save failed and its error was not retrieved.
            DeadlineError: some are not ingested after ``timeout`` seconds; names them. They continue
                as long as the process does, and another ``close()`` waits for them again.
        """
        self._ending.close(timeout)

    @property
    def is_own_process(self) -> bool:
        """False in a process forked from the one that made this."""
        return self._ending.is_own_process

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has waited for everything."""
        return self._ending.is_closed

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
            # The block's own error is raised; this one is logged.
            _log.error("while leaving after %s: %s", type(error).__name__, later)

    # For this package.

    def raise_unretrieved(self) -> None:
        """Raises errors of saves that were not retrieved."""
        self.saves.errors.raise_all()

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

        def run(save: Save) -> tuple[SidecarClient, Save]:
            self._ending.check_open()
            chosen = Options(Deadline(timeout_s), overwrite=overwrite, counts=False)
            save.call.accept(options.checkpoint_path(checkpoint_id), chosen)
            return save.call.member.sidecar(), save

        return self._numbered(process_group, no_dist, options.reported_path(checkpoint_id), run)

    def _numbered(
        self, process_group: Any, no_dist: bool, checkpoint_id: str, body: Callable[[Save], _T]
    ) -> _T:
        """Runs ``body`` as the group's next save; see :meth:`Caller.numbered`."""
        check_may_wait("a save")
        member, group = self.memberships.of_save(process_group, no_dist)
        return self._caller.numbered(member, group, checkpoint_id, body)

    def _disconnect_unused(self) -> None:
        self._ending.disconnect_unused()

    def _world_replaced(self) -> None:
        self._caller.forget_plans()
        self._ending.disconnect_unused()

    def _raising_earlier(self) -> AbstractContextManager[None]:
        """Raises unretrieved errors of earlier saves, once the block has saved.

        Raised before, they would end that save, too: on all ranks, since the others take part in it.
        """
        return self.saves.errors.deferred(
            "raised by a later call, whose own save is made all the same: wait_all() waits for it"
        )


def _skipped_handle(call: SaveCall, error: SaveSkippedError) -> SaveHandle | None:
    """A handle that raises ``error``; None: the call's arguments were not accepted."""
    if not call.is_accepted:
        return None
    context = call.context(call.member.sidecar())
    return skipped(call.text, context.checkpoint_id, error)
