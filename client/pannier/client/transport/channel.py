"""The gRPC channel to the sidecar, and how it behaves around a fork.

In: calls to start. Out: running calls. Owned by a sidecar connection. Thread-safe.

A process that forks (DataLoader workers) must neither hang nor pass its connection on
to the child: the sidecar detects a trainer's death by the end of its connection, which
lives as long as any process holds it. The child replaces the inherited sockets by
/dev/null. It never touches what else it inherits: gRPC objects are kept from its
garbage collection, and a channel in it refuses to work.
"""

import ctypes
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, TypeVar

import grpc

from pannier.client import fork_hooks
from pannier.wire.addresses import channel_options, keepalive_options
from pannier.wire.auth_token import Metadata, TokenFile
from pannier.wire.errors import (
    ConfigurationError,
    UnauthenticatedError,
    UnavailableError,
)
from pannier.wire.tls import Tls, is_unix, open_channel

Running = TypeVar("Running", bound=grpc.RpcContext)

_log = logging.getLogger(__name__)
_DESCRIPTORS = "/proc/self/fd"

Peer = str | tuple[str, int]
"""What a socket is connected to: a path, or an IP address and a port."""


class SidecarChannel:
    """A channel to ``address``, opened with the first call.

    Args:
        tls: for TCP; None: plaintext.
        trusted_uids: users that may own a unix socket; None: any user.
        token: the job token that calls carry; None: no token.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        trusted_uids: Collection[int] | None = None,
        token: TokenFile | None = None,
    ) -> None:
        if _forked_with_channels:
            raise fork_hooks.forked_error()
        self.address = address
        self._tls = tls
        self._trusted_uids = trusted_uids
        self._token = token
        self._lock = threading.RLock()
        self._channel: grpc.Channel | None = None
        self._peers: set[Peer] = set()
        self._calls: set[grpc.RpcContext] = set()
        self._closed = False
        self._inherited = False
        _keep_grpc_running()
        # Freeing it would run gRPC's code.
        fork_hooks.keep(self)
        fork_hooks.close_in_child(self, SidecarChannel._leave)

    @contextmanager
    def call(self, start: Callable[[grpc.Channel], Running]) -> Iterator[Running]:
        """Starts a call and yields it; it must have ended when the block does.

        Raises:
            UnavailableError: the channel is closed; from the block, for a call whose token was replaced
                meanwhile.
            InvalidRequestError: this process was forked from the channel's.
            ConfigurationError: another user's socket is at the address, or the token can't be read.
        """
        self.check_process()
        metadata = self.metadata()
        if self._channel is None:
            self._peers |= _addresses_of(self.address)
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            if self._channel is None:
                self._check_owner()
                options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
                if not is_unix(self.address):
                    options += keepalive_options()
                self._channel = open_channel(self.address, options, self._tls)
            running = start(self._channel)
            self._calls.add(running)
        try:
            yield running
        except UnauthenticatedError as error:
            if self.metadata() != metadata:
                raise UnavailableError("the job token was replaced during the call") from error
            raise
        finally:
            with self._lock:
                self._calls.discard(running)

    def metadata(self) -> Metadata:
        """What a call carries: the token, read from its file now. Raises ConfigurationError."""
        return () if self._token is None else self._token.metadata()

    def digest(self) -> bytes:
        """Digest of the token; empty: there is no token. Raises ConfigurationError."""
        return b"" if self._token is None else self._token.digest()

    def renew(self) -> None:
        """Checks the socket's owner again and reloads TLS files, after a lost connection.

        Raises ConfigurationError when another user's socket is at the address.
        """
        with self._lock:
            self._check_owner()
            if self._tls is None or self._channel is None or not self._tls.changed():
                return
            previous, self._channel = self._channel, None
        _close_in_background(previous, self.address)

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the channel's."""
        if self._inherited:
            raise fork_hooks.forked_error()

    def cancel_calls(self) -> None:
        """Cancels all running calls."""
        with self._lock:
            calls = list(self._calls)
        for running in calls:
            running.cancel()

    def close(self) -> None:
        """Cancels running calls and refuses new ones. Returns at once."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            if not threading.main_thread().is_alive():
                # The interpreter is ending. It stops threads where they are; one of them may hold a
                # call's lock, and freeing that call would wait for the lock for ever.
                for running in (*self._calls, channel):
                    _leak(running)
        self.cancel_calls()
        if channel is not None:
            _close_in_background(channel, self.address)

    def _check_owner(self) -> None:
        """Raises ConfigurationError for another user's socket: that user would get the checkpoints."""
        if self._trusted_uids is None or not is_unix(self.address):
            return
        try:
            owner = os.stat(self.address.removeprefix("unix://")).st_uid
        except OSError:
            return  # no socket: connecting fails with the reason
        if owner not in self._trusted_uids:
            raise ConfigurationError(
                f"the socket {self.address} belongs to user {owner}, not to user {os.geteuid()} or "
                "root: any user may have started the sidecar there. Set PANNIER_SIDECAR to your own, or "
                f"PANNIER_ALLOW_UID={owner} if you trust that user"
            )

    def _leave(self) -> None:
        """In a forked child: ends what it inherited."""
        global _forked_with_channels
        _forked_with_channels = self._inherited = True
        # A thread that doesn't exist here may hold it.
        self._lock = threading.RLock()
        _disconnect(self._peers)


def _close_in_background(channel: grpc.Channel, address: str) -> None:
    # A hung server can hold close() for seconds.
    try:
        threading.Thread(target=channel.close, name="pannier-close", daemon=True).start()
    except RuntimeError:  # the interpreter is ending and starts no threads
        _log.debug("the channel to %s is left to the end of the process", address)


_forked_with_channels = False
"""This process was forked from one that had channels."""


@functools.cache
def _keep_grpc_running() -> object:
    """A gRPC object, which the cache references.

    gRPC shuts down in the background when its last object is freed, as by closing a channel, and a fork
    meanwhile hangs for ever.
    """
    running = grpc.local_server_credentials()
    fork_hooks.keep(running)
    return running


def _leak(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _addresses_of(address: str) -> set[Peer]:
    """Peers of sockets connected to ``address``. For the parent: it may query a name server.

    Paths are compared with those that daemons have bound: the socket of a daemon that has bound it
    under another path (another mount) isn't found.
    """
    if address.startswith("unix://"):
        return {os.path.realpath(address.removeprefix("unix://"))}
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return set()  # a name without an IP address has no connections
    return {(_plain(str(where[0])), int(where[1])) for *_, where in found}


def _disconnect(peers: Collection[Peer]) -> None:
    """Replaces by /dev/null every descriptor that is connected to one of ``peers``.

    Runs right after a fork: no locks, no threads, no name service. The numbers stay in use, so
    that a gRPC object that closes its descriptor can't close another's. The parent's
    connections are not affected.
    """
    if not os.path.isdir(_DESCRIPTORS):
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir(_DESCRIPTORS):
        if _peer(int(name)) in peers:
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _peer(descriptor: int) -> Peer | None:
    """What a descriptor is connected to; None when it isn't."""
    try:
        stream = socket.socket(fileno=descriptor)
    except OSError:
        return None  # no socket, or already closed, as the directory's own descriptor
    try:
        where = stream.getpeername()
    except OSError:
        return None  # not connected
    finally:
        stream.detach()
    if stream.family == socket.AF_UNIX:
        return os.path.realpath(where) if where and isinstance(where, str) else None
    if stream.family in (socket.AF_INET, socket.AF_INET6):
        return _plain(str(where[0])), int(where[1])
    return None


def _plain(number: str) -> str:
    """An IP address as text: as IPv4 if it was mapped into IPv6; ``localhost`` for a loopback address.

    gRPC resolves ``localhost`` to more addresses than the system's resolver does.
    """
    parsed: IPv4Address | IPv6Address = ip_address(number)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return "localhost" if parsed.is_loopback else str(parsed)
