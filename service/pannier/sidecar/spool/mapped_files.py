"""Leases of spool files to trainers, which map the files and stage into them.

In: sizes that a client requests, and the end of its connection. Out: files that stay the client's until
it returns them or its process ends. A lease lasts as long as the connection over which its descriptors
went (:mod:`pannier.sidecar.spool.fd_server`), which the kernel closes with the process. Each
descriptor carries a shared lock that ends with the last process, and the last mapping, that holds it:
only then is a file given to another owner. Thread-safe.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import BusyError, InvalidRequestError
from pannier.wire.file_layout import STAMP_BYTES

_log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
_FETCH_S: Final = 30.0
"""A lease ends when its descriptors weren't fetched within this time."""
_CLEANUP_S: Final = 10.0
"""How long a file may stay in use after its save has ended: uploads are cancelled meanwhile."""

Owner = tuple[str, str, int]
"""Job, incarnation, rank."""


@dataclass(eq=False)
class _FileLease:
    """The files of one ``Reserve`` call."""

    owner: Owner
    client: str
    files: dict[str, SpoolFile]
    """By the name in messages."""
    token: bytes
    made_at: float
    connection: object | None = None
    """The connection over which the descriptors went; None: not yet."""
    in_use: dict[str, RankSave] = field(default_factory=dict)
    """Ranks whose content the sidecar still needs, by the file's name."""
    over: bool = False
    """The client has disconnected."""

    @property
    def idle(self) -> list[SpoolFile]:
        """Files that hold nothing of a save."""
        return [file for name, file in self.files.items() if name not in self.in_use]

    @property
    def idle_bytes(self) -> int:
        return sum(file.capacity for file in self.idle)


class MappedFiles:
    """The leases of one spool.

    Args:
        request_room: called with the clients that hold idle files, when others need the room.
    """

    def __init__(
        self, spool: Spool, request_room: Callable[[set[str]], None] = lambda clients: None
    ) -> None:
        self._spool = spool
        self._request_room = request_room
        self._prefix = secrets.token_hex(4)
        """Keeps names of an earlier sidecar process's leases from being taken for ours."""
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        """Notified whenever a save has released a leased file."""
        self._count = 0
        self._leases: set[_FileLease] = set()
        self._by_name: dict[str, tuple[_FileLease, SpoolFile]] = {}
        self._by_file: dict[SpoolFile, tuple[_FileLease, str]] = {}
        self._held: list[SpoolFile] = []
        """No longer needed, but a process may still write into them."""

    def reserve(
        self, owner: Owner, client: str, sizes: Sequence[int], spare: int = 0
    ) -> sidecar_pb2.ReserveResponse:
        """Leases files of at least these sizes, bytes, with any content.

        Args:
            client: id of the client object.
            spare: bytes of room that must be left.

        Raises:
            BusyError: the spool has no room now; clients with idle files were asked to return them.
            PannierError: the spool can't be written.
        """
        files: list[SpoolFile] = []
        try:
            for size in sizes:
                files.append(self._spool.take(owner[0], size + STAMP_BYTES, spare=spare))
        except BaseException as error:
            for file in files:
                self.give_back(file)
            if isinstance(error, BusyError):
                self.request_room()
            raise
        with self._lock:
            self._count += 1
            names = [f"{self._prefix}-{self._count}-{index}" for index in range(len(files))]
            lease = _FileLease(
                owner,
                client,
                dict(zip(names, files, strict=True)),
                secrets.token_bytes(TOKEN_BYTES),
                time.monotonic(),
            )
            self._leases.add(lease)
            for name, file in lease.files.items():
                self._by_name[name] = (lease, file)
                self._by_file[file] = (lease, name)
        return sidecar_pb2.ReserveResponse(
            files=[
                sidecar_pb2.LeasedFile(spool_file=name, capacity=file.stageable)
                for name, file in lease.files.items()
            ],
            token=lease.token,
        )

    def open_descriptors(self, token: bytes, connection: object) -> list[int]:
        """New descriptors of the lease with that token, each locked; the caller closes them.

        The lease lasts as long as ``connection`` does. Empty: no lease with that token is unfetched.
        """
        with self._lock:
            lease = next(
                (
                    each
                    for each in self._leases
                    if each.connection is None and secrets.compare_digest(each.token, token)
                ),
                None,
            )
            if lease is None:
                return []
            lease.connection = connection
        descriptors: list[int] = []
        try:
            for file in lease.files.values():
                # Opened again, not duplicated: a lock belongs to the open file description.
                fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
                descriptors.append(fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return descriptors

    def disconnect(self, connection: object) -> None:
        """Ends the leases of a connection."""
        with self._lock:
            leases = [lease for lease in self._leases if lease.connection is connection]
        for lease in leases:
            self._end(lease)

    def release(self, owner: Owner, names: Sequence[str]) -> None:
        """A client has unmapped these files; names that aren't its own are ignored."""
        free = []
        with self._lock:
            for name in names:
                lease, file = self._by_name.get(name, (None, None))
                if lease is None or file is None or lease.owner != owner:
                    continue
                # One that is in use is given back when its save has ended.
                if name not in lease.in_use:
                    free.append(file)
                self._forget(lease, name)
        for file in free:
            self.give_back(file)

    def claim(self, rank: RankSave, name: str, size: int) -> SpoolFile:
        """The file that holds ``size`` bytes of a data file of ``rank``; the caller gives it back.

        Waits a moment for a file whose save has ended but isn't cleaned up yet.

        Raises InvalidRequestError: the rank has no lease of it, it holds another data file, or it is
        too short.
        """
        owner = (rank.save.id.job, rank.save.id.incarnation, rank.rank)
        with self._lock:
            self._returned.wait_for(lambda: not self._is_ending(name), _CLEANUP_S)
            lease, file = self._by_name.get(name, (None, None))
            if lease is None or file is None or lease.owner != owner:
                raise InvalidRequestError(
                    f"{rank.label}: {name!r} is no spool file that the rank has leased since this "
                    "sidecar started"
                )
            if name in lease.in_use:
                raise InvalidRequestError(
                    f"{rank.label}: the leased file {name} already holds a data file of a save that "
                    "hasn't ended"
                )
            if size > file.stageable:
                raise InvalidRequestError(
                    f"{rank.label}: {size} bytes are announced in the leased file {name}, which has "
                    f"{file.stageable}"
                )
            lease.in_use[name] = rank
        return file

    def give_back(self, file: SpoolFile) -> None:
        """Takes a file back whose content isn't needed: it is its client's again, or free."""
        with self._lock:
            lease, name = self._by_file.get(file, (None, ""))
            if lease is not None and not lease.over:
                lease.in_use.pop(name, None)
                self._returned.notify_all()
                return
            if lease is not None:
                self._forget(lease, name)
            if _is_held(file):
                self._held.append(file)
                return
        self._spool.give(file)

    def leased_to(self, owner: Owner) -> int:
        """Bytes that the rank has leased and that hold nothing of a save."""
        with self._lock:
            return sum(lease.idle_bytes for lease in self._leases if lease.owner == owner)

    def leased_bytes(self) -> tuple[int, int]:
        """Leased bytes, and bytes that a process still holds though its lease is over."""
        with self._lock:
            return (
                sum(file.capacity for file in self._by_file),
                sum(file.capacity for file in self._held),
            )

    def unused(self) -> int:
        """Leased bytes that hold nothing of a save."""
        with self._lock:
            return sum(lease.idle_bytes for lease in self._leases)

    def request_room(self) -> None:
        """Asks the clients that hold idle files to return them."""
        with self._lock:
            clients = {lease.client for lease in self._leases if lease.idle}
        if clients:
            self._request_room(clients)

    def tick(self) -> None:
        """Ends leases that were never fetched, frees files that were released. Call it now and then."""
        now = time.monotonic()
        with self._lock:
            late = [
                lease
                for lease in self._leases
                if lease.connection is None and now - lease.made_at > _FETCH_S
            ]
            held, self._held = self._held, []
        for lease in late:
            self._end(lease)
        for file in held:
            self.give_back(file)

    def _end(self, lease: _FileLease) -> None:
        with self._lock:
            lease.over = True
            idle = lease.idle
            if lease.in_use:
                _log.info(
                    "the trainer of rank %d of job %s has disconnected; uploads of %d files continue",
                    *(lease.owner[2], lease.owner[0], len(lease.in_use)),
                )
            if not lease.files:
                self._leases.discard(lease)
        for file in idle:
            self.give_back(file)

    def _is_ending(self, name: str) -> bool:
        """Whether the file's save has ended, so that its next use is valid but early."""
        lease, _ = self._by_name.get(name, (None, None))
        rank = lease.in_use.get(name) if lease is not None else None
        return rank is not None and rank.save.outcome is not None

    def _forget(self, lease: _FileLease, name: str) -> None:
        """Takes a file out of its lease; with the lock held."""
        file = lease.files.pop(name)
        lease.in_use.pop(name, None)
        del self._by_name[name]
        del self._by_file[file]
        if not lease.files:
            self._leases.discard(lease)


def _is_held(file: SpoolFile) -> bool:
    """Whether a process holds a descriptor or a mapping of a lease."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    return False
