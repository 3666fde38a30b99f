"""A wall clock that is wrong by a constant, for one process and those that it starts.

Shifts what Python's code reads: ``time.time``, ``time.time_ns`` and ``datetime``'s ``now``. The
monotonic clock, the kernel's file times and what C code reads for itself stay as they are, and so
does what Python hands to such code: deadlines of gRPC.
"""

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "PANNIER_TEST_CLOCK_SHIFT"
"""Seconds; of a process that is started with :func:`environment`."""
_STARTER = Path(__file__).parent / "wrong_clock"
"""Has a ``sitecustomize``, which Python imports before anything else."""


def environment(seconds: float) -> dict[str, str]:
    """What makes a Python process's clock wrong by so many seconds; nothing for 0."""
    if not seconds:
        return {}
    path = [str(_STARTER), str(_STARTER.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: str(seconds), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def shift(seconds: float) -> None:
    """Makes this process's clock wrong by so many seconds, from now on.

    Modules that hold on to ``datetime.datetime`` already keep the right one.
    """
    seconds_now, nanoseconds_now, right = time.time, time.time_ns, datetime.datetime

    def wrong() -> float:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return seconds_now() + (0.0 if caller.startswith("grpc.") else seconds)

    time.time = wrong
    time.time_ns = lambda: nanoseconds_now() + int(seconds * 1e9)

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, right)

    class Wrong(right, metaclass=Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return right.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return right.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return right.fromtimestamp(time.time())

    datetime.datetime = Wrong  # type: ignore[misc]
