"""Which users may speak to a daemon over its unix socket: the kernel tells who connected.

In: calls. Out: the same calls, unless somebody else is connected, whose connection is cut.
The socket's mode keeps others out already; this holds where it was opened (``--allow-uid``,
a chmod). gRPC shows neither its connections nor their credentials, so the process looks
through its own descriptors: before each call, not for each message of a stream, and once a second for
those who connect and say nothing. Thread-safe.
"""

import asyncio
import functools
import inspect
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc

from pannier.daemon.handler_wrapping import Continuation, Handler, Rewrapping, rewrapped

_log = logging.getLogger(__name__)

_DESCRIPTORS: Final = "/proc/self/fd"
_CREDENTIALS: Final = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""
_CLOSED_S: Final = 1.0
"""For gRPC to close a connection that was cut: what came in before may still be read."""
_TOLD_S: Final = 0.02
"""For gRPC to tell the calls of a connection that they have ended with it."""
_WARY_S: Final = 60.0
"""Calls are held up for _TOLD_S as long after a stranger was seen: the next one may be gone, all
but its call, before anybody looks."""
_LOOK_S: Final = 1.0
_APART_S: Final = 0.002
"""Between looks for the calls of an aio server: thousands may come at once."""
_STEP_S: Final = 0.002
_REFUSED: Final = "its connection belongs to a user that may not connect, or has ended"

Id = tuple[int, int]
"""Device and inode of a socket: a descriptor's number is soon another's."""


class Peers:
    """The connections of one unix socket.

    Args:
        path: of the socket, as it was bound.
        allowed: users that may connect.
    """

    def __init__(self, path: Path, allowed: Collection[int]) -> None:
        self._path = str(path)
        self._allowed = frozenset(allowed)
        self._lock = threading.Lock()
        self._known: dict[Id, bool] = {}
        """The sockets of this process: whether a stranger is at the other end."""
        self._wary_until = 0.0

    @property
    def wary(self) -> bool:
        """Whether a stranger was here lately."""
        return time.monotonic() < self._wary_until

    def strangers(self) -> frozenset[Id]:
        """Cuts the connections of users that aren't allowed; gives those that gRPC still holds."""
        with self._lock:
            known: dict[Id, bool] = {}
            for name in os.listdir(_DESCRIPTORS):
                descriptor = int(name)
                try:
                    found = os.fstat(descriptor)
                except OSError:
                    continue  # closed by now
                if stat.S_ISSOCK(found.st_mode):
                    one = (found.st_dev, found.st_ino)
                    stranger = self._known.get(one)
                    if stranger is None:
                        one, stranger = self._look(descriptor) or (one, False)
                    known[one] = stranger
            self._known = known
            strangers = frozenset(one for one, stranger in known.items() if stranger)
            if strangers:
                self._wary_until = time.monotonic() + _WARY_S
        return strangers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Cuts strangers that say nothing, too, as long as the context lasts."""
        end = threading.Event()

        def watch() -> None:
            while not end.wait(_LOOK_S):
                self.strangers()

        thread = threading.Thread(target=watch, name="pannier-peers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _look(self, descriptor: int) -> tuple[Id, bool] | None:
        """The socket behind a descriptor, and whether a stranger is at its other end: cut."""
        try:
            # Our own: the other may be closed, and be another's, at any moment.
            own = os.dup(descriptor)
        except OSError:
            return None
        found = os.fstat(own)
        if not stat.S_ISSOCK(found.st_mode):
            os.close(own)
            return None
        one = (found.st_dev, found.st_ino)
        with socket.socket(fileno=own) as connection:
            if connection.family != socket.AF_UNIX or not self._is_ours(connection):
                return one, False
            told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(told)
            if user in self._allowed:
                return one, False
            _log.warning(
                "user %d (process %d) connected to %s, which is for %s: cut",
                *(user, pid, self._path),
                " and ".join(f"user {each}" for each in sorted(self._allowed)),
            )
            with suppress(OSError):  # it is gone by itself
                connection.shutdown(socket.SHUT_RDWR)
            return one, True

    def _is_ours(self, connection: socket.socket) -> bool:
        # What was accepted has the listener's name; what we connected ourselves has none.
        # gRPC binds "unix:///run/x" as "///run/x".
        name = connection.getsockname()
        return isinstance(name, str) and "/" + name.lstrip("/") == self._path


class PeerInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For a synchronous server; the first of its interceptors."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of all services."""
        handler = continuation(handler_call_details)
        return None if handler is None else rewrapped(handler, self._checked)

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # What gRPC reads from a function's attributes stays.
        @functools.wraps(function)
        def checked(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            if _is_unix(context):
                self._check(context)
            return function(request, context, *more)

        return checked

    def _check(self, context: grpc.ServicerContext) -> None:
        strangers = self._peers.strangers()
        deadline = time.monotonic() + _CLOSED_S
        # Those that come later have nothing to do with this call.
        while strangers and time.monotonic() < deadline:
            time.sleep(_STEP_S)
            strangers &= self._peers.strangers()
        if self._peers.wary:
            time.sleep(_TOLD_S)
        if strangers or not context.is_active():
            context.abort(grpc.StatusCode.UNAVAILABLE, _REFUSED)


class _Looking:
    """Looks of an event loop: one for all calls that have come before it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last = 0.0
        self._next: asyncio.Future[frozenset[Id]] | None = None

    async def strangers(self) -> frozenset[Id]:
        """As :meth:`Peers.strangers`, looked for from now on."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_at(self._last + _APART_S, self._look, self._next)
        # A call that is cancelled leaves the others theirs.
        return await asyncio.shield(self._next)

    def _look(self, told: "asyncio.Future[frozenset[Id]]") -> None:
        self._next = None
        try:
            told.set_result(self._peers.strangers())
        except OSError as error:
            told.set_exception(error)
        self._last = asyncio.get_running_loop().time()


class AioPeerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For an aio server; the first of its interceptors."""

    def __init__(self, peers: Peers) -> None:
        self._looking = _Looking(peers)
        self._rewrapped = Rewrapping()
        self._peers = peers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handlers of all services."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._rewrapped(handler, handler_call_details.method, self._checked)

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._check(context)
                async for response in function(request, context):
                    yield response

            return stream

        @functools.wraps(function)
        async def unary(request: Any, context: Any) -> Any:
            await self._check(context)
            return await function(request, context)

        return unary

    async def _check(self, context: Any) -> None:
        if not _is_unix(context):
            return
        strangers = await self._looking.strangers()
        deadline = time.monotonic() + _CLOSED_S
        while strangers and time.monotonic() < deadline:
            await asyncio.sleep(_STEP_S)
            strangers &= await self._looking.strangers()
        if self._peers.wary:
            await asyncio.sleep(_TOLD_S)
        if strangers or context.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, _REFUSED)


def _is_unix(context: Any) -> bool:
    return str(context.peer()).startswith("unix:")
