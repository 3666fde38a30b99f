"""Deadlines of tests, on the product's scale: a slow machine takes its time, and still finds a hang."""

import asyncio
import time
from collections.abc import Callable

from pannier.common import timeouts


def stretched(seconds: float) -> float:
    """A deadline in seconds, as long as this machine needs it."""
    return seconds * timeouts.SCALE


BOUND_S = stretched(60.0)
"""How long a test waits at most for what must happen: long enough for a machine that stalls.

It costs nothing while tests pass. How soon something happens is no business of such a bound.
"""


async def until(condition: Callable[[], object]) -> None:
    """Returns when the condition is true, on an event loop; for what has no event of its own."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for didn't come"
        await asyncio.sleep(0.005)
