"""Prometheus metrics of loads: those that run, how others have ended, and what they read.

In: a daemon's load registry. Out: families with stable names; see :mod:`pannier.daemon.metrics`. On the
event loop.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.v1 import load_status_pb2

_OUTCOMES: Final = {
    "loaded": load_status_pb2.LOAD_STATE_LOADED,
    "failed": load_status_pb2.LOAD_STATE_FAILED,
}
_SOURCES: Final = {"own spool": "own_spool", "bucket": "bucket"}
"""Labels by source; any other source is a host, with the label ``peer``."""
_EVENTS: Final = (
    ("retries", "pannier_load_retries", "Requests of loads that were repeated."),
    (
        "hedges",
        "pannier_load_hedges",
        "Requests of loads that were made a second time, elsewhere if possible, since the first took long.",
    ),
    (
        "rejected_blocks",
        "pannier_load_rejected_blocks",
        "Blocks whose checksum was wrong: loads read them from the next place.",
    ),
)
_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)


def observe_seconds(loads: LoadRegistry, registry: CollectorRegistry) -> None:
    """Registers a histogram of the durations of loads, which ``loads`` fills."""
    loads.seconds = Histogram(
        "pannier_load_seconds",
        "Seconds from the first rank's call of load until the slowest rank had loaded.",
        buckets=_SECONDS,
        registry=registry,
    )


def load_families(loads: LoadRegistry) -> Iterable[Metric]:
    """Loads that run, and how others have ended."""
    yield GaugeMetricFamily("pannier_loads", "Loads that run.", loads.running)
    ended = CounterMetricFamily(
        "pannier_loads_ended", "Ended loads, by outcome.", labels=["outcome"]
    )
    for outcome, state in _OUTCOMES.items():
        ended.add_metric([outcome], loads.ended[state])
    yield ended


def read_families(loads: LoadRegistry) -> Iterable[Metric]:
    """What loads of this host's ranks have read."""
    sizes: Counter[str] = Counter(dict.fromkeys((*_SOURCES.values(), "peer"), 0))
    for name, size in loads.totals.items():
        kind, _, source = name.partition(" ")
        if kind == "bytes":
            sizes[_SOURCES.get(source, "peer")] += size
    read = CounterMetricFamily(
        "pannier_load_bytes",
        "Bytes that loads of this host's ranks have read, by where they came from.",
        labels=["source"],
    )
    for source, size in sizes.items():
        read.add_metric([source], size)
    yield read
    for event, name, help in _EVENTS:
        yield CounterMetricFamily(name, help, loads.totals[event])
