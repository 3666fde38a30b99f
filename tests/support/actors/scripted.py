"""Both peers of a sidecar, played by a test: a scripted coordinator, and trainers."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import crc32c
import grpc

from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    plan_pb2,
    records_pb2,
    save_pb2,
    sidecar_pb2,
    sidecar_pb2_grpc,
)
from pannier.wire import chunk_codec, errors, object_names
from pannier.wire.addresses import channel_options
from pannier.wire.version import WIRE_VERSION
from support.processes.channels import OWN_CONNECTION
from support.processes.stretch import BOUND_S

TIMEOUT_S = BOUND_S
PLAN_ID = "0123456789abcdef"


def attempt_of(save: save_pb2.SaveId) -> str:
    """The attempt that the scripted coordinator assigns to a save."""
    return object_names.Attempt(1, save.number, save.group, save.incarnation).name


class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers plans at once, records all requests, and decides when the test calls :meth:`decide`.

    Args:
        address: unix socket to listen on.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: dict[int, dict[str, int]] = {}
        """Names' middles ("0", "objects") and sizes of the planned files, by rank."""
        self.part = "part"
        """What it plans for each rank."""
        self.plan_error: errors.PannierError | None = None
        self.plans: list[sidecar_pb2.PlanRequest] = []
        self.fails: list[sidecar_pb2.FailRequest] = []
        self.requests: list[coordinator_pb2.AttachRequest] = []
        self.hold_plans = threading.Event()
        self.hold_plans.set()
        self.cancelled_plans = 0
        self._condition = threading.Condition()
        self._streams: list[queue.SimpleQueue[coordinator_pb2.AttachResponse | None]] = []
        self._server: grpc.Server | None = None

    def __enter__(self) -> "ScriptedCoordinator":
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(32), options=channel_options())
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """As a crash does: connections end; the recorded requests stay."""
        self.hold_plans.set()
        for stream in list(self._streams):
            stream.put(None)
        self._streams.clear()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    # What the sidecar calls.

    def Plan(self, request: Any, context: Any) -> Any:
        self.plans.append(request)
        context.add_callback(lambda: None)
        while not self.hold_plans.wait(0.05):
            if not context.is_active():
                self.cancelled_plans += 1
                return None
        if self.plan_error is not None:
            context.set_trailing_metadata(errors.trailing_metadata(self.plan_error))
            context.abort(self.plan_error.code, str(self.plan_error))
        save, rank = request.context.save, request.context.rank
        attempt = attempt_of(save)
        files = [
            plan_pb2.PlannedFile(name=f"__{attempt}_{rank}_{middle}.distcp", size=size)
            for middle, size in self.files.get(rank, {}).items()
        ]
        return sidecar_pb2.PlanResponse(
            plan=plan_pb2.FinalPlan(plan_id=PLAN_ID, attempt=attempt, files=files, part=self.part)
        )

    def Begin(self, request: Any, context: Any) -> Any:
        return sidecar_pb2.BeginResponse(attempt=attempt_of(request.context.save))

    def Finish(self, request: Any, context: Any) -> Any:
        return sidecar_pb2.FinishResponse(
            status=status_of(request.context, save_pb2.SAVE_STATE_COMMITTED)
        )

    def Fail(self, request: Any, context: Any) -> Any:
        self.fails.append(request)
        return sidecar_pb2.FailResponse()

    def Attach(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        responses: queue.SimpleQueue[coordinator_pb2.AttachResponse | None] = queue.SimpleQueue()
        with self._condition:
            self._streams.append(responses)
            self._condition.notify_all()

        def read() -> None:
            try:
                for request in requests:
                    with self._condition:
                        self.requests.append(request)
                        self._condition.notify_all()
            except grpc.RpcError:
                pass
            responses.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            # As the real one does: the stream is accepted.
            yield coordinator_pb2.AttachResponse()
            while (response := responses.get()) is not None:
                yield response
        finally:
            with self._condition, suppress(ValueError):
                self._streams.remove(responses)

    # What the test does.

    def send(self, *statuses: save_pb2.SaveStatus) -> None:
        """Sends statuses to all attached sidecars."""
        self.respond(coordinator_pb2.AttachResponse(saves=statuses))

    def respond(self, response: coordinator_pb2.AttachResponse) -> None:
        """Sends a response to all attached sidecars; one may be about to attach."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._streams, TIMEOUT_S), "none is attached"
            for stream in self._streams:
                stream.put(response)

    def decide(
        self,
        context: sidecar_pb2.SaveContext,
        state: "save_pb2.SaveState",
        *failures: save_pb2.Failure,
    ) -> None:
        """Sends the status of a save, or its outcome, to all attached sidecars."""
        self.send(status_of(context, state, *failures))

    @property
    def reports(self) -> list[coordinator_pb2.RankReport]:
        """All reports so far, oldest first."""
        return [report for request in list(self.requests) for report in request.reports]

    def await_request(
        self, expected: Callable[[coordinator_pb2.AttachRequest], bool], *, after: int = 0
    ) -> coordinator_pb2.AttachRequest:
        """The first request of a sidecar (from the ``after``-th on) that is as expected."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._condition:
            while True:
                for request in self.requests[after:]:
                    if expected(request):
                        return request
                left = deadline - time.monotonic()
                assert left > 0, f"no such request among {self.requests[after:]}"
                self._condition.wait(left)

    def await_report(
        self, expected: Callable[[coordinator_pb2.RankReport], bool], *, after: int = 0
    ) -> coordinator_pb2.RankReport:
        """The first report (from the ``after``-th on) that is as expected."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._condition:
            while True:
                for report in self.reports[after:]:
                    if expected(report):
                        return report
                left = deadline - time.monotonic()
                assert left > 0, f"no such report among {self.reports[after:]}"
                self._condition.wait(left)

    def await_phase(
        self, context: sidecar_pb2.SaveContext, phase: "save_pb2.RankPhase", *, after: int = 0
    ) -> coordinator_pb2.RankReport:
        """The first report of that rank in that phase."""
        return self.await_report(
            lambda report: (
                report.context.save == context.save
                and report.context.rank == context.rank
                and report.status.phase == phase
            ),
            after=after,
        )


def status_of(
    context: sidecar_pb2.SaveContext, state: "save_pb2.SaveState", *failures: save_pb2.Failure
) -> save_pb2.SaveStatus:
    """A coordinator's status of a save."""
    return save_pb2.SaveStatus(
        save=context.save,
        id=object_names.save_text(context.save),
        checkpoint_id=context.checkpoint_id,
        attempt=attempt_of(context.save),
        state=state,
        failures=failures,
    )


class Trainer:
    """One rank's client, call by call. A context manager that connects."""

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        job: str = "job",
        client: str = "c1",
        host: str = "node-0",
        incarnation: str = "inc1",
    ) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        self.job = job
        self.client = client
        self.host = host
        self.incarnation = incarnation
        self.channel = grpc.insecure_channel(
            address,
            options=OWN_CONNECTION,
        )
        self.stub = sidecar_pb2_grpc.SidecarStub(self.channel)
        self.events: queue.SimpleQueue[sidecar_pb2.ConnectResponse] = queue.SimpleQueue()
        self._stream: Any = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "Trainer":
        self.connect()
        return self

    def __exit__(self, *details: object) -> None:
        self.die()

    def connect(self, wire_version: int = WIRE_VERSION) -> sidecar_pb2.Welcome:
        """Opens the ``Connect`` stream; returns the welcome."""
        request = sidecar_pb2.ConnectRequest(
            wire_version=wire_version,
            client_version="9.9",
            job=self.job,
            incarnation=self.incarnation,
            rank=self.rank,
            world_size=max(self.ranks) + 1,
            host=self.host,
            pid=4242,
            client=self.client,
        )
        stream = self._stream = self.stub.Connect(request, wait_for_ready=True)
        try:
            welcome = next(stream).welcome
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, peer="sidecar") from error

        def read() -> None:
            try:
                for event in stream:
                    self.events.put(event)
            except grpc.RpcError:
                pass

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        return welcome

    def disconnect(self) -> None:
        """Breaks the ``Connect`` stream."""
        if self._stream is not None:
            self._stream.cancel()
        if self._reader is not None:
            self._reader.join(TIMEOUT_S)

    def die(self) -> None:
        """All connections end, as with SIGKILL."""
        self.disconnect()
        self.channel.close()

    def context(self, checkpoint_id: str, number: int = 1) -> sidecar_pb2.SaveContext:
        """Of this rank's ``number``-th save."""
        save = save_pb2.SaveId(
            job=self.job,
            incarnation=self.incarnation,
            group=object_names.group_name(self.ranks),
            number=number,
        )
        return sidecar_pb2.SaveContext(
            save=save,
            checkpoint_id=checkpoint_id,
            ranks=self.ranks,
            world_size=max(self.ranks) + 1,
            rank=self.rank,
            host=self.host,
        )

    def call(self, method: str, request: Any, timeout: float = TIMEOUT_S) -> Any:
        """A unary call; errors as the client sees them."""
        try:
            return getattr(self.stub, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, peer="sidecar") from error

    def plan(
        self, context: sidecar_pb2.SaveContext, timeout_s: float = TIMEOUT_S
    ) -> plan_pb2.FinalPlan:
        request = sidecar_pb2.PlanRequest(context=context, digest="d", timeout_s=timeout_s)
        return self.call("Plan", request, timeout_s + BOUND_S).plan

    def header(
        self, context: sidecar_pb2.SaveContext, middle: str, size: int
    ) -> sidecar_pb2.FileHeader:
        attempt = attempt_of(context.save)
        return sidecar_pb2.FileHeader(
            context=context,
            attempt=attempt,
            name=f"__{attempt}_{context.rank}_{middle}.distcp",
            size=size,
        )

    def stream(self, header: sidecar_pb2.FileHeader) -> "WriteStream":
        """Opens a ``Write`` stream."""
        return WriteStream(self.channel, header)

    def write(
        self, context: sidecar_pb2.SaveContext, middle: str, data: bytes
    ) -> records_pb2.DataFile:
        """Streams a whole data file."""
        header = self.header(context, middle, len(data))
        with self.stream(header) as stream:
            held = stream.committed()
            for offset in range(held, len(data), chunk_codec.CHUNK_BYTES):
                stream.send(data[offset : offset + chunk_codec.CHUNK_BYTES], offset)
            while held < len(data):
                held = stream.committed()
        return data_file(header.name, data)

    def hand_over(
        self,
        context: sidecar_pb2.SaveContext,
        *files: records_pb2.DataFile,
        plan_id: str = PLAN_ID,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
    ) -> None:
        self.call(
            "HandOver",
            sidecar_pb2.HandOverRequest(
                context=context,
                attempt=attempt_of(context.save),
                plan_id="" if claim is not None else plan_id,
                claim=claim,
                files=files,
            ),
        )

    def await_state(
        self, context: sidecar_pb2.SaveContext, state: "save_pb2.SaveState"
    ) -> save_pb2.SaveStatus:
        """The next pushed status of that save in that state."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no status update with {save_pb2.SaveState.Name(state)}"
                ) from None
            if event.save.save == context.save and event.save.state == state:
                return event.save


class WriteStream:
    """A ``Write`` stream, message by message. Errors as the client sees them."""

    def __init__(self, channel: grpc.Channel, header: sidecar_pb2.FileHeader) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._messages.put(header)
        self._call = channel.stream_stream(
            "/pannier.v1.Sidecar/Write",
            request_serializer=_encode,
            response_deserializer=sidecar_pb2.WriteResponse.FromString,
        )(iter(self._messages.get, None), timeout=TIMEOUT_S)

    def __enter__(self) -> "WriteStream":
        return self

    def __exit__(self, *details: object) -> None:
        self.cut()

    def send(self, data: bytes, offset: int, crc: int | None = None) -> None:
        self._messages.put((data, offset, crc32c.crc32c(data) if crc is None else crc))

    def send_raw(self, message: bytes) -> None:
        self._messages.put(message)

    def committed(self) -> int:
        """The next acknowledgement."""
        try:
            return next(self._call).committed
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, peer="sidecar") from error
        except StopIteration:
            raise AssertionError("the stream ended without an answer") from None

    def finish(self) -> None:
        """Ends the stream from this side; returns when the sidecar has ended it."""
        self._messages.put(None)
        assert list(self._call) == []

    def cut(self) -> None:
        self._call.cancel()
        self._messages.put(None)


def _encode(message: Any) -> bytes:
    if not isinstance(message, tuple):
        return message if isinstance(message, bytes) else chunk_codec.encode(message)
    data, offset, crc = message
    buffer = ctypes.create_string_buffer(data, len(data))
    return chunk_codec.encode(chunk_codec.Chunk(offset, crc, ctypes.addressof(buffer), len(data)))


def data_file(name: str, data: bytes) -> records_pb2.DataFile:
    """The record of a file in a hand-over."""
    return records_pb2.DataFile(name=name, size=len(data), crc32c=crc32c.crc32c(data))
