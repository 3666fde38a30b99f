"""Deadlines: a point in time that several waits share, and a time-out for a coroutine.

Both use the clock of ``time.monotonic()``. A :class:`Deadline` is thread-safe; :func:`within` is for an event
loop.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadline:
    """The time ``seconds`` from now; by default never."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end


async def within(
    seconds: float,
    work: Coroutine[Any, Any, T],
    *,
    sooner: Callable[[], float] | None = None,
) -> T:
    """``work``'s result. After ``seconds``, ``work`` is cancelled and waited for.

    Before Python 3.12, asyncio.wait_for loses a cancellation that arrives together with the result.

    Args:
        sooner: returns an earlier end, by time.monotonic(), which may change.

    Raises:
        asyncio.TimeoutError
    """
    end = time.monotonic() + seconds
    task = asyncio.ensure_future(work)
    # A cancelled caller doesn't retrieve the task's error.
    task.add_done_callback(_retrieve)
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
            await _cancel(task)
    if timely or not task.cancelled():
        return task.result()
    raise asyncio.TimeoutError


async def set_within(seconds: float, event: asyncio.Event) -> bool:
    """Waits for ``event``; whether it was set within ``seconds``."""
    try:
        return await within(seconds, event.wait())
    except asyncio.TimeoutError:
        return False


async def _cancel(task: "asyncio.Future[Any]") -> None:
    """Cancels ``task`` and waits until it has ended, also when the caller is cancelled again."""
    cancelled = False
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
            task.cancel()
    if cancelled:
        raise asyncio.CancelledError


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Keeps asyncio from logging an error that no caller retrieves."""
    if not task.cancelled():
        task.exception()
