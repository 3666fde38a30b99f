"""One call of ``Peer.Replicate``, as the host sees it that gets the replica.

In: the messages of another host's sidecar. Out: how much of each file is here, now and then, and at the end that
all of it outlives this process. On the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from pannier.common import timeouts
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.replicas.held_replica import HeldReplica
from pannier.v1 import restore_pb2
from pannier.wire.errors import InvalidRequestError, PannierError


class ReplicateStream:
    """Made by the call's handler, which another stream, or the end of the replica, cancels."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._task = asyncio.current_task()
        self._problem: PannierError | None = None

    async def responses(
        self, requests: AsyncIterator[restore_pb2.ReplicateRequest]
    ) -> AsyncGenerator[restore_pb2.ReplicateResponse, None]:
        """Takes the replica. Raises PannierError."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("request") != "start":
            raise InvalidRequestError("a stream with a replica begins with `start`")
        held = self._replicas.held
        self._replicas.check_start(first.start)
        replica = await held.open(first.start)
        try:
            await held.begin(replica, self, self._cancel)
            yield _response(replica)
            async with aclosing(self._receive(replica, requests)) as responses:
                async for response in responses:
                    yield response
        except asyncio.CancelledError:
            if self._problem is None:
                raise
            raise self._problem from None
        finally:
            self._task = None
            replica.end(self)

    async def _receive(
        self, replica: HeldReplica, requests: AsyncIterator[restore_pb2.ReplicateRequest]
    ) -> AsyncGenerator[restore_pb2.ReplicateResponse, None]:
        due = time.monotonic() + timeouts.REPLICA_ACK_S
        while not replica.arrived:
            request = await anext(requests, None)
            if request is None:
                # It goes on with another stream.
                return
            if request.WhichOneof("request") != "chunk":
                raise InvalidRequestError("a stream with a replica has a second `start`")
            await self._replicas.held.append(replica, self, request.chunk)
            # Frees its MiB while the next one arrives.
            del request
            if time.monotonic() >= due:
                due = time.monotonic() + timeouts.REPLICA_ACK_S
                yield _response(replica)
        await self._replicas.held.finish(replica)
        yield _response(replica, complete=True)

    def _cancel(self, problem: PannierError) -> None:
        """Ends the call with an error, unless it has ended."""
        if self._task is not None and self._problem is None:
            self._problem = problem
            if self._task is not asyncio.current_task():
                self._task.cancel()


def _response(replica: HeldReplica, *, complete: bool = False) -> Any:
    return restore_pb2.ReplicateResponse(held=replica.held, complete=complete)
