"""The ``Coordinator`` service: what sidecars call on behalf of their ranks.

In: requests. Out: answers, once the save that they speak of has come so far. Decides
nothing itself: it fills :class:`Save`s and waits for what the conductor makes of them.
Event loop only.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from pannier.common import observer_clock
from pannier.coordinator.planning import varints
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.encoded_plans import PlanCall, UnreadPlan, parse_call, unread
from pannier.coordinator.planning.plan_cache import AgreedPlan, AgreedPlans
from pannier.coordinator.saves.admission import check_place, join
from pannier.coordinator.saves.participants import DisagreementError, Proposal
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import DEFAULT_TIMEOUT_S, Save, State
from pannier.coordinator.sidecar_streams import Attachments, check_version
from pannier.coordinator.stores import Places
from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    plan_pb2,
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import limits, object_names
from pannier.wire.errors import (
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
)

NAME: Final = "pannier.v1.Coordinator"
LOST_AFTER_S: Final = 1.0
"""A rank whose Plan call broke off counts as lost unless its sidecar calls again by then."""
_ANSWER: Final = sidecar_pb2.PlanResponse.DESCRIPTOR.fields_by_name["plan"].number
_BEGIN_S: Final = 60.0
"""For storage to answer when a save is opened with Begin."""


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """See the proto."""

    def __init__(
        self,
        registry: Registry,
        places: Places,
        planners: Planners,
        attachments: Attachments,
        plans: AgreedPlans,
    ) -> None:
        self._registry = registry
        self._plans = plans
        self._places = places
        self._planners = planners
        self._attachments = attachments
        self._callers: Counter[tuple[str, int]] = Counter()
        """Plan calls that wait, by save and rank."""

    async def Plan(self, call: PlanCall, context: Any) -> bytes:
        """See the proto. Request and answer are as :func:`add_to_server` has them read and written.

        Raises:
            SaveAbortedError: the save is aborted, for whatever reason on whatever rank.
            InvalidRequestError: this call can't be part of any save.
            VersionMismatchError: its sidecar would never be heard of again.
        """
        request = call.request
        if call.error is not None:
            raise call.error
        check_version(request.wire_version, request.context.host)
        limits.check_plan(request)
        rank = request.context.rank
        await self._keep_in_step(request)
        save = self._enter(request.context)
        proposing = self._admit(save, request, call.plan)
        attempt = request.attempt
        del request
        call.forget()
        answered = await self._wait_planned(save, rank, proposing=proposing)
        if not answered:
            raise save.error()
        if proposing and save.state is State.PLANNING:
            return sidecar_pb2.PlanResponse(wanted=True).SerializeToString()
        plan = self._agreed(save)
        save.parts[rank].advance(save_pb2.RANK_PHASE_PLANNED)
        if proposing:
            agreed = plan_pb2.FinalPlan(plan_id=plan.plan_id, attempt=attempt)
            return sidecar_pb2.PlanResponse(plan=agreed).SerializeToString()
        assert save.attempt is not None
        return varints.field(_ANSWER, plan.packed_plan(rank, save.attempt.name))

    async def Begin(
        self, request: sidecar_pb2.BeginRequest, context: Any
    ) -> sidecar_pb2.BeginResponse:
        """See the proto. Raises SaveAbortedError when storage refuses the save."""
        check_version(request.wire_version, request.context.host)
        limits.check_seconds(save_timeout_s=request.save_timeout_s)
        save = self._enter(request.context)
        if save.gathering.plans or save.gathering.proposals or save.plan_id:
            raise InvalidRequestError(f"{save.label} is planned by Pannier: it can't be begun")
        save.external = True
        save.finisher = request.context
        save.set_deadlines(request.context.rank, _BEGIN_S, request.save_timeout_s)
        self._hear(save, request.context.rank)
        save.ring()
        await save.until(lambda: save.doomed.is_set() or save.state is not State.PLANNING)
        if save.doomed.is_set():
            raise save.error()
        assert save.attempt is not None
        return sidecar_pb2.BeginResponse(attempt=save.attempt.name)

    async def Finish(
        self, request: sidecar_pb2.FinishRequest, context: Any
    ) -> sidecar_pb2.FinishResponse:
        """See the proto. The commit goes on when the caller is gone.

        Raises:
            SaveAbortedError: the save was aborted, by a durable decision.
            DeadlineError: how it ends isn't known yet.
        """
        limits.check_metadata(request.metadata)
        limits.check_seconds(timeout_s=request.timeout_s)
        save = self._enter(request.context)
        if save.state is State.PLANNING and not save.external:
            # Another life of the coordinator opened it.
            save.resumed = save.external = True
        if not save.external and not save.ended:
            raise InvalidRequestError(f"{save.label} was not opened with Begin")
        if save.finisher is None:
            save.finisher = request.context
        deadline = time.monotonic() + (request.timeout_s or DEFAULT_TIMEOUT_S)
        if not save.ended:
            if save.attempt is not None and request.attempt != save.attempt.name:
                raise InvalidRequestError(
                    f"{save.label} is attempt {save.attempt.name}, not {request.attempt}"
                )
            if save.metadata is None:
                save.metadata = request.metadata
            elif save.metadata != request.metadata:
                raise InvalidRequestError(f"{save.label} was finished with other metadata before")
            save.shorten(deadline)
        self._hear(save, request.context.rank)
        save.ring()
        # A moment more, for the abort that the deadline brings about.
        if not await save.until(lambda: save.ended, lambda: deadline + 1.0):
            raise DeadlineError(f"{save.label} is {save.state.name}, {save.waiting_text()}")
        if save.state is State.ABORTED:
            raise save.error()
        return sidecar_pb2.FinishResponse(status=save.status())

    async def Fail(
        self, request: sidecar_pb2.FailRequest, context: Any
    ) -> sidecar_pb2.FailResponse:
        """See the proto."""
        save = self._registry.enter(request.context, failing=True)
        rank = request.context.rank
        self._hear(save, rank)
        failure = limits.shortened(request.failure)
        failure.rank = rank
        failure.host = failure.host or request.context.host
        ingested = save.parts[rank].phase >= save_pb2.RANK_PHASE_INGESTED
        if not (ingested and failure.kind == save_pb2.FAILURE_KIND_LOST):
            save.doom([failure])
        return sidecar_pb2.FailResponse()

    async def Attach(
        self, request_iterator: AsyncIterator[coordinator_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[bytes]:
        """See the proto."""
        async for response in self._attachments.serve(request_iterator):
            yield response

    # Inside.

    async def _keep_in_step(self, request: sidecar_pb2.PlanRequest) -> None:
        """Sends a rank that is behind its group to the save that it belongs to."""
        context = request.context
        number = await self._registry.current(context, request.timeout_s)
        if number:
            error = SaveAbortedError(
                f"save number {context.save.number} of group {context.save.group} ended without "
                f"rank {context.rank}; the save to {context.checkpoint_id} is number {number}"
            )
            error.resume_at = number
            raise error

    def _enter(self, context: sidecar_pb2.SaveContext) -> Save:
        """The save; raises what it is refused with, which then dooms it for the others."""
        try:
            save = self._registry.enter(context)
        except DisagreementError as error:
            raise _aborted(error, self._registry, context) from error
        check_place(save, self._places, context.rank)
        return save

    def _admit(self, save: Save, request: sidecar_pb2.PlanRequest, plan: UnreadPlan | None) -> bool:
        """Takes in the plan, or that the rank goes by an earlier one (True).

        Raises what makes it impossible.
        """
        rank, host = request.context.rank, request.context.host
        self._hear(save, rank)
        said: RankPlan | Proposal
        proposing = bool(request.cached_plan_id) and plan is None
        if proposing:
            object_names.Attempt.parse(request.attempt)
            said = Proposal(rank, host, request.digest, request.cached_plan_id, request.attempt)
        else:
            plan = plan or unread(plan_pb2.LocalPlan())
            said = RankPlan(rank, host, request.digest, plan)
            try:
                self._planners.check(plan.options)
            except InvalidRequestError as error:
                save.fail(save_pb2.FAILURE_KIND_INVALID_PLAN, str(error), rank)
                raise
        if save.ended and not (save.state is State.PREPARED and request.prepare):
            if save.doomed.is_set():
                raise save.error()
            raise InvalidRequestError(f"{save.label} is {save.state.name}: it takes no more plans")
        save.set_deadlines(rank, request.timeout_s, request.save_timeout_s)
        join(save, said, preparing=request.prepare)
        save.ring()
        return proposing

    def _agreed(self, save: Save) -> AgreedPlan:
        """The plan of a save that was planned. Raises InvalidRequestError when it isn't kept."""
        if save.manifest is not None:
            return save.manifest.plan
        plan = self._plans.find(save.context, save.plan_id)
        if plan is None or save.state is not State.PREPARED:
            raise InvalidRequestError(f"{save.label} is {save.state.name}: it takes no more plans")
        return plan

    async def _wait_planned(self, save: Save, rank: int, *, proposing: bool) -> bool:
        """Whether the plan was agreed. A caller that goes away is soon counted as lost.

        Args:
            proposing: the wait also ends when the rank's local plan is wanted.
        """
        caller = (save.key, rank)
        self._callers[caller] += 1
        gone = True
        try:
            await save.until_planned(proposing=proposing)
            gone = False
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
                if gone and not save.ended:
                    loop = asyncio.get_running_loop()
                    loop.call_later(LOST_AFTER_S, self._lose, save, rank)
        return not save.doomed.is_set()

    def _lose(self, save: Save, rank: int) -> None:
        part = save.parts[rank]
        if save.touched and part.host not in {each.host for each in self._attachments.present()}:
            # The whole link broke: its sidecar may have gone to another coordinator, which has
            # adopted this plan. Storage tells, or the deadline.
            return
        unheard = part.phase < save_pb2.RANK_PHASE_PLANNED
        if unheard and not self._callers[(save.key, rank)] and not save.deciding:
            save.fail(
                save_pb2.FAILURE_KIND_LOST,
                "the process is gone: its call of Plan broke off while the save was planned",
                rank,
                concluded=True,
            )

    def _hear(self, save: Save, rank: int) -> None:
        save.parts[rank].heard = observer_clock.now()


class _Registrar:
    """What the generated code registers, but with our own reading and writing of messages."""

    def __init__(self, server: grpc.aio.Server, service: CoordinatorService) -> None:
        self._server = server
        self._service = service

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Without: it comes with the registered ones, which are all that is needed."""

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        """Called by the generated code."""
        # What they answer is serialised already.
        own: dict[str, Any] = {
            "Plan": grpc.unary_unary_rpc_method_handler(
                self._service.Plan, request_deserializer=parse_call
            ),
            "Attach": grpc.stream_stream_rpc_method_handler(
                self._service.Attach,
                request_deserializer=coordinator_pb2.AttachRequest.FromString,
            ),
        }
        handler = grpc.method_handlers_generic_handler(name, {**handlers, **own})
        self._server.add_generic_rpc_handlers((handler,))


def add_to_server(service: CoordinatorService, server: grpc.aio.Server) -> None:
    """Serves ``pannier.v1.Coordinator``."""
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, _Registrar(server, service))


def _aborted(
    error: DisagreementError, registry: Registry, context: sidecar_pb2.SaveContext
) -> PannierError:
    """The same error for every rank of the save that a disagreement has doomed."""
    save = registry.find(context.save)
    return error if save is None else save.error()
