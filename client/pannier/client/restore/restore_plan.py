"""Who reads which block of a checkpoint's files from where, decided once for all ranks of a load.

In: what each rank needs, and what lies in the spool of its host. Out: for each rank, the blocks that it
takes through sidecars: those that another host has in its spool, and those of which ranks together need
more bytes than the block has. The latter have an owner: the host that reads them from storage, once,
for all; owners are balanced by bytes. Everything else is read from storage by the rank that needs it.
Deterministic. Pure; any thread.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pannier.client.restore.load_result import BUCKET
from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.records import parse_blocks

_NO_OWNER: Final = -1
_Counts = npt.NDArray[np.int64]
"""One number per block of a file."""


class Host(NamedTuple):
    """A sidecar, and the ranks of its host that share it."""

    key: str
    """Equal for ranks that share a sidecar; no others have it."""
    name: str
    """Human-readable."""
    address: str = ""
    """Where other hosts read blocks; "": they can't."""
    fetches: bool = True
    """Whether its sidecar fetches blocks for its ranks."""
    requires_tls: bool = False
    """Whether its address requires mutual TLS."""
    certified_name: str = ""
    """Name in its certificate; "": the host of its address."""


@dataclass(frozen=True)
class Credentials:
    """The TLS files of the embedded daemons of one start of a job; PEM."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)


class Span(NamedTuple):
    """Bytes of a file."""

    start: int
    end: int


@dataclass(frozen=True)
class RankNeeds:
    """What one rank needs, and what its host can send to others."""

    rank: int
    host: Host | None
    """None: no sidecar runs on its host."""
    holds: frozenset[str] = frozenset()
    """Files that other hosts can read in its host's spool."""
    spans: Mapping[str, "array[int]"] = field(default_factory=dict)
    """By file, without those that it reads in its own spool: alternating starts and ends of what it needs,
    sorted and disjoint."""
    asks_peers: bool = False
    """Whether it can read from other hosts' sidecars itself, where its own doesn't fetch."""
    credentials: Credentials | None = None
    """With which ranks on hosts without a sidecar may read from other hosts; None: it knows none."""

    @property
    def fetching_host(self) -> Host | None:
        """The host that fetches blocks for it; None: it asks peers itself, if it can."""
        return self.host if self.host is not None and self.host.fetches else None


class BlockSource(NamedTuple):
    """Where one rank has a block from; indices into :attr:`RankPlan.hosts`."""

    holders: tuple[int, ...]
    """Hosts with the file in their spools; the first one is to be asked first."""
    owner: int | None
    """The host that reads the block from storage for others; None: that is the reader's own host."""
    readers: int
    """How often the block is read at the reader's host."""
    owner_readers: int
    """How often the block is read at the owner."""


@dataclass(frozen=True)
class SharedFile:
    """The blocks of one file that ranks of one host take through sidecars; columns, one entry per block."""

    record: bytes
    """Its ``DataFile``, serialised."""
    holders: tuple[int, ...]
    blocks: "array[int]"
    """Numbers, ascending."""
    owners: "array[int]"
    readers: "array[int]"
    owner_readers: "array[int]"

    def sources(self) -> Iterator[tuple[int, BlockSource]]:
        """Each block's number and source."""
        for block, owner, readers, owner_readers in zip(
            self.blocks, self.owners, self.readers, self.owner_readers, strict=True
        ):
            # Spreads the blocks over the holders: not all blocks are first requested from the same one.
            first = block % max(1, len(self.holders))
            yield (
                block,
                BlockSource(
                    self.holders[first:] + self.holders[:first],
                    None if owner == _NO_OWNER else owner,
                    readers,
                    owner_readers,
                ),
            )


@dataclass(frozen=True)
class RankPlan:
    """What one rank takes through sidecars."""

    hosts: tuple[Host, ...]
    own: int | None
    """Index of the rank's host; None: it asks peers itself."""
    files: Mapping[str, SharedFile]
    """By name."""
    credentials: Credentials | None = None
    """TLS files for a rank that asks peers itself and has none of its own."""


def merge(spans: Iterable[Span], gap: int = 0) -> "array[int]":
    """The spans in the form of :attr:`RankNeeds.spans`.

    Args:
        gap: spans that are at most so many bytes apart are joined.
    """
    merged = array("Q")
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1] + gap:
            merged[-1] = max(merged[-1], end)
        else:
            merged.extend((start, end))
    return merged


def shared_candidates(needs: Sequence[RankNeeds]) -> set[str]:
    """Files of which ranks may take blocks through sidecars: their receipts are needed."""
    held = {name for each in needs if each.host and each.host.address for name in each.holds}
    known = _credentials(needs)
    wanted = Counter(name for each in needs if _takes_part(each, known) for name in each.spans)
    return {name for name, ranks in wanted.items() if ranks > 1 or name in held}


def plan_restore(
    needs: Sequence[RankNeeds], records: Mapping[str, records_pb2.DataFile]
) -> list[RankPlan | None]:
    """Each rank's plan, in the order of ``needs``; None: it takes nothing through sidecars.

    Args:
        records: of the files of :func:`shared_candidates`, as in the receipts. Those without
            checksums of blocks are not taken from spools. Other files are read from storage.
    """
    hosts = tuple({each.host.key: each.host for each in needs if each.host}.values())
    planner = _Planner(hosts, needs)
    for name in sorted(records):
        planner.add(records[name])
    return planner.plans()


def _credentials(needs: Sequence[RankNeeds]) -> Credentials | None:
    return next((each.credentials for each in needs if each.credentials is not None), None)


def _takes_part(needs: RankNeeds, known: Credentials | None) -> bool:
    """Whether a rank can get blocks through sidecars."""
    return needs.fetching_host is not None or needs.asks_peers or known is not None


def block_count(size: int) -> int:
    """Blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


class _Planner:
    def __init__(self, hosts: tuple[Host, ...], needs: Sequence[RankNeeds]) -> None:
        self._hosts = hosts
        self._needs = needs
        index = {host.key: number for number, host in enumerate(hosts)}
        self._host_of = [
            index[each.fetching_host.key] if each.fetching_host else None for each in needs
        ]
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for each in needs:
            if each.host is not None and each.host.address:
                number = index[each.host.key]
                for name in each.holds:
                    if number not in self._holders[name]:
                        self._holders[name].append(number)
        self._credentials = _credentials(needs)
        self._users: defaultdict[str, list[int]] = defaultdict(list)
        """By file, positions in ``needs``."""
        for position, each in enumerate(needs):
            if _takes_part(each, self._credentials):
                for name in each.spans:
                    self._users[name].append(position)
        self._owned = np.zeros(len(hosts), np.int64)
        """Bytes by host that it reads from storage for others."""
        self._files: list[dict[str, SharedFile]] = [{} for _ in needs]

    def plans(self) -> list[RankPlan | None]:
        return [
            RankPlan(self._hosts, own, files, None if own is not None else self._credentials)
            if files
            else None
            for own, files in zip(self._host_of, self._files, strict=True)
        ]

    def add(self, record: records_pb2.DataFile) -> None:
        """Plans the blocks of one file."""
        demand = _Demand(record.size)
        by_spans: defaultdict[bytes, list[int]] = defaultdict(list)
        for position in self._users[record.name]:
            by_spans[self._needs[position].spans[record.name].tobytes()].append(position)
        for positions in by_spans.values():
            demand.add(
                self._needs[positions[0]].spans[record.name],
                Counter(self._host_of[position] for position in positions),
            )
        holders = self._holders[record.name] if record.block_crc32c else []
        shared = demand.total > (0 if holders else demand.sizes)
        owners = self._owners(demand, shared, weighed=not holders)
        serialised = record.SerializeToString()
        at_owner = demand.at_owner(owners)
        columns: dict[tuple[bytes, int | None], SharedFile] = {}
        for spans, positions in by_spans.items():
            needed = demand.bytes_per_block(self._needs[positions[0]].spans[record.name]) > 0
            for position in positions:
                own = self._host_of[position]
                if (spans, own) not in columns:
                    columns[spans, own] = demand.file(
                        serialised,
                        tuple(each for each in holders if each != own),
                        own,
                        owners,
                        at_owner,
                        needed & shared,
                    )
                if columns[spans, own].blocks:
                    self._files[position][record.name] = columns[spans, own]

    def _owners(
        self, demand: "_Demand", shared: npt.NDArray[np.bool_], *, weighed: bool
    ) -> _Counts:
        """The owner of each block; none unless several hosts need it, and one of them can be its owner."""
        owners = np.full(len(demand.sizes), _NO_OWNER, np.int64)
        for block in np.flatnonzero(shared):
            readers = demand.readers_of(int(block))
            # A block that only one host needs has no owner: that host reads it itself.
            is_alone = len(readers) + demand.ranks_without_sidecar[block] == 1
            candidates = [host for host in readers if self._hosts[host].address]
            if candidates and not is_alone:
                owner = min(candidates, key=lambda host: (self._owned[host], host))
                owners[block] = owner
                if weighed:
                    self._owned[owner] += demand.sizes[block]
        return owners


class _Demand:
    """What is needed of the blocks of one file, and by whom."""

    def __init__(self, size: int) -> None:
        count = block_count(size)
        self._bounds = np.minimum(np.arange(count + 1, dtype=np.int64) * BLOCK_BYTES, size)
        self.sizes: _Counts = np.diff(self._bounds)
        self.total: _Counts = np.zeros(count, np.int64)
        """Bytes that ranks need, each rank's counted."""
        self.ranks_without_sidecar: _Counts = np.zeros(count, np.int64)
        """Ranks that ask peers themselves, by block."""
        self._readers: dict[int, _Counts] = {}
        """Ranks by host."""

    def bytes_per_block(self, spans: "array[int]") -> _Counts:
        """Bytes of these spans in each block."""
        columns = np.frombuffer(spans, np.uint64).astype(np.int64).reshape(-1, 2)
        starts, ends = columns[:, 0], columns[:, 1]
        before = np.concatenate(([0], np.cumsum(ends - starts)))
        last = np.searchsorted(starts, self._bounds, side="left")
        behind = np.maximum(0, np.concatenate(([0], ends))[last] - self._bounds)
        return np.asarray(np.diff(before[last] - behind), np.int64)

    def add(self, spans: "array[int]", ranks: Mapping[int | None, int]) -> None:
        """Adds ranks that need these spans: their number by host; None: ranks that ask peers themselves."""
        needed = self.bytes_per_block(spans)
        self.total += needed * sum(ranks.values())
        for host, count in ranks.items():
            if host is None:
                self.ranks_without_sidecar += count * (needed > 0)
            else:
                readers = self._readers.setdefault(host, np.zeros_like(self.total))
                readers += count * (needed > 0)

    def readers_of(self, block: int) -> list[int]:
        """The hosts that need a block, ascending."""
        return sorted(host for host, readers in self._readers.items() if readers[block])

    def at_owner(self, owners: _Counts) -> _Counts:
        """How often each block is read at its owner: by the owner's own ranks, and once by each other host
        and each rank without a sidecar."""
        found: _Counts = self.ranks_without_sidecar.copy()
        for host, readers in self._readers.items():
            found += np.where(owners == host, readers, readers > 0)
        return found

    def file(
        self,
        record: bytes,
        holders: tuple[int, ...],
        own: int | None,
        owners: _Counts,
        at_owner: _Counts,
        mask: npt.NDArray[np.bool_],
    ) -> SharedFile:
        """The columns for the ranks of a host that need the blocks of ``mask``."""
        here = self._readers[own] if own is not None else np.ones_like(self.ranks_without_sidecar)
        if not holders:
            # A block without holders and owner is worth sharing only among several ranks of a host: a rank
            # that asks peers itself has no source for it.
            mask = mask & ((owners != _NO_OWNER) | (here > 1))
        blocks = np.flatnonzero(mask)
        is_owner = owners == own if own is not None else np.zeros_like(mask)
        return SharedFile(
            record,
            holders,
            _column("I", blocks),
            _column("i", np.where(is_owner, _NO_OWNER, owners)[blocks]),
            _column("I", np.where(is_owner, at_owner, here)[blocks]),
            _column("I", np.where(owners == _NO_OWNER, 0, at_owner)[blocks]),
        )


def _column(code: str, values: _Counts) -> "array[int]":
    return array(code, values.astype(code).tobytes())


class SharedBlock(NamedTuple):
    """One block."""

    file: int
    """Index into :attr:`BlockTable.files`."""
    number: int
    offset: int
    size: int
    crc32c: int | None
    """From the receipt; None: there is none."""
    source: BlockSource


class LoadName(NamedTuple):
    """Identifies a load, its checkpoint and this rank."""

    load: str
    """Its random id, the same on all ranks."""
    checkpoint_id: str
    attempt: str
    """Empty: Pannier didn't write the checkpoint."""
    rank: int
    """This one's global rank."""


class BlockTable:
    """The shared blocks of one rank: where they lie in their files, and where they come from. Immutable; any thread."""

    def __init__(self, plan: RankPlan) -> None:
        self.hosts: Final[Sequence[Host]] = plan.hosts
        self.own: Final = plan.own
        self.files: Final = [
            records_pb2.DataFile.FromString(file.record) for file in plan.files.values()
        ]
        self.names: Final = frozenset(plan.files)
        found: dict[tuple[str, int], SharedBlock] = {}
        for index, (record, file) in enumerate(zip(self.files, plan.files.values(), strict=True)):
            sums = parse_blocks(record)
            for number, source in file.sources():
                offset = number * BLOCK_BYTES
                found[record.name, number] = SharedBlock(
                    index,
                    number,
                    offset,
                    min(BLOCK_BYTES, record.size - offset),
                    sums[number] if sums else None,
                    source,
                )
        self.blocks: Final[Mapping[tuple[str, int], SharedBlock]] = found

    def first_source(self, name: str, block: int) -> str:
        """The source that is asked first for a block: the name of a host, or the bucket."""
        source = self.blocks[name, block].source
        number = source.holders[0] if source.holders else source.owner
        return BUCKET if number is None else self.hosts[number].name
