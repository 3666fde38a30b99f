"""Where the bytes of a load come from: each file from the nearest place that has it.

In: ranges of data files. Out: their bytes, from this host's spool where the file is there, else from
storage; how many came from where. A file that can't be used in the spool is read from storage from then
on. Blocking; thread-safe; for one load of one rank.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from pannier.client.interrupts import shielded
from pannier.client.restore.local_file import LocalFile
from pannier.common.sizes import size_text
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

OWN_SPOOL: Final = "own spool"
BUCKET: Final = "bucket"
_NEAREST_FIRST: Final = (OWN_SPOOL, BUCKET)


@dataclass(frozen=True)
class LoadResult:
    """What a load has read, on all its ranks together."""

    checkpoint_id: str
    files: Mapping[str, int]
    """Data files by source, ``own spool`` or ``bucket``: once for each rank that read one, and by the
    farthest place that the rank read it from."""
    bytes: Mapping[str, int]
    """Bytes by source."""
    seconds: float
    """From the call to its end, on the slowest rank."""
    slowest_rank: int
    """Global rank."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(self.bytes.values())

    @property
    def files_text(self) -> str:
        """``812 files: 760 own spool, 52 bucket``."""
        by_source = [
            f"{self.files[each]} {each}" for each in _NEAREST_FIRST if self.files.get(each)
        ]
        total = sum(self.files.values())
        return f"{total} file{'s' if total != 1 else ''}: {', '.join(by_source) or 'none needed'}"

    def __str__(self) -> str:
        rate = size_text(int(self.total_bytes / max(self.seconds, 1e-3)))
        return f"LoadResult: {self.files_text}; {rate}/s"


@dataclass
class ReadCounts:
    """What one rank has read."""

    files: Counter[str] = field(default_factory=Counter)
    """By source."""
    bytes: Counter[str] = field(default_factory=Counter)
    """By source."""
    seconds: float = 0.0
    """Of the whole load, on this rank."""


class RangeSource(Protocol):
    """Reads the files of a checkpoint. Thread-safe."""

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises StorageError."""


class Sources:
    """Reads the data files of one checkpoint.

    Args:
        storage: the checkpoint in storage.
        url: its directory, for messages.
        local: those of its files that are in this host's spool.
    """

    def __init__(self, storage: RangeSource, url: str, local: Mapping[str, LocalFile]) -> None:
        self._storage = storage
        self._url = url
        self._lock = threading.Lock()
        self._local = dict(local)
        self._source_of: dict[str, str] = {}
        self._bytes: Counter[str] = Counter()

    @shielded
    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises as reading from storage does."""
        local = self._local.get(name)
        if local is not None and self._read_local(local, name, offset, target):
            return
        self._storage.read_into(name, offset, target)
        self._count(BUCKET, name, len(target))

    def counts(self) -> ReadCounts:
        """What was read so far."""
        with self._lock:
            return ReadCounts(Counter(self._source_of.values()), Counter(self._bytes))

    def close(self) -> None:
        """Lets go of the files in the spool, which the sidecar may use again then."""
        with self._lock:
            self._local.clear()

    def _read_local(self, local: LocalFile, name: str, offset: int, target: memoryview) -> bool:
        try:
            local.read_into(offset, target)
        except (IntegrityError, OSError) as error:
            with self._lock:
                first = self._local.pop(name, None) is not None
            if first:
                _log.warning(
                    "%s/%s is read from storage, not from this host's spool: %s",
                    *(self._url, name, error),
                )
            return False
        self._count(OWN_SPOOL, name, len(target))
        return True

    def _count(self, source: str, name: str, size: int) -> None:
        with self._lock:
            self._bytes[source] += size
            if source == BUCKET or name not in self._source_of:
                self._source_of[name] = source


def combine(checkpoint_id: str, counts: Mapping[int, ReadCounts]) -> LoadResult:
    """The result of a load from what each rank has read, by global rank."""
    slowest = max(counts, key=lambda rank: counts[rank].seconds)
    return LoadResult(
        checkpoint_id=checkpoint_id,
        files=dict(sum((each.files for each in counts.values()), Counter())),
        bytes=dict(sum((each.bytes for each in counts.values()), Counter())),
        seconds=counts[slowest].seconds,
        slowest_rank=slowest,
    )
