"""Named places at which a daemon can be made to die, for tests of what it leaves behind.

In: ``PANNIER_CRASH_AT=name`` or ``name:n``, read once. Out: SIGKILL to this process when
it passes that place for the n-th time (default: the first). Each place stands directly
before or after a change of something that outlives the process: the spool, its journal,
objects in storage. Thread-safe.
"""

import os
import signal
import threading
from typing import Final

from pannier.wire.errors import ConfigurationError

VARIABLE: Final = "PANNIER_CRASH_AT"

POINTS: Final = frozenset[str]()
"""All places: ``daemon.what.when``."""


class _Armed:
    def __init__(self, text: str) -> None:
        self.name, _, count = text.partition(":")
        if self.name not in POINTS or not (count or "1").isdigit():
            raise ConfigurationError(
                f"{VARIABLE}={text!r} names no place to crash at; there are {sorted(POINTS)}, "
                "each with an optional :n for the n-th pass"
            )
        self._left = int(count or "1")
        self._lock = threading.Lock()

    def passed(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


_armed: _Armed | None = _Armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def point(name: str) -> None:
    """The process dies here if it was armed to. Raises KeyError for a name that isn't listed."""
    if name not in POINTS:
        raise KeyError(name)
    if _armed is not None and _armed.name == name:
        _armed.passed()
