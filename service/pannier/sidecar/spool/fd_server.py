"""The socket over which trainers get descriptors of the spool files that they have leased.

gRPC can't pass descriptors, so a second unix socket lies beside the sidecar's own. In: connections of
this host's trainers, which send one token after the other, TOKEN_BYTES each. Out: for each token a message
per up to PER_MESSAGE descriptors (SCM_RIGHTS), whose one byte is their number: 0 for an unknown
token. A connection stays open for the client's life. Where a sidecar serves several jobs, the digest
of a job's token comes first and is answered with one byte, 1 if it is valid. One thread serves all.
"""

import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from pannier.daemon.listeners import MAX_CONNECTIONS
from pannier.sidecar.spool.mapped_files import TOKEN_BYTES, MappedFiles
from pannier.wire.auth_token import DIGEST_BYTES

_log = logging.getLogger(__name__)

SUFFIX: Final = ".fd"
"""Of the socket's name, after the sidecar's own."""
PER_MESSAGE: Final = 64
_LONGEST_PATH: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")
_SEND_S: Final = 2.0

Listen = Callable[[Path], AbstractContextManager[socket.socket]]
"""Listens on a path as long as the context lasts."""


class DescriptorServer:
    """Serves one socket; see :func:`serving_descriptors`.

    Args:
        allowed: users that may connect; None: any.
        accepts: whether the digest that each connection sends first is valid; None: none is sent.
    """

    def __init__(
        self,
        listener: socket.socket,
        mapped: MappedFiles,
        allowed: Collection[int] | None,
        accepts: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._listener = listener
        self._mapped = mapped
        self._allowed = None if allowed is None else frozenset(allowed)
        self._accepts = accepts
        self._authenticated: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._partial: dict[socket.socket, bytes] = {}
        """All connections, with the part of a token that has arrived."""

    def run(self) -> None:
        """Serves until :meth:`stop`."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._stop_read:
                    self._close()
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(key.fileobj)
                except Exception:  # noqa: BLE001 - one connection's error isn't the others'
                    _log.exception("passing descriptors of spool files")

    def stop(self) -> None:
        """Ends :meth:`run`."""
        os.write(self._stop_write, b"\0")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(peer)
        stranger = self._allowed is not None and user not in self._allowed
        if stranger or len(self._partial) >= MAX_CONNECTIONS:
            _log.warning("user %d (process %d) may not lease spool files: closed", user, pid)
            connection.close()
            return
        connection.settimeout(_SEND_S)
        self._partial[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        try:
            unknown = self._accepts is not None and connection not in self._authenticated
            wanted = DIGEST_BYTES if unknown else TOKEN_BYTES
            more = connection.recv(wanted - len(self._partial[connection]))
            received = self._partial[connection] + more
            if not more:
                self._end(connection)
            elif len(received) < wanted:
                self._partial[connection] = received
            else:
                self._partial[connection] = b""
                (self._authenticate if unknown else self._pass)(connection, received)
        except OSError as error:
            _log.debug("a connection for descriptors broke: %s", error)
            self._end(connection)

    def _authenticate(self, connection: socket.socket, digest: bytes) -> None:
        assert self._accepts is not None
        if self._accepts(digest):
            self._authenticated.add(connection)
            connection.sendall(b"\1")
            return
        _log.debug("a connection for descriptors has no token of the job: closed")
        connection.sendall(b"\0")
        self._end(connection)

    def _pass(self, connection: socket.socket, token: bytes) -> None:
        descriptors = self._mapped.open_descriptors(token, connection)
        try:
            if not descriptors:
                connection.sendall(b"\0")
            for start in range(0, len(descriptors), PER_MESSAGE):
                batch = descriptors[start : start + PER_MESSAGE]
                socket.send_fds(connection, [bytes([len(batch)])], batch)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._partial[connection]
        self._authenticated.discard(connection)
        connection.close()
        self._mapped.disconnect(connection)

    def _close(self) -> None:
        for connection in list(self._partial):
            connection.close()
        self._selector.close()
        for fd in (self._stop_read, self._stop_write):
            os.close(fd)


@contextmanager
def serving_descriptors(
    path: Path,
    mapped: MappedFiles,
    listen: Listen,
    *,
    allowed: Collection[int] | None,
    accepts: Callable[[bytes], bool] | None = None,
) -> Iterator[str]:
    """Passes descriptors as long as the context lasts; yields the socket's name, or "" for none.

    Args:
        path: of the sidecar's own socket, whose lock covers this one, too.
        listen: makes the socket.
        allowed, accepts: see :class:`DescriptorServer`.
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
        served = DescriptorServer(listener, mapped, allowed, accepts)
        thread = threading.Thread(target=served.run, name="pannier-descriptors", daemon=True)
        thread.start()
        try:
            yield beside.name
        finally:
            served.stop()
            thread.join()
