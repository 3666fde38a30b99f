"""Finds data files of a checkpoint in the spools of this host, for loads.

In: an attempt and names of its files. Out: those that a sidecar of this host still has, opened. Only
sidecars that run are asked, and none is started: a load without one reads from storage. Blocking;
thread-safe.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.restore.local_file import LocalFile
from pannier.client.transport.channel import InterruptedCallError, SidecarChannel
from pannier.client.transport.shared_memory import (
    connect_descriptors,
    fetch_descriptors,
    socket_beside,
)
from pannier.common import timeouts
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import (
    IntegrityError,
    PannierError,
    UnavailableError,
    from_rpc_error,
)
from pannier.wire.tls import is_unix
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)


class LocalCopies:
    """The sidecars of this host, as loads ask them.

    Args:
        settings: where they are.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    def locate(self, attempt: str, names: Sequence[str]) -> dict[str, LocalFile]:
        """Those of the attempt's files that are here, by name; logs why a sidecar can't be asked."""
        found: dict[str, LocalFile] = {}
        try:
            settings = self._settings()
            places = _addresses(settings)
        except PannierError as error:
            _log.warning("no sidecar of this host is asked for local copies: %s", error)
            return found
        for address in places:
            missing = [name for name in names if name not in found]
            if not missing:
                break
            try:
                found.update(_ask(settings, address, attempt, missing))
            except (PannierError, OSError) as error:
                _log.warning(
                    "the sidecar at %s can't be asked for local copies, so storage is read: %s",
                    *(address, error),
                )
        return found


def _addresses(settings: Settings) -> list[str]:
    """Of the sidecars on this host that pass descriptors."""
    if settings.sidecar is not None:
        return [settings.sidecar] if is_unix(settings.sidecar) else []
    known = addresses.embedded_sidecars(settings.runtime_dir)
    return [each for each in known if launcher.accepts(each.removeprefix("unix://"))]


def _ask(
    settings: Settings, address: str, attempt: str, names: Sequence[str]
) -> dict[str, LocalFile]:
    channel = SidecarChannel(address, trusted_uids=settings.trusted_uids, token=settings.token())
    try:
        response = _locate(channel, restore_pb2.LocateRequest(attempt=attempt, files=names))
        digest = channel.digest() if response.token_first else b""
    finally:
        channel.close()
    if not response.files or response.wire_version != WIRE_VERSION:
        return {}
    path = socket_beside(address, response.descriptors)
    with connect_descriptors(path, digest) as connection:
        fds = fetch_descriptors(connection, response.token, len(response.files))
    return _opened(response.files, fds)


def _opened(located: Sequence[restore_pb2.LocatedFile], fds: list[int]) -> dict[str, LocalFile]:
    """The files; closes the descriptors of those that can't be checked."""
    found = {}
    for each, fd in zip(located, fds, strict=True):
        try:
            found[each.file.name] = LocalFile(each, fd)
        except IntegrityError as error:
            _log.info("%s is read from storage: %s", each.file.name, error)
    return found


def _locate(
    channel: SidecarChannel, request: restore_pb2.LocateRequest
) -> restore_pb2.LocateResponse:
    """Raises PannierError."""

    def start(connection: grpc.Channel) -> Any:
        stub: Any = restore_pb2_grpc.RestoreStub(connection)
        return stub.Locate.future(request, timeout=timeouts.LOCATE_S, metadata=channel.metadata())

    try:
        with channel.call(start) as call:
            try:
                response: restore_pb2.LocateResponse = call.result()
            except grpc.RpcError as error:
                raise from_rpc_error(error, peer=f"sidecar at {channel.address}") from error
    except (InterruptedCallError, grpc.FutureCancelledError) as error:
        raise UnavailableError("a fork interrupted the call") from error
    return response
