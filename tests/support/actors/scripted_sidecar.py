"""A sidecar that does what a test says, on a real unix socket, for tests of the client alone."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import crc32c
import grpc

from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import addresses, chunk_codec, errors, object_names
from pannier.wire.errors import PannierError
from pannier.wire.file_layout import lay_out
from pannier.wire.plan_columns import decode_column, encode_column
from pannier.wire.version import WIRE_VERSION
from support.processes.stretch import BOUND_S

Hook = Callable[[Any], None]


@dataclass
class Spool:
    """What one file has come to."""

    size: int
    data: bytearray = field(default_factory=bytearray)
    streams: int = 0
    offsets: list[int] = field(default_factory=list)
    """Where each stream began."""


class ScriptedSidecar(sidecar_pb2_grpc.SidecarServicer):
    """Takes every file, agrees to every plan and commits every save, unless set otherwise.

    ``with ScriptedSidecar(directory) as sidecar`` serves at ``sidecar.address``.
    """

    def __init__(self, directory: Path, *, name: str = "s.sock") -> None:
        self.address = f"unix://{directory}/{name}"
        self.wire_version = WIRE_VERSION
        self.coordinator = "unix:///nowhere"
        self.commit = True
        """Whether a hand-over is followed by the status update COMMITTED."""
        self.unresponsive = False
        """Accept connections, send nothing."""
        self.on: dict[str, Hook] = {}
        """By method: called with each request; what it raises is the answer."""
        self.cut_at: list[int] = []
        """Write streams break when a file has so many bytes; one entry a stream."""
        self.stall_at: list[int] = []
        """Write streams stop reading when a file has so many bytes; one entry a stream."""
        self.pause_s = 0.0
        """Between the chunks of a stream."""
        self.attempt = "i1-a1-g00000000-s1"
        self.confirm = True
        """Whether it answers claims at all."""
        self.forgetful = False
        """Whether it requests the local plans of ranks that claim a cached plan."""
        self.files: dict[str, Spool] = {}
        self.connects: list[sidecar_pb2.ConnectRequest] = []
        self.ended: list[str] = []
        """Clients whose Connect stream has ended, in that order."""
        self.requests: list[Any] = []
        self.pings: list[sidecar_pb2.PingRequest] = []
        self.changed = threading.Condition()
        self._updates: list[save_pb2.SaveStatus] = []
        self._server: grpc.Server | None = None
        self._stopped = threading.Event()

    # Life.

    def __enter__(self) -> "ScriptedSidecar":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._stopped.clear()
        server = grpc.server(futures.ThreadPoolExecutor(16), options=addresses.channel_options())
        sidecar_pb2_grpc.add_SidecarServicer_to_server(self, server)
        write = grpc.stream_stream_rpc_method_handler(
            self.Write,
            request_deserializer=chunk_codec.decode,
            response_serializer=sidecar_pb2.WriteResponse.SerializeToString,
        )
        server.add_registered_method_handlers("pannier.v1.Sidecar", {"Write": write})
        assert server.add_insecure_port(self.address)
        server.start()
        self._server = server

    def stop(self) -> None:
        """Cuts all connections."""
        if self._server is not None:
            self._stopped.set()
            with self.changed:
                self.changed.notify_all()
            self._server.stop(None).wait()
            self._server = None

    # What tests ask.

    def wait_for(self, condition: Callable[[], bool], timeout: float = BOUND_S) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), "what the test waits for didn't come"

    def send_status(
        self,
        save: save_pb2.SaveId,
        state: save_pb2.SaveState,
        *failures: save_pb2.Failure,
        checkpoint_id: str = "",
        **more: Any,
    ) -> None:
        """Pushes a status to everyone connected, now and later; ``more``: its other fields."""
        update = save_pb2.SaveStatus(
            save=save,
            id=object_names.save_text(save),
            checkpoint_id=checkpoint_id,
            attempt=self.attempt,
            state=state,
            failures=failures,
            **more,
        )
        with self.changed:
            self._updates.append(update)
            self.changed.notify_all()

    def abort(self, context: sidecar_pb2.SaveContext, *failures: save_pb2.Failure) -> None:
        self.send_status(
            context.save,
            save_pb2.SAVE_STATE_ABORTED,
            *failures,
            checkpoint_id=context.checkpoint_id,
        )

    def asked(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    # The service.

    def Connect(
        self, request: sidecar_pb2.ConnectRequest, context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.ConnectResponse]:
        with self.changed:
            self.connects.append(request)
            self.changed.notify_all()
        context.add_callback(lambda: self._end(request.client))
        if self.unresponsive:
            self._stopped.wait()
            return
        yield sidecar_pb2.ConnectResponse(
            welcome=sidecar_pb2.Welcome(
                wire_version=self.wire_version,
                sidecar_version="9.9",
                host="node-0",
                coordinator=self.coordinator,
            )
        )
        sent = 0

        def over() -> bool:
            return self._stopped.is_set() or not context.is_active()

        while True:
            with self.changed:
                while len(self._updates) <= sent and not over():
                    self.changed.wait()
                if over():
                    return
                updates = self._updates[sent:]
            for status in updates:
                yield sidecar_pb2.ConnectResponse(save=status)
            sent += len(updates)

    def Plan(
        self, request: sidecar_pb2.PlanRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PlanResponse:
        self._take("Plan", request, context)
        local = request.plan
        lengths = [decode_column(column) for column in (local.head, local.body, local.tail)]
        slotted = [i for i, head in enumerate(lengths[0]) if head]
        layout = lay_out(*([column[i] for i in slotted] for column in lengths))
        placed = zip(layout.file, layout.offset, layout.length, strict=True)
        places = dict(zip(slotted, placed, strict=True))
        rank, count = request.context.rank, len(lengths[0])
        final = plan_pb2.FinalPlan(
            plan_id="p1",
            part="part",
            attempt=self.attempt,
            positions=encode_column(range(count)),
        )
        for index, size in enumerate(layout.sizes):
            name = object_names.data_file(self.attempt, rank, index)
            final.files.add(name=name, size=size)
        objects = len(layout.sizes)
        if len(slotted) < count:
            final.files.add(name=object_names.objects_file(self.attempt, rank))
        own = [places.get(position, (objects, 0, 0)) for position in range(count)]
        for index, name in enumerate(("file", "offset", "length")):
            setattr(final.placement, name, encode_column([place[index] for place in own]))
        return sidecar_pb2.PlanResponse(plan=final)

    def HandOver(
        self, request: sidecar_pb2.HandOverRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.HandOverResponse:
        self._take("HandOver", request, context)
        for inlined in request.inlined:
            self.files[inlined.name] = Spool(len(inlined.data), bytearray(inlined.data))
        mapped = {file.name for file in request.mapped}
        for file in request.files:
            if file.name in mapped:
                continue
            held = bytes(self.files[file.name].data)
            assert (len(held), crc32c.crc32c(held)) == (file.size, file.crc32c), file.name
        if request.HasField("claim") and self.confirm:
            self.send_status(
                request.context.save,
                save_pb2.SAVE_STATE_PLANNING,
                checkpoint_id=request.context.checkpoint_id,
                plan=save_pb2.PlanState(
                    id="" if self.forgetful else "p1", full_plan_requested=self.forgetful
                ),
            )
        if self.commit and not (request.HasField("claim") and self.forgetful):
            self.send_status(
                request.context.save,
                save_pb2.SAVE_STATE_COMMITTED,
                checkpoint_id=request.context.checkpoint_id,
            )
        return sidecar_pb2.HandOverResponse()

    def Fail(
        self, request: sidecar_pb2.FailRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.FailResponse:
        self._take("Fail", request, context)
        self.abort(request.context, request.failure)
        return sidecar_pb2.FailResponse()

    def Ping(
        self, request: sidecar_pb2.PingRequest, context: grpc.ServicerContext
    ) -> sidecar_pb2.PingResponse:
        with self.changed:
            self.pings.append(request)
            self.changed.notify_all()
        return sidecar_pb2.PingResponse()

    def Write(
        self, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[sidecar_pb2.WriteResponse]:
        header = next(messages)
        self._take("Write", header, context)
        with self.changed:
            spool = self.files.setdefault(header.name, Spool(header.size))
            spool.streams += 1
            spool.offsets.append(len(spool.data))
            cut = self.cut_at.pop(0) if self.cut_at else None
            stall = self.stall_at.pop(0) if self.stall_at else None
            self.changed.notify_all()
        yield sidecar_pb2.WriteResponse(committed=len(spool.data))
        while len(spool.data) < spool.size:
            if stall is not None and len(spool.data) >= stall:
                while context.is_active() and not self._stopped.wait(0.02):
                    pass
                return
            message = next(messages, None)
            if message is None:
                return
            assert message.offset == len(spool.data)
            assert crc32c.crc32c(message.data) == message.crc32c
            spool.data += message.data
            time.sleep(self.pause_s)
            if cut is not None and len(spool.data) >= cut:
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            yield sidecar_pb2.WriteResponse(committed=len(spool.data))

    def _take(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        hook = self.on.get(method)
        if hook is None:
            return
        try:
            hook(request)
        except PannierError as error:
            context.set_trailing_metadata(errors.trailing_metadata(error))
            context.abort(error.code, str(error))

    def _end(self, client: str) -> None:
        with self.changed:
            self.ended.append(client)
            self.changed.notify_all()


def wait_until(condition: Callable[[], bool], timeout: float = BOUND_S) -> None:
    """For what has no event of its own."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for didn't come"
        time.sleep(0.005)
