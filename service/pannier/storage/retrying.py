"""One place that decides how often something is tried again, and when not.

The libraries below are told not to retry by themselves (or are called beneath
their own retries): two layers multiply, hide the reason, and miss the deadline.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from pannier.storage.base import Retried, StorageError

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 20.0


class TransientError(StorageError):
    """Worth another try: overload, a broken connection, a time-out.

    Args:
        after_s: the store asked to wait at least this long (Retry-After).
    """

    def __init__(self, message: str, after_s: float = 0) -> None:
        super().__init__(message)
        self.after_s = after_s


def silent(reason: str) -> None:
    """A :data:`Retried` for operations whose retries nobody counts."""


async def retry(
    operation: Callable[[], Awaitable[T]], *, deadline_s: float, retried: Retried = silent
) -> T:
    """Runs ``operation`` until it doesn't raise TransientError, waiting with jitter in between.

    Raises:
        StorageError: the last TransientError's message, once ``deadline_s`` has passed.
    """
    started = time.monotonic()
    jitter = wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        after_s = error.after_s if isinstance(error, TransientError) else 0
        return max(jitter(state), min(after_s, 60))

    def stop(state: RetryCallState) -> bool:
        # Not when the next try would begin after the deadline.
        return time.monotonic() - started + state.upcoming_sleep >= deadline_s

    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        retried(str(error))

    async def once() -> T:
        return await operation()

    attempts = AsyncRetrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait,
        stop=stop,
        before_sleep=before_sleep,
        reraise=True,
    )
    try:
        return await attempts(once)
    except TransientError as error:
        tries = attempts.statistics.get("attempt_number", 1)
        raise StorageError(
            f"{error} (given up after {tries} tries in {deadline_s:.0f} s)"
        ) from error
