"""One call of ``Peer.Replicate``, on the host that gets the replica.

In: the messages of another host's sidecar. Out: from time to time, how much of each file is here; at the end,
the confirmation that all of it outlives this process. On the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from pannier.common import timeouts
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.replicas.held_replica import HeldReplica
from pannier.v1 import restore_pb2
from pannier.wire.errors import InvalidRequestError, PannierError

T = TypeVar("T")


class ReplicateStream:
    """The stream that fills a replica, until the end of the replica or another stream for it ends this one.

    That cancels the operation that is awaited here, never the handler's task: gRPC can send no status while a
    response is being sent.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._awaited: asyncio.Future[Any] | None = None
        self._problem: PannierError | None = None

    async def responses(
        self, requests: AsyncIterator[restore_pb2.ReplicateRequest]
    ) -> AsyncGenerator[restore_pb2.ReplicateResponse, None]:
        """Takes the replica. Raises PannierError."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("request") != "start":
            raise InvalidRequestError("a stream with a replica begins with `start`")
        held = self._replicas.held
        await self._replicas.check_start(first.start)
        replica = await held.open(first.start)
        try:
            await held.begin(replica, self, self._cancel)
            yield _response(replica)
            async with aclosing(self._receive(replica, requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            replica.end(self)

    async def _receive(
        self, replica: HeldReplica, requests: AsyncIterator[restore_pb2.ReplicateRequest]
    ) -> AsyncGenerator[restore_pb2.ReplicateResponse, None]:
        due = time.monotonic() + timeouts.REPLICA_ACK_S
        while not replica.arrived:
            request = await self._run(anext(requests, None))
            if request is None:
                # The sender resumes with another stream.
                return
            if request.WhichOneof("request") != "chunk":
                raise InvalidRequestError("a stream with a replica has a second `start`")
            await self._run(self._replicas.held.append(replica, self, request.chunk))
            # Frees the chunk's memory while the next one arrives.
            del request
            if time.monotonic() >= due:
                due = time.monotonic() + timeouts.REPLICA_ACK_S
                yield _response(replica)
        await self._run(self._replicas.held.finish(replica))
        yield _response(replica, complete=True)

    async def _run(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises the error that ends this stream as soon as there is one."""
        self._awaited = awaited = asyncio.ensure_future(work)
        if self._problem is not None:
            awaited.cancel()
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._problem is None:
                raise
            raise self._problem from None
        finally:
            self._awaited = None

    def _cancel(self, problem: PannierError) -> None:
        if self._problem is None:
            self._problem = problem
            if self._awaited is not None and self._awaited is not asyncio.current_task():
                self._awaited.cancel()


def _response(replica: HeldReplica, *, complete: bool = False) -> Any:
    return restore_pb2.ReplicateResponse(held=replica.held, complete=complete)
