"""Retries of calls after errors that may be temporary: one policy for blocking code and coroutines.

In: a call. Out: its result, or the error of the last try. The pauses double from try to try and are
random, so that callers that failed together don't come back together. Thread-safe.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

T = TypeVar("T")


def _never(_error: BaseException) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a call is tried again. The defaults never give up."""

    retriable: Callable[[BaseException], bool]
    """Whether another try may succeed after this error."""
    first_s: float
    """Most seconds of the first pause."""
    longest_s: float
    """Most seconds of any pause."""
    least_s: Callable[[BaseException], float] = _never
    """Fewest seconds of the pause after this error: what the peer has asked for."""
    end: float = math.inf
    """``time.monotonic()`` after which no try begins. Pauses become shorter before it, so that the last try
    comes within ``first_s`` of it, unless ``least_s`` is longer."""
    stop: Callable[[], bool] = lambda: False
    """Whether to give up after an error."""
    on_retry: Callable[[BaseException], object] = _never
    """Called before each pause, with the error of the last try."""

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """``function()``; ``sleep`` waits between two tries."""
        return tenacity.Retrying(sleep=sleep, **self._options())(function)

    async def run(
        self,
        function: Callable[[], Awaitable[T]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> T:
        """``await function()``; ``sleep`` waits between two tries."""

        async def once() -> T:
            return await function()

        return await tenacity.AsyncRetrying(sleep=sleep, **self._options())(once)

    def _options(self) -> dict[str, Any]:
        jitter = tenacity.wait_random_exponential(multiplier=self.first_s, max=self.longest_s)

        def pause(state: tenacity.RetryCallState) -> float:
            left_s = self.end - time.monotonic()
            return max(min(jitter(state), left_s / 2), self.least_s(_error(state)), 0)

        def stop(state: tenacity.RetryCallState) -> bool:
            left_s = self.end - time.monotonic()
            return self.stop() or left_s < max(self.first_s, state.upcoming_sleep)

        return {
            "retry": tenacity.retry_if_exception(self.retriable),
            "wait": pause,
            "stop": stop,
            "before_sleep": lambda state: self.on_retry(_error(state)),
            "reraise": True,
        }


def _error(state: tenacity.RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None, "pauses only follow errors"
    return error
