"""The listener of ``--health``: gRPC health checks in plaintext, for Kubernetes' probes.

In: an address, a readiness function, and the daemon's event loop. Out: ``grpc.health.v1.Health/Check``,
its reflection, and no other service, since the kubelet's probes support neither unix sockets nor TLS: all
that a caller learns is whether the daemon lives and takes saves. Runs in threads of its own server.

``liveness``: the event loop runs callbacks. ``readiness``, or no service name: recovery is complete
and new saves are taken.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pannier.common import timeouts
from pannier.daemon.listeners import server_options
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger(__name__)

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_THREADS: Final = 4
_CALLS: Final = 16
"""Calls at a time; further ones are refused, since probes are repeated."""

_Status = health_pb2.HealthCheckResponse


class _Health(health_pb2_grpc.HealthServicer):
    """Handlers run in the server's threads."""

    def __init__(
        self,
        ready: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        alive: Callable[[], bool],
    ) -> None:
        self._ready = ready
        self._alive = alive
        self._loop = loop

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1."""
        if request.service == LIVENESS:
            serving = self._alive() and self._is_loop_responsive(context)
        elif request.service in ("", READINESS):
            serving = self._ready()
        else:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service!r}; there are {LIVENESS!r} and {READINESS!r}",
            )
        return _Status(status=_Status.SERVING if serving else _Status.NOT_SERVING)

    def _is_loop_responsive(self, context: grpc.ServicerContext) -> bool:
        left = context.time_remaining()
        callback = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)

        def cancel() -> None:
            callback.cancel()

        # When the call ends: a loop that waits for this server to stop runs no callbacks.
        context.add_callback(cancel)
        try:
            callback.result(timeouts.LOOP_S if left is None else min(left, timeouts.LOOP_S))
        except (LateError, CancelledError):
            return False
        return True


@contextmanager
def serve_health(
    address: str | None,
    *,
    ready: Callable[[], bool],
    loop: asyncio.AbstractEventLoop,
    alive: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Serves health checks at ``address``, ``host:port``, while the context lasts; None: nowhere.

    Args:
        ready: whether new saves are taken; called by any thread.
        loop: runs, or will run, in a thread.
        alive: what else the daemon needs to live; called by any thread.

    Raises ConfigurationError when it can't listen there.
    """
    if address is None:
        yield
        return
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-health")
    server = grpc.server(threads, options=server_options(), maximum_concurrent_rpcs=_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(ready, loop, alive), server)
    reflection.enable_server_reflection((health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(parse_address(address, setting="--health"))
    except RuntimeError as error:
        raise ConfigurationError(f"can't listen on {address} (--health): {error}") from error
    server.start()
    _log.info("health checks are served at %s", address)
    try:
        yield
    finally:
        server.stop(0).wait()
        threads.shutdown()
