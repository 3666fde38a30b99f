"""The methods of ``pannier.v1.Sidecar``, each call in a thread of the gRPC server.

In: requests. Out: responses; errors are raised and become statuses in
:mod:`pannier.daemon.interceptors`. Other modules do the work; here is only the order of steps.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import grpc

from pannier.sidecar.coordinator_client import DEADLINE_SLACK_S, CoordinatorClient
from pannier.sidecar.ingest import Ingest, check_attempt
from pannier.sidecar.rpc.connections import Connections
from pannier.sidecar.rpc.idle_streams import Stream, Streams
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import CachedPlanClaim, Phase, RankSave
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import chunk_codec, limits
from pannier.wire.chunk_codec import ReceivedChunk
from pannier.wire.errors import (
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    UnavailableError,
)
from pannier.wire.failures import aborted_error, failure_kind
from pannier.wire.version import WIRE_VERSION

NAME: Final = "pannier.v1.Sidecar"
LIMITS: Final = {
    f"/{NAME}/{method}": limit
    for method, limit in {
        # One each for a client's life.
        "Connect": 512,
        # One per rank while its group plans, or torch's metadata is committed.
        "Plan": 512,
        "Begin": 128,
        "Finish": 128,
        "Write": 256,
        "Reserve": 128,
        "Release": 128,
        "HandOver": 256,
        "Fail": 128,
        "Ping": 256,
    }.items()
}
"""Calls at a time; each has a thread."""
ACKNOWLEDGE: Final = 16 << 20
"""Bytes between two acknowledgements of a stream."""
LOOKAHEAD: Final = 2 << 20
"""Bytes of a stream that may arrive before they are read: without it the client waits after each
message."""
_STREAMS: Final = 16
"""Streams that are read at the same time: each may buffer some MiB of messages (LOOKAHEAD)."""
_PATIENCE_S: Final = 4.0
"""After this wait a stream is read all the same: trainers that don't send must not block others."""
_FAIL_S: Final = 2.0
_BEGIN_S: Final = 60.0

Message = sidecar_pb2.FileHeader | ReceivedChunk | PannierError


class SidecarServicer(sidecar_pb2_grpc.SidecarServicer):
    """See the proto for what each call does."""

    def __init__(
        self,
        saves: SaveRegistry,
        ingest: Ingest,
        connections: Connections,
        coordinator: CoordinatorClient,
    ) -> None:
        self._saves = saves
        self._ingest = ingest
        self._connections = connections
        self._coordinator = coordinator
        self._streams = threading.BoundedSemaphore(_STREAMS)
        self.open_streams = Streams()
        """Streams of ``Write``."""

    def Connect(
        self, request: sidecar_pb2.ConnectRequest, context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.ConnectResponse]:
        """Welcomes a client, then sends it the statuses of its saves until it disconnects."""
        return self._connections.connect(request, context.add_callback, peer=context.peer())

    def Plan(
        self, request: sidecar_pb2.PlanRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PlanResponse:
        """Forwards a local plan, or confirms a cached one; returns once the whole group is planned."""
        limits.check_plan(request)
        if request.prepare:
            # It belongs to no save, so nothing is recorded here.
            self._ingest.check(request.context)
            prepared: sidecar_pb2.PlanResponse = self._call(
                "Plan", request, request.timeout_s, context
            )
            return prepared
        try:
            rank = self._enter(request.context)
        except SaveAbortedError:
            # It ended without this rank: the coordinator knows which save the rank belongs to now.
            self._call("Plan", request, request.timeout_s, context)
            raise
        self._saves.check(rank)
        self._saves.limit_time(rank, request.timeout_s, request.save_timeout_s)
        if request.cached_plan_id and not request.HasField("plan"):
            try:
                return self._confirm_cached_plan(rank, request, _until_end(context))
            except SaveAbortedError:
                if rank.save.outcome is not None:
                    self._call("Plan", request, request.timeout_s, context)
                raise
        response: sidecar_pb2.PlanResponse = self._forward(
            rank, "Plan", request, request.timeout_s, context
        )
        self._saves.set_plan(rank, response.plan)
        self._ingest.check_room(rank)
        return response

    def Begin(
        self, request: sidecar_pb2.BeginRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.BeginResponse:
        """Forwards the opening of a save that torch plans."""
        limits.check_seconds(save_timeout_s=request.save_timeout_s)
        rank = self._enter(request.context)
        self._saves.check(rank)
        self._saves.limit_time(rank, 0, request.save_timeout_s)
        response: sidecar_pb2.BeginResponse = self._forward(
            rank, "Begin", request, _BEGIN_S, context
        )
        self._saves.set_attempt(rank, response.attempt)
        return response

    def Write(
        self, messages: Iterator[Message], context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        """Receives one data file, from the offset that is held."""
        stream = self.open_streams.add(context.cancel)
        try:
            yield from self._write(messages, context, stream)
        finally:
            self.open_streams.remove(stream)

    def _write(
        self, messages: Iterator[Message], context: grpc.ServicerContext, stream: Stream
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        header = next(messages, None)
        stream.take_header()
        if isinstance(header, PannierError):
            raise header
        if not isinstance(header, sidecar_pb2.FileHeader):
            raise InvalidRequestError("a Write stream begins with the file's header")
        rank = self._enter(header.context)
        file = self._ingest.open(header, rank)
        patient = self._streams.acquire(timeout=_PATIENCE_S)
        try:
            # The stream is the writer: a later one of the same file replaces it.
            held = file.begin(context, context.cancel)
            yield sidecar_pb2.WriteResponse(committed=held)
            yield from self._receive(messages, context, stream, rank, file, held)
        except (InvalidRequestError, IntegrityError) as error:
            # First: failing the rank cancels its streams, and this one must still send the error.
            file.end(context)
            self._saves.fail(rank, failure_kind(error), str(error))
            raise
        finally:
            file.end(context)
            if patient:
                self._streams.release()

    def Reserve(
        self, request: sidecar_pb2.ReserveRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.ReserveResponse:
        """Leases files of the spool."""
        return self._ingest.reserve(request)

    def Release(
        self, request: sidecar_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.ReleaseResponse:
        """Ends leases."""
        self._ingest.release(request)
        return sidecar_pb2.ReleaseResponse()

    def HandOver(
        self, request: sidecar_pb2.HandOverRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.HandOverResponse:
        """Returns once the rank is ingested."""
        self._ingest.hand_over(request, self._enter(request.context))
        return sidecar_pb2.HandOverResponse()

    def Finish(
        self, request: sidecar_pb2.FinishRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.FinishResponse:
        """Forwards the metadata that torch made; returns once the save is committed."""
        limits.check_metadata(request.metadata)
        limits.check_words(attempt=request.attempt)
        limits.check_seconds(timeout_s=request.timeout_s)
        self._enter(request.context)
        response: sidecar_pb2.FinishResponse = self._coordinator.call_from_thread(
            "Finish", request, request.timeout_s, timed=True, on_start=_until_end(context)
        )
        return response

    def Fail(
        self, request: sidecar_pb2.FailRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.FailResponse:
        """The rank skips the save or fails: forwarded by a call and by the report."""
        # The checkpoint id isn't checked: it may be the very reason of the failure.
        limits.check_context(request.context)
        request.failure.CopyFrom(limits.shortened(request.failure))
        # When the save has ended or the rank contradicts itself, the coordinator decides.
        with suppress(SaveAbortedError, InvalidRequestError):
            rank = self._saves.enter(request.context, failing=True)
            self._saves.fail(rank, request.failure.kind, request.failure.message)
        # When the coordinator can't be reached, the report follows once it can.
        with suppress(UnavailableError, DeadlineError):
            self._coordinator.call_from_thread(
                "Fail", request, _FAIL_S, on_start=_until_end(context)
            )
        return sidecar_pb2.FailResponse()

    def Ping(
        self, request: sidecar_pb2.PingRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PingResponse:
        """Notes that a client is alive."""
        self._connections.ping(request)
        return sidecar_pb2.PingResponse()

    def _enter(self, context: sidecar_pb2.SaveContext) -> RankSave:
        self._ingest.check(context)
        rank = self._saves.enter(context)
        self._connections.expect(rank)
        return rank

    def _call(
        self, method: str, request: Any, timeout_s: float, context: grpc.ServicerContext
    ) -> Any:
        request.wire_version = WIRE_VERSION
        return self._coordinator.call_from_thread(
            method, request, timeout_s, timed=method == "Plan", on_start=_until_end(context)
        )

    def _forward(
        self,
        rank: RankSave,
        method: str,
        request: Any,
        timeout_s: float,
        context: grpc.ServicerContext,
    ) -> Any:
        """Calls the coordinator for a rank, and ends the rank here when the call fails."""
        try:
            return self._call(method, request, timeout_s, context)
        except SaveAbortedError as error:
            self._saves.reject(rank, error)
            raise
        except UnavailableError:
            # The trainer has disconnected. If it doesn't reconnect, its rank fails.
            raise
        except PannierError as error:
            self._saves.fail(rank, failure_kind(error), f"{method}: {error}")
            raise

    def _confirm_cached_plan(
        self,
        rank: RankSave,
        request: sidecar_pb2.PlanRequest,
        on_end: Callable[[Callable[[], Any]], None],
    ) -> sidecar_pb2.PlanResponse:
        """Waits until the coordinator confirms the claimed plan, or requests the rank's local plan.

        This makes no call to the coordinator: the claim travels with the reports, and the
        confirmation with the save's status.

        Args:
            on_end: takes a function to call when the trainer cancels its call.

        Raises:
            SaveAbortedError: the save, or this rank, has failed.
            InvalidRequestError: the rank claimed another plan before.
            DeadlineError: the coordinator didn't decide in time; the rank has failed.
            UnavailableError: the call was cancelled.
        """
        check_attempt(request.attempt, rank)
        cancelled = False

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            self._saves.notify_waiters()

        def decided() -> bool:
            status = rank.save.coordinator_status
            plan_requested = status is not None and status.full_plan_requested
            ended = rank.save.outcome is not None or rank.phase is not Phase.PLANNING
            return cancelled or plan_requested or ended or bool(_storage_failures(rank))

        claim = CachedPlanClaim(request.cached_plan_id, request.digest, request.attempt)
        self._saves.claim_plan(rank, claim)
        on_end(cancel)
        deadline = time.monotonic() + request.timeout_s + DEADLINE_SLACK_S
        in_time = self._saves.wait_until(decided, deadline)
        self._saves.check(rank)
        if rank.phase is not Phase.PLANNING:
            confirmed = plan_pb2.FinalPlan(plan_id=rank.plan.id, attempt=rank.attempt)
            return sidecar_pb2.PlanResponse(plan=confirmed)
        if in_time and not cancelled and self._saves.withdraw_claim(rank):
            return sidecar_pb2.PlanResponse(full_plan_requested=True)
        if failures := _storage_failures(rank):
            error = aborted_error(rank.save.key, rank.save.checkpoint_id, failures)
            self._saves.reject(rank, error)
            raise error
        if cancelled:
            raise UnavailableError(f"{rank.label}: the call of Plan was cancelled")
        problem = (
            f"the {self._coordinator.description} did not confirm the cached plan within "
            f"{request.timeout_s:.0f} s"
        )
        status = rank.save.coordinator_status
        if status is not None and status.waiting_on.text:
            problem += f"; it last waited for {status.waiting_on.text}"
        self._saves.fail(rank, save_pb2.FAILURE_KIND_DEADLINE, f"Plan: {problem}")
        raise DeadlineError(problem)

    def _receive(
        self,
        messages: Iterator[Message],
        context: grpc.ServicerContext,
        stream: Stream,
        rank: RankSave,
        file: DataFile,
        held: int,
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        """The data path: one iteration per MiB."""
        size, append = file.size, file.append
        next_stop = held + ACKNOWLEDGE
        while held < size:
            stream.await_message()
            message = next(messages, None)
            stream.take_message()
            if type(message) is ReceivedChunk:
                held = append(context, message)
            elif message is None:
                # The client stopped early: it resumes with another stream, or fails the save.
                return
            elif isinstance(message, PannierError):
                raise message
            else:
                raise InvalidRequestError(f"{file.label}: a second header in one stream")
            # Frees its MiB while the next one arrives.
            del message
            if held >= next_stop or held == size:
                next_stop = held + ACKNOWLEDGE
                self._ingest.record_progress(rank, file)
                yield sidecar_pb2.WriteResponse(committed=held)


def _storage_failures(rank: RankSave) -> list[save_pb2.Failure]:
    """Why the coordinator fails the save, if storage is among the reasons.

    Its ABORT may then take as long as storage is unavailable. A rank that calls with its local plan
    isn't kept waiting for it either.
    """
    status = rank.save.coordinator_status
    failures = list(status.failures) if status is not None else []
    storage = any(each.kind == save_pb2.FAILURE_KIND_STORAGE for each in failures)
    return failures if storage else []


def _until_end(context: grpc.ServicerContext) -> Callable[[Callable[[], Any]], None]:
    """Registers a function that cancels a forwarded call when the caller disconnects."""

    def register(cancel: Callable[[], Any]) -> None:
        if not context.add_callback(cancel):
            cancel()

    return register


def _parse(message: bytes) -> Message:
    # An exception here would reach the client without its message.
    try:
        return chunk_codec.decode(message)
    except InvalidRequestError as error:
        return error


class _Registrar:
    """Registers the generated handlers, but with our own decoder for ``Write``."""

    def __init__(self, server: grpc.Server, servicer: SidecarServicer) -> None:
        self._server = server
        self._servicer = servicer

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the registered handlers are enough."""

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        """Called by the generated code."""
        own = grpc.stream_stream_rpc_method_handler(
            self._servicer.Write,
            request_deserializer=_parse,
            response_serializer=sidecar_pb2.WriteResponse.SerializeToString,
        )
        self._server.add_registered_method_handlers(name, {**handlers, "Write": own})


def add_to_server(servicer: SidecarServicer, server: grpc.Server) -> None:
    """Serves ``pannier.v1.Sidecar``."""
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, _Registrar(server, servicer))
