"""One place that decides how often something is tried again, and when not.

The libraries below are told not to retry by themselves (or are called beneath
their own retries): two layers multiply, hide the reason, and miss the deadline.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from pannier.storage.base import Retried, StorageError, UnreachableError
from pannier.storage.time_limits import end_of, tell, within

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 20.0
_LONGEST_PAUSE_S = 2.0
"""Between two tries of a write that others may win."""
_SETTLE_TRIES = 6
_LONGEST_REQUEST_S = 60.0
"""Most that a store is obeyed when it asks to wait."""


class TransientError(StorageError):
    """Worth another try: overload, a broken connection, a time-out.

    Args:
        after_s: the store asked to wait at least this long (Retry-After).
        answered: False when nothing came from the store itself.
    """

    def __init__(self, message: str, after_s: float = 0, *, answered: bool = True) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.answered = answered


class UnsettledError(StorageError):
    """A write whose outcome reading back doesn't tell: what was to be there isn't, nor is anything else."""


def silent(reason: str) -> None:
    """A :data:`Retried` for operations whose retries nobody counts by themselves."""


async def retry(
    operation: Callable[[], Coroutine[Any, Any, T]],
    *,
    what: str,
    deadline_s: float,
    retried: Retried = silent,
) -> T:
    """Runs ``operation`` until it doesn't raise TransientError, waiting with jitter in between.

    Ends after ``deadline_s``, or when the time of :func:`pannier.storage.time_limits.limited` is
    up if that is sooner; a try that is on its way then is cut off.

    Args:
        what: the object, for errors.

    Raises:
        StorageError: with the last TransientError's message when the time is up. Whether
            a write has reached the store is unknown then. UnreachableError: it has not answered
            in any try.
    """
    started = time.monotonic()
    end = end_of(deadline_s)
    jitter = wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)
    problem: TransientError | None = None
    answered = False

    def wait(state: RetryCallState) -> float:
        after_s = problem.after_s if problem is not None else 0
        return max(jitter(state), min(after_s, _LONGEST_REQUEST_S))

    def stop(state: RetryCallState) -> bool:
        # Not when the next try would begin after the deadline.
        return time.monotonic() + state.upcoming_sleep >= end

    def before_sleep(state: RetryCallState) -> None:
        retried(str(problem))
        tell(str(problem))

    async def once() -> T:
        nonlocal problem, answered
        try:
            return await within(end - time.monotonic(), operation())
        except TransientError as error:
            problem = error
            answered = answered or error.answered
            raise

    attempts = AsyncRetrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait,
        stop=stop,
        before_sleep=before_sleep,
        reraise=True,
    )
    try:
        return await attempts(once)
    except (TransientError, asyncio.TimeoutError) as error:
        tries = attempts.statistics.get("attempt_number", 1)
        last = problem or f"{what}: no answer"
        kind = StorageError if answered else UnreachableError
        raise kind(
            f"{last} (given up after {tries} {'try' if tries == 1 else 'tries'} in "
            f"{time.monotonic() - started:.0f} s)"
        ) from error


async def contend(tries: int) -> AsyncIterator[int]:
    """Numbers the tries of a write that others may win; pauses with jitter before each but the first.

    Without the pause, writers that lost to the same one meet again at once.
    """
    for number in range(tries):
        if number:
            longest_s = min(_LONGEST_PAUSE_S, FIRST_WAIT_S * 2 ** min(number, 16))
            await asyncio.sleep(random.uniform(0, longest_s))
        yield number


async def settle(write: Callable[[], Coroutine[Any, Any, T]], *, retried: Retried = silent) -> T:
    """Runs a write with a precondition again while it raises UnsettledError.

    Raises:
        StorageError: with the last UnsettledError's message after a few tries.
    """
    problem: UnsettledError | None = None
    async for _ in contend(_SETTLE_TRIES):
        if problem is not None:
            retried(str(problem))
            tell(str(problem))
        try:
            return await write()
        except UnsettledError as error:
            problem = error
    raise StorageError(f"{problem} (given up after {_SETTLE_TRIES} tries)") from problem
