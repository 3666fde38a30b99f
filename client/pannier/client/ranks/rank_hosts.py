"""Which host each rank runs on, for messages, and whether ranks of this machine still run.

In: every rank registers itself in the default process group's store, at its first ``latest`` or ``load``.
Out: texts such as ``rank 3 (host node-2)``. A rank that has not registered is known by the others that
its launcher started on the same host. Blocking, as the store is, also for ever: to be called by
:class:`~pannier.client.ranks.group_store.GroupStore`, unless said otherwise. Thread-safe.
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.torch_compat import Store
from pannier.common.machine import machine_id, process_start_s, process_state
from pannier.wire.failures import ranks_text, shorten

_PREFIX: Final = "pannier-hosts"
_SHOWN: Final = 4
"""Hosts spelled out in a text."""


_servers: Final[WeakKeyDictionary[Any, "RankRecord"]] = WeakKeyDictionary()
"""Rank 0 of each default process group, which is to be named when its store doesn't answer."""


@dataclass(frozen=True)
class RankRecord:
    """Where one rank runs."""

    host: str
    machine: str
    """The same for processes that see each other: of one kernel and PID namespace."""
    pid: int
    started_s: float
    """Of the process, since the machine's boot."""
    first: int
    """The first rank that the launcher started on this host; -1: not known."""
    count: int
    """How many, from that on."""

    def is_beside(self, rank: int) -> bool:
        """Whether the launcher started a rank on the same host."""
        return 0 <= rank - self.first < self.count if self.first >= 0 else False


class RankHosts:
    """What is known of the ranks of the default process group.

    Args:
        rank: this process's global rank.
        store: the default process group's, of this start; None: see :meth:`use`.
    """

    def __init__(self, rank: int, store: Store | None = None) -> None:
        self._store: Store | None = None
        if store is not None:
            self.use(store)
        self.rank: Final = rank
        self.own: Final = _own_record(rank)
        self._known: dict[int, RankRecord] = {}

    def use(self, store: Store) -> None:
        """Looks ranks up in the default process group's store of this start, from now on."""
        self._store = PrefixStore(_PREFIX, store)

    def register(self) -> None:
        """Lets the other ranks know where this one is, and looks up rank 0, which often serves the store."""
        assert self._store is not None
        self._store.set(str(self.rank), json.dumps(asdict(self.own)))
        if (server := self._record(0)) is not None and dist.group.WORLD is not None:
            _servers[dist.group.WORLD] = server

    def server_text(self) -> str:
        """Which process serves the store, as far as that is known without it."""
        known = self._known_record(0)
        place = _place(self.known_host(0), self._state(known))
        return f"rank 0{place} or its launcher"

    def known_host(self, rank: int) -> str:
        """The host of a rank, without a look into the store; empty: not known."""
        if rank == self.rank or self.own.is_beside(rank):
            return self.own.host
        known = self._known_record(rank)
        return known.host if known is not None else ""

    def host(self, rank: int) -> str:
        """The host of a rank; empty: not known."""
        self._record(rank)
        if known := self.known_host(rank):
            return known
        # Launchers mostly start as many ranks on each host, in order.
        count = max(self.own.count, 1)
        begin = rank // count * count
        for other in range(begin, begin + count):
            found = self._record(other) if other not in (rank, self.rank) else None
            if found is not None and found.is_beside(rank):
                return found.host
        return ""

    def text(self, ranks: Iterable[int]) -> str:
        """``rank 3 (host node-2), ranks [5, 6] (host node-3, stopped)``."""
        by_place: defaultdict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            by_place[self._place(rank)].append(rank)
        texts = [ranks_text(listed) + place for place, listed in by_place.items()]
        return shorten(texts, _SHOWN)

    def dead(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of the ranks whose processes ran on this machine and have ended, with a description."""
        found = {}
        for rank in ranks:
            record = self._seen_record(rank)
            if record is not None and process_state(record.pid, record.started_s) == "ended":
                found[rank] = f"its process {record.pid} has ended"
        return found

    def _place(self, rank: int) -> str:
        return _place(self.host(rank), self._state(self._record(rank)))

    def _seen_record(self, rank: int) -> RankRecord | None:
        """A rank's record, if its process can be seen from here."""
        record = self._record(rank)
        return record if record is not None and record.machine == self.own.machine else None

    def _state(self, record: RankRecord | None) -> str:
        """See :func:`process_state`; empty also where the process can't be seen from here."""
        if record is None or record.machine != self.own.machine:
            return ""
        return process_state(record.pid, record.started_s)

    def _known_record(self, rank: int) -> RankRecord | None:
        """Without a look into the store."""
        group = dist.group.WORLD
        if rank or group is None or rank in self._known:
            return self._known.get(rank)
        return _servers.get(group)

    def _record(self, rank: int) -> RankRecord | None:
        key = str(rank)
        # `get` alone would wait for a value.
        if rank not in self._known and self._store is not None and self._store.check([key]):
            self._known[rank] = RankRecord(**json.loads(self._store.get(key)))
        return self._known.get(rank)


def _place(host: str, state: str) -> str:
    if not host:
        return ""
    return f" (host {host}, {state})" if state else f" (host {host})"


def _own_record(rank: int) -> RankRecord:
    first, count = _launched_here(rank)
    return RankRecord(
        host=socket.gethostname(),
        machine=machine_id(),
        pid=os.getpid(),
        started_s=process_start_s(),
        first=first,
        count=count,
    )


def _launched_here(rank: int) -> tuple[int, int]:
    """First and number of this host's ranks, by what torchrun sets; (-1, 0): not known."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [os.environ.get(name, "") for name in names]
    if not all(number.isdecimal() for number in numbers):
        return -1, 0
    launched, local, count = map(int, numbers)
    return (rank - local, count) if launched == rank and local < count else (-1, 0)


def default_hosts() -> RankHosts:
    """Of the default process group; this process isn't registered yet, and no store used."""
    return RankHosts(dist.get_rank())
