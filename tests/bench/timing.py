"""Clocks and statistics: medians, percentiles, ratios of what was measured in turns."""

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def timed(action: Callable[..., T], *arguments: Any, **named: Any) -> tuple[float, T]:
    """Seconds on the wall clock, and what the action returned."""
    begun = time.perf_counter()
    result = action(*arguments, **named)
    return time.perf_counter() - begun, result


class ThreadCpu:
    """CPU seconds of this process by the names of its threads, from now on until :meth:`stop`."""

    def __init__(self) -> None:
        self._before = _thread_cpu()
        self._begun = time.process_time()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Of all threads, and by name: those that ended meanwhile and those of libraries under one each."""
        whole = time.process_time() - self._begun
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        spent: Counter[str] = Counter()
        for thread, seconds in _thread_cpu().items():
            # Without the numbers of threads of a kind.
            name = re.sub(r"[-_0-9() ]+$", "", names.get(thread, "gRPC's own"))
            spent[name] += seconds - self._before.get(thread, 0.0)
        spent["ended"] = max(0.0, whole - spent.total())
        return whole, dict(spent)


def _thread_cpu() -> dict[int, float]:
    """CPU seconds of each thread so far, by its id in the kernel."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # ended meanwhile
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of all lie below."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@dataclass(frozen=True)
class Ratio:
    """One thing against another, each measured several times, in turns."""

    value: float
    """Median divided by median."""
    low: float
    high: float
    """Smallest and largest ratio of one turn."""

    def __str__(self) -> str:
        return f"{self.value:.2f} × ({self.low:.2f} to {self.high:.2f})"


def ratio(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """Of medians; with the spread over the turns (the n-th of both belong together)."""
    turns = [a / b for a, b in zip(these, those, strict=True)]
    return Ratio(statistics.median(these) / statistics.median(those), min(turns), max(turns))


def milliseconds(value: float) -> str:
    """Seconds as milliseconds, for people."""
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
