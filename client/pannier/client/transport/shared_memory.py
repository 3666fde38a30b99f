"""Files of the sidecar's spool, mapped: what is staged there needs no copy to the spool.

In: sizes. Out: :class:`SpoolMapping`, writable memory that the sidecar reads through the file. The
descriptors come over a unix socket beside the sidecar's own, which stays open: the leases end with
it. Each descriptor carries a lock that lasts as long as its mapping, so that the sidecar knows
when no process can write to the file any more. Thread-safe.
"""

import ctypes
import functools
import logging
import mmap
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from pannier.client.fork_hooks import close_in_child
from pannier.client.staging.arena import (
    HUGE_PAGE,
    Arena,
    ArenaPool,
    MemoryMapping,
    advise_huge,
    no_memory,
    populate,
)
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import BusyError, PannierError, UnavailableError
from pannier.wire.file_layout import STAMP_BYTES
from pannier.wire.tls import is_unix

_log = logging.getLogger(__name__)

_MOST_DESCRIPTORS: Final = 64
"""Most descriptors in one message of the sidecar."""
_PIECE: Final = 16 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_PROT_NONE: Final = 0

Reserve = Callable[[Sequence[int]], sidecar_pb2.ReserveResponse]
Release = Callable[[Sequence[str]], None]


class SpoolMapping(MemoryMapping):
    """A file of the spool in this process's memory; unmapped with the last view of it."""

    def __init__(self, leases: "FileLeases", file: str, capacity: int, fd: int) -> None:
        """Maps and populates ``capacity`` bytes. The caller closes ``fd``.

        Raises PannierError: there is no memory for it.
        """
        super().__init__()
        self.source = self._leases = leases
        self.file = file
        """Name of the leased file."""
        self.stamp = b""
        """Random bytes after the file's capacity; new ones each time it is staged into."""
        length = capacity + STAMP_BYTES
        address = _map(fd, length)
        # The mapping keeps the open file, and so the lock. A forked child must not inherit it: it
        # could hold the lock, and write to the file, after this process's death.
        array = (ctypes.c_char * length).from_address(address)
        unmap = weakref.finalize(array, _unmap, os.getpid(), address, length)
        unmap.atexit = False
        _libc.madvise(address, length, mmap.MADV_DONTFORK)
        try:
            advise_huge(address, length)
            populate(address, length)
        except BaseException:
            unmap()  # This frame, which the traceback holds, keeps the array.
            raise
        self.address = address
        self.capacity = capacity
        whole = memoryview(array).cast("B")
        self.memory = whole[:capacity]

    @property
    def usable(self) -> bool:
        """Whether what is staged here can still be handed over."""
        return not self._leases.lost

    def seal(self) -> None:
        """Makes it read-only: its content is handed over."""
        self._protect(mmap.PROT_READ)

    def unseal(self) -> None:
        """Makes it writable again."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def begin_use(self) -> None:
        """Writes a new stamp, which invalidates earlier hand-overs of this memory."""
        # The sidecar compares it before and after it reads.
        self.stamp = secrets.token_bytes(STAMP_BYTES)
        ctypes.memmove(self.address + self.capacity, self.stamp, STAMP_BYTES)

    def _protect(self, protection: int) -> None:
        # In pieces: during each, no other thread can allocate or touch a new page.
        length = self.capacity + STAMP_BYTES
        for start in range(0, length, _PIECE):
            size = min(_PIECE, length - start)
            if _libc.mprotect(self.address + start, size, protection):
                code = ctypes.get_errno()
                raise PannierError(f"mprotect of staging memory failed: {os.strerror(code)}")


def _map(fd: int, length: int) -> int:
    """Maps the file, writable, at a multiple of a huge page, so that the kernel can map and seal huge pages.

    Raises PannierError: there is no memory for it.
    """
    room = length + HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start: int = _libc.mmap(None, room, _PROT_NONE, private, -1, 0)
    if start != _FAILED:
        address = -(-start // HUGE_PAGE) * HUGE_PAGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        shared = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, length, protection, shared, fd, 0) != _FAILED:
            end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
            for left, right in ((start, address), (end, start + room)):
                if left < right:
                    _libc.munmap(left, right - left)
            return address
    code = ctypes.get_errno()
    if start != _FAILED:
        _libc.munmap(start, room)
    raise no_memory(length, OSError(code, os.strerror(code)))


def _unmap(pid: int, address: int, capacity: int) -> None:
    # A forked child doesn't have this mapping.
    if os.getpid() == pid:
        _libc.munmap(address, capacity)


def connect_descriptors(path: str, digest: bytes = b"") -> socket.socket:
    """Connects to the socket.

    Args:
        digest: of the job's token, sent first where the sidecar requires one; empty: not sent.

    Raises UnavailableError: it can't be reached, with the reason.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeouts.DESCRIPTORS_S)
    try:
        connection.connect(path)
        if digest:
            connection.sendall(digest)
            if connection.recv(1) != b"\1":
                raise OSError("the sidecar rejected the job token")
    except OSError as error:
        connection.close()
        raise UnavailableError(f"{path} can't be reached: {error}") from error
    return connection


def socket_beside(address: str, name: str) -> str:
    """Path of the socket with that name in the directory of the sidecar's own, ``unix:///path``."""
    return os.path.join(os.path.dirname(address.removeprefix("unix://")), name)


def fetch_descriptors(connection: socket.socket, token: bytes, count: int) -> list[int]:
    """The ``count`` descriptors of a token. Raises OSError."""
    connection.sendall(token)
    found: list[int] = []
    try:
        while len(found) < count:
            counted, fds, _, _ = socket.recv_fds(
                connection, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            found += fds
            if not counted or counted[0] == 0 or counted[0] != len(fds):
                raise OSError(f"the sidecar announced {count} descriptors, but sent {len(found)}")
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    return found


class FileLeases:
    """Leases of spool files from one sidecar process.

    Args:
        path: of the socket that passes descriptors.
        reserve: requests files from the sidecar.
        release: reports to it which are unmapped.
        digest: of the token, sent first where the sidecar requires one; empty: not sent.

    Raises UnavailableError: the socket can't be reached, with the reason.
    """

    def __init__(self, path: str, reserve: Reserve, release: Release, digest: bytes = b"") -> None:
        self._reserve = reserve
        self._release = release
        self._lock = threading.Lock()
        self._lost = False
        self.second_set = ""
        """Why a second set of the largest files didn't fit beside the first; empty: it did."""
        self._largest = 0
        self._pools: weakref.WeakSet[ArenaPool] = weakref.WeakSet()
        self._connection = connect_descriptors(path, digest)
        close_in_child(self, FileLeases._leave)

    def _leave(self) -> None:
        """In a forked child: its copy of the parent's connection would keep the leases after the parent's death."""
        self._lost = True
        with suppress(OSError):
            os.close(self._connection.detach())

    @property
    def lost(self) -> bool:
        """Whether the sidecar process has ended, and the leases with it."""
        if not self._lost:
            poll = select.poll()
            try:
                # Reads nothing: another thread may be receiving descriptors.
                poll.register(self._connection, select.POLLRDHUP)
                self._lost = bool(poll.poll(0))
            except (OSError, ValueError):
                self._lost = True
        return self._lost

    def add_pool(self, pool: ArenaPool) -> None:
        """``pool`` leases files here, and releases unused ones when other clients need room."""
        self._pools.add(pool)

    def map_files(self, sizes: Sequence[int]) -> list[SpoolMapping]:
        """Maps a file for each size, bytes.

        Raises:
            BusyError: the spool has no room now.
            UnavailableError: the sidecar disconnected.
            PannierError: it refused the request, or there is no memory.
        """
        with self._lock:
            reserved = self._reserve(sizes)
            if sum(sizes) > self._largest:
                self._largest, self.second_set = sum(sizes), reserved.second_set
            try:
                return self._map_reserved(reserved)
            except OSError as error:
                raise UnavailableError(f"the sidecar did not pass its files: {error}") from error

    def _map_reserved(self, reserved: sidecar_pb2.ReserveResponse) -> list[SpoolMapping]:
        """Maps all files, or releases all. Raises PannierError or OSError."""
        try:
            fds = fetch_descriptors(self._connection, reserved.token, len(reserved.files))
        except BaseException:
            # Descriptors that come later would be taken for those of the next files.
            self.close()
            raise
        mappings: list[SpoolMapping] = []
        try:
            try:
                for file, fd in zip(reserved.files, fds, strict=True):
                    mappings.append(SpoolMapping(self, file.spool_file, file.capacity, fd))
            finally:
                for fd in fds:
                    os.close(fd)
        except BaseException:
            for each in mappings:
                each.memory = None
            self._report_unmapped([file.spool_file for file in reserved.files])
            raise
        return mappings

    def unmap_files(self, mappings: list[MemoryMapping]) -> None:
        """Unmaps these, which only the list references, and reports that to the sidecar.

        If the report fails, the leases end with the connection.
        """
        files = [each.file for each in mappings if isinstance(each, SpoolMapping)]
        for each in mappings:
            # A range that is unmapped, but pinned, would let devices write to its former pages.
            each.unpin()
            # Whatever else still references the mapping, as a traceback may.
            each.memory = None
        mappings.clear()
        self._report_unmapped(files)

    def _report_unmapped(self, files: Sequence[str]) -> None:
        if self.lost:
            return
        try:
            self._release(files)
        except PannierError as error:
            _log.debug("released files stay leased until the connection ends: %s", error)

    def release_unused(self) -> None:
        """Releases files that no save uses: other clients need room in the spool."""
        for pool in list(self._pools):
            pool.unmap_unused(self)

    def close(self) -> None:
        """Ends all leases; what is mapped stays readable until it is unmapped."""
        self._lost = True
        self._connection.close()


class MappedTransport:
    """Staging memory of one sidecar client: spool files where that is possible. Thread-safe.

    Args:
        channel: to the sidecar.
        transport: ``auto``, ``mapped`` or ``streamed``.
        reserve, release: calls of the sidecar client.
    """

    def __init__(
        self, channel: SidecarChannel, transport: str, reserve: Reserve, release: Release
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._reserve = reserve
        self._release = release
        self._lock = threading.Lock()
        self._socket = ""
        self._token_first = False
        self._leases: FileLeases | None = None
        self.reason = ""
        """Why there are no leases, human-readable."""

    def update_socket(self, welcome: sidecar_pb2.Welcome) -> None:
        """Records the descriptors' socket of the sidecar, which may have restarted; "": it has none."""
        with self._lock:
            self._socket, self._token_first = welcome.descriptors, welcome.token_first

    def leases(self) -> FileLeases | None:
        """The connected leases; None, with :attr:`reason`, if mapping is impossible.

        Raises UnavailableError: it is impossible, and ``PANNIER_TRANSPORT=mapped``.
        """
        with self._lock:
            if self._leases is not None and self._leases.lost:
                self._leases.close()
                self._leases = None
            if self._leases is None:
                self._leases = self._connect()
            if self._leases is None and self._transport == "mapped":
                raise UnavailableError(
                    f"PANNIER_TRANSPORT=mapped, but the spool can't be mapped: {self.reason}; "
                    "use auto to stream instead"
                )
            return self._leases

    def arena(self, pool: ArenaPool, sizes: Sequence[int]) -> Arena:
        """An arena of ``pool`` with a buffer of each size, bytes; leased if that is possible now.

        Raises:
            BusyError: it would exceed this process's memory limit.
            PannierError: there is no memory for it, or it must be mapped and can't be.
        """
        leases = self.leases()
        reason = self.reason
        if leases is not None:
            leases.add_pool(pool)
            try:
                arena = pool.acquire(sizes, leases)
                if leases.second_set and pool.limit > 1:
                    _log_once(
                        "saves can't overlap: each waits until the one before is in storage. Staging "
                        f"another one takes {leases.second_set}: more memory, or a spool on a disk "
                        "(PANNIER_SPOOL; a sidecar's --spool), lets them overlap"
                    )
                return arena
            except PannierError as error:
                # The sidecar may have room, or be connected again, when the bytes are sent.
                reason = str(error)
        try:
            return pool.acquire(sizes, streaming_reason=reason)
        except BusyError as error:
            raise BusyError(f"{error}. Streamed, because {reason}") from error

    def release_unused(self) -> None:
        """Other clients need room in the spool."""
        leases = self._leases
        if leases is not None:
            leases.release_unused()

    def close(self) -> None:
        """Ends all leases."""
        with self._lock:
            leases, self._leases = self._leases, None
            self._socket = ""
        if leases is not None:
            leases.close()

    def _connect(self) -> FileLeases | None:
        self.reason = self._impossible()
        if self.reason:
            return None
        try:
            return FileLeases(
                socket_beside(self._channel.address, self._socket),
                self._reserve,
                self._release,
                self._channel.digest() if self._token_first else b"",
            )
        except UnavailableError as error:
            self.reason = str(error)
            return None

    def _impossible(self) -> str:
        if self._transport == "streamed":
            return "PANNIER_TRANSPORT=streamed"
        if not is_unix(self._channel.address):
            return "the sidecar is reached over TCP; a unix socket would pass its files"
        if not self._socket:
            return "the sidecar has no socket that passes its files"
        return ""


@functools.cache
def _log_once(text: str) -> None:
    _log.warning("%s", text)
