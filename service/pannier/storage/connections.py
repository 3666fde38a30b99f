"""One connection for all stores of an event loop with the same options.

A daemon has a store per checkpoint; separate sessions and credentials would mean a TLS handshake and a
token request for every save.
"""

import asyncio
import difflib
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pannier.common import timeouts
from pannier.storage.base import StorageError, UnreachableError, unlimited
from pannier.storage.retry import retry
from pannier.wire.errors import ConfigurationError

T = TypeVar("T")


@dataclass
class _Shared(Generic[T]):
    opening: "asyncio.Task[T]"
    users: "set[SharedConnection[T]]" = field(default_factory=set)


_all: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared[Any]]]"
_all = weakref.WeakKeyDictionary()


def check_names(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises ConfigurationError for a name that the library below would drop; ``what`` names their kind."""
    for name in given:
        if name not in known:
            like = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {like[0]!r}?" if like else ""
            raise ConfigurationError(f"{what} has no {name!r}{hint}")


class SharedConnection(Generic[T]):
    """A store's reference to a shared connection; used in one event loop.

    Args:
        key: equal for equal options.
        open: opens the connection, within the loop; repeated when it raises TransientError.
        close: closes it, after its last reference was released.
    """

    def __init__(
        self,
        key: str,
        open: Callable[[], Coroutine[Any, Any, T]],
        close: Callable[[T], Awaitable[None]],
    ) -> None:
        self._key, self._open, self._close = key, open, close
        self._closed = False

    async def get(self, end: float) -> T:
        """The connection. Raises the error of opening it; the next call opens it again.

        Args:
            end: time.monotonic() at which it raises a StorageError if the connection isn't open.
        """
        if self._closed:
            raise StorageError("the store is closed")
        loop = asyncio.get_running_loop()
        shared = _all.setdefault(loop, {})
        entry: _Shared[T] | None = shared.get(self._key)
        if entry is None:
            entry = shared[self._key] = _Shared(loop.create_task(self._opened()))
        entry.users.add(self)
        try:
            await asyncio.wait({entry.opening}, timeout=max(0.0, end - time.monotonic()))
            if not entry.opening.done():
                raise UnreachableError(
                    "no credentials were found in time: does the machine's metadata server answer?"
                )
            return entry.opening.result()
        except BaseException:
            failed = entry.opening.done() and (
                entry.opening.cancelled() or entry.opening.exception() is not None
            )
            if failed and shared.get(self._key) is entry:
                del shared[self._key]
            raise

    async def _opened(self) -> T:
        with unlimited():
            # Not only for the store that was first, whose deadline may be near.
            return await retry(
                self._open, what="credentials", deadline_s=timeouts.STORAGE_CONTACT_S
            )

    async def release(self) -> None:
        """Releases the reference. Idempotent."""
        self._closed = True
        shared = _all.get(asyncio.get_running_loop(), {})
        entry: _Shared[T] | None = shared.get(self._key)
        if entry is None or self not in entry.users:
            return
        entry.users.discard(self)
        if not entry.users:
            del shared[self._key]
            entry.opening.cancel()
            await asyncio.wait({entry.opening})
            if not entry.opening.cancelled() and entry.opening.exception() is None:
                await self._close(entry.opening.result())
