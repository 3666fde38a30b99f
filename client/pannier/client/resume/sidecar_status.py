"""What the sidecars of this host know of saves that are not decided yet.

In: a root. Out: the status of its saves, by checkpoint id and attempt. Only sidecars that run are asked.
Blocking; thread-safe.
"""

import logging
from collections.abc import Callable
from typing import Any

import grpc

from pannier.client.config import Settings
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.common.locations import CHILDREN, Pattern
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire.errors import PannierError, from_rpc_error

_log = logging.getLogger(__name__)


class SidecarStatus:
    """Asks the sidecars of this host.

    Args:
        settings: where they are.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    def saves(self, root: str, pattern: Pattern = CHILDREN) -> list[save_pb2.SaveStatus]:
        """The saves below a root that they list; logs why one can't be asked."""
        found: list[save_pb2.SaveStatus] = []
        try:
            settings = self._settings()
            places = settings.sidecars()
        except PannierError as error:
            _log.warning("no sidecar of this host is asked for its saves: %s", error)
            return found
        for address in places:
            try:
                found += _list(settings, address)
            except (PannierError, OSError) as error:
                _log.info("the sidecar at %s can't be asked for its saves: %s", address, error)
        return [save for save in found if pattern.name_below(root, save.checkpoint_id)]


def _list(settings: Settings, address: str) -> list[save_pb2.SaveStatus]:
    """Raises PannierError."""
    channel = SidecarChannel(
        address, tls=settings.tls(), trusted_uids=settings.trusted_uids, token=settings.token()
    )

    def start(connection: grpc.Channel) -> Any:
        stub: Any = status_pb2_grpc.StatusStub(connection)
        return stub.ListSaves.future(
            status_pb2.ListSavesRequest(), timeout=timeouts.LOCATE_S, metadata=channel.metadata()
        )

    try:
        with channel.call(start) as call:
            try:
                return list(call.result().saves)
            except grpc.RpcError as error:
                raise from_rpc_error(error, peer=f"sidecar at {address}") from error
    finally:
        channel.close()
