"""One factor for all deadlines of tests: a slow machine takes its time, and still finds a hang."""

import os

FACTOR = float(os.environ.get("PANNIER_TEST_STRETCH") or "1")
"""Of ``PANNIER_TEST_STRETCH``, which conftest keeps when it removes the settings of the caller."""


def stretched(seconds: float) -> float:
    """A deadline in seconds, as long as this machine needs it."""
    return seconds * FACTOR
