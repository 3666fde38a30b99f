"""The gRPC face of the sidecar: each call of ``pannier.v1.Sidecar``, in a thread of the server.

In: messages. Out: answers; errors are raised and become statuses in
:mod:`pannier.daemon.interceptors`. What a call means is elsewhere; here is only the
order of steps.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import grpc

from pannier.sidecar.coordinator_client import Link
from pannier.sidecar.ingest import Receiving
from pannier.sidecar.rpc.cached_plan_claims import is_proposal, propose
from pannier.sidecar.rpc.connections import Sessions
from pannier.sidecar.rpc.idle_streams import IDLE_S, Stream, Streams
from pannier.sidecar.save_state import RankSave, Saves
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import sidecar_pb2, sidecar_pb2_grpc
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
from pannier.wire.failures import failure_kind
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
"""Bytes of a stream that may come in before they are asked for: without it the client waits for
the sidecar after every message."""
_STREAMS: Final = 16
"""Streams that are read at the same time: each may hold some MiB of messages (LOOKAHEAD)."""
_PATIENCE_S: Final = 4.0
"""A stream is read all the same when trainers that don't send keep others out for so long."""
_FAIL_S: Final = 2.0
_BEGIN_S: Final = 60.0

Message = sidecar_pb2.FileHeader | ReceivedChunk | PannierError


class SidecarServicer(sidecar_pb2_grpc.SidecarServicer):
    """See the proto for what each call does."""

    def __init__(self, saves: Saves, receiving: Receiving, sessions: Sessions, link: Link) -> None:
        self._saves = saves
        self._receiving = receiving
        self._sessions = sessions
        self._link = link
        self._streams = threading.BoundedSemaphore(_STREAMS)
        self.open_streams = Streams()
        """Of Write."""

    def Connect(
        self, request: sidecar_pb2.ConnectRequest, context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.ConnectResponse]:
        """Welcomes a client, then tells it of its saves until it leaves."""
        return self._sessions.connect(request, context.add_callback, peer=context.peer())

    def Plan(
        self, request: sidecar_pb2.PlanRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PlanResponse:
        """Forwards a local plan; waits for the whole group's."""
        limits.check_plan(request)
        if request.prepare:
            # No save: nothing is kept of it here.
            self._receiving.check(request.context)
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
        self._saves.timed(rank, request.timeout_s, request.save_timeout_s)
        if is_proposal(request):
            try:
                return propose(self._saves, self._link, rank, request, _until_end(context))
            except SaveAbortedError:
                if rank.save.verdict is not None:
                    self._call("Plan", request, request.timeout_s, context)
                raise
        response: sidecar_pb2.PlanResponse = self._forward(
            rank, "Plan", request, request.timeout_s, context
        )
        self._saves.planned(rank, response.plan)
        self._receiving.check_room(rank)
        return response

    def Begin(
        self, request: sidecar_pb2.BeginRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.BeginResponse:
        """Forwards the opening of a save that torch plans."""
        limits.check_seconds(save_timeout_s=request.save_timeout_s)
        rank = self._enter(request.context)
        self._saves.check(rank)
        self._saves.timed(rank, 0, request.save_timeout_s)
        response: sidecar_pb2.BeginResponse = self._forward(
            rank, "Begin", request, _BEGIN_S, context
        )
        self._saves.begun(rank, response.attempt)
        return response

    def Write(
        self, messages: Iterator[Message], context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        """Takes one data file, from the offset that is held."""
        stream = self.open_streams.add(context.cancel)
        try:
            yield from self._write(messages, context, stream)
        finally:
            self.open_streams.remove(stream)

    def _write(
        self, messages: Iterator[Message], context: grpc.ServicerContext, stream: Stream
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        header = next(messages, None)
        stream.busy()
        stream.patience_s = IDLE_S
        if isinstance(header, PannierError):
            raise header
        if not isinstance(header, sidecar_pb2.FileHeader):
            raise InvalidRequestError("a Write stream begins with the file's header")
        rank = self._enter(header.context)
        file = self._receiving.open(header, rank)
        patient = self._streams.acquire(timeout=_PATIENCE_S)
        try:
            # The stream itself is who writes: a later one of the same file takes over from it.
            held = file.begin(context, context.cancel)
            yield sidecar_pb2.WriteResponse(committed=held)
            yield from self._receive(messages, context, stream, rank, file, held)
        except (InvalidRequestError, IntegrityError) as error:
            # Out of the way first: a failed rank's streams are cut, and this one has more to say.
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
        """Lends files of the spool."""
        return self._receiving.reserve(request)

    def Release(
        self, request: sidecar_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.ReleaseResponse:
        """Takes back what was lent."""
        self._receiving.release(request)
        return sidecar_pb2.ReleaseResponse()

    def HandOver(
        self, request: sidecar_pb2.HandOverRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.HandOverResponse:
        """Answers when the rank is ingested."""
        self._receiving.hand_over(request, self._enter(request.context))
        return sidecar_pb2.HandOverResponse()

    def Finish(
        self, request: sidecar_pb2.FinishRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.FinishResponse:
        """Forwards the metadata that torch made; waits for the commit."""
        limits.check_metadata(request.metadata)
        limits.check_words(attempt=request.attempt)
        limits.check_seconds(timeout_s=request.timeout_s)
        self._enter(request.context)
        response: sidecar_pb2.FinishResponse = self._link.call_from_thread(
            "Finish", request, request.timeout_s, timed=True, on_start=_until_end(context)
        )
        return response

    def Fail(
        self, request: sidecar_pb2.FailRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.FailResponse:
        """The rank skips or gives up: told to the coordinator by a call and by the report."""
        # Not refused for where the save goes: it may be given up for that very reason.
        limits.check_context(request.context)
        request.failure.CopyFrom(limits.shortened(request.failure))
        # When the save has ended or the rank contradicts itself, the coordinator judges.
        with suppress(SaveAbortedError, InvalidRequestError):
            rank = self._saves.enter(request.context, failing=True)
            self._saves.fail(rank, request.failure.kind, request.failure.message)
        # When the coordinator can't be reached, the report tells it once it can.
        with suppress(UnavailableError, DeadlineError):
            self._link.call_from_thread("Fail", request, _FAIL_S, on_start=_until_end(context))
        return sidecar_pb2.FailResponse()

    def Ping(
        self, request: sidecar_pb2.PingRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PingResponse:
        """A client lives."""
        self._sessions.ping(request)
        return sidecar_pb2.PingResponse()

    def _enter(self, context: sidecar_pb2.SaveContext) -> RankSave:
        self._receiving.check(context)
        rank = self._saves.enter(context)
        self._sessions.expect(rank)
        return rank

    def _call(
        self, method: str, request: Any, timeout_s: float, context: grpc.ServicerContext
    ) -> Any:
        request.wire_version = WIRE_VERSION
        return self._link.call_from_thread(
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
        """Asks the coordinator for the rank's part in a save; what it refuses is over here too."""
        try:
            return self._call(method, request, timeout_s, context)
        except SaveAbortedError as error:
            self._saves.refused(rank, error)
            raise
        except UnavailableError:
            # The caller went away. If it doesn't come back, its rank is lost.
            raise
        except PannierError as error:
            self._saves.fail(rank, failure_kind(error), f"{method}: {error}")
            raise

    def _receive(
        self,
        messages: Iterator[Message],
        context: grpc.ServicerContext,
        stream: Stream,
        rank: RankSave,
        file: DataFile,
        held: int,
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        """The data path: one turn of this loop per MiB."""
        size, append, now = file.size, file.append, time.monotonic
        next_stop = held + ACKNOWLEDGE
        while held < size:
            stream.waiting_since = now()
            message = next(messages, None)
            stream.waiting_since = math.inf
            if type(message) is ReceivedChunk:
                held = append(context, message)
            elif message is None:
                # The client stopped early: it goes on with another stream, or fails the save.
                return
            elif isinstance(message, PannierError):
                raise message
            else:
                raise InvalidRequestError(f"{file.label}: a second header in one stream")
            # Its MiB is free while the next one comes.
            del message
            if held >= next_stop or held == size:
                next_stop = held + ACKNOWLEDGE
                self._receiving.held(rank, file)
                yield sidecar_pb2.WriteResponse(committed=held)


def _until_end(context: grpc.ServicerContext) -> Callable[[Callable[[], Any]], None]:
    """Cancels a forwarded call when the caller goes away."""

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
    """What the generated code registers, but with our own decoder for ``Write``."""

    def __init__(self, server: grpc.Server, servicer: SidecarServicer) -> None:
        self._server = server
        self._servicer = servicer

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Without: the registered ones are all that is needed."""

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
