"""Prometheus metrics of both daemons: families with stable names.

In: functions that return current values, called at each scrape, and counts of ended saves
(:class:`SaveCounts`). Out: the response of ``/metrics``. The training job is the label
``training_job``, since ``job`` is Prometheus' own. Names and labels are a contract: the alerts and the
dashboard in deploy/ use them. Called by any thread.
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

from pannier.common.message_json import seconds_of
from pannier.common.wait_text import wait_word
from pannier.daemon.http_server import Request, Response
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.storage import io_threads
from pannier.v1 import save_pb2
from pannier.wire.errors import kind_name
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
"""Upper bounds of the buckets for a save's phases."""


@dataclass(frozen=True)
class ActiveSaves:
    """Undecided saves at the time of a scrape."""

    states: Mapping[int, int]
    """Their number by ``SaveState``."""
    oldest_s: float = 0.0
    """Seconds since the oldest began."""


@dataclass
class _Job:
    since: float
    """Unix time of its first save here."""
    committed: float | None = None
    """Unix time of its last commit."""
    step: int | None = None
    bytes: int = 0


class SaveCounts:
    """Counts of ended saves since the daemon started. Thread-safe.

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
            "Seconds from a committed save's first message until all its ranks had completed the phase.",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )

    def began(self, job: str, created_at: float) -> None:
        """Records a new save; ``created_at`` is Unix time."""
        with self._lock:
            self._job(job, created_at)

    def ended(self, save: save_pb2.SaveStatus) -> None:
        """Records the status, without ranks, of an ended save; called once each."""
        with self._lock:
            self._ended[save.state] += 1
            self._failures.update(failure.kind for failure in save.failures)
            if save.state != save_pb2.SAVE_STATE_COMMITTED:
                return
            job = self._job(save.save.job, seconds_of(save.created_at))
            job.bytes += save.bytes_total
            at = seconds_of(save.created_at) + save.committed_s
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
        """The metric families."""
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
            "Number at the end of the last committed checkpoint id.",
            labels=[_JOB],
        )
        at = GaugeMetricFamily(
            "pannier_last_commit_timestamp_seconds",
            "Unix time of the last commit since the coordinator started.",
            labels=[_JOB],
        )
        age = GaugeMetricFamily(
            "pannier_last_commit_age_seconds",
            "Seconds since the last commit; before the first one since the coordinator started, since the job's first save.",
            labels=[_JOB],
        )
        sizes = CounterMetricFamily(
            "pannier_committed_bytes",
            "Bytes of committed checkpoints.",
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
    # Longer numbers are dates or hashes, which a metric's float can't represent exactly.
    return int(digits) if 0 < len(digits) <= 15 else None


def saves_ended(ended: Mapping[int, int]) -> Metric:
    """Ended saves by outcome; ``ended`` is by ``SaveState``."""
    family = CounterMetricFamily(
        "pannier_saves_ended", "Ended saves, by outcome.", labels=["outcome"]
    )
    for state in _ENDED:
        family.add_metric([state_word(state)], ended.get(state, 0))
    return family


def failures_total(failures: Mapping[int, int]) -> Metric:
    """Failures by cause; ``failures`` is by ``FailureKind``."""
    family = CounterMetricFamily(
        "pannier_failures",
        "Ranks that failed in a save, by cause; one per save that failed as a whole.",
        labels=["cause"],
    )
    for kind in save_pb2.FailureKind.values():
        if kind != save_pb2.FAILURE_KIND_UNSPECIFIED:
            family.add_metric([kind_name(kind).lower()], failures.get(kind, 0))
    return family


def saves_under_way(under: ActiveSaves) -> Iterable[Metric]:
    """Undecided saves by state, and the age of the oldest."""
    family = GaugeMetricFamily("pannier_saves", "Undecided saves, by state.", labels=["state"])
    for state in UNDER_WAY:
        family.add_metric([state_word(state)], under.states.get(state, 0))
    yield family
    yield GaugeMetricFamily(
        "pannier_oldest_save_age_seconds",
        "Seconds since the oldest undecided save began; 0 without one.",
        under.oldest_s,
    )


def ranks_waiting(waits: Iterable[save_pb2.TrainingWait]) -> Metric:
    """Ranks whose training loop stands still, by reason."""
    family = GaugeMetricFamily(
        "pannier_ranks_waiting",
        "Ranks whose training loop a call of Pannier has kept waiting for more than 2 s, by reason.",
        labels=["reason"],
    )
    ranks = Counter({reason: 0 for reason in save_pb2.WaitReason.values() if reason})
    for wait in waits:
        ranks[wait.reason] += wait.ranks
    for reason, count in ranks.items():
        family.add_metric([wait_word(reason)], count)
    return family


def state_word(state: int) -> str:
    """``in_doubt`` of ``SAVE_STATE_IN_DOUBT``."""
    return save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_").lower()


def backlog_families(backlog: Backlog) -> Iterable[Metric]:
    """A sidecar's uploads and its spool."""
    for name, help, value in (
        (
            "pannier_queue_bytes",
            "Bytes of undecided saves that are in the spool and not yet durable.",
            backlog.bytes_queued,
        ),
        (
            "pannier_oldest_upload_age_seconds",
            "Seconds since the first byte of the oldest data file that isn't durable; 0 without one.",
            backlog.oldest_s,
        ),
        (
            "pannier_spool_reserved_bytes",
            "Reserved space of the spool, in bytes: all that Pannier holds on this host.",
            backlog.spool_bytes,
        ),
        (
            "pannier_spool_leased_bytes",
            "Reserved bytes that trainers have mapped and stage into.",
            backlog.leased_bytes,
        ),
        (
            "pannier_spool_held_bytes",
            "Reserved bytes that were released, but are still mapped by a stopped process.",
            backlog.held_bytes,
        ),
        (
            "pannier_spool_saves_bytes",
            "Reserved bytes that hold data files of saves.",
            backlog.saves_bytes,
        ),
        (
            "pannier_spool_capacity_bytes",
            "Most bytes the spool can hold: by its budget, its file system, or the memory limit.",
            backlog.capacity_bytes,
        ),
        (
            "pannier_spool_free_bytes",
            "Bytes of the spool that are free for saves.",
            backlog.free_bytes,
        ),
        (
            "pannier_spool_local_copies_bytes",
            "Bytes of committed checkpoints that are still in the spool: loads on this host read them there.",
            sum(each.bytes for each in backlog.local_copies),
        ),
        (
            "pannier_spool_replicas_bytes",
            "Bytes of other hosts' ranks in the spool, of saves that haven't ended.",
            backlog.replicas_bytes,
        ),
        (
            "pannier_fetched_blocks_bytes",
            "Bytes of checkpoints' blocks that are kept in memory for loads, within --restore-budget.",
            backlog.blocks_bytes,
        ),
        (
            "pannier_upload_limit_bytes_per_second",
            "Most bytes per second of uploads, --upload-limit; 0 without a limit.",
            backlog.upload_limit,
        ),
    ):
        yield GaugeMetricFamily(name, help, value)
    yield CounterMetricFamily(
        "pannier_spool_refusals",
        "Requests for room in the spool that were refused; trainers repeat theirs while they wait.",
        backlog.refusals,
    )
    yield CounterMetricFamily(
        "pannier_local_copies_served_bytes",
        "Bytes of data files in the spool that loads have opened there.",
        backlog.local_copies_served,
    )
    yield CounterMetricFamily(
        "pannier_local_copies_evicted",
        "Checkpoints that were dropped from the spool for lack of room: loads read them from storage.",
        backlog.local_copies_evicted,
    )
    yield CounterMetricFamily(
        "pannier_fetched_blocks_evicted",
        "Blocks that loads may have to fetch again, since --restore-budget had no room for them any longer.",
        backlog.blocks_evicted,
    )
    yield CounterMetricFamily(
        "pannier_peers_sent_bytes",
        "Bytes of blocks that loads of other hosts have read from this one.",
        backlog.peers_sent,
    )
    yield CounterMetricFamily(
        "pannier_replicas_sent_bytes",
        "Bytes of this host's ranks that were sent to the spool of another host.",
        backlog.replicas_sent,
    )
    yield CounterMetricFamily(
        "pannier_replicas_refused",
        "Replicas of other hosts' ranks that the spool had no room for, from the first byte or once it was needed.",
        backlog.replicas_refused,
    )
    yield CounterMetricFamily(
        "pannier_upload_limited_seconds",
        "Seconds in which uploads have waited for --upload-limit.",
        backlog.upload_limited_s,
    )


class _Families(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """None, so that registering collects nothing."""
        return ()


class Metrics:
    """The metrics of one daemon."""

    def __init__(self, daemon: str, daemon_info: DaemonInfo, *, own: bool = True) -> None:
        """``daemon`` is ``sidecar`` or ``coordinator``; without ``own``, there are only those of :meth:`add`."""
        # Their creation times add nothing to what Prometheus records.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._daemon = daemon
        self._daemon_info = daemon_info
        if own:
            ProcessCollector(registry=self.registry)
            self.add(self._own)

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Calls ``collect`` at each scrape, in any thread."""
        self.registry.register(_Families(collect))

    def respond(self, request: Request) -> Response:
        """The route ``/metrics``, in the format that the scraper accepts."""
        encode, content_type = choose_encoder(request.accept)
        return Response(encode(self.registry), content_type)

    def _own(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "pannier_build_info",
            "1; the labels are the daemon, its version and its host.",
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
            "Blocking storage calls that were abandoned and have not returned.",
            io_threads.abandoned(),
        )
