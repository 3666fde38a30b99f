"""Times that requests to the doubles of stores take: a few milliseconds, so that answers come out of order.

Without them a double on the same host answers in the order of the requests, and what goes wrong when tasks
end together, or in another order than they began, isn't seen.
"""

import random
from threading import Lock

_USUAL_S = 0.002
_SLOW_S = 0.02
_SLOW_SHARE = 1 / 16


class Jitter:
    """Pauses before and after the handling of requests; the same for the same seed. Thread-safe."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lock = Lock()

    def next_s(self) -> tuple[float, float]:
        """Seconds until the next request is handled, and from then until it is answered."""
        with self._lock:
            return self._pause(), self._pause()

    def _pause(self) -> float:
        slow = self._random.random() < _SLOW_SHARE
        return self._random.uniform(0, _SLOW_S if slow else _USUAL_S)
