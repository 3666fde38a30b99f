"""Files of the sidecar's spool, mapped: what is staged there is in the spool already.

In: sizes. Out: :class:`SpoolMapping`, writable memory that the sidecar reads through the file. The
descriptors come over a unix socket beside the sidecar's own, which stays open: with it the loans
end. Each descriptor carries a lock that lasts as long as its mapping, so that the sidecar knows
when nobody can write there any more. Thread-safe.
"""

import ctypes
import logging
import mmap
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from pannier.client.staging.arena import (
    Arena,
    ArenaPool,
    MemoryMapping,
    advise_huge,
    no_memory,
    populate,
)
from pannier.client.transport.channel import SidecarChannel
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import PannierError, UnavailableError
from pannier.wire.file_layout import STAMP_BYTES
from pannier.wire.tls import is_unix

_log = logging.getLogger(__name__)

_SOCKET_S: Final = 10.0
_MOST_AT_ONCE: Final = 64
"""Descriptors in one message of the sidecar's."""

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

Reserve = Callable[[Sequence[int]], sidecar_pb2.ReserveResponse]
Release = Callable[[Sequence[str]], None]


class SpoolMapping(MemoryMapping):
    """A file of the spool in this process's memory; unmapped with the last view of it."""

    def __init__(self, lender: "Lender", slab: str, capacity: int, fd: int) -> None:
        """Maps and populates ``capacity`` bytes. ``fd`` stays the caller's, to be closed.

        Raises PannierError: there is no memory for it.
        """
        super().__init__()
        self.source = self._lender = lender
        self.slab = slab
        """Name of the loan."""
        self.stamp = b""
        """What the file carries behind its capacity: other bytes each time it is staged into."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        length = capacity + STAMP_BYTES
        address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise no_memory(length, OSError(code, os.strerror(code)))
        # The mapping keeps the open file, and so the lock. A fork must not: a child could hold
        # it, and write there, for longer than we live.
        array = (ctypes.c_char * length).from_address(address)
        unmap = weakref.finalize(array, _unmap, os.getpid(), address, length)
        unmap.atexit = False
        _libc.madvise(address, length, mmap.MADV_DONTFORK)
        advise_huge(address, length)
        populate(address, length)
        self.address = address
        self.capacity = capacity
        whole = memoryview(array).cast("B")
        self.memory = whole[:capacity]

    @property
    def usable(self) -> bool:
        """Whether what is staged here can still be handed over."""
        return not self._lender.lost

    def seal(self) -> None:
        """Makes it read-only, for what is in it is handed over."""
        self._protect(mmap.PROT_READ)

    def unseal(self) -> None:
        """Makes it writable again."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def begin_use(self) -> None:
        """Writes another stamp: what was handed over from here before is refused from now on."""
        # The sidecar compares it before and after it reads.
        self.stamp = secrets.token_bytes(STAMP_BYTES)
        ctypes.memmove(self.address + self.capacity, self.stamp, STAMP_BYTES)

    def _protect(self, protection: int) -> None:
        # In pieces: while the kernel is at one, no other thread can allocate or touch a new page.
        length = self.capacity + STAMP_BYTES
        for start in range(0, length, _PIECE):
            size = min(_PIECE, length - start)
            if _libc.mprotect(self.address + start, size, protection):
                code = ctypes.get_errno()
                raise PannierError(f"mprotect of staging memory failed: {os.strerror(code)}")


def _unmap(pid: int, address: int, capacity: int) -> None:
    # A forked child has something else there, or nothing.
    if os.getpid() == pid:
        _libc.munmap(address, capacity)


class Lender:
    """Borrows from one life of one sidecar.

    Args:
        path: of the socket that passes descriptors.
        reserve: asks the sidecar for files.
        give_back: tells it which are unmapped.
        digest: what is said first, where the sidecar wants to hear a token's; empty: nothing.

    Raises UnavailableError: the socket can't be reached, with the reason.
    """

    def __init__(
        self, path: str, reserve: Reserve, give_back: Release, digest: bytes = b""
    ) -> None:
        self._reserve = reserve
        self._give_back = give_back
        self._lock = threading.Lock()
        self._lost = False
        self._pools: weakref.WeakSet[ArenaPool] = weakref.WeakSet()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_SOCKET_S)
        try:
            self._connection.connect(path)
            if digest:
                self._connection.sendall(digest)
                if self._connection.recv(1) != b"\1":
                    raise OSError("the token is none that is known there")
        except OSError as error:
            self._connection.close()
            raise UnavailableError(f"{path} can't be reached: {error}") from error
        _lenders.add(self)

    @property
    def lost(self) -> bool:
        """Whether the sidecar that lent is gone: it knows nothing of these loans any more."""
        if not self._lost:
            poll = select.poll()
            try:
                poll.register(self._connection, select.POLLIN)
                # Nothing ever comes unretrieved: what can be read then is the end.
                self._lost = bool(poll.poll(0)) and not self._connection.recv(1, socket.MSG_PEEK)
            except (OSError, ValueError):
                self._lost = True
        return self._lost

    def serve(self, pool: ArenaPool) -> None:
        """``pool`` borrows here, and is to give back when others need room."""
        self._pools.add(pool)

    def map_files(self, sizes: Sequence[int]) -> list[SpoolMapping]:
        """Maps a file for each size, bytes.

        Raises:
            BusyError: the spool has no room now.
            UnavailableError: the sidecar went away.
            PannierError: it refused, or there is no memory.
        """
        with self._lock:
            lent = self._reserve(sizes)
            descriptors: list[int] = []
            try:
                descriptors = self._fetch(lent.token, len(lent.files))
                return [
                    SpoolMapping(self, file.slab, file.capacity, fd)
                    for file, fd in zip(lent.files, descriptors, strict=True)
                ]
            except OSError as error:
                raise UnavailableError(f"the sidecar's files can't be had: {error}") from error
            finally:
                for fd in descriptors:
                    os.close(fd)

    def unmap_files(self, mappings: list[MemoryMapping]) -> None:
        """Unmaps these, which the list holds alone, and tells the sidecar.

        It finds out by itself, at the end of the connection, when it can't be told.
        """
        slabs = [each.slab for each in mappings if isinstance(each, SpoolMapping)]
        for each in mappings:
            each.memory = None
        mappings.clear()
        if self.lost:
            return
        try:
            self._give_back(slabs)
        except PannierError as error:
            _log.debug("lent files stay until the end of the connection: %s", error)

    def room_wanted(self) -> None:
        """Others need room in the spool: gives back what isn't in use."""
        for pool in list(self._pools):
            pool.unmap_unused(self)

    def close(self) -> None:
        """Ends all loans; what is mapped stays readable until it is unmapped."""
        self._lost = True
        self._connection.close()

    def _fetch(self, token: bytes, count: int) -> list[int]:
        self._connection.sendall(token)
        found: list[int] = []
        try:
            while len(found) < count:
                said, fds, _, _ = socket.recv_fds(
                    self._connection, 1, _MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC
                )
                found += fds
                if not said or said[0] == 0 or said[0] != len(fds):
                    raise OSError(f"{count} descriptors were promised, {len(found)} came")
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found


class MappedTransport:
    """Which lender one session has now, if any. Thread-safe.

    Args:
        line: to the sidecar.
        transport: ``auto``, ``mapped`` or ``streamed``.
        reserve, release: calls of the session.
    """

    def __init__(
        self, line: SidecarChannel, transport: str, reserve: Reserve, release: Release
    ) -> None:
        self._line = line
        self._address = line.address
        self._transport = transport
        self._reserve = reserve
        self._release = release
        self._lock = threading.Lock()
        self._socket = ""
        self._token_first = False
        self._lender: Lender | None = None
        self.reason = ""
        """Why there is none, for people."""

    def welcomed(self, welcome: sidecar_pb2.Welcome) -> None:
        """The sidecar, maybe in a new life, told its socket's name; "": it has none."""
        with self._lock:
            self._socket, self._token_first = welcome.descriptors, welcome.token_first

    def lender(self) -> Lender | None:
        """The present one, which is connected; None, with a reason, if there can be none.

        Raises UnavailableError: there is none, but it must be mapped.
        """
        with self._lock:
            if self._lender is not None and self._lender.lost:
                self._lender.close()
                self._lender = None
            if self._lender is None:
                self._lender = self._connect()
            if self._lender is None and self._transport == "mapped":
                raise UnavailableError(
                    f"PANNIER_TRANSPORT=mapped, but the spool can't be mapped: {self.reason}; "
                    "use auto to stream instead"
                )
            return self._lender

    def arena(self, pool: ArenaPool, sizes: Sequence[int]) -> Arena:
        """An arena of ``pool`` with a region of each size, bytes: borrowed if that is possible now.

        Raises PannierError: there is no memory for it, or it must be mapped and can't be.
        """
        lender = self.lender()
        reason = self.reason
        if lender is not None:
            lender.serve(pool)
            try:
                return pool.acquire(sizes, lender)
            except PannierError as error:
                # It may have room, or be there again, by the time the bytes are sent.
                reason = str(error)
        arena = pool.acquire(sizes)
        arena.streaming_reason = reason
        return arena

    def room_wanted(self) -> None:
        """Others need room in the spool."""
        lender = self._lender
        if lender is not None:
            lender.room_wanted()

    def close(self) -> None:
        """Ends all loans."""
        with self._lock:
            lender, self._lender = self._lender, None
            self._socket = ""
        if lender is not None:
            lender.close()

    def _connect(self) -> Lender | None:
        self.reason = self._impossible()
        if self.reason:
            return None
        own = self._address.removeprefix("unix://")
        try:
            return Lender(
                os.path.join(os.path.dirname(own), self._socket),
                self._reserve,
                self._release,
                self._line.digest() if self._token_first else b"",
            )
        except UnavailableError as error:
            self.reason = str(error)
            return None

    def _impossible(self) -> str:
        if self._transport == "streamed":
            return "PANNIER_TRANSPORT=streamed"
        if not is_unix(self._address):
            return "the sidecar is reached over TCP; a unix socket would pass its files"
        if not self._socket:
            return "the sidecar has no socket that passes its files"
        return ""


_lenders: "weakref.WeakSet[Lender]" = weakref.WeakSet()


def _after_fork() -> None:
    # The connection is the parent's: with a copy of it here its loans would outlive it.
    for lender in list(_lenders):
        lender._lost = True
        _quietly_close(lender._connection)


def _quietly_close(connection: Any) -> None:
    try:
        os.close(connection.detach())
    except OSError as error:
        _log.debug("after a fork: %s", error)


os.register_at_fork(after_in_child=_after_fork)
