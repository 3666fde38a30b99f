"""The socket over which trainers get descriptors: of leased spool files, and of what loads may read.

gRPC can't pass descriptors, so a second unix socket lies beside the sidecar's own. In: connections of
this host's trainers, which send one token after the other, TOKEN_BYTES each. Out: for each token its
descriptors (SCM_RIGHTS), at most PER_MESSAGE in a message, whose single byte is their number; 0: the token is
unknown. A connection stays open as long as the client. Where a node serves several jobs, the digest
of a job's token comes first and is answered with one byte, 1 if it is valid. On the event loop.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.daemon.listeners import MAX_CONNECTIONS
from pannier.sidecar.spool.mapped_files import TOKEN_BYTES, MappedFiles
from pannier.wire.auth_token import DIGEST_BYTES

_log = logging.getLogger(__name__)

SUFFIX: Final = ".fd"
"""Follows the name of the sidecar's own socket."""
PER_MESSAGE: Final = 64
_RESTORING: Final = 4
"""Loads whose descriptors are open at a time."""
_LONGEST_PATH: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")

OpenForLoads = Callable[[bytes], Awaitable[list[int]]]
"""New descriptors of what a token stands for, which the caller closes; none: the token isn't known."""
Listen = Callable[[Path], AbstractContextManager[socket.socket]]
"""Listens on a path as long as the context lasts."""


class _DescriptorServer:
    """Serves one socket; see :func:`serving_descriptors`."""

    def __init__(
        self,
        listener: socket.socket,
        mapped: MappedFiles,
        open_for_loads: OpenForLoads,
        allowed: Collection[int] | None,
        accepts: Callable[[bytes], bool] | None,
    ) -> None:
        self._listener = listener
        self._mapped = mapped
        self._open_for_loads = open_for_loads
        self._allowed = None if allowed is None else frozenset(allowed)
        self._accepts = accepts
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._restoring = asyncio.Semaphore(_RESTORING)

    async def run(self) -> None:
        """Serves until it is cancelled."""
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    # No descriptors are left, for example.
                    _log.warning("a connection for descriptors can't be accepted: %s", error)
                    await asyncio.sleep(timeouts.ACCEPT_AGAIN_S)
                    continue
                self._accept(connection)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, connection: socket.socket) -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(peer)
        if self._allowed is not None and user not in self._allowed:
            _log.warning("user %d (process %d) may not lease spool files: closed", user, pid)
            connection.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            _log.warning(
                "%d connections for descriptors are open, which is the limit: the one of process %d is closed",
                *(len(self._connections), pid),
            )
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            if await self._is_authentic(connection):
                while token := await self._receive(connection, TOKEN_BYTES):
                    await self._pass(connection, token)
        except (OSError, asyncio.TimeoutError) as error:
            _log.debug("a connection for descriptors broke: %s", error)
        except Exception:  # noqa: BLE001 - an error of one connection ends no other
            _log.exception("passing descriptors of spool files")
        finally:
            connection.close()
            await self._mapped.disconnect(connection)

    async def _is_authentic(self, connection: socket.socket) -> bool:
        if self._accepts is None:
            return True
        digest = await self._receive(connection, DIGEST_BYTES)
        accepted = bool(digest) and self._accepts(digest)
        await self._loop.sock_sendall(connection, bytes([accepted]))
        if not accepted:
            _log.debug("a connection for descriptors has no token of the job: closed")
        return accepted

    async def _receive(self, connection: socket.socket, count: int) -> bytes:
        """Exactly so many bytes; none at the end of the connection."""
        received = b""
        while len(received) < count:
            more = await self._loop.sock_recv(connection, count - len(received))
            if not more:
                return b""
            received += more
        return received

    async def _pass(self, connection: socket.socket, token: bytes) -> None:
        descriptors = await self._mapped.open_descriptors(token, connection)
        if not descriptors:
            # Few at a time: saves need descriptors, too.
            async with self._restoring:
                descriptors = await self._open_for_loads(token)
                await self._send_all(connection, descriptors)
            return
        await self._send_all(connection, descriptors)

    async def _send_all(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Sends and closes them."""
        try:
            if not descriptors:
                await self._loop.sock_sendall(connection, b"\0")
            for start in range(0, len(descriptors), PER_MESSAGE):
                batch = descriptors[start : start + PER_MESSAGE]
                await within(timeouts.DESCRIPTORS_SEND_S, self._send(connection, batch))
        finally:
            for fd in descriptors:
                os.close(fd)

    async def _send(self, connection: socket.socket, batch: list[int]) -> None:
        while True:
            try:
                socket.send_fds(connection, [bytes([len(batch)])], batch)
            except BlockingIOError:
                await self._writable(connection)
            else:
                return

    async def _writable(self, connection: socket.socket) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(connection, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(connection)


@asynccontextmanager
async def serving_descriptors(
    path: Path,
    mapped: MappedFiles,
    open_for_loads: OpenForLoads,
    listen: Listen,
    *,
    allowed: Collection[int] | None,
    accepts: Callable[[bytes], bool] | None = None,
) -> AsyncIterator[str]:
    """Passes descriptors as long as the context lasts; yields the socket's name, or "" for none.

    Args:
        path: of the sidecar's own socket, whose lock covers this one, too.
        listen: makes the socket.
        allowed: users that may connect; None: any.
        accepts: whether the digest that each connection sends first is valid; None: none is sent.
    """
    beside = path.with_name(path.name + SUFFIX)
    if len(os.fsencode(beside)) > _LONGEST_PATH:
        _log.warning(
            "%s is too long for a socket's path, so trainers stream instead of mapping the spool: "
            "choose a shorter --address",
            beside,
        )
        yield ""
        return
    with listen(beside) as listener:
        server = _DescriptorServer(listener, mapped, open_for_loads, allowed, accepts)
        task = asyncio.get_running_loop().create_task(server.run())
        try:
            yield beside.name
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
