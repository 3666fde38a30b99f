"""What the sidecars of this host have for a load: files in their spools, and whether they fetch blocks.

In: an attempt's receipts and names of its files. Out: those that a sidecar of this host still has, opened, to
be compared with the checksums of the receipts; for a load of several ranks, also the address of that sidecar, and the files that other hosts may read from it. Only
sidecars that run are asked, and none is started: a load without one reads from storage. Blocking;
thread-safe.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from pannier.client.config import Settings
from pannier.client.embedded.daemon_spec import tls_files
from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.restore.fetched_blocks import FetchedBlocks
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.local_file import LocalFile
from pannier.client.restore.peer_blocks import PeerBlocks
from pannier.client.restore.restore_plan import BlockTable, Credentials, Host, LoadName, RankPlan
from pannier.client.restore.shared_blocks import BlockReader
from pannier.client.transport.channel import SidecarChannel
from pannier.client.transport.shared_memory import (
    connect_descriptors,
    fetch_descriptors,
    socket_beside,
)
from pannier.common import machine, timeouts
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.errors import (
    IntegrityError,
    PannierError,
    from_rpc_error,
)
from pannier.wire.tls import is_unix
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_RECEIPTS_READ: Final = 8
"""Requests for receipts at a time."""


@dataclass
class HostSurvey:
    """What the sidecars of this host have for one load."""

    files: dict[str, LocalFile] = field(default_factory=dict)
    """Files in a spool that this rank needs, by name."""
    host: Host | None = None
    """The host of the sidecar that fetches blocks for it and serves files to others; None: none runs."""
    held: frozenset[str] = frozenset()
    """Names of the files that other hosts may read there."""
    sidecar: str = ""
    """Its address."""
    reads_peers: bool = False
    """Whether this rank has TLS files with which it can read from other hosts itself."""
    credentials: Credentials | None = None
    """Credentials of the embedded daemons of a job on several hosts."""


class HostCopies:
    """Asks the sidecars of this host, for loads.

    Args:
        settings: where they are.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    def locate(self, receipts: Receipts, names: Sequence[str]) -> dict[str, LocalFile]:
        """The files of the receipts' attempt that are here, by name; logs why a sidecar can't be asked."""
        found: dict[str, LocalFile] = {}
        for settings, address in self._sidecars():
            missing = [name for name in names if name not in found]
            if not missing:
                break
            request = restore_pb2.LocateRequest(attempt=receipts.attempt, files=missing)
            try:
                found.update(_ask(settings, address, request, receipts).files)
            except (PannierError, OSError) as error:
                _log_unasked(address, error)
        return found

    def survey(
        self, load: LoadName, receipts: Receipts, names: Sequence[str], others: Collection[str]
    ) -> HostSurvey:
        """What is here for a load of several ranks; logs why a sidecar can't be asked.

        Args:
            receipts: of the load's attempt.
            names: of the files that this rank needs.
            others: of those that other ranks may need.
        """
        survey = HostSurvey(reads_peers=self._has_tls())
        best: tuple[bool, int, bool] | None = None
        for settings, address in self._sidecars():
            request = restore_pb2.LocateRequest(
                attempt=load.attempt,
                files=[name for name in names if name not in survey.files],
                load=load.load,
                checkpoint_id=load.checkpoint_id,
            )
            try:
                answer = _ask(settings, address, request, receipts)
                held = answer.held
                if others and load.attempt:
                    del request.files[:]
                    request.files.extend(others)
                    held |= _ask(settings, address, request, None).held
            except (PannierError, OSError) as error:
                _log_unasked(address, error)
                continue
            survey.files.update(answer.files)
            if answer.host is None:
                continue
            # With several on a host, the one with the most of this checkpoint.
            rank = (bool(held), len(held), answer.host.fetches)
            if best is None or rank > best:
                best = rank
                survey.host, survey.held, survey.sidecar = answer.host, frozenset(held), address
                if settings.embedded and answer.host.requires_tls:
                    survey.credentials = _credentials_beside(address)
        return survey

    def open_blocks(
        self, survey: HostSurvey, plan: RankPlan, load: LoadName, progress: LoadProgress
    ) -> BlockReader:
        """A reader that gets the blocks of a plan through sidecars. Raises PannierError."""
        settings, table = self._settings(), BlockTable(plan)
        if plan.own is None:
            tls = settings.tls() or plan.credentials
            return PeerBlocks(table, load, socket.gethostname(), tls)
        return FetchedBlocks(_channel(settings, survey.sidecar), table, load, progress)

    def _has_tls(self) -> bool:
        try:
            return self._settings().tls() is not None
        except PannierError:
            return False

    def _sidecars(self) -> Iterator[tuple[Settings, str]]:
        try:
            settings = self._settings()
            # Those that pass descriptors.
            places = [address for address in settings.sidecars() if is_unix(address)]
        except PannierError as error:
            _log.warning("no sidecar of this host is asked for local copies: %s", error)
            return
        for address in places:
            yield settings, address


def _credentials_beside(address: str) -> Credentials | None:
    """Credentials of the embedded daemons with this socket; None: they have none of their own."""
    directory = Path(address.removeprefix("unix://")).parent
    try:
        return Credentials(*(path.read_bytes() for path in tls_files(directory)))
    except OSError:
        return None


def _log_unasked(address: str, error: Exception) -> None:
    _log.warning(
        "the sidecar at %s can't be asked for local copies, so storage is read: %s",
        *(address, error),
    )


@dataclass
class _Answer:
    files: dict[str, LocalFile] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    """Names of the files that are there."""
    host: Host | None = None


def _channel(settings: Settings, address: str) -> SidecarChannel:
    return SidecarChannel(address, trusted_uids=settings.trusted_uids, token=settings.token())


def _ask(
    settings: Settings,
    address: str,
    request: restore_pb2.LocateRequest,
    receipts: Receipts | None,
) -> _Answer:
    """What a sidecar has. Raises PannierError, OSError.

    Args:
        receipts: with which the files are opened; None: only their names are wanted.
    """
    channel = _channel(settings, address)
    try:
        response = _locate(channel, request)
        digest = channel.digest() if response.token_first else b""
    finally:
        channel.close()
    answer = _Answer()
    if response.wire_version != WIRE_VERSION:
        return answer
    answer.held = {each.name for each in response.files}
    if response.descriptors:
        answer.host = Host(
            _host_key(address),
            response.host or socket.gethostname(),
            response.peer_address,
            fetches=response.restore_budget > 0,
            requires_tls=response.peer_tls,
            certified_name=response.peer_name,
        )
    if not response.files or receipts is None:
        return answer
    # Before the descriptors, whose locks keep the files from being staged into.
    names = [each.name for each in response.files]
    committed = receipts.recorded(names, threads=_RECEIPTS_READ)
    path = socket_beside(address, response.descriptors)
    with connect_descriptors(path, digest) as connection:
        fds = fetch_descriptors(connection, response.token, len(response.files))
    answer.files = _opened(response.files, committed, fds)
    return answer


def _host_key(address: str) -> str:
    """Equal for all processes that use this socket; containers may have the same host names."""
    found = os.stat(address.removeprefix("unix://"))
    text = f"{machine.boot_id()} {found.st_dev} {found.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _opened(
    located: Sequence[restore_pb2.LocatedFile],
    committed: Mapping[str, records_pb2.DataFile],
    fds: Sequence[int],
) -> dict[str, LocalFile]:
    """The files; closes the descriptors of those that can't be checked."""
    found = {}
    for each, fd in zip(located, fds, strict=True):
        # Without an entry in a receipt, as in one without checksums.
        record = committed.get(each.name) or records_pb2.DataFile(name=each.name, size=each.size)
        try:
            found[each.name] = LocalFile(each, record, fd)
        except IntegrityError as error:
            _log.warning(
                "%s is read from storage, not from this host's spool: %s", each.name, error
            )
    return found


def _locate(
    channel: SidecarChannel, request: restore_pb2.LocateRequest
) -> restore_pb2.LocateResponse:
    """Raises PannierError."""

    def start(connection: grpc.Channel) -> Any:
        stub: Any = restore_pb2_grpc.RestoreStub(connection)
        return stub.Locate.future(request, timeout=timeouts.LOCATE_S, metadata=channel.metadata())

    with channel.call(start) as call:
        try:
            response: restore_pb2.LocateResponse = call.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=f"sidecar at {channel.address}") from error
    return response
