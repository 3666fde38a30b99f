"""The methods of ``pannier.v1.Restore``.

In: requests of loads. Out: responses; errors are raised and become statuses in
:mod:`pannier.daemon.interceptors`. On the event loop.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire import limits
from pannier.wire.version import WIRE_VERSION

NAME: Final = "pannier.v1.Restore"
LIMITS: Final = {f"/{NAME}/Locate": 128}
"""Calls at a time."""


class RestoreServicer(restore_pb2_grpc.RestoreServicer):
    """See the proto for what each call does.

    Args:
        await_clean_up: waits until the files of an attempt that has ended are a local copy, or free.
        descriptors: name of the socket that passes descriptors; "": there is none.
        token_first: it requires the digest of the job's token.
    """

    def __init__(
        self,
        local_copies: LocalCopies,
        await_clean_up: Callable[[str], Awaitable[None]],
        descriptors: Callable[[], str],
        *,
        token_first: bool,
    ) -> None:
        self._local_copies = local_copies
        self._await_clean_up = await_clean_up
        self._descriptors = descriptors
        self._token_first = token_first

    async def Locate(
        self, request: restore_pb2.LocateRequest, context: Any
    ) -> restore_pb2.LocateResponse:
        """Which data files of an attempt are in this host's spool."""
        limits.check_locate(request)
        if not self._descriptors():
            return restore_pb2.LocateResponse(wire_version=WIRE_VERSION)
        # A trainer may load what was committed just now.
        await self._await_clean_up(request.attempt)
        response = await self._local_copies.locate(request)
        response.wire_version = WIRE_VERSION
        response.descriptors = self._descriptors()
        response.token_first = self._token_first
        return response
