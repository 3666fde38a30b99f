"""One load, as its ranks' reports show it.

In: reports of single ranks. Out: its status, with the ranks that it waits for and why it failed; what the
reports added to the daemon's totals. On the event loop.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from pannier.common import observer_clock, timeouts
from pannier.common.message_json import timestamp
from pannier.common.wait_text import Awaited, waiting_on
from pannier.v1 import load_status_pb2, save_pb2
from pannier.wire.failures import ranks_text

ENTERING: Final = load_status_pb2.LOAD_PHASE_ENTERING
LOADED: Final = load_status_pb2.LOAD_PHASE_LOADED
FAILED: Final = load_status_pb2.LOAD_PHASE_FAILED
_ENDED: Final = (LOADED, FAILED)
_FAILURES: Final = 16
"""Most failures in a status: ranks that fail for one cause have the same message."""
_EVENTS: Final = ("retries", "hedges", "rejected_blocks")


class RankLoad:
    """One rank's call of load."""

    def __init__(self, call: str, rank: int) -> None:
        self.call: Final = call
        self.rank: Final = rank
        self.pid = 0
        self.seen_at = self.reported_at = 0.0
        """When the rank was last seen, and when a report about it last came, on the observer's clock."""
        self._status = load_status_pb2.RankLoadStatus()

    def apply(self, report: load_status_pb2.LoadReport) -> Counter[str]:
        """Takes the next report; returns what it adds to the last one: bytes by source, and events."""
        before = _amounts(self._status)
        self.pid = report.pid or self.pid
        self._status.CopyFrom(report.status)
        self.reported_at = observer_clock.now()
        self.seen_at = self.reported_at - report.status.seconds_since_seen
        return _amounts(self._status) - before

    def fail(self, message: str) -> None:
        """Fails the rank as lost."""
        self._status.phase = FAILED
        self._status.failure = save_pb2.FAILURE_KIND_LOST
        self._status.last_error = message

    @property
    def phase(self) -> int:
        """As last reported."""
        return self._status.phase

    @property
    def ended(self) -> bool:
        """Whether it has loaded, or failed."""
        return self.phase in _ENDED

    @property
    def unseen_s(self) -> float:
        """Seconds since the rank was last seen."""
        return max(0.0, observer_clock.now() - self.seen_at)

    def status(self) -> load_status_pb2.RankLoadStatus:
        """The status as of now."""
        status = load_status_pb2.RankLoadStatus()
        status.CopyFrom(self._status)
        status.seconds_since_seen = self.unseen_s
        if not self.ended:
            status.seconds += status.seconds_since_seen
        return status


class Load:
    """One load.

    Args:
        key: its name for watches, which never changes.
        report: the first one.
        sees_all: reports of the whole group come here, not only those of one host.
    """

    def __init__(self, key: str, report: load_status_pb2.LoadReport, *, sees_all: bool) -> None:
        self.key: Final = key
        self._sees_all = sees_all
        self.group: Final = report.group
        self.load_id = ""
        """Empty: not known yet."""
        self.created_at: Final = time.time() - report.status.seconds
        self.ranks: dict[int, RankLoad] = {}
        """By rank."""
        self.superseded = False
        """One of its ranks has begun another load."""
        self.all_reported = False
        """No host is expected to report further ranks."""
        self.ended_at: float | None = None
        """When it was first seen to have ended, on the monotonic clock."""
        self.group_ranks: tuple[int, ...] = ()
        """Global ranks that load together; empty: not reported."""
        self._about = load_status_pb2.LoadReport()

    def describe(self, report: load_status_pb2.LoadReport) -> None:
        """Takes what a report says about the load as a whole."""
        if report.ranks:
            self.group_ranks = tuple(report.ranks)
        for name in ("job", "checkpoint_id", "attempt"):
            if value := getattr(report, name):
                setattr(self._about, name, value)

    @property
    def id(self) -> str:
        """As the command line takes it: ``load-1f2e3d4c5b6a``."""
        return name_of(self.load_id or self.group)

    @property
    def job(self) -> str:
        """Empty: it has no name."""
        return self._about.job

    @property
    def checkpoint_id(self) -> str:
        """Its directory."""
        return self._about.checkpoint_id

    @property
    def attempt(self) -> str:
        """Empty: not known yet, or Pannier didn't write the checkpoint."""
        return self._about.attempt

    @property
    def state(self) -> "load_status_pb2.LoadState":
        """The state by all ranks that have reported: one failed rank fails the load."""
        phases = {rank.phase for rank in self.ranks.values()}
        if FAILED in phases or (self.superseded and phases != {LOADED}):
            return load_status_pb2.LOAD_STATE_FAILED
        if phases == {LOADED} and not self._awaits_reports:
            return load_status_pb2.LOAD_STATE_LOADED
        return load_status_pb2.LOAD_STATE_LOADING

    @property
    def _awaits_reports(self) -> bool:
        """Whether other hosts may still report ranks of the group."""
        return self._sees_all and not self.all_reported and not {*self.group_ranks} <= {*self.ranks}

    @property
    def unreported_s(self) -> float:
        """Seconds since a report about one of its ranks last came."""
        newest = max((rank.reported_at for rank in self.ranks.values()), default=0.0)
        return observer_clock.now() - newest

    @property
    def ended(self) -> bool:
        """Whether it has loaded, or failed."""
        return self.state != load_status_pb2.LOAD_STATE_LOADING

    @property
    def seconds(self) -> float:
        """Seconds that the load has taken on the slowest rank."""
        return max((rank.status().seconds for rank in self.ranks.values()), default=0.0)

    def status(self, *, ranks: bool = True) -> load_status_pb2.LoadStatus:
        """The status as of now; ``ranks``: with the status of each rank."""
        each = [self.ranks[number].status() for number in sorted(self.ranks)]
        amounts = sum((_amounts(status) for status in each), Counter())
        made = load_status_pb2.LoadStatus(
            id=self.id,
            job=self.job,
            checkpoint_id=self.checkpoint_id,
            attempt=self.attempt,
            state=self.state,
            ranks=each if ranks else (),
            failures=self._failures(each),
            created_at=timestamp(self.created_at),
            seconds=max((status.seconds for status in each), default=0.0),
            group_size=len(self.group_ranks),
            bytes_total=sum(status.bytes_total for status in each),
            bytes_read=sum(source.bytes for status in each for source in status.sources),
            sources=_sum_of_sources(each),
            retries=amounts["retries"],
            hedges=amounts["hedges"],
            rejected_blocks=amounts["rejected_blocks"],
        )
        if not self.ended:
            made.waiting_on.CopyFrom(self._waiting_on(each))
        return made

    def _waiting_on(self, ranks: list[load_status_pb2.RankLoadStatus]) -> save_pb2.WaitingOn:
        """Ranks that were not seen for some time, else what the ranks themselves wait for."""
        late = [
            Awaited(each.rank, each.host, each.seconds_since_seen)
            for each in ranks
            if each.phase not in _ENDED and each.seconds_since_seen > timeouts.UNRESPONSIVE_S
        ]
        if late:
            return waiting_on(late)
        missing = sorted({*self.group_ranks} - {*self.ranks})
        if self._sees_all and missing and all(each.phase == ENTERING for each in ranks):
            # A rank that waits for the missing ones may know their hosts.
            named = next((each.waiting_for for each in ranks if "rank" in each.waiting_for), "")
            text = named or f"{ranks_text(missing)} to call load"
            return save_pb2.WaitingOn(ranks=missing, text=text)
        if missing and self._awaits_reports and all(each.phase == LOADED for each in ranks):
            text = f"{ranks_text(missing)} to be reported"
            return save_pb2.WaitingOn(ranks=missing, text=text)
        text = next((each.waiting_for for each in ranks if each.waiting_for), "")
        return save_pb2.WaitingOn(text=text)

    def _failures(
        self, ranks: Iterable[load_status_pb2.RankLoadStatus]
    ) -> Iterator[save_pb2.Failure]:
        shown: set[str] = set()
        for each in ranks:
            if each.phase != FAILED or each.last_error in shown or len(shown) >= _FAILURES:
                continue
            shown.add(each.last_error)
            kind = each.failure or save_pb2.FAILURE_KIND_CLIENT
            yield save_pb2.Failure(
                rank=each.rank, host=each.host, kind=kind, message=each.last_error
            )
        if self.superseded and not shown and self.state == load_status_pb2.LOAD_STATE_FAILED:
            yield save_pb2.Failure(
                rank=-1,
                kind=save_pb2.FAILURE_KIND_LOST,
                message="one of its ranks has begun another load meanwhile",
            )


def name_of(text: str) -> str:
    """The short name of a load by its id, or by its group while that isn't known."""
    return f"load-{text.replace('-', '')[:12]}"


def _sum_of_sources(
    ranks: Iterable[load_status_pb2.RankLoadStatus],
) -> list[load_status_pb2.LoadSource]:
    """The sources of all ranks together, the largest first."""
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for status in ranks:
        for source in status.sources:
            files[source.source] += source.files
            sizes[source.source] += source.bytes
    return [
        load_status_pb2.LoadSource(source=name, files=files[name], bytes=size)
        for name, size in sizes.most_common()
    ]


def _amounts(status: load_status_pb2.RankLoadStatus) -> Counter[str]:
    """Bytes by ``bytes SOURCE``, and events by name."""
    amounts: Counter[str] = Counter()
    for source in status.sources:
        amounts[f"bytes {source.source}"] += source.bytes
    for name in _EVENTS:
        amounts[name] += getattr(status, name)
    return amounts
