"""Confirms, after staging, that all ranks go by the cached plan that a save was staged by.

In: the cached plan of a save. Out: the plan id that all ranks confirmed, or an error. Owned by one
save task, whose thread blocks here while training continues.
"""

from collections.abc import Callable

from pannier.client.planning.plan_cache import CachedPlan, PlanCache
from pannier.client.staging.stager import Staged
from pannier.common.deadline import Deadline
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import DeadlineError, PannierError


class PlanConfirmation:
    """Confirms one save's cached-plan claim with the coordinator.

    Args:
        plans: drops the plan when the save fails, so that the next save requests a full plan.
        plan: what the save was staged by.
        send_claim: the ``Plan`` call, with its timeout in seconds.
        deadline: of the save.
        wait_s: longest wait for the other ranks, seconds.
        resume_after: makes the number after this one the group's next.
    """

    def __init__(
        self,
        plans: PlanCache,
        plan: CachedPlan,
        send_claim: Callable[[sidecar_pb2.PlanRequest, float], sidecar_pb2.PlanResponse],
        *,
        deadline: Deadline,
        wait_s: float,
        resume_after: Callable[[int], None],
    ) -> None:
        self._plans = plans
        self._plan = plan
        self._send_claim = send_claim
        self._deadline = deadline
        self._wait_s = wait_s
        self._resume_after = resume_after

    def confirm(self, context: sidecar_pb2.SaveContext) -> str:
        """The id of the plan that all ranks go by. Blocks until every rank has claimed it.

        Raises:
            SaveAbortedError: the save was aborted on all ranks, with failures by rank; or
                only for this rank, which missed saves of the others (``resume_at``).
            DeadlineError: not every rank has claimed a plan in time.
            PannierError: the coordinator made another plan, so that what was staged is of no use.
        """
        plan, number = self._plan, context.save.number
        attempt = plan.attempt(number)
        request = sidecar_pb2.PlanRequest(
            context=context,
            digest=plan.digest,
            cached_plan_id=plan.plan_id,
            attempt=attempt,
        )
        answer = self._send(request)
        if answer.full_plan_requested:
            # The coordinator doesn't know the plan id: it needs the full local plan.
            request.plan.CopyFrom(plan.message)
            request.ClearField("cached_plan_id")
            final = self._send(request).plan
            is_same = plan.equals(final, number)
        else:
            final = answer.plan
            is_same = final.attempt == attempt
        if not is_same:
            raise PannierError(
                f"this save was staged as {attempt} by the plan {plan.plan_id[:12]} of an earlier "
                f"one, but the coordinator's plan is {final.plan_id[:12]} for {final.attempt}; "
                "the next save is planned again"
            )
        plan.confirm(final.plan_id)
        return plan.plan_id

    def renumber(self, number: int, staged: Staged) -> tuple[str, Staged]:
        """Attempt and staged files under the name of the group's ``number``-th save."""
        self._resume_after(number)
        return self._plan.attempt(number), staged.renamed(self._plan.file_names(number))

    def save_failed(self) -> None:
        """Drops the cached plan."""
        self._plans.drop(self._plan.scope)

    def _send(self, request: sidecar_pb2.PlanRequest) -> sidecar_pb2.PlanResponse:
        if self._deadline.passed:
            raise DeadlineError(
                f"save {object_names.save_text(request.context.save)} was staged, but its timeout "
                "passed before its plan could be confirmed"
            )
        request.save_timeout_s = self._deadline.remaining()
        request.timeout_s = min(self._wait_s, request.save_timeout_s)
        return self._send_claim(request, request.timeout_s)
