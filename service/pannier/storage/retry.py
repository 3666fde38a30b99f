"""How often a store tries an operation, and when it gives up: the only retries in this package.

The retries of the libraries below are switched off, or calls are made beneath them: two layers of
retries multiply, hide the reason, and miss the deadline. Event loop only.
"""

import asyncio
import functools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, ParamSpec, TypeVar

from pannier.common import timeouts
from pannier.common.deadline import within
from pannier.common.retry import RetryPolicy
from pannier.storage.base import (
    DeniedError,
    NotFoundError,
    Retried,
    StorageError,
    UnreachableError,
    end_of,
    notify_retry,
    unlimited,
)
from pannier.wire.errors import IntegrityError

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_SETTLE_TRIES = 6
_UPLOADS = 3
"""When the server has lost so many uploads of one object, the upload fails."""


class TransientError(StorageError):
    """Worth another try: overload, a broken connection, a time-out.

    Args:
        after_s: fewest seconds until the next try, as the store asked (Retry-After).
        answered: False when nothing came from the store itself.
    """

    def __init__(self, message: str, after_s: float = 0, *, answered: bool = True) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.answered = answered


class UploadLostError(NotFoundError):
    """The server no longer has an upload that it had begun, or loses its bytes."""


class UnsettledError(StorageError):
    """Reading back doesn't show the outcome of a write: neither its object nor another one is there."""


def asked_pause_s(headers: Mapping[str, str]) -> float:
    """Seconds to wait that a response asks for; 0: none.

    ``Retry-After`` is a number of seconds, or a date by the server's clock
    (https://www.rfc-editor.org/rfc/rfc9110#field.retry-after).

    Args:
        headers: with names in lower case, or without regard to case.
    """
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        due, now = (parsedate_to_datetime(text) for text in (value, headers.get("date", "")))
        return max(0.0, (due - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def uncounted(reason: str) -> None:
    """A :data:`Retried` for operations whose retries aren't counted."""


async def retry(
    operation: Callable[[], Coroutine[Any, Any, T]],
    *,
    what: str,
    deadline_s: float,
    retried: Retried = uncounted,
    writes: bool = False,
) -> T:
    """Runs ``operation`` until it doesn't raise TransientError, with random pauses between the tries.

    Ends after ``deadline_s``, or at the end set by :func:`pannier.storage.base.limited` if that is
    sooner; a try that is running then is cut off.

    Args:
        what: the object, for errors.
        writes: whether it writes an object: a DeniedError then means that nothing was written.

    Raises:
        StorageError: with the last TransientError's message after the deadline; a write may have
            reached the store. UnreachableError: the store has not answered in any try.
    """
    started = time.monotonic()
    end = end_of(deadline_s)
    problem: TransientError | None = None
    answered = False
    tries = 0

    async def once() -> T:
        nonlocal problem, answered, tries
        tries += 1
        try:
            return await within(end - time.monotonic(), operation())
        except TransientError as error:
            problem = error
            answered = answered or error.answered
            raise

    def notify(error: BaseException) -> None:
        retried(str(error))
        notify_retry(str(error))

    policy = RetryPolicy(
        retriable=lambda error: isinstance(error, TransientError),
        first_s=timeouts.RETRY_S,
        longest_s=timeouts.LONGEST_RETRY_S,
        least_s=lambda error: min(getattr(error, "after_s", 0), timeouts.LONGEST_RETRY_AFTER_S),
        end=end,
        on_retry=notify,
    )
    try:
        with unless_written(lambda: writes and problem is not None):
            return await policy.run(once)
    except (TransientError, asyncio.TimeoutError) as error:
        last = problem or f"{what}: no answer"
        kind = StorageError if answered else UnreachableError
        raise kind(
            f"{last} (given up after {tries} {'try' if tries == 1 else 'tries'} in "
            f"{time.monotonic() - started:.0f} s)"
        ) from error


@contextmanager
def unless_written(may_be: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raises a DeniedError as a plain StorageError if ``may_be()``: an earlier request may have written."""
    try:
        yield
    except DeniedError as error:
        if may_be():
            raise StorageError(f"{error} (an earlier try may have written the object)") from error
        raise


async def contend(tries: int) -> AsyncIterator[int]:
    """Numbers the tries of a write for which several writers compete, with random pauses between.

    Without the pauses, writers that lost to the same one would collide again at once.
    """
    for number in range(tries):
        if number:
            longest_s = min(timeouts.CONFLICT_AGAIN_S, timeouts.RETRY_S * 2 ** min(number, 16))
            await asyncio.sleep(random.uniform(0, longest_s))
        yield number


async def settle(write: Callable[[], Coroutine[Any, Any, T]], *, retried: Retried = uncounted) -> T:
    """Runs a write with a precondition again while it raises UnsettledError.

    Raises:
        StorageError: with the last UnsettledError's message after a few tries.
    """
    problem: UnsettledError | None = None
    async for _ in contend(_SETTLE_TRIES):
        if problem is not None:
            retried(str(problem))
            notify_retry(str(problem))
        try:
            return await write()
        except UnsettledError as error:
            problem = error
    raise StorageError(f"{problem} (given up after {_SETTLE_TRIES} tries)") from problem


async def restart_lost(upload: Callable[[], Coroutine[Any, Any, T]], *, retried: Retried) -> T:
    """Begins an upload again when the server has lost it. Raises UploadLostError after a few losses."""
    for remaining in range(_UPLOADS - 1, -1, -1):
        try:
            return await upload()
        except UploadLostError as error:
            if not remaining:
                raise
            retried(str(error))
    raise AssertionError("unreachable")


async def settle_upload(upload: Callable[[], Coroutine[Any, Any, T]], *, retried: Retried) -> T:
    """As :func:`settle`; what arrived damaged is sent once more. Raises IntegrityError, StorageError."""
    try:
        return await settle(upload, retried=retried)
    except IntegrityError as error:
        retried(str(error))
        return await settle(upload, retried=retried)


def in_time(operation: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A store's operation that raises StorageError when its end has passed before it begins.

    For stores without retries, so that :func:`pannier.storage.base.limited` holds for every store.
    """

    @functools.wraps(operation)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if end_of(math.inf) <= time.monotonic():
            what = " ".join(str(each) for each in args[1:2] if isinstance(each, str))
            raise StorageError(f"{operation.__name__} {what}: its deadline has passed")
        return await operation(*args, **kwargs)

    return checked


async def clean_up(request: Coroutine[Any, Any, object], what: str) -> None:
    """Removes what a failed upload left, also while its task is being cancelled.

    Runs ``request`` for at most ``timeouts.UPLOAD_CLEAN_UP_S``. A StorageError is logged, not raised: it
    must not hide the error that made the upload fail. A cancellation ends it, and is raised.
    """
    with unlimited():
        task = asyncio.ensure_future(request)
    try:
        await asyncio.wait({task}, timeout=timeouts.UPLOAD_CLEAN_UP_S)
    finally:
        await _end_clean_up(task, what)


async def _end_clean_up(task: "asyncio.Future[object]", what: str) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1)
    error = task.exception() if task.done() and not task.cancelled() else None
    if isinstance(error, StorageError) or task.cancelled():
        _log.warning(
            "%s: %s", what, error or f"no answer within {timeouts.UPLOAD_CLEAN_UP_S:.0f} s"
        )
    elif error is not None:
        raise error
