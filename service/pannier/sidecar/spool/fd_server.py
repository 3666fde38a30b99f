"""The socket over which trainers get descriptors of the files that are lent to them.

gRPC can't pass descriptors, so a second unix socket lies beside the sidecar's own. In:
connections of this host's trainers, and tokens. Out: descriptors (SCM_RIGHTS). A connection
says one token after the other, TOKEN_BYTES each, and gets for each a message per up to
PER_MESSAGE descriptors, whose one byte is their number: 0 for a token that nothing stands for.
It stays open for the client's life. Where a sidecar serves several jobs, the digest of a job's token
comes first, and is answered with a byte, 1 for a good one. One thread serves all.
"""

import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pannier.daemon.listeners import MAX_CONNECTIONS, private_socket
from pannier.sidecar.multi_job.sockets import job_socket
from pannier.sidecar.spool.mapped_files import TOKEN_BYTES, Lending
from pannier.wire.auth_token import DIGEST_BYTES

_log = logging.getLogger(__name__)

SUFFIX: Final = ".fd"
"""Of the socket's name, after the sidecar's own."""
PER_MESSAGE: Final = 64
_LONGEST_PATH: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")
_SEND_S: Final = 2.0

Knows = Callable[[bytes], bool]
"""Whether a digest is that of a good token."""


class Passing:
    """Serves one socket; see :func:`passing`.

    Args:
        allowed: users that may connect; None: anybody.
        knows: a digest is to be said first, and judged by it; None: none is.
    """

    def __init__(
        self,
        listener: socket.socket,
        lending: Lending,
        allowed: Collection[int] | None,
        knows: Knows | None = None,
    ) -> None:
        self._listener = listener
        self._lending = lending
        self._allowed = None if allowed is None else frozenset(allowed)
        self._knows = knows
        self._greeted: set[socket.socket] = set()
        """Connections that have shown a token."""
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._said: dict[socket.socket, bytes] = {}
        """Connections, with the part of a token that has come in."""

    def run(self) -> None:
        """Serves until :meth:`stop`."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._woken:
                    self._close()
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(key.fileobj)
                except Exception:  # noqa: BLE001 - one connection's trouble isn't the others'
                    _log.exception("passing descriptors of lent files")

    def stop(self) -> None:
        """Ends :meth:`run`."""
        os.write(self._wake, b"\0")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(told)
        stranger = self._allowed is not None and user not in self._allowed
        if stranger or len(self._said) >= MAX_CONNECTIONS:
            _log.warning("user %d (process %d) may not borrow files of the spool: cut", user, pid)
            connection.close()
            return
        connection.settimeout(_SEND_S)
        self._said[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        try:
            said = self._said[connection]
            greets = self._knows is not None and connection not in self._greeted
            wanted = DIGEST_BYTES if greets else TOKEN_BYTES
            more = connection.recv(wanted - len(said))
            said += more
            if not more:
                self._end(connection)
            elif len(said) < wanted:
                self._said[connection] = said
            elif greets:
                self._said[connection] = b""
                self._greet(connection, said)
            else:
                self._said[connection] = b""
                self._pass(connection, said)
        except OSError as error:
            _log.debug("a connection for descriptors broke: %s", error)
            self._end(connection)

    def _greet(self, connection: socket.socket, digest: bytes) -> None:
        assert self._knows is not None
        if self._knows(digest):
            self._greeted.add(connection)
            connection.sendall(b"\1")
            return
        _log.debug("a connection for descriptors has shown no token of the job's: cut")
        connection.sendall(b"\0")
        self._end(connection)

    def _pass(self, connection: socket.socket, token: bytes) -> None:
        descriptors = self._lending.fetched(token, connection)
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
        del self._said[connection]
        self._greeted.discard(connection)
        connection.close()
        self._lending.gone(connection)

    def _close(self) -> None:
        for connection in list(self._said):
            connection.close()
        self._selector.close()
        for fd in (self._woken, self._wake):
            os.close(fd)


@contextmanager
def passing(
    path: Path, lending: Lending, *, allow_uid: Collection[int] = (), knows: Knows | None = None
) -> Iterator[str]:
    """Passes descriptors as long as the context lasts; gives the socket's name, or "" for none.

    Args:
        path: of the sidecar's own socket, which the lock beside it keeps for us.
        allow_uid: other users that may connect.
        knows: anybody may connect who says a digest that it knows.
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
    allowed = {os.geteuid(), 0, *allow_uid} if knows is None else None
    opened = private_socket(beside, allow_uid) if knows is None else job_socket(beside)
    with opened as listener:
        served = Passing(listener, lending, allowed, knows)
        thread = threading.Thread(target=served.run, name="pannier-passing", daemon=True)
        thread.start()
        try:
            yield beside.name
        finally:
            served.stop()
            thread.join()
