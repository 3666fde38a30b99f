"""How far one rank's load is: counted while it reads, for its result and for operators.

In: what the load does, from any of its threads. Out: counts, and a report of them all. Costs a lock per
request that is read. Thread-safe; for one call of load.
"""

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from pannier.client.restore.load_result import BUCKET, OWN_SPOOL, Keys, ReadCounts
from pannier.common import timeouts
from pannier.common.units import size_text
from pannier.v1 import load_status_pb2
from pannier.wire.failures import cut_text

ENTERING: Final = load_status_pb2.LOAD_PHASE_ENTERING
RESOLVING: Final = load_status_pb2.LOAD_PHASE_RESOLVING
PLANNING: Final = load_status_pb2.LOAD_PHASE_PLANNING
READING: Final = load_status_pb2.LOAD_PHASE_READING
FINISHING: Final = load_status_pb2.LOAD_PHASE_FINISHING
LOADED: Final = load_status_pb2.LOAD_PHASE_LOADED
FAILED: Final = load_status_pb2.LOAD_PHASE_FAILED

_ERROR: Final = 2000
"""Characters of an error that are reported."""


class LoadProgress:
    """See the module.

    Args:
        rank: this process's global rank.
        ranks: sorted global ranks that load together.
        checkpoint_id: as given; :meth:`describe` replaces it.
    """

    def __init__(
        self, rank: int = 0, ranks: Sequence[int] = (0,), *, checkpoint_id: str = ""
    ) -> None:
        self.call: Final = secrets.token_hex(8)
        """Identifies this call on this rank."""
        self.ranks: Final = tuple(ranks)
        self._rank = rank
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ended: float | None = None
        self._about = {"checkpoint_id": checkpoint_id}
        """Fields of the report about the load as a whole."""
        self.unread = Keys()
        """See :class:`pannier.client.restore.load_result.LoadResult`; on the first rank."""
        self.cast = Keys()
        """Of this rank's state."""
        self._phase: load_status_pb2.LoadPhase = ENTERING
        self._sizes: Mapping[str, int] = {}
        """Bytes that the plan needs, by file."""
        self._read: Counter[str] = Counter()
        """Bytes that were read, by file."""
        self._requests: dict[object, tuple[str, float]] = {}
        """Source and start time of each request under way; the oldest first."""
        self._source_of: dict[str, str] = {}
        """By file: the farthest place that it was read from."""
        self._bytes: Counter[str] = Counter()
        """By source."""
        self._events: Counter[str] = Counter()
        """By field of the report."""
        self._waits: list[Callable[[], str]] = []
        self._error = ""

    # What was read.

    def add_read(self, source: str, file: str, size: int) -> None:
        """``size`` bytes of a file came from a source: the own spool, a host, or the bucket."""
        with self._lock:
            self._bytes[source] += size
            self._read[file] += size
            if _distance(source) >= _distance(self._source_of.get(file, "")):
                self._source_of[file] = source

    def add_retry(self) -> None:
        """A request is repeated."""
        self._add("retries")

    def add_hedge(self) -> None:
        """A request is made a second time, elsewhere if possible, since the first takes long."""
        self._add("hedges")

    def add_rejected(self) -> None:
        """A block had a wrong checksum."""
        self._add("rejected_blocks")

    def add_fetched(self, *, retries: int, hedges: int, rejected: int) -> None:
        """Adds the events that a sidecar counted while it fetched a block."""
        with self._lock:
            for name, count in (
                ("retries", retries),
                ("hedges", hedges),
                ("rejected_blocks", rejected),
            ):
                self._events[name] += count

    def counts(self) -> ReadCounts:
        """What was read so far."""
        with self._lock:
            return ReadCounts(
                Counter(self._source_of.values()),
                Counter(self._bytes),
                unread=self.unread,
                cast=self.cast,
            )

    def text(self) -> str:
        """``1.2 GiB of 4.0 GiB read``; empty before it reads."""
        with self._lock:
            done, total = self._bytes.total(), sum(self._sizes.values())
        return f"{size_text(done)} of {size_text(total)} read" if done else ""

    @contextmanager
    def requesting(self, source: str) -> Iterator[None]:
        """In this block a request to ``source`` is under way."""
        request = object()
        with self._lock:
            self._requests[request] = source, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._requests[request]

    def stalled_on(self) -> str:
        """What a slow request waits for: ``node-3 (4 of 812 files, 1.2 GiB left)``; empty: none is slow."""
        with self._lock:
            source, since = next(iter(self._requests.values()), ("", 0.0))
            if not source or time.monotonic() - since < timeouts.WAIT_WARNING_S:
                return ""
            left = {
                name: size - self._read[name]
                for name, size in self._sizes.items()
                if size > self._read[name]
            }
            files = f"{len(left)} of {len(self._sizes)} file{'s' if len(self._sizes) != 1 else ''}"
        return f"{source} ({files}, {size_text(sum(left.values()))} left)"

    # What it does.

    def describe(self, **about: str) -> None:
        """Records what is now known of the load: ``load`` (its id), ``checkpoint_id``, ``attempt``."""
        with self._lock:
            self._about.update(about)

    def begin(self, phase: "load_status_pb2.LoadPhase") -> None:
        """A phase begins."""
        with self._lock:
            self._phase = phase

    def expect(self, sizes: Mapping[str, int]) -> None:
        """The plan needs about so many bytes of each of these data files."""
        with self._lock:
            self._sizes = sizes

    def settle(self) -> None:
        """Everything was read: the expected sizes become the bytes read, which include gaps."""
        with self._lock:
            self._sizes = dict(self._read)

    @contextmanager
    def waiting(self, reason: Callable[[], str]) -> Iterator[None]:
        """In this block the load waits for what ``reason`` returns, as ``rank 3 (host node-2)``."""
        with self._lock:
            self._waits.append(reason)
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(reason)

    def end(self, error: BaseException | None = None) -> None:
        """The load has ended, or failed with ``error``."""
        with self._lock:
            self._phase = FAILED if error is not None else LOADED
            self._ended = time.monotonic()
            if error is not None:
                self._error = cut_text(str(error) or type(error).__name__, _ERROR)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._ended is not None

    # What is reported.

    def report(self) -> load_status_pb2.LoadReport:
        """The current report."""
        waits = self._waits[-1:]
        # Outside the lock: it may take others.
        waiting_for = waits[0]() if waits else self.stalled_on()
        with self._lock:
            files = Counter(self._source_of.values())
            status = load_status_pb2.RankLoadStatus(
                rank=self._rank,
                host=socket.gethostname(),
                phase=self._phase,
                bytes_total=sum(self._sizes.values()),
                sources=[
                    load_status_pb2.LoadSource(source=each, files=files[each], bytes=size)
                    for each, size in self._bytes.items()
                ],
                waiting_for=waiting_for if self._ended is None else "",
                last_error=self._error,
                seconds=(self._ended or time.monotonic()) - self._began,
                retries=self._events["retries"],
                hedges=self._events["hedges"],
                rejected_blocks=self._events["rejected_blocks"],
            )
            return load_status_pb2.LoadReport(
                call=self.call, ranks=self.ranks, status=status, pid=os.getpid(), **self._about
            )

    def _add(self, event: str) -> None:
        with self._lock:
            self._events[event] += 1


def _distance(source: str) -> int:
    """How far a source is; a host is between the own spool and the bucket."""
    return {"": 0, OWN_SPOOL: 1, BUCKET: 3}.get(source, 2)
