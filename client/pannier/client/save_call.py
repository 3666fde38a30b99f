"""One numbered call of this rank for a save of its group, until it returns a handle or raises.

In: a group's next number, and arguments as they are checked. Out: the save's context, or a report
to the other ranks that the save failed here. Whatever the call raises, its number is consumed on
all ranks, so that their numbers stay in step. Used by the caller's thread, except where noted.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client.handle import SaveHandle, skipped
from pannier.client.identity import Group
from pannier.client.interrupts import shielded
from pannier.client.planning import stage_plan
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.planning.stage_plan import SaveSpec
from pannier.client.transport.membership import Membership
from pannier.client.transport.save_errors import fail_request
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, SaveAbortedError, SaveSkippedError

_log = logging.getLogger(__name__)

_OVERWRITE: Final = {
    None: save_pb2.OVERWRITE_UNSPECIFIED,
    False: save_pb2.OVERWRITE_NEVER,
    True: save_pb2.OVERWRITE_ANY,
}


class SaveCall:
    """See the module. Takes the group's next number.

    Args:
        member: connects to the sidecar.
        group: the ranks that save together.
        checkpoint_id: as the caller gave it, not checked yet.
    """

    def __init__(self, member: Membership, group: Group, checkpoint_id: str) -> None:
        self.member = member
        self.group = group
        self.number = member.world.next_number(group)
        self._checkpoint_id = checkpoint_id
        self._overwrite: bool | None = None
        self._is_accepted = False
        self._is_planned = False
        self._text = ""
        self._lock = threading.Lock()
        self._task: SaveTask | None = None
        self._is_dropped = False

    @property
    def checkpoint_id(self) -> str:
        """An absolute path or a URL, once it is accepted."""
        return self._checkpoint_id

    def accept(self, checkpoint_id: str, overwrite: bool | None = None) -> None:
        """The arguments are valid: what is raised from now on concerns this save."""
        self._checkpoint_id = checkpoint_id
        self._overwrite = overwrite
        self._is_accepted = True

    def context(self, sidecar: SidecarClient | None = None) -> sidecar_pb2.SaveContext:
        """What every message of this save carries.

        Args:
            sidecar: knows the host's name; None: it isn't connected yet, and this process's hostname is used.
        """
        who = self.member.identity if sidecar is None else sidecar.identity
        world = self.member.world
        context = sidecar_pb2.SaveContext(
            save=save_pb2.SaveId(
                job=who.job,
                incarnation=who.incarnation,
                group=self.group.name,
                number=self.number,
            ),
            checkpoint_id=self._checkpoint_id,
            ranks=self.group.ranks,
            world_size=world.size,
            rank=self.group.rank,
            host=(sidecar and sidecar.welcome.host) or who.host,
            overwrite=_OVERWRITE[self._overwrite],
            apart=world.apart,
            launch=who.launch,
        )
        seen = world.seen_incarnation(self._checkpoint_id)
        if seen is not None:
            context.seen_incarnation = seen
        self._text = object_names.save_text(context.save)
        return context

    def plan_ahead(
        self, state_dict: Mapping[str, Any], planner: SavePlanner | None
    ) -> SaveSpec | None:
        """Runs the planner while another thread finds or starts the sidecar.

        Returns None without planning if the sidecar is known: then the plan may be cached.
        """
        if not self.member.open_ahead():
            return None
        return stage_plan.plan_ahead(self.context(), state_dict, planner)

    def mark_planned(self) -> None:
        """From now on the coordinator may know the save, and then reports its end to the other ranks."""
        self._is_planned = True

    # The task may be made and detached by another thread, while an interrupt ends the call.

    def begin(self, task: SaveTask) -> None:
        """``task`` belongs to this call. Any thread."""
        with self._lock:
            self._task = task
            is_dropped = self._is_dropped
        if is_dropped:
            task.status.forget()

    def detach(self, start: Callable[[], None]) -> None:
        """Runs ``start``, after which the task is independent of the call. Any thread.

        No effect after :meth:`drop`. Raises RuntimeError: no thread can be started.
        """
        with self._lock:
            if self._is_dropped:
                return
            assert self._task is not None
            self._task.detach(start)

    def drop(self) -> bool:
        """The call ends without a handle; False: the task is independent of it. Any thread."""
        with self._lock:
            self._is_dropped = True
            return self._task is None or not self._task.is_detached

    def forget(self) -> None:
        """Ends the task, if there is one."""
        if self._task is not None:
            self._task.status.forget()

    # Errors.

    def resumes_after(self, error: BaseException) -> bool:
        """Whether this rank missed saves of the others; if so, it takes over the number of their next."""
        if not isinstance(error, SaveAbortedError) or error.resume_at <= self.number:
            return False
        _log.warning("%s", error)
        self.member.world.resume(self.group, error.resume_at)
        return True

    def fail(self, error: BaseException) -> None:
        """Ends the save on the other ranks, unless it has ended there; names it in ``error``."""
        if self._task is not None:
            # The caller gets ``error``; a later call must not raise the task's own error as well.
            self._task.status.resolver.outcome.mark_retrieved()
        self._report(error)
        # Afterwards: the report names the save anyway.
        name_save(error, self._text, self._checkpoint_id)

    def skipped_handle(self, error: SaveSkippedError) -> SaveHandle | None:
        """A handle that raises ``error``; None: the arguments were not accepted."""
        if not self._is_accepted:
            return None
        context = self.context(self.member.sidecar())
        return skipped(object_names.save_text(context.save), context.checkpoint_id, error)

    @shielded
    def _report(self, error: BaseException) -> None:
        if isinstance(error, SaveAbortedError) and self._is_planned:
            return
        others = len(self.group.ranks) > 1
        if not others and not self._is_planned:
            return
        try:
            sidecar = self.member.sidecar()
            sidecar.fail(fail_request(self.context(sidecar), error))
        except PannierError as problem:
            if others:
                _log.warning("%r could not be reported to the other ranks: %s", error, problem)


def request_final_plan(
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
    request = sidecar_pb2.PlanRequest(
        context=context,
        plan=run.message,
        digest=run.digest,
        timeout_s=wait_s,
        save_timeout_s=save_timeout_s,
        prepare=prepare,
        storage_wait_s=storage_wait_s,
    )
    return sidecar.plan(request, wait_s).plan
