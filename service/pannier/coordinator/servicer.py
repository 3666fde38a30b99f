"""The ``Coordinator`` service: what sidecars call on behalf of their ranks.

In: requests. Out: responses, once their save has reached the state that they wait for. The service records
requests in :class:`Save` objects and waits for their tasks, which decide everything. Event loop only.
"""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import grpc

from pannier.common import observer_clock, timeouts
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.plan_cache import AgreedPlan, PlanCache
from pannier.coordinator.planning.replicas import ReplicaHashes
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.admission import admit, check_destination
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.coordinator.saves.states import PlanMode, State
from pannier.coordinator.sidecar_streams import SidecarStreams, check_version
from pannier.coordinator.stores import Stores
from pannier.daemon.rank_phase import has_reached
from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import limits
from pannier.wire.errors import (
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    failure_messages,
)

_log = logging.getLogger(__name__)

NAME: Final = "pannier.v1.Coordinator"


class PlanCall:
    """A request of ``Plan``, which is released before the call waits.

    The server keeps what it passes to a handler until the call ends, and local plans are large.
    """

    def __init__(self, data: bytes) -> None:
        self._request: sidecar_pb2.PlanRequest | None = sidecar_pb2.PlanRequest.FromString(data)

    def take(self) -> sidecar_pb2.PlanRequest:
        """The request; to be called once."""
        request, self._request = self._request, None
        assert request is not None
        return request


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """See the proto."""

    def __init__(
        self,
        registry: Registry,
        stores: Stores,
        planners: Planners,
        streams: SidecarStreams,
        cache: PlanCache,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._stores = stores
        self._planners = planners
        self._streams = streams
        self._callers: Counter[tuple[str, int]] = Counter()
        """Waiting Plan calls, by save and rank."""
        self._replicas: WeakKeyDictionary[Save, ReplicaHashes] = WeakKeyDictionary()

    async def Plan(self, call: PlanCall, context: Any) -> sidecar_pb2.PlanResponse:
        """See the proto.

        Raises:
            SaveAbortedError: the save is aborted, whichever rank has failed.
            InvalidRequestError: this call can't be part of any save.
            VersionMismatchError: the sidecar has another wire version.
        """
        request = call.take()
        check_version(request.wire_version, request.context.host)
        limits.check_plan(request)
        rank = request.context.rank
        await self._keep_in_step(request)
        save = self._enter(request.context)
        self._admit(save, request)
        hashes = self._replicas.setdefault(save, ReplicaHashes())
        hashes.add(rank, request.value_hashes)
        del request
        await self._wait_planned(save, rank)
        if save.failing:
            raise save.error()
        plan = self._agreed_plan(save)
        save.ranks[rank].advance(save_pb2.RANK_PHASE_PLANNED)
        assert save.attempt is not None
        if (warning := hashes.warning()) and save.note != warning:
            _log.warning("%s: %s", save.label, warning, extra=save.log_fields)
            save.set_note(warning)
        return sidecar_pb2.PlanResponse(
            plan=plan.final_plan(rank, save.attempt.name), warning=warning
        )

    async def Begin(
        self, request: sidecar_pb2.BeginRequest, context: Any
    ) -> sidecar_pb2.BeginResponse:
        """See the proto. Raises SaveAbortedError when storage refuses the save."""
        check_version(request.wire_version, request.context.host)
        limits.check_seconds(save_timeout_s=request.save_timeout_s)
        save = self._enter(request.context)
        if save.plans.any or save.records.plan_id:
            raise InvalidRequestError(f"{save.label} is planned by Pannier: it can't be begun")
        save.begin_external(request.context)
        save.deadlines.report(request.context.rank, timeouts.BEGIN_S, request.save_timeout_s)
        save.participants.note_call(request.context.rank)
        save.notify()
        await save.wait_until(lambda: save.failing or save.state is not State.PLANNING)
        if save.failing:
            raise save.error()
        assert save.attempt is not None
        return sidecar_pb2.BeginResponse(attempt=save.attempt.name)

    async def Finish(
        self, request: sidecar_pb2.FinishRequest, context: Any
    ) -> sidecar_pb2.FinishResponse:
        """See the proto. The commit continues when the caller disconnects.

        Raises:
            SaveAbortedError: the save was aborted, by a durable decision.
            DeadlineError: the save has not ended in time; its outcome isn't known yet.
        """
        limits.check_metadata(request.metadata)
        limits.check_seconds(timeout_s=request.timeout_s)
        save = self._enter(request.context)
        if save.state is State.PLANNING and not save.external:
            save.resume_external()
        if not save.external and not save.ended:
            raise InvalidRequestError(f"{save.label} was not opened with Begin")
        deadline = time.monotonic() + (request.timeout_s or timeouts.DEFAULT_SAVE_S)
        if not save.ended:
            if save.attempt is not None and request.attempt != save.attempt.name:
                raise InvalidRequestError(
                    f"{save.label} is attempt {save.attempt.name}, not {request.attempt}"
                )
            known = save.external_plan
            if known.finisher is None:
                save.begin_external(request.context)
            if known.metadata is None:
                save.set_external_metadata(request.metadata)
            elif known.metadata != request.metadata:
                raise InvalidRequestError(f"{save.label} was finished with other metadata before")
            save.deadlines.shorten(deadline)
        save.participants.note_call(request.context.rank)
        save.notify()
        # One second more, for the abort that the deadline causes.
        if not await save.wait_until(lambda: save.ended, lambda: deadline + 1.0):
            text = save_view.awaited_text(save)
            raise DeadlineError(f"{save.label} is {save.state.name}, {text}")
        if save.state is State.ABORTED:
            raise save.error()
        return sidecar_pb2.FinishResponse(status=save_view.status(save))

    async def Fail(
        self, request: sidecar_pb2.FailRequest, context: Any
    ) -> sidecar_pb2.FailResponse:
        """See the proto."""
        save = self._registry.enter(request.context, failing=True)
        rank = request.context.rank
        save.participants.note_call(rank)
        failure = limits.shortened(request.failure)
        failure.rank = rank
        failure.host = failure.host or request.context.host
        ingested = has_reached(save.ranks[rank].phase, save_pb2.RANK_PHASE_INGESTED)
        if not (ingested and failure.kind == save_pb2.FAILURE_KIND_LOST):
            save.fail_ranks([failure])
        return sidecar_pb2.FailResponse()

    async def Attach(
        self, request_iterator: AsyncIterator[coordinator_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[bytes]:
        """See the proto."""
        async for response in self._streams.serve(request_iterator):
            yield response

    async def _keep_in_step(self, request: sidecar_pb2.PlanRequest) -> None:
        """Raises SaveAbortedError with the save that a rank behind its group belongs to."""
        context = request.context
        number = await self._registry.find_current(context, request.timeout_s)
        if number:
            error = SaveAbortedError(
                f"save number {context.save.number} of group {context.save.group} ended without "
                f"rank {context.rank}; the save to {context.checkpoint_id} is number {number}"
            )
            error.resume_at = number
            raise error

    def _enter(self, context: sidecar_pb2.SaveContext) -> Save:
        """The save of the context; what this raises fails the save for the other ranks, too."""
        try:
            save = self._registry.enter(context)
        except DisagreementError as error:
            raise _shared_error(error, self._registry, context) from error
        check_destination(save, self._stores, context.rank)
        return save

    def _admit(self, save: Save, request: sidecar_pb2.PlanRequest) -> None:
        """Records the rank's plan. Raises SaveAbortedError, InvalidRequestError."""
        rank, host = request.context.rank, request.context.host
        save.participants.note_call(rank)
        given = RankPlan(rank, host, request.digest, request.plan, request.staged_positions)
        try:
            self._planners.check(request.plan.options)
        except InvalidRequestError as error:
            save.fail(save_pb2.FAILURE_KIND_INVALID_PLAN, str(error), rank)
            raise
        if save.ended and not (save.state is State.PREPARED and request.prepare):
            if save.failing:
                raise save.error()
            raise InvalidRequestError(f"{save.label} is {save.state.name}: it takes no more plans")
        save.deadlines.report(rank, request.timeout_s, request.save_timeout_s)
        save.deadlines.limit_storage_wait(request.storage_wait_s)
        admit(save, given, mode=PlanMode.PREPARE if request.prepare else PlanMode.SAVE)
        save.notify()

    def _agreed_plan(self, save: Save) -> AgreedPlan:
        """The agreed plan of a save. Raises InvalidRequestError when it isn't kept any more."""
        if save.manifest is not None:
            return save.manifest.plan
        plan = self._cache.find(save.context, save.records.plan_id)
        if plan is None or save.state is not State.PREPARED:
            raise InvalidRequestError(f"{save.label} is {save.state.name}: it takes no more plans")
        return plan

    async def _wait_planned(self, save: Save, rank: int) -> None:
        """See :meth:`Save.wait_planned`. A rank whose call is cut off fails unless it soon calls again."""
        caller = (save.key, rank)
        self._callers[caller] += 1
        broken = True
        try:
            await save.wait_planned()
            broken = False
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
                if broken:
                    self._check_broken_call(save, rank, timeouts.CALL_RETURN_S)

    def _check_broken_call(self, save: Save, rank: int, after_s: float) -> None:
        """Fails the rank later unless it has called again, or its sidecar is disconnected, too.

        That sidecar may be restarted, cut off, or attached to another coordinator, which has resumed the
        save: the trainer's call comes again, storage shows the outcome, or the save's deadline passes.
        """

        def check() -> None:
            state = save.ranks[rank]
            if (
                save.ended
                or save.deciding
                or self._callers[(save.key, rank)]
                or has_reached(state.phase, save_pb2.RANK_PHASE_PLANNED)
            ):
                return
            attached = [
                peer.attached_at
                for peer in self._streams.attached()
                if peer.host == state.host and peer.job in ("", save.context.save.job)
            ]
            latest = observer_clock.now() - timeouts.TRAINER_CONNECT_S
            if not attached or max(attached) > latest:
                self._check_broken_call(save, rank, timeouts.SIDECAR_RETURN_S)
                return
            save.fail(
                save_pb2.FAILURE_KIND_LOST,
                "the rank's Plan call was cut off and not repeated within "
                f"{timeouts.CALL_RETURN_S:g} s: did its trainer die?",
                rank,
                timed_out=True,
            )

        observer_clock.call_later(after_s, check)


class _Registrar:
    """Registers what the generated code does, but with our own (de)serialisation of some messages."""

    def __init__(self, server: grpc.aio.Server, service: CoordinatorService) -> None:
        self._server = server
        self._service = service

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the registered handlers are all that is needed."""

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        """Called by the generated code."""
        own: dict[str, Any] = {
            "Plan": grpc.unary_unary_rpc_method_handler(
                self._service.Plan,
                request_deserializer=PlanCall,
                response_serializer=sidecar_pb2.PlanResponse.SerializeToString,
            ),
            # Its responses are serialised already.
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


def _shared_error(
    error: DisagreementError, registry: Registry, context: sidecar_pb2.SaveContext
) -> PannierError:
    """The error of the save that the disagreement has failed: every rank of the save gets it.

    A save that has ended otherwise doesn't fail any more: the caller alone gets the disagreement.
    """
    save = registry.find(context.save)
    if save is not None and save.failing:
        return save.error()
    return InvalidRequestError(str(error), failure_messages(error))
