"""The one gRPC channel of a session, and how it behaves around a fork.

In: calls to start. Out: running calls. Owned by a session. Thread-safe.

A process that forks (DataLoader workers) must neither hang nor hand its
connection down. The child never touches what it inherits: gRPC objects are kept
from its garbage collection and a line in it refuses to work. With
``GRPC_ENABLE_FORK_SUPPORT`` on, gRPC itself stops its threads around a fork; it
waits 5 s for a call whose stream is idle and may leave children hanging, so we
end our calls and close the channel before it looks. To those who use the line
that is a broken connection, repaired at once. Without it, the child lets go of the
connections to our address.
"""

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from pannier.client.interrupts import Condition
from pannier.client.transport import inherited_sockets
from pannier.wire.addresses import channel_options, keepalive_options
from pannier.wire.auth_token import Metadata, TokenFile
from pannier.wire.errors import (
    ConfigurationError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
from pannier.wire.tls import Tls, is_unix, open_channel

Running = TypeVar("Running", bound=grpc.RpcContext)

_log = logging.getLogger(__name__)
_FORKED = (
    "process {pid} was forked from one whose client was connected, and gRPC doesn't survive a "
    'fork: use the client in the parent, or start this process with "spawn"'
)
_PAUSE_S = 2.0
"""Longest that a fork waits for our calls to end."""


class InterruptedCallError(Exception):
    """The line was put down around a fork, or had a token that was replaced: make the call again."""


class SidecarChannel:
    """A channel to ``address``, opened with the first call and again after a fork.

    Args:
        tls: for TCP; None: plaintext.
        trusted_uids: users that may own a unix socket; None: anybody.
        token: what calls show; None: nothing.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        trusted_uids: Collection[int] | None = None,
        token: TokenFile | None = None,
    ) -> None:
        if _orphaned:
            raise InvalidRequestError(_FORKED.format(pid=os.getpid()))
        self.address = address
        self._tls = tls
        self._trusted_uids = trusted_uids
        self._token = token
        self._condition = Condition()
        self._channel: grpc.Channel | None = None
        self._peers: set[inherited_sockets.Peer] = set()
        self._calls: set[grpc.RpcContext] = set()
        self._interrupted: weakref.WeakSet[grpc.RpcContext] = weakref.WeakSet()
        self._paused = False
        self._closed = False
        self._inherited = False
        _follow_forks(self)

    @contextmanager
    def call(self, start: Callable[[grpc.Channel], Running]) -> Iterator[Running]:
        """Starts a call and gives it; leaves when the caller is done with it.

        Raises:
            InterruptedCallError: out of the block, for a call that a fork ended, or whose token was
                replaced while it was made.
            UnavailableError: the line is closed.
            InvalidRequestError: this process was forked from the line's.
            ConfigurationError: somebody else's socket is at the address, or the token can't be read.
        """
        self.check_process()
        shown = self.metadata()
        if self._channel is None:
            self._peers |= inherited_sockets.peers(self.address)
        with self._condition:
            self._condition.wait_for(lambda: not self._paused)
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
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if running in self._interrupted:
                raise InterruptedCallError from error
            raise
        except UnauthenticatedError as error:
            if self.metadata() != shown:
                raise InterruptedCallError from error
            raise
        finally:
            with self._condition:
                self._calls.discard(running)
                self._condition.notify_all()

    def metadata(self) -> Metadata:
        """What a call carries: the token, as its file is now. Raises ConfigurationError."""
        return () if self._token is None else self._token.metadata()

    def digest(self) -> bytes:
        """What stands for the token; empty: there is none. Raises ConfigurationError."""
        return b"" if self._token is None else self._token.digest()

    def renew(self) -> None:
        """To be called when the connection was lost: who is there now is looked at again.

        Raises ConfigurationError when somebody else's socket is at the address.
        """
        with self._condition:
            self._check_owner()
            if self._tls is None or self._channel is None or not self._tls.changed():
                return
            former, self._channel = self._channel, None
        _close_aside(former, self.address)

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the line's."""
        if self._inherited:
            raise InvalidRequestError(_FORKED.format(pid=os.getpid()))

    def was_interrupted(self, running: grpc.RpcContext) -> bool:
        """Whether a fork ended this call."""
        return running in self._interrupted

    def cancel_calls(self) -> None:
        """Ends all running calls."""
        with self._condition:
            calls = list(self._calls)
        for running in calls:
            running.cancel()

    def close(self) -> None:
        """Ends all calls, now and later. Returns at once."""
        with self._condition:
            self._closed = True
            channel, self._channel = self._channel, None
            if not threading.main_thread().is_alive():
                # The interpreter is ending. It stops threads where they are, and one of them may
                # hold a call's lock: freeing that call would wait for it for ever.
                for running in (*self._calls, channel):
                    _keep_for_good(running)
        self.cancel_calls()
        if channel is not None:
            _close_aside(channel, self.address)

    def _check_owner(self) -> None:
        """Whoever listens on a socket of another user's would get this one's checkpoints."""
        if self._trusted_uids is None or not is_unix(self.address):
            return
        try:
            owner = os.stat(self.address.removeprefix("unix://")).st_uid
        except OSError:
            return  # nobody there: connecting tells
        if owner not in self._trusted_uids:
            raise ConfigurationError(
                f"the socket {self.address} belongs to user {owner}, not to user {os.geteuid()} or "
                "root: a sidecar there could be anyone's. Set PANNIER_SIDECAR to your own, or "
                f"PANNIER_ALLOW_UID={owner} if you trust that user"
            )

    def _pause(self) -> None:
        with self._condition:
            self._paused = True
            for running in self._calls:
                self._interrupted.add(running)
                running.cancel()
            if not self._condition.wait_for(lambda: not self._calls, _PAUSE_S):
                _log.warning("calls to %s did not end before a fork", self.address)
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _resume(self) -> None:
        with self._condition:
            self._paused = False
            self._condition.notify_all()


def _close_aside(channel: grpc.Channel, address: str) -> None:
    # A hung server can hold close() for seconds.
    try:
        threading.Thread(target=channel.close, name="pannier-close", daemon=True).start()
    except RuntimeError:  # the interpreter is ending and starts no threads
        _log.debug("the channel to %s is left to the end of the process", address)


_lines: "weakref.WeakSet[SidecarChannel]" = weakref.WeakSet()
_kept_in_children: "weakref.WeakSet[Any]" = weakref.WeakSet()
_orphaned = False
"""This process was forked from one that had lines, without gRPC's fork support."""
_following = False
_running: object = None
"""An object of gRPC's, held so that its core goes on running between two channels."""
_following_lock = threading.Lock()


def keep_in_children(thing: Any) -> None:
    """A forked child never frees ``thing``: it owns memory that isn't mapped there."""
    _kept_in_children.add(thing)


def _follow_forks(line: SidecarChannel) -> None:
    global _following, _running
    with _following_lock:
        _lines.add(line)
        if not _following:
            _following = True
            # gRPC stops when its last object is freed, aside, and a fork that comes while
            # it does hangs for ever. Closing our channel must not be the end of it.
            _running = grpc.local_server_credentials()
            keep_in_children(_running)
            # Handlers before a fork run last-registered first. gRPC has registered its own
            # with its first object, so that ours come before them.
            os.register_at_fork(
                before=_before_fork,
                after_in_parent=_after_fork_in_parent,
                after_in_child=_after_fork_in_child,
            )


def _before_fork() -> None:
    if cygrpc.is_fork_support_enabled():
        for line in list(_lines):
            line._pause()


def _after_fork_in_parent() -> None:
    for line in list(_lines):
        line._resume()


def _after_fork_in_child() -> None:
    global _orphaned
    _orphaned = _orphaned or (len(_lines) > 0 and not cygrpc.is_fork_support_enabled())
    peers: set[inherited_sockets.Peer] = set()
    for line in list(_lines):
        peers |= line._peers
        line._inherited = True
        # Its locks may be held by threads that don't exist here, and freeing its
        # channel would run gRPC code: it stays as it is, for good.
        line._condition = Condition()
        _keep_for_good(line)
    for thing in list(_kept_in_children):
        _keep_for_good(thing)
    if not cygrpc.is_fork_support_enabled():
        # With it gRPC lives on here, and minds its descriptors itself.
        inherited_sockets.let_go(peers)


def _keep_for_good(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
