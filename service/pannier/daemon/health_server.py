"""Health alone, in plaintext, for probes that know neither unix sockets nor TLS.

In: an address, what tells whether the daemon is ready, and its event loop. Out: ``grpc.health.v1.Health/Check``, and no
other service: whoever can connect learns whether the daemon lives and takes saves, nothing of
what it does. Kubernetes' gRPC probes, which the kubelet sends from the node, are the users.

``liveness``: its event loop turns. ``readiness``, or no service: it has recovered what an earlier
one left, and takes new saves.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.daemon.listeners import server_options
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger(__name__)

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_THREADS: Final = 4
_CALLS: Final = 16
"""At a time; a probe that comes on top is refused, as probes are repeated."""
_TURN_S: Final = 10.0
"""For a turn of the event loop; a probe's own deadline is mostly shorter."""

_Status = health_pb2.HealthCheckResponse


class _Health(health_pb2_grpc.HealthServicer):
    """Handlers run in the server's threads."""

    def __init__(self, ready: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
        self._ready = ready
        self._loop = loop

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1."""
        if request.service == LIVENESS:
            well = self._turns(context)
        elif request.service in ("", READINESS):
            well = self._ready()
        else:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{request.service!r} is unknown here: ask for {LIVENESS!r} or {READINESS!r}",
            )
        return _Status(status=_Status.SERVING if well else _Status.NOT_SERVING)

    def _turns(self, context: grpc.ServicerContext) -> bool:
        left = context.time_remaining()
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)

        def give_up() -> None:
            turn.cancel()

        # A loop that is ending, and waits for this server's end, turns no more.
        context.add_callback(give_up)
        try:
            turn.result(_TURN_S if left is None else min(left, _TURN_S))
        except (LateError, CancelledError):
            return False
        return True


@contextmanager
def serve_health(
    address: str | None, *, ready: Callable[[], bool], loop: asyncio.AbstractEventLoop
) -> Iterator[None]:
    """Answers probes at ``address``, ``host:port``, as long as the context lasts; None: nowhere.

    Args:
        ready: whether new saves are taken; asked by any thread.
        loop: runs, or will run, in a thread.

    Raises ConfigurationError when it can't listen there.
    """
    if address is None:
        yield
        return
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-health")
    server = grpc.server(threads, options=server_options(), maximum_concurrent_rpcs=_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(ready, loop), server)
    try:
        server.add_insecure_port(parse_address(address, setting="--health"))
    except RuntimeError as error:
        raise ConfigurationError(f"can't listen on {address} (--health): {error}") from error
    server.start()
    _log.info("probes are answered at %s", address)
    try:
        yield
    finally:
        server.stop(0).wait()
        threads.shutdown()
