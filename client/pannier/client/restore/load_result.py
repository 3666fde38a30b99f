"""What a load has read, and where from: counted by each rank, and put together for the caller. Pure."""

import builtins
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from pannier.common.units import size_text

OWN_SPOOL: Final = "own spool"
BUCKET: Final = "bucket"


@dataclass(frozen=True)
class Keys:
    """Some keys of a state dict."""

    count: int = 0
    first: tuple[str, ...] = ()
    """The first few, sorted."""

    def __str__(self) -> str:
        more = self.count - len(self.first)
        shown = ", ".join(map(repr, self.first)) + (f" and {more} more" if more else "")
        return f"{self.count} key{'s' if self.count != 1 else ''}" + (f": {shown}" if shown else "")


NO_KEYS: Final = Keys()
_count: Final = attrgetter("count")


@dataclass(frozen=True)
class LoadResult:
    """What a load has read, on all its ranks together."""

    checkpoint_id: str
    files: Mapping[str, int]
    """Number of data files by source: ``own spool``, the name of a host, or ``bucket``. A file counts once
    for each rank that read it, under the farthest source that the rank read it from. A rank's own host is the
    source of what its sidecar had fetched for another rank."""
    bytes: Mapping[str, int]
    """Bytes by source."""
    seconds: float
    """From the call to its end, on the slowest rank."""
    slowest_rank: int
    """Global rank."""
    slowest_host: str = ""
    """Its host; "": one rank loaded alone."""
    attempt: str = ""
    """Which save to this id was read; "": Pannier didn't write it."""
    extra_files: Mapping[str, builtins.bytes] = field(default_factory=dict, repr=False)
    """Those that this rank has asked for, by name."""
    unread: Keys = NO_KEYS
    """Keys of the checkpoint that no rank's state has."""
    cast: Keys = NO_KEYS
    """Tensors that were read into a dtype that can't hold all values of the stored one."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(self.bytes.values())

    @property
    def files_text(self) -> str:
        """``812 files of all ranks: 760 own host's spool, 48 node-3, 4 storage``; ``18 files: 18 own spool``.

        They are sums over the ranks: a host that is named has sent files to the ranks of others.
        """
        words = {BUCKET: "storage"}
        if hosts := self.files.keys() - {OWN_SPOOL, BUCKET}:
            words[OWN_SPOOL] = "own host's spool"
        by_source = [
            f"{self.files[each]} {words.get(each, each)}"
            for each in _shown(self.files)
            if self.files[each]
        ]
        total = sum(self.files.values())
        files = f"{total} file{'s' if total != 1 else ''}{' of all ranks' if hosts else ''}"
        return f"{files}: {', '.join(by_source) or 'none needed'}"

    def __str__(self) -> str:
        rate = size_text(int(self.total_bytes / max(self.seconds, 1e-3)))
        slowest = f"; slowest {self.slowest_text}" if self.slowest_host else ""
        return f"LoadResult: {self.files_text}; {rate}/s{slowest}"

    @property
    def slowest_text(self) -> str:
        """``rank 12 (node-1)``."""
        host = f" ({self.slowest_host})" if self.slowest_host else ""
        return f"rank {self.slowest_rank}{host}"


@dataclass
class ReadCounts:
    """What one rank has read."""

    files: dict[str, int] = field(default_factory=Counter)
    """By source."""
    bytes: dict[str, int] = field(default_factory=Counter)
    """By source."""
    seconds: float = 0.0
    """Of the whole load, on this rank."""
    host: str = ""
    """Name of the rank's host."""
    unread: Keys = NO_KEYS
    """See :class:`LoadResult`; from the first rank alone, which has the plans of all."""
    cast: Keys = NO_KEYS
    """Of this rank's state."""


def combine(checkpoint_id: str, counts: Mapping[int, ReadCounts]) -> LoadResult:
    """The result of a load from what each rank has read, by global rank."""
    slowest = max(counts, key=lambda rank: counts[rank].seconds)
    return LoadResult(
        checkpoint_id=checkpoint_id,
        files=_sums(each.files for each in counts.values()),
        bytes=_sums(each.bytes for each in counts.values()),
        seconds=counts[slowest].seconds,
        slowest_rank=slowest,
        slowest_host=counts[slowest].host if len(counts) > 1 else "",
        unread=max((each.unread for each in counts.values()), key=_count),
        cast=max((each.cast for each in counts.values()), key=_count),
    )


def to_json(record: ReadCounts | LoadResult) -> dict[str, Any]:
    """The fields of a record, for JSON."""
    return {
        name: [value.count, value.first] if isinstance(value, Keys) else value
        for name, value in vars(record).items()
    }


def from_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that :func:`to_json` returned, as arguments of the record's class."""
    keys = {name: Keys(fields[name][0], tuple(fields[name][1])) for name in ("unread", "cast")}
    return {**fields, **keys}


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for each in counts:
        sums.update(each)
    return {source: count for source, count in sums.items() if count}


def _shown(files: Mapping[str, int]) -> list[str]:
    """The sources, nearest first; of hosts, that with the most files first."""
    hosts = files.keys() - {OWN_SPOOL, BUCKET}
    shown = [OWN_SPOOL, *sorted(hosts, key=lambda host: (-files[host], host)), BUCKET]
    return [each for each in shown if each in files]
