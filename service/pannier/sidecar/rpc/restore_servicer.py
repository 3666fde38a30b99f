"""The methods of ``pannier.v1.Restore``.

In: requests of loads. Out: responses; errors are raised and become statuses in
:mod:`pannier.daemon.interceptors`. On the event loop.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.load_reports import LoadReports
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.rpc.fetch_stream import FetchStream, first_message
from pannier.v1 import load_status_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire import limits
from pannier.wire.errors import check_wire_version
from pannier.wire.version import WIRE_VERSION

NAME: Final = "pannier.v1.Restore"
LIMITS: Final = {
    f"/{NAME}/Locate": 128,
    # One per rank that loads.
    f"/{NAME}/Fetch": 512,
    f"/{NAME}/Report": 1024,
}
"""Calls at a time."""


class RestoreServicer(restore_pb2_grpc.RestoreServicer):
    """See the proto for what each call does.

    Args:
        await_clean_up: waits until the files of an attempt that has ended are a local copy, or free.
        blocks: what this host fetches for loads.
        descriptors: name of the socket that passes descriptors; "": there is none.
        loads: takes reports of loads.
        token_first: that socket requires the digest of the job's token first.
        peer: where and how other hosts reach this sidecar, as in LocateResponse.
    """

    def __init__(
        self,
        local_copies: LocalCopies,
        await_clean_up: Callable[[str], Awaitable[None]],
        blocks: HostBlocks,
        descriptors: Callable[[], str],
        *,
        loads: LoadReports,
        token_first: bool,
        peer: Callable[[], restore_pb2.LocateResponse],
    ) -> None:
        self._loads = loads
        self._local_copies = local_copies
        self._await_clean_up = await_clean_up
        self._blocks = blocks
        self._peer = peer
        self._descriptors = descriptors
        self._token_first = token_first

    async def Locate(
        self, request: restore_pb2.LocateRequest, context: Any
    ) -> restore_pb2.LocateResponse:
        """Which data files of an attempt are in this host's spool."""
        limits.check_locate(request)
        self._blocks.announce(request)
        response = restore_pb2.LocateResponse()
        if self._descriptors():
            # A trainer may load what was committed just now.
            await self._await_clean_up(request.attempt)
            response = await self._local_copies.locate(request)
            response.descriptors = self._descriptors()
            response.token_first = self._token_first
        response.MergeFrom(self._peer())
        response.wire_version = WIRE_VERSION
        response.restore_budget = await self._blocks.budget_for(request.checkpoint_id)
        return response

    async def Fetch(
        self, messages: AsyncIterator[restore_pb2.FetchRequest], context: Any
    ) -> AsyncIterator[restore_pb2.FetchResponse]:
        """Fetches the blocks that a rank requests, until it ends the stream."""
        start = await first_message(messages)
        check_wire_version(
            f"rank {start.rank}", start.wire_version, f"the sidecar of {self._blocks.host}"
        )
        await self._blocks.check_start(start)
        stream = FetchStream(self._blocks, start)
        stream.open(messages)
        try:
            yield restore_pb2.FetchResponse(
                memory=restore_pb2.FetchMemory(
                    size=self._blocks.cache.memory.size,
                    token=self._blocks.offer(),
                    descriptors=self._descriptors(),
                    token_first=self._token_first,
                )
            )
            async for response in stream.responses():
                yield response
        finally:
            await stream.close()

    async def Report(
        self, requests: AsyncIterator[load_status_pb2.ReportRequest], context: Any
    ) -> load_status_pb2.ReportResponse:
        """Takes the reports of a rank's load."""
        await self._loads.follow(requests)
        return load_status_pb2.ReportResponse()
