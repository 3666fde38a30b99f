"""How long a store may take for what it is doing, set by whoever called it.

A daemon knows the save's deadline, a store only its own; :func:`limited` carries the
first to the second through whatever lies in between, for the task that calls and the
tasks that it starts.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pannier.wire.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")

Told = Callable[[str], None]
"""Called with the reason whenever something is tried again."""


@dataclass(frozen=True)
class Limits:
    """What holds for the operations of a task."""

    until: Callable[[], float] | None = None
    """Asked again before each try: time.monotonic() after which none begins or goes on."""
    told: Told | None = None


_limits: ContextVar[Limits] = ContextVar("pannier-storage-limits")
_NONE = Limits()


@contextmanager
def limited(
    *, until: Callable[[], float] | None = None, told: Told | None = None
) -> Iterator[None]:
    """What any store does in this block ends at ``until()``, with a StorageError.

    Args:
        until: the time on the clock of ``time.monotonic()``; None: the store's own deadline.
        told: hears of every retry, beside whoever an upload tells.
    """
    token = _limits.set(Limits(until, told))
    try:
        yield
    finally:
        _limits.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """For what has to be done also when the time is up: taking away what is half-made."""
    with limited():
        yield


def end_of(deadline_s: float) -> float:
    """When something that begins now and may take ``deadline_s`` has to end (time.monotonic())."""
    end = time.monotonic() + deadline_s
    until = _limits.get(_NONE).until
    return end if until is None else min(end, until())


def in_time(operation: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A store's operation that raises StorageError when the time is up before it begins.

    For stores that answer at once, where nothing is tried again: what a caller may do is the same
    on every store.
    """

    @functools.wraps(operation)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if end_of(math.inf) <= time.monotonic():
            what = " ".join(str(each) for each in args[1:2] if isinstance(each, str))
            raise StorageError(f"{operation.__name__} {what}: the time for it was up")
        return await operation(*args, **kwargs)

    return checked


def listener() -> Told | None:
    """Who is told in this task when something is tried again."""
    return _limits.get(_NONE).told


def tell(reason: str) -> None:
    """Tells whoever listens to this task that something is tried again."""
    told = listener()
    if told is not None:
        told(reason)


async def within(
    seconds: float,
    work: Coroutine[Any, Any, T],
    *,
    sooner: Callable[[], float] | None = None,
) -> T:
    """``work``'s result; it is cancelled, and has ended, when ``seconds`` have passed.

    asyncio.wait_for would, before Python 3.12, lose a cancellation that arrives together
    with the result.

    Args:
        sooner: an end that moves, as long as it comes before; by time.monotonic().

    Raises:
        asyncio.TimeoutError
    """
    end = time.monotonic() + seconds
    task = asyncio.ensure_future(work)
    timely = False
    try:
        while not timely:
            left = (end if sooner is None else min(end, sooner())) - time.monotonic()
            if left <= 0:
                break
            await asyncio.wait({task}, timeout=left)
            timely = task.done()
    finally:
        if not task.done():
            await _end(task)
    if timely or not task.cancelled():
        return task.result()
    raise asyncio.TimeoutError


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancels ``task`` and waits until it has ended, also when we are cancelled once more."""
    cancelled = False
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
            task.cancel()
    if not task.cancelled():
        task.exception()  # Retrieved; the time that is up is what counts.
    if cancelled:
        raise asyncio.CancelledError
