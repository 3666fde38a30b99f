"""The plan by which one save was staged: confirmed before, or the claim of this rank's part of the last one.

In: a part, and the statuses of the save. Out: the claim, which travels with the save's bytes; the id of the plan
that has the part; or why none has. Owned by a save, on the engine's loop.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pannier.client.engine import engine
from pannier.client.planning.plan_cache import CachedPlan
from pannier.client.transport.sidecar_client import SidecarClient, seconds_left
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError, SaveAbortedError

_log = logging.getLogger(__name__)


@dataclass
class PlanInUse:
    """See the module."""

    attempt: str
    part: CachedPlan | None
    """What the save claims; None: its plan was confirmed before it was staged."""
    drop_part: Callable[[], object]
    """Later saves must not use this rank's part of the plan."""
    sidecar: SidecarClient
    context: sidecar_pb2.SaveContext
    deadline: Deadline
    """Of the save."""
    timeout_s: float
    """For the other ranks' claims or plans."""
    confirmed: "asyncio.Future[str]"
    """Id of the plan that has the part."""
    refused: "asyncio.Future[Exception]"
    """Why none has it."""

    def __post_init__(self) -> None:
        # Once: an earlier save's confirmation, which may arrive meanwhile, changes what the part claims next.
        self._claim = None if self.part is None else self.part.claim()
        self._answer = Deadline(min(self.timeout_s, self.deadline.remaining()))
        self._is_requested = False

    def claim(self) -> sidecar_pb2.CachedPlanClaim | None:
        """The claim with the time that is left; None: it is answered."""
        if self._claim is None or self.confirmed.done():
            return None
        self._claim.timeout_s = seconds_left(self._answer)
        return self._claim

    @property
    def id(self) -> str:
        """Of the plan; empty: not known yet."""
        return self.confirmed.result() if self.confirmed.done() else ""

    def on_status(self, plan: save_pb2.PlanState) -> None:
        """Takes the coordinator's answer, if ``plan`` has it."""
        if plan.id:
            self._confirm(plan.id)
        elif plan.full_plan_requested and not self._is_requested and not self.confirmed.done():
            self._is_requested = True
            engine().start(self._send_local_plan)

    async def current_save(
        self, error: BaseException | None, decided: save_pb2.SaveStatus | None
    ) -> int:
        """The number of the save that the group is at; 0: it is this one, or isn't known.

        Args:
            error: what ended this save on this rank.
            decided: the end of the group's save with this number.
        """
        is_elsewhere = decided is not None and decided.checkpoint_id != self.context.checkpoint_id
        if self.confirmed.done() or not (isinstance(error, SaveAbortedError) or is_elsewhere):
            return 0
        number = error.resume_at if isinstance(error, SaveAbortedError) else 0
        if not number:
            try:
                await self._request()
            except SaveAbortedError as ended:
                number = ended.resume_at
            except PannierError as problem:
                _log.debug("where the group is isn't known: %s", problem)
        return number

    def _confirm(self, plan_id: str) -> None:
        if self.part is not None and not self.confirmed.done():
            self.confirmed.set_result(plan_id)
            self.part.confirm(self.context.checkpoint_id, self.attempt)

    async def _send_local_plan(self) -> None:
        """What was staged must be this rank's part of the new plan, too."""
        assert self.part is not None
        try:
            final = await self._request()
            if not self.part.equals(final, self.context.save.number):
                assert self._claim is not None
                error = PannierError(
                    f"this save was staged as {self.attempt} by the part {self._claim.part[:12]} "
                    f"of the last plan, but the coordinator's plan has {final.part[:12]} for "
                    f"{final.attempt}"
                )
                error.kind = save_pb2.FAILURE_KIND_PLAN_CHANGED
                raise error
        except Exception as error:  # noqa: BLE001 - becomes the save's
            if not self.refused.done():
                self.refused.set_result(error)
        else:
            self._confirm(final.plan_id)

    async def _request(self) -> plan_pb2.FinalPlan:
        assert self.part is not None
        request = sidecar_pb2.PlanRequest(
            context=self.context,
            plan=self.part.message,
            digest=self.part.digest,
            staged_positions=self.part.staged_positions,
            save_timeout_s=seconds_left(self.deadline),
        )
        wait_s = min(self.timeout_s, self.deadline.remaining())
        response = await self.sidecar.plan(request, wait_s)
        return response.plan
