"""A server with a daemon's status services, in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from pannier.daemon.interceptors import ErrorInterceptor
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.daemon.signals import StopSignals
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import DaemonInfo, StatusServices
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

    async def Plan(self, request: Any, context: Any) -> Any:
        raise errors.SaveSkippedError("rank 2 skipped", failures(3))

    async def Begin(self, request: Any, context: Any) -> Any:
        raise errors.SaveAbortedError("many", failures(5000))

    async def Finish(self, request: Any, context: Any) -> Any:
        raise RuntimeError("a bug")

    async def Connect(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield sidecar_pb2.ConnectResponse(welcome=sidecar_pb2.Welcome(host="here"))
        raise errors.UnavailableError("no more")


class Served:
    """A server with a status registry, on an event loop in a thread."""

    def __init__(self, directory: Path) -> None:
        self.status_registry = StatusRegistry()
        self.address = f"unix://{directory}/d.sock"
        self.state = save_pb2.SAVE_STATE_PLANNING
        self.daemon_info = DaemonInfo("node-0")
        self._stack = ExitStack()

    def _start(self) -> None:
        ready: threading.Event = threading.Event()

        async def serve() -> None:
            server = grpc.aio.server(options=server_options(), interceptors=[ErrorInterceptor()])
            status_services = StatusServices(
                server, self.status_registry, self.daemon_info, ["pannier.v1.Sidecar"]
            )
            sidecar_pb2_grpc.add_SidecarServicer_to_server(Failing(), server)
            with bind_listeners(server, self.address):
                await server.start()
                await status_services.serve()
                loop = asyncio.get_running_loop()
                self.drain = lambda: asyncio.run_coroutine_threadsafe(
                    status_services.drain(), loop
                ).result(BOUND_S)
                async with StopSignals() as stop:
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
