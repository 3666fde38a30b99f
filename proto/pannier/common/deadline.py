"""A point in time that several waits share. Monotonic; thread-safe."""

import time


class Deadline:
    """Passes ``seconds`` after it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end
