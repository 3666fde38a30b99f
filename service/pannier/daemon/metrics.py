"""What Prometheus is told: the figures of both daemons as metric families with stable names.

In: functions that give the figures of this moment, asked at each scrape, and counts of what has
ended (:class:`SaveCounts`). Out: an answer for ``/metrics``. The training job is the label
``training_job``: ``job`` is Prometheus' own. Names and labels are a contract; deploy/alerts and
deploy/grafana are written to it.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pannier.daemon.http_server import Request, Response
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.storage import io_threads
from pannier.v1 import save_pb2
from pannier.wire.failures import kind_name
from pannier.wire.version import package_version

UNDER_WAY: Final = (
    save_pb2.SAVE_STATE_PLANNING,
    save_pb2.SAVE_STATE_STAGING,
    save_pb2.SAVE_STATE_INGESTED,
    save_pb2.SAVE_STATE_UPLOADING,
    save_pb2.SAVE_STATE_IN_DOUBT,
)
_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_JOBS_KEPT: Final = 256
_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
"""Upper bounds of what a save's phases take."""


@dataclass(frozen=True)
class ActiveSaves:
    """Saves under way, at one moment."""

    states: Mapping[int, int]
    """How many there are, by ``SaveState``."""
    oldest_s: float = 0.0
    """Since the oldest began."""


@dataclass
class _Job:
    since: float
    """Unix time of its first save here."""
    committed: float | None = None
    """Unix time of its last commit."""
    step: int | None = None
    bytes: int = 0


class SaveCounts:
    """What has happened so far, in this life of the daemon. Thread-safe.

    Args:
        registry: gets the histogram of phases.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._ended: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._phases = Histogram(
            "pannier_save_phase_seconds",
            "Seconds from a committed save's first message until all its ranks had come so far.",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )

    def began(self, job: str, created_at: float) -> None:
        """A save was heard of for the first time; ``created_at`` is Unix time."""
        with self._lock:
            self._job(job, created_at)

    def ended(self, save: save_pb2.SaveStatus) -> None:
        """A save has ended, as its status without ranks tells; once each."""
        with self._lock:
            self._ended[save.state] += 1
            self._failures.update(failure.kind for failure in save.failures)
            if save.state != save_pb2.SAVE_STATE_COMMITTED:
                return
            job = self._job(save.save.job, save.created_at)
            job.bytes += save.bytes_total
            at = save.created_at + save.committed_s
            if job.committed is None or at >= job.committed:
                job.committed, job.step = at, step_of(save.checkpoint_id)
        for phase, seconds in (
            ("planned", save.planned_s),
            ("ingested", save.ingested_s),
            ("durable", save.durable_s),
            ("committed", save.committed_s),
        ):
            if seconds:
                self._phases.labels(phase).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """The families."""
        now = time.time()
        with self._lock:
            ended, failures = self._ended.copy(), self._failures.copy()
            jobs = {
                name: _Job(j.since, j.committed, j.step, j.bytes) for name, j in self._jobs.items()
            }
        yield saves_ended(ended)
        yield failures_total(failures)
        step = GaugeMetricFamily(
            "pannier_last_committed_step",
            "Number at the end of the checkpoint id that was committed last.",
            labels=[_JOB],
        )
        at = GaugeMetricFamily(
            "pannier_last_commit_timestamp_seconds",
            "Unix time of the last commit, in this life of the coordinator.",
            labels=[_JOB],
        )
        age = GaugeMetricFamily(
            "pannier_last_commit_age_seconds",
            "Seconds since the last commit; before the first one here, since the job's first save.",
            labels=[_JOB],
        )
        sizes = CounterMetricFamily(
            "pannier_committed_bytes",
            "Bytes of the checkpoints that were committed.",
            labels=[_JOB],
        )
        for name, job in jobs.items():
            if job.step is not None:
                step.add_metric([name], job.step)
            if job.committed is not None:
                at.add_metric([name], job.committed)
            age.add_metric([name], max(0.0, now - (job.committed or job.since)))
            sizes.add_metric([name], job.bytes)
        yield from (step, at, age, sizes)

    def _job(self, name: str, since: float) -> _Job:
        job = self._jobs.setdefault(name, _Job(since))
        self._jobs.move_to_end(name)
        while len(self._jobs) > _JOBS_KEPT:
            self._jobs.popitem(last=False)
        return job


_JOB: Final = "training_job"


def step_of(checkpoint_id: str) -> int | None:
    """1000 of ``gs://bucket/run/step-1000``; None without a number at the end."""
    name = checkpoint_id.rstrip("/")
    digits = name[len(name.rstrip("0123456789")) :]
    # Longer ones are dates or hashes, which a metric's float couldn't tell apart.
    return int(digits) if 0 < len(digits) <= 15 else None


def saves_ended(ended: Mapping[int, int]) -> Metric:
    """By outcome; ``ended`` is by ``SaveState``."""
    family = CounterMetricFamily(
        "pannier_saves_ended", "Saves that have ended, by outcome.", labels=["outcome"]
    )
    for state in _ENDED:
        family.add_metric([state_word(state)], ended.get(state, 0))
    return family


def failures_total(failures: Mapping[int, int]) -> Metric:
    """By cause; ``failures`` is by ``FailureKind``."""
    family = CounterMetricFamily(
        "pannier_failures",
        "Ranks that failed in a save, by cause; one for the whole save where no rank is to blame.",
        labels=["cause"],
    )
    for kind in save_pb2.FailureKind.values():
        if kind != save_pb2.FAILURE_KIND_UNSPECIFIED:
            family.add_metric([kind_name(kind).lower()], failures.get(kind, 0))
    return family


def saves_under_way(under: ActiveSaves) -> Iterable[Metric]:
    """By state, and how old the oldest is."""
    family = GaugeMetricFamily("pannier_saves", "Saves under way, by state.", labels=["state"])
    for state in UNDER_WAY:
        family.add_metric([state_word(state)], under.states.get(state, 0))
    yield family
    yield GaugeMetricFamily(
        "pannier_oldest_save_age_seconds",
        "Seconds since the oldest save under way began; 0 without one.",
        under.oldest_s,
    )


def state_word(state: int) -> str:
    """``in_doubt`` of ``SAVE_STATE_IN_DOUBT``."""
    return save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_").lower()


def backlog_families(backlog: Backlog) -> Iterable[Metric]:
    """Of a sidecar: what waits for storage, and its spool."""
    for name, help, value in (
        (
            "pannier_queue_bytes",
            "Bytes in the spool of undecided saves that storage doesn't hold yet.",
            backlog.bytes_queued,
        ),
        (
            "pannier_oldest_upload_age_seconds",
            "Seconds since the oldest data file that isn't durable began to fill; 0 without one.",
            backlog.oldest_s,
        ),
        (
            "pannier_spool_reserved_bytes",
            "Reserved space of the spool: all that Pannier holds on this host.",
            backlog.spool_bytes,
        ),
        (
            "pannier_spool_lent_bytes",
            "Of the reserved space: lent to trainers, which stage into it.",
            backlog.lent_bytes,
        ),
        (
            "pannier_spool_held_bytes",
            "Of the reserved space: given up, but held by a process that is stopped.",
            backlog.held_bytes,
        ),
        (
            "pannier_spool_saves_bytes",
            "Of the reserved space: holds data files of saves.",
            backlog.saves_bytes,
        ),
        (
            "pannier_spool_capacity_bytes",
            "Most bytes the spool can have: its budget, or what its file system has.",
            backlog.capacity_bytes,
        ),
        (
            "pannier_spool_free_bytes",
            "Bytes of the spool that saves could still take.",
            backlog.free_bytes,
        ),
    ):
        yield GaugeMetricFamily(name, help, value)


class _Families(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Without: nothing is asked before the first scrape."""
        return ()


class Metrics:
    """All that one daemon tells."""

    def __init__(self, daemon: str, daemon_info: DaemonInfo) -> None:
        """``daemon`` is ``sidecar`` or ``coordinator``."""
        # Of this process: they tell nothing that Prometheus doesn't know.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._daemon = daemon
        self._daemon_info = daemon_info
        ProcessCollector(registry=self.registry)
        self.add(self._own)

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Asks ``collect`` at each scrape, in any thread."""
        self.registry.register(_Families(collect))

    def answer(self, request: Request) -> Response:
        """The route of ``/metrics``, in the format that the scraper accepts."""
        encode, content_type = choose_encoder(request.accept)
        return Response(encode(self.registry), content_type)

    def _own(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "pannier_build_info",
            "1; the labels say which daemon this is.",
            labels=["daemon", "version", "host"],
        )
        build.add_metric([self._daemon, package_version(), self._daemon_info.host], 1)
        yield build
        yield GaugeMetricFamily(
            "pannier_draining",
            "1 when no new saves are taken, else 0.",
            int(self._daemon_info.draining),
        )
        yield GaugeMetricFamily(
            "pannier_storage_abandoned_threads",
            "Blocking calls to storage that were abandoned and have not returned.",
            io_threads.abandoned(),
        )
