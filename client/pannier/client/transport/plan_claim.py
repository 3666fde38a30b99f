"""The claim of one save to use this rank's part of the last plan, until the coordinator has answered it.

In: a cached plan, and the statuses of the save. Out: the claim, which travels with the save's bytes,
and the id of the plan that has the part, or an error. Owned by a save's status follower.
Thread-safe: statuses arrive on threads of the sidecar client, and a local plan is sent by a thread
made for that, since bytes may be under way for long.
"""

import threading
from typing import Protocol

from pannier.client.transport.file_stream import Cancellation, StoppedError
from pannier.client.transport.followed_saves import seconds_left
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError, SaveAbortedError


class CachedPlan(Protocol):
    """See :class:`pannier.client.planning.plan_cache.CachedPlan`."""

    message: plan_pb2.LocalPlan
    digest: str

    @property
    def staged_positions(self) -> bytes:
        """A column: the items of the local plan that this rank writes."""

    def claim(self) -> sidecar_pb2.CachedPlanClaim:
        """The claim of a save to use this part."""

    def confirm(self, checkpoint_id: str, attempt: str) -> None:
        """Records that the attempt's manifest has this part, too."""

    def attempt(self, number: int) -> str:
        """Name of the attempt that is the group's ``number``-th save."""

    def equals(self, final: plan_pb2.FinalPlan, number: int) -> bool:
        """Whether ``final`` is this part for the ``number``-th save."""


class PlanClaim:
    """See the module.

    Args:
        plan: what the save was staged by.
        sidecar: gets the local plan when it is requested.
        context, deadline: of the save.
        wait_s: longest wait for the other ranks, seconds.
        stop: set when the local plan is refused; ends waits.
    """

    def __init__(
        self,
        plan: CachedPlan,
        sidecar: SidecarClient,
        context: sidecar_pb2.SaveContext,
        *,
        deadline: Deadline,
        wait_s: float,
        stop: Cancellation,
    ) -> None:
        self._plan = plan
        self._claim = plan.claim()
        self._sidecar = sidecar
        self._context = context
        self._save_deadline = deadline
        self._wait_s = wait_s
        self._deadline = Deadline(min(wait_s, deadline.remaining()))
        """Deadline of the other ranks' claims or plans."""
        self._stop = stop
        self._changed = threading.Condition()
        self._plan_id = ""
        self._error: Exception | None = None
        self.aborted: save_pb2.SaveStatus | None = None
        """The group's save with this number was aborted, and went to another checkpoint: this rank may
        have missed it, and others since."""
        self._is_requested = False
        self._is_unsent = False
        """The local plan is requested, and :meth:`wait` is to send it."""
        self._is_cancelled = False
        stop.add(self)

    @property
    def plan_id(self) -> str:
        """Id of the plan that all ranks use; empty: not known yet."""
        return self._plan_id

    def message(self) -> sidecar_pb2.CachedPlanClaim:
        """The claim with the time that is left."""
        self._claim.timeout_s = seconds_left(self._deadline)
        return self._claim

    def on_status(self, status: save_pb2.SaveStatus) -> None:
        """Takes the coordinator's answer, if ``status`` has it."""
        if status.plan.id:
            self._confirm(status.plan.id)
        elif status.plan.full_plan_requested and not self._is_requested:
            self._is_requested = True
            number = self._context.save.number
            try:
                threading.Thread(
                    target=self._send_local_plan, name=f"pannier-plan-{number}"
                ).start()
            except RuntimeError:  # no thread can be started, as while the interpreter ends
                with self._changed:
                    self._is_unsent = True
                    self._changed.notify_all()

    def wait(self) -> str:
        """The plan's id; empty: there was no answer in time, or the save was stopped.

        Sends a requested local plan itself if no thread could be started for that. Raises the error by which
        the local plan was refused.
        """
        with self._changed:
            self._changed.wait_for(
                self._ends_wait, min(self._wait_s, self._save_deadline.remaining())
            )
            is_unsent, self._is_unsent = self._is_unsent, False
        if is_unsent and not self._is_cancelled:
            self._send_local_plan()
        if self._error is not None:
            raise self._error
        return self._plan_id

    def find_current_save(self, error: SaveAbortedError | StoppedError) -> int:
        """The number of the save that the group is at, if this rank missed saves; 0: it didn't, as far as is known.

        Args:
            error: what ended the sending of this one.

        Raises the error by which the local plan was refused; PannierError: the coordinator can't be asked.
        """
        cause = self._error or error
        if self._plan_id or (isinstance(cause, StoppedError) and self.aborted is None):
            return 0
        if not isinstance(cause, SaveAbortedError | StoppedError):
            raise cause
        number = cause.resume_at if isinstance(cause, SaveAbortedError) else 0
        if not number:
            try:
                self._request_plan()
            except SaveAbortedError as ended:
                number = ended.resume_at
        if number > self._context.save.number:
            return number
        if cause is not error:
            raise cause
        return 0

    def cancel(self) -> None:
        """The save has ended."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def _ends_wait(self) -> bool:
        has_answer = bool(self._plan_id) or self._error is not None
        return has_answer or self._is_cancelled or self._is_unsent

    def _confirm(self, plan_id: str) -> None:
        number = self._context.save.number
        with self._changed:
            if not self._plan_id:
                self._plan_id = plan_id
                self._plan.confirm(self._context.checkpoint_id, self._plan.attempt(number))
            self._changed.notify_all()

    def _send_local_plan(self) -> None:
        number = self._context.save.number
        try:
            final = self._request_plan()
            if not self._plan.equals(final, number):
                error = PannierError(
                    f"this save was staged as {self._plan.attempt(number)} by the part "
                    f"{self._claim.part[:12]} of the last plan, but the coordinator's plan has "
                    f"{final.part[:12]} for {final.attempt}"
                )
                error.kind = save_pb2.FAILURE_KIND_PLAN_CHANGED
                raise error
        except Exception as error:  # noqa: BLE001 - a thread's end: raised by the one that waits
            self._error = error
            self._stop.set()
        else:
            self._confirm(final.plan_id)

    def _request_plan(self) -> plan_pb2.FinalPlan:
        left = self._save_deadline.remaining()
        request = sidecar_pb2.PlanRequest(
            context=self._context,
            plan=self._plan.message,
            digest=self._plan.digest,
            staged_positions=self._plan.staged_positions,
            save_timeout_s=seconds_left(self._save_deadline),
        )
        return self._sidecar.plan(request, min(self._wait_s, left)).plan
