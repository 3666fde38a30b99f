"""Leases of spool files to trainers, which map the files and stage into them.

In: sizes that a client requests, and the end of its connection. Out: files that stay the client's until
it returns them or its process ends. A lease lasts as long as the connection over which its descriptors
went (:mod:`pannier.sidecar.spool.fd_server`), which the kernel closes with the process. Each
descriptor carries a shared lock that ends with the last process, and the last mapping, that holds it:
only then is a file given to another owner. On the event loop.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.common.units import size_text
from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.storage.io_threads import reservation_threads
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import BusyError, InvalidRequestError
from pannier.wire.file_layout import STAMP_BYTES

_log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16

Owner = tuple[str, str, int]
"""Job, incarnation, rank."""


class Copies(Protocol):
    """Content that stays in spool files after its save (:mod:`pannier.sidecar.restore.local_copies`)."""

    async def make_way(self, job: str, requested: int) -> None:
        """Evicts what must go before files of so many bytes are reserved for ``job``."""

    async def evict_oldest(self) -> bool:
        """Evicts files, since the spool has no room; False: there are none."""

    async def restaged(self, spool_file: SpoolFile) -> None:
        """A trainer has staged another save into that file."""


class Replicas(Protocol):
    """Content of other hosts' ranks (:mod:`pannier.sidecar.replicas`), which is the first to make way."""

    def room(self, job: str) -> int:
        """Bytes of their spool files, of one job."""

    async def make_way(self) -> bool:
        """Gives one replica up, since the spool has no room; False: there is none."""


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
        self._returned = asyncio.Event()
        """Set, and replaced by a new event, when a save has released a leased file."""
        self._count = 0
        self.refusals = 0
        """Requests that the spool had no room for."""
        self._leases: set[_FileLease] = set()
        self._by_name: dict[str, tuple[_FileLease, SpoolFile]] = {}
        self._by_file: dict[SpoolFile, tuple[_FileLease, str]] = {}
        self._held: list[SpoolFile] = []
        """Files that are no longer needed, but that a process may still write into."""
        self._kept: set[SpoolFile] = set()
        """Files whose content stays after its save: until :meth:`drop`, or until a trainer that has leased
        the file stages another save there."""
        self._copies: Copies | None = None
        self._replicas: Replicas | None = None
        self._requested: Counter[str] = Counter()
        """Bytes that are being reserved, by job."""

    async def reserve(
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
        try:
            files = await self._take_all(owner[0], [size + STAMP_BYTES for size in sizes], spare)
        except BusyError:
            self.request_room()
            raise
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

    async def take(self, job: str, size: int, spare: int = 0) -> SpoolFile:
        """A spool file of at least ``size`` bytes; see :meth:`Spool.take`. It may take seconds."""
        (file,) = await self._take_all(job, [size], spare)
        return file

    async def _take_all(self, job: str, sizes: Sequence[int], spare: int) -> list[SpoolFile]:
        files: list[SpoolFile] = []
        self._requested[job] += sum(sizes)
        try:
            # A process that ends may hold its files for some milliseconds after its connection has ended.
            await self._free_held()
            if self._copies is not None:
                await self._copies.make_way(job, sum(sizes))
            for size in sizes:
                files.append(await self._take(job, size, spare))
                self._requested[job] -= size
        except BaseException:
            for file in files:
                reservation_threads.submit(self._spool.give, file)
            raise
        finally:
            self._requested[job] -= sum(sizes[len(files) :])
            self._requested += Counter()  # without zeros
        return files

    async def _take(self, job: str, size: int, spare: int) -> SpoolFile:
        take = partial(self._spool.take, job, size, spare=spare)
        while True:
            try:
                return await reservation_threads.run(take, undo=self._spool.give)
            except BusyError:
                if not await self._make_way():
                    raise

    async def _make_way(self) -> bool:
        """Gives up what isn't needed for a save; False: there is nothing."""
        if self._replicas is not None and await self._replicas.make_way():
            return True
        return self._copies is not None and await self._copies.evict_oldest()

    # Content that stays.

    def set_copies(self, copies: Copies) -> None:
        """``copies`` decides about the files that are kept; before the first call."""
        self._copies = copies

    def set_replicas(self, replicas: Replicas) -> None:
        """``replicas`` make way for files of this host's ranks; before the first call."""
        self._replicas = replicas

    def keep(self, file: SpoolFile) -> None:
        """Keeps a file's content, of a save that has ended; a client that has leased it may stage there."""
        self._kept.add(file)
        lease, name = self._by_file.get(file, (None, ""))
        if lease is not None and lease.over:
            self._forget(lease, name)
        elif lease is not None:
            self._return(lease, name)

    async def drop(self, file: SpoolFile) -> None:
        """Keeps the content no longer: from now on the file is its client's alone, or free."""
        if file not in self._kept:
            return
        self._kept.discard(file)
        if file not in self._by_file:
            await self.give_back(file)

    def keeps(self, file: SpoolFile) -> bool:
        """Whether its content is kept."""
        return file in self._kept

    def is_leased(self, file: SpoolFile) -> bool:
        """Whether a client has leased it."""
        return file in self._by_file

    def used_by(self, job: str) -> int:
        """Bytes of a job's files that are leased, hold something of its saves or are being reserved."""
        kept = sum(each.capacity for each in self._unleased() if each.job == job)
        kept += 0 if self._replicas is None else self._replicas.room(job)
        return self._spool.taken_by(job) - kept + self._requested[job]

    def problem_of_another_set(self, job: str) -> str:
        """Why files as large as all that the job uses don't fit, too; for messages. Empty: they do."""
        usage, needed = self._spool.usage, self.used_by(job)
        free = usage.free + self.kept_bytes()
        free += 0 if self._replicas is None else self._replicas.room(job)
        if needed <= free:
            return ""
        return (
            f"{size_text(needed)} more for the ranks of this host, and {size_text(free)} are free in the spool "
            f"{self._spool.directory}, which has {size_text(usage.capacity)} {usage.bound}"
        )

    def kept_bytes(self) -> int:
        """Bytes of the files whose content is kept and that no client has leased."""
        return sum(each.capacity for each in self._unleased())

    def _unleased(self) -> list[SpoolFile]:
        return [each for each in self._kept if each not in self._by_file]

    # Leases.

    async def open_descriptors(self, token: bytes, connection: object) -> list[int]:
        """New descriptors of the lease with that token, each locked; the caller closes them.

        The lease lasts as long as ``connection``. Empty: no lease has that token, or it was used already.
        """
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
        files = list(lease.files.values())
        return await reservation_threads.run(_open_for_staging, files, undo=close_all)

    async def disconnect(self, connection: object) -> None:
        """Ends the leases of a connection."""
        for lease in [lease for lease in self._leases if lease.connection is connection]:
            await self._end(lease)

    async def release(self, owner: Owner, names: Sequence[str]) -> None:
        """Takes back files that a client has unmapped; names that aren't its own are ignored."""
        free = []
        for name in names:
            lease, file = self._by_name.get(name, (None, None))
            if lease is None or file is None or lease.owner != owner:
                continue
            # A file in use is given back when its save has ended.
            if name not in lease.in_use and file not in self._kept:
                free.append(file)
            self._forget(lease, name)
        for file in free:
            await self.give_back(file)

    async def claim(self, rank: RankSave, name: str, size: int) -> SpoolFile:
        """The file that holds ``size`` bytes of a data file of ``rank``; the caller gives it back.

        Waits a moment for a file whose save has ended but isn't cleaned up yet.

        Raises InvalidRequestError: the rank has no lease of it, it holds another data file, or it is
        too short.
        """
        owner = (rank.save.id.job, rank.save.id.incarnation, rank.rank)
        deadline = time.monotonic() + timeouts.FILE_RELEASE_S
        while self._is_ending(name) and (left := deadline - time.monotonic()) > 0:
            await set_within(left, self._returned)
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
        if file in self._kept and self._copies is not None:
            self._kept.discard(file)
            await self._copies.restaged(file)
        return file

    async def give_back(self, file: SpoolFile) -> None:
        """Takes a file back whose content isn't needed: it is its client's again, or free."""
        lease, name = self._by_file.get(file, (None, ""))
        if lease is not None and not lease.over:
            self._return(lease, name)
            return
        if lease is not None:
            self._forget(lease, name)
        # To its end, even if the caller is cancelled: else the file would be neither free nor held.
        await asyncio.shield(self._free(file))

    async def _free(self, file: SpoolFile) -> None:
        future = reservation_threads.submit(self._give_unless_held, file)
        if not await asyncio.wrap_future(future):
            self._held.append(file)

    def _return(self, lease: _FileLease, name: str) -> None:
        """The save that used a leased file has ended."""
        lease.in_use.pop(name, None)
        self._returned.set()
        self._returned = asyncio.Event()

    def leased_to(self, owner: Owner) -> int:
        """Bytes that the rank has leased and that hold nothing of a save."""
        return sum(lease.idle_bytes for lease in self._leases if lease.owner == owner)

    def leased_bytes(self) -> tuple[int, int]:
        """Leased bytes, and bytes that a process still holds though its lease is over."""
        return (
            sum(file.capacity for file in self._by_file),
            sum(file.capacity for file in self._held),
        )

    def unused(self) -> int:
        """Leased bytes that hold nothing of a save."""
        return sum(lease.idle_bytes for lease in self._leases)

    def request_room(self) -> None:
        """The spool had no room for a request: asks the clients that hold idle files to return them."""
        self.refusals += 1
        self._request_idle()

    def _request_idle(self) -> None:
        clients = {lease.client for lease in self._leases if lease.idle}
        if clients:
            self._request_room(clients)

    async def tick(self) -> None:
        """Ends leases that were never fetched, frees files that were released, makes way where memory is short.

        Call it now and then.
        """
        now = time.monotonic()
        for lease in list(self._leases):
            if lease.connection is None and now - lease.made_at > timeouts.DESCRIPTORS_FETCH_S:
                await self._end(lease)
        await self._free_held()
        limit = self._spool.usage.limit
        if limit is not None and limit.free < 0 and not await self._make_way():
            self._request_idle()

    async def _free_held(self) -> None:
        for _ in range(len(self._held)):
            if self._held:  # another caller may have taken the rest
                await self.give_back(self._held.pop(0))

    async def _end(self, lease: _FileLease) -> None:
        lease.over = True
        idle = lease.idle
        if lease.in_use:
            _log.info(
                "the trainer of rank %d of job %s has disconnected; uploads of %d files continue",
                *(lease.owner[2], lease.owner[0], len(lease.in_use)),
            )
        if not lease.files:
            self._leases.discard(lease)
        # Those that are kept now are given back by drop(), maybe while this waits for another one.
        free = [file for file in idle if file not in self._kept]
        for file in idle:
            self._forget(*self._by_file[file])
        for file in free:
            await self.give_back(file)

    def _is_ending(self, name: str) -> bool:
        """Whether a save that has ended still uses the file, so that its next use is valid but early."""
        lease, _ = self._by_name.get(name, (None, None))
        rank = lease.in_use.get(name) if lease is not None else None
        return rank is not None and rank.save.outcome is not None

    def _forget(self, lease: _FileLease, name: str) -> None:
        """Takes a file out of its lease."""
        file = lease.files.pop(name)
        lease.in_use.pop(name, None)
        del self._by_name[name]
        del self._by_file[file]
        if not lease.files:
            self._leases.discard(lease)

    def _give_unless_held(self, file: SpoolFile) -> bool:
        """In a thread: frees the file unless a process may still write into it; whether it is free."""
        if _is_held(file):
            return False
        self._spool.give(file)
        return True


def _is_held(file: SpoolFile) -> bool:
    """Whether a process holds a descriptor or a mapping of a lease."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    return False


def _open_for_staging(files: Sequence[SpoolFile]) -> list[int]:
    return _open_locked(files, os.O_RDWR)


def open_for_reading(files: Sequence[SpoolFile]) -> list[int]:
    """New read-only descriptors; each has a lock that keeps its file from another owner."""
    return _open_locked(files, os.O_RDONLY)


def _open_locked(files: Sequence[SpoolFile], mode: int) -> list[int]:
    descriptors: list[int] = []
    try:
        for file in files:
            # Opened again, not duplicated: a lock belongs to the open file description.
            fd = os.open(f"/proc/self/fd/{file.fd}", mode | os.O_CLOEXEC)
            descriptors.append(fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        close_all(descriptors)
        raise
    return descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Closes them."""
    for fd in descriptors:
        os.close(fd)
