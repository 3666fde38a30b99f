"""Clocks and statistics: medians, percentiles, ratios of what was measured in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def timed(action: Callable[..., T], *arguments: Any, **named: Any) -> tuple[float, T]:
    """Seconds on the wall clock, and what the action returned."""
    begun = time.perf_counter()
    result = action(*arguments, **named)
    return time.perf_counter() - begun, result


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
