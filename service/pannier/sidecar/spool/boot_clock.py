"""Deadlines in the journal: the time that a save has left, across restarts of the sidecar.

In: a rank's deadline on the monotonic clock, which is meaningless in another process. Out: the seconds
left, with the boot and the time since that boot when they were recorded (CLOCK_BOOTTIME, which
counts while the machine sleeps). After another boot, or on another host, the time that has passed is
unknown: the recorded seconds count from the sidecar's start. Thread-safe.
"""

import time
from functools import cache
from pathlib import Path
from typing import Final

from pannier.v1 import journal_pb2
from pannier.wire import limits

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LEAST_S: Final = 0.001
"""Stands for a remaining time that is over; 0 means that the deadline isn't known."""


@cache
def boot_id() -> str:
    """The kernel's random id of this boot; empty where it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def boot_time_s() -> float:
    """Seconds since this boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note(begun: journal_pb2.PartBegun, deadline: float) -> None:
    """Records the seconds until ``deadline`` (monotonic clock; 0: not known)."""
    if deadline:
        begun.save_timeout_s = max(_LEAST_S, deadline - time.monotonic())
        begun.boot_id, begun.boot_time_s = boot_id(), boot_time_s()


def copy(source: journal_pb2.PartBegun, target: journal_pb2.PartBegun) -> None:
    """Copies a deadline from a later record; the first one may have come before it was known."""
    if source.save_timeout_s:
        target.save_timeout_s = source.save_timeout_s
        target.boot_id, target.boot_time_s = source.boot_id, source.boot_time_s


def adopt(begun: journal_pb2.PartBegun) -> None:
    """Makes the seconds recorded in an earlier boot, or on another host, count from now."""
    if begun.save_timeout_s and (not boot_id() or begun.boot_id != boot_id()):
        begun.boot_id, begun.boot_time_s = boot_id(), boot_time_s()


def remaining(begun: journal_pb2.PartBegun) -> float:
    """Seconds left now, of a record of this boot; 0: not known."""
    if not 0 < begun.save_timeout_s <= limits.MAX_TIMEOUT_S:
        return 0.0
    passed = max(0.0, boot_time_s() - begun.boot_time_s)
    return max(_LEAST_S, begun.save_timeout_s - passed)
