"""A server of either kind (threads, asyncio) with a daemon's status services, in this process."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from pannier.daemon.interceptors import AioErrorInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.daemon.signals import AioStopSignals
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import AioStatusServices, DaemonInfo, StatusServices
from pannier.v1 import save_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import errors
from support.processes.stretch import BOUND_S

SAVE = save_pb2.SaveId(job="job", incarnation="abc", group="g12345678", number=1)
KEY = "job/abc/g12345678/1"


def failures(count: int) -> list[save_pb2.Failure]:
    return [
        save_pb2.Failure(rank=rank, host=f"node-{rank}", message="it broke " * 10)
        for rank in range(count)
    ]


class Failing(sidecar_pb2_grpc.SidecarServicer):
    """Each call fails in its own way."""

    def Plan(self, request: Any, context: Any) -> Any:
        raise errors.SaveSkippedError("rank 2 skipped", failures(3))

    def Begin(self, request: Any, context: Any) -> Any:
        raise errors.SaveAbortedError("many", failures(5000))

    def Finish(self, request: Any, context: Any) -> Any:
        raise RuntimeError("a bug")

    def Connect(self, request: Any, context: Any) -> Iterator[Any]:
        yield sidecar_pb2.ConnectResponse(welcome=sidecar_pb2.Welcome(host="here"))
        raise errors.UnavailableError("no more")


class AioFailing(sidecar_pb2_grpc.SidecarServicer):
    async def Plan(self, request: Any, context: Any) -> Any:
        return Failing().Plan(request, context)

    async def Begin(self, request: Any, context: Any) -> Any:
        return Failing().Begin(request, context)

    async def Finish(self, request: Any, context: Any) -> Any:
        return Failing().Finish(request, context)

    async def Connect(self, request: Any, context: Any) -> Any:
        for response in Failing().Connect(request, context):
            yield response


class Served:
    """A server of either kind with a status registry."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.status_registry = StatusRegistry()
        self.address = f"unix://{directory}/d.sock"
        self.state = save_pb2.SAVE_STATE_PLANNING
        self.daemon_info = DaemonInfo("node-0")
        self._stack = ExitStack()
        self._start = self._start_aio if kind == "aio" else self._start_sync

    def _start_sync(self) -> None:
        server = grpc.server(
            ThreadPoolExecutor(8), options=server_options(), interceptors=[ErrorInterceptor()]
        )
        status_services = StatusServices(
            server, self.status_registry, self.daemon_info, ["pannier.v1.Sidecar"]
        )
        sidecar_pb2_grpc.add_SidecarServicer_to_server(Failing(), server)
        self._stack.enter_context(bind_listeners(server, self.address))
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())
        self.drain = status_services.drain

    def _start_aio(self) -> None:
        ready: threading.Event = threading.Event()

        async def serve() -> None:
            server = grpc.aio.server(options=server_options(), interceptors=[AioErrorInterceptor()])
            status_services = AioStatusServices(
                server, self.status_registry, self.daemon_info, ["pannier.v1.Sidecar"]
            )
            sidecar_pb2_grpc.add_SidecarServicer_to_server(AioFailing(), server)
            with bind_listeners(server, self.address):
                await server.start()
                await status_services.serve()
                loop = asyncio.get_running_loop()
                self.drain = lambda: asyncio.run_coroutine_threadsafe(
                    status_services.drain(), loop
                ).result(BOUND_S)
                async with AioStopSignals() as stop:
                    self.stop = stop
                    ready.set()
                    await stop.wait()
                await server.stop(None)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert ready.wait(BOUND_S)
        self._stack.callback(thread.join)
        self._stack.callback(lambda: self.stop.request())

    def render(self) -> save_pb2.SaveStatus:
        return save_pb2.SaveStatus(save=SAVE, id=KEY, checkpoint_id="/c/step-1", state=self.state)

    def __enter__(self) -> "Served":
        self._start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()
