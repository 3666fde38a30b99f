"""The methods of ``pannier.v1.Sidecar``.

In: requests. Out: responses; errors are raised and become statuses in
:mod:`pannier.daemon.interceptors`. Other modules do the work; here is only the order of steps. On the
event loop. A handler is cancelled when its caller disconnects: work that must not stop halfway runs in
:meth:`SidecarServicer._complete`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, TypeVar

import grpc

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.sidecar.coordinator_client import CoordinatorClient
from pannier.sidecar.ingest import Ingest
from pannier.sidecar.rpc.connections import Connections
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import chunk_codec, limits
from pannier.wire.chunk_codec import ACKNOWLEDGE_BYTES, ReceivedChunk
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

_log = logging.getLogger(__name__)

NAME: Final = "pannier.v1.Sidecar"
LIMITS: Final = {
    f"/{NAME}/{method}": limit
    for method, limit in {
        # One per connected client.
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
"""Calls at a time."""
LOOKAHEAD: Final = 4 << 20
"""Bytes of a stream that may arrive before they are read: while a chunk is stored, the next one arrives."""
_STREAMS: Final = 16
"""Streams that are read at the same time: each may buffer some MiB of messages (LOOKAHEAD)."""


Message = sidecar_pb2.FileHeader | ReceivedChunk | PannierError
T = TypeVar("T")


class _WriteStream:
    """The messages of one call of ``Write``, which is the writer of its file.

    Created in the task of the call's handler, which :meth:`cancel` cancels, unless a response is being sent: then
    the handler ends when that is done, since gRPC can send no status before.
    """

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        self._messages = messages
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._waiting_since = math.inf
        self._idle_limit_s = timeouts.WRITE_HEADER_S
        self._timer = self._loop.call_later(timeouts.WRITE_HEADER_S, self._check_idle)
        self._sending = False
        self.problem = ""
        """Why it was cancelled; empty: it wasn't."""

    async def read(self) -> Message | None:
        """The next message; None at the end."""
        self._waiting_since = self._loop.time()
        message = await anext(self._messages, None)
        self._waiting_since = math.inf
        return message

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around the yield of a response. Raises UnavailableError: the call was cancelled meanwhile."""
        self._sending = True
        yield
        self._sending = False
        if self.problem:
            raise self.error()

    def error(self) -> UnavailableError:
        """For the client, after :meth:`cancel`."""
        return UnavailableError(f"the stream was ended: {self.problem}")

    def take_header(self) -> None:
        """Called when the header has arrived: sets the idle limit for chunks."""
        self._idle_limit_s = timeouts.WRITE_IDLE_S

    def cancel(self, problem: str = "the file is no longer filled by this stream") -> None:
        """Ends the call with an error, unless it has ended."""
        if self._task is not None and not self.problem:
            self.problem = problem
            if not self._sending:
                self._task.cancel()

    def close(self) -> None:
        """Stops the idle timer; called when the handler ends."""
        self._timer.cancel()
        self._task = None

    def _check_idle(self) -> None:
        left = self._idle_limit_s - max(0.0, self._loop.time() - self._waiting_since)
        if left <= 0:
            self.cancel(f"nothing arrived for {self._idle_limit_s:g} s")
        else:
            self._timer = self._loop.call_later(left, self._check_idle)


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
        self._streams = asyncio.BoundedSemaphore(_STREAMS)
        self._writes: set[asyncio.Task[Any]] = set()
        self._completing: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Returns when no call changes anything any more; after the server has stopped."""
        for task in self._writes:
            task.cancel()
        await asyncio.gather(*self._writes, *self._completing, return_exceptions=True)

    async def Connect(
        self, request: sidecar_pb2.ConnectRequest, context: Any
    ) -> AsyncIterator[sidecar_pb2.ConnectResponse]:
        """Welcomes a client, then sends it the statuses of its saves until it disconnects."""
        async with aclosing(self._connections.connect(request, peer=context.peer())) as responses:
            async for response in responses:
                yield response

    async def Plan(
        self, request: sidecar_pb2.PlanRequest, context: Any
    ) -> sidecar_pb2.PlanResponse:
        """Forwards a local plan; returns once the whole group is planned."""
        limits.check_plan(request)
        if request.prepare:
            # A prepared plan belongs to no save, so nothing is recorded here.
            await self._ingest.check(request.context)
            prepared: sidecar_pb2.PlanResponse = await self._call(
                "Plan", request, request.timeout_s
            )
            return prepared
        try:
            rank = await self._enter(request.context)
            if rank.save.outcome is not None:
                raise rank.save.ended_error()
        except SaveAbortedError:
            # The save ended without this rank: the coordinator knows which save the rank belongs to now.
            await self._call("Plan", request, request.timeout_s)
            raise
        self._saves.check(rank)
        self._saves.limit_time(rank, request.timeout_s, request.save_timeout_s)
        response: sidecar_pb2.PlanResponse = await self._forward(
            rank, "Plan", request, request.timeout_s
        )
        if rank.claim is None:
            self._saves.set_plan(rank, response.plan)
            await self._ingest.check_room(rank)
        else:
            await self._ingest.confirm(rank, response.plan)
        return response

    async def Begin(
        self, request: sidecar_pb2.BeginRequest, context: Any
    ) -> sidecar_pb2.BeginResponse:
        """Forwards the opening of a save that torch plans."""
        limits.check_seconds(save_timeout_s=request.save_timeout_s)
        rank = await self._enter(request.context)
        self._saves.check(rank)
        self._saves.limit_time(rank, 0, request.save_timeout_s)
        response: sidecar_pb2.BeginResponse = await self._forward(
            rank, "Begin", request, timeouts.BEGIN_S
        )
        self._saves.set_attempt(rank, response.attempt)
        return response

    async def Write(
        self, messages: AsyncIterator[Message], context: Any
    ) -> AsyncIterator[sidecar_pb2.WriteResponse]:
        """Receives one data file, from the offset that is held."""
        stream = _WriteStream(messages)
        task = asyncio.current_task()
        assert task is not None
        self._writes.add(task)
        try:
            async with aclosing(self._write(stream)) as acknowledged:
                async for held in acknowledged:
                    with stream.sending():
                        yield sidecar_pb2.WriteResponse(committed=held)
        except asyncio.CancelledError:
            if not stream.problem:
                raise
            raise stream.error() from None
        finally:
            stream.close()
            self._writes.discard(task)

    async def _write(self, stream: _WriteStream) -> AsyncGenerator[int, None]:
        """Yields how many bytes of the file are held, whenever the client is to know."""
        header = await stream.read()
        stream.take_header()
        if isinstance(header, PannierError):
            raise header
        if not isinstance(header, sidecar_pb2.FileHeader):
            raise InvalidRequestError("a Write stream begins with the file's header")
        rank = await self._enter(header.context)
        file = await self._complete(self._ingest.open(header, rank))
        has_turn = False

        async def take_turn() -> None:
            nonlocal has_turn
            await self._streams.acquire()
            has_turn = True

        try:
            with suppress(asyncio.TimeoutError):
                await within(timeouts.WRITE_TURN_S, take_turn())
            # A later stream of the same file replaces this one.
            held = await file.begin(stream, stream.cancel)
            yield held
            async with aclosing(self._receive(stream, rank, file, held)) as acknowledged:
                async for held in acknowledged:
                    yield held
        except (InvalidRequestError, IntegrityError) as error:
            # First: failing the rank cancels its streams, and this one must still send the error.
            file.end(stream)
            self._saves.fail(rank, failure_kind(error), str(error))
            raise
        finally:
            file.end(stream)
            if has_turn:
                self._streams.release()

    async def Reserve(
        self, request: sidecar_pb2.ReserveRequest, context: Any
    ) -> sidecar_pb2.ReserveResponse:
        """Leases files of the spool."""
        return await self._complete(self._ingest.reserve(request))

    async def Release(
        self, request: sidecar_pb2.ReleaseRequest, context: Any
    ) -> sidecar_pb2.ReleaseResponse:
        """Ends leases."""
        await self._complete(self._ingest.release(request))
        return sidecar_pb2.ReleaseResponse()

    async def HandOver(
        self, request: sidecar_pb2.HandOverRequest, context: Any
    ) -> sidecar_pb2.HandOverResponse:
        """Returns once the rank is ingested, or handed over with a claim that isn't confirmed."""
        rank = await self._enter(request.context)
        await self._complete(self._ingest.hand_over(request, rank))
        return sidecar_pb2.HandOverResponse()

    async def Finish(
        self, request: sidecar_pb2.FinishRequest, context: Any
    ) -> sidecar_pb2.FinishResponse:
        """Forwards the metadata that torch made; returns once the save is committed."""
        limits.check_metadata(request.metadata)
        limits.check_words(attempt=request.attempt)
        limits.check_seconds(timeout_s=request.timeout_s)
        await self._enter(request.context)
        response: sidecar_pb2.FinishResponse = await self._coordinator.call(
            "Finish", request, request.timeout_s, timed=True
        )
        return response

    async def Fail(
        self, request: sidecar_pb2.FailRequest, context: Any
    ) -> sidecar_pb2.FailResponse:
        """The rank skips the save or fails. The failure is forwarded by a call and with the reports."""
        # The checkpoint id isn't checked: it may be the very reason of the failure.
        limits.check_context(request.context)
        request.failure.CopyFrom(limits.shortened(request.failure))
        # When the save has ended or the rank contradicts itself, the coordinator decides.
        with suppress(SaveAbortedError, InvalidRequestError):
            rank = self._saves.enter(request.context, failing=True)
            self._saves.fail(rank, request.failure.kind, request.failure.message)
        # When the coordinator can't be reached now, it gets the failure with the reports.
        with suppress(UnavailableError, DeadlineError):
            await self._coordinator.call("Fail", request, timeouts.FAIL_S)
        return sidecar_pb2.FailResponse()

    async def Ping(
        self, request: sidecar_pb2.PingRequest, context: Any
    ) -> sidecar_pb2.PingResponse:
        """Notes that a client is alive."""
        self._connections.ping(request)
        return sidecar_pb2.PingResponse()

    async def _enter(self, context: sidecar_pb2.SaveContext) -> RankSave:
        await self._ingest.check(context)
        rank = self._saves.enter(context)
        self._connections.expect(rank)
        return rank

    async def _complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` to its end, even if the caller disconnects."""
        task = asyncio.get_running_loop().create_task(work)
        self._completing.add(task)
        task.add_done_callback(self._completed)
        return await asyncio.shield(task)

    def _completed(self, task: asyncio.Task[Any]) -> None:
        self._completing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The handler raises it, unless its caller has disconnected.
            level = logging.DEBUG if isinstance(error, PannierError) else logging.ERROR
            _log.log(level, "a call ended with %r", error)

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        request.wire_version = WIRE_VERSION
        return await self._coordinator.call(method, request, timeout_s, timed=method == "Plan")

    async def _forward(self, rank: RankSave, method: str, request: Any, timeout_s: float) -> Any:
        """Calls the coordinator for a rank, and ends the rank here when the call fails.

        The call is cancelled when the trainer disconnects; a rank whose trainer doesn't reconnect fails.
        """
        try:
            return await self._call(method, request, timeout_s)
        except SaveAbortedError as error:
            self._saves.reject(rank, error)
            raise
        except PannierError as error:
            self._saves.fail(rank, failure_kind(error), f"{method}: {error}")
            raise

    async def _receive(
        self, stream: _WriteStream, rank: RankSave, file: DataFile, held: int
    ) -> AsyncGenerator[int, None]:
        """The data path: one iteration per chunk."""
        size, append, read = file.size, file.append, stream.read
        next_stop = held + ACKNOWLEDGE_BYTES
        while held < size:
            message = await read()
            if type(message) is ReceivedChunk:
                held = await append(stream, message)
            elif message is None:
                # The client stopped early: it resumes with another stream, or fails the save.
                return
            elif isinstance(message, PannierError):
                raise message
            else:
                raise InvalidRequestError(f"{file.label}: a second header in one stream")
            # Frees the chunk's memory while the next one arrives.
            del message
            if held >= next_stop or held == size:
                next_stop = held + ACKNOWLEDGE_BYTES
                await self._ingest.record_progress(rank, file)
                yield held


def _parse(message: bytes) -> Message:
    # An exception here would reach the client without its message.
    try:
        return chunk_codec.decode(message)
    except InvalidRequestError as error:
        return error


class _Registrar:
    """Registers the generated handlers, but with our own decoder for ``Write``."""

    def __init__(self, server: grpc.aio.Server, servicer: SidecarServicer) -> None:
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
        handler = grpc.method_handlers_generic_handler(name, {**handlers, "Write": own})
        self._server.add_generic_rpc_handlers((handler,))


def add_to_server(servicer: SidecarServicer, server: grpc.aio.Server) -> None:
    """Serves ``pannier.v1.Sidecar``."""
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, _Registrar(server, servicer))
