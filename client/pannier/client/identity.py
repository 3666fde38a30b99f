"""Who saves: the incarnation, the group and the number of a save.

In: torch.distributed as the trainer set it up. Out: words that are the same on
all ranks of a save. No collective; the process group's store is asked once per
incarnation. Owned by the client.
"""

import json
import queue
import secrets
import socket
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.compat import group_store
from pannier.client.config import Settings
from pannier.wire.errors import ConfigurationError, DeadlineError, InvalidRequestError
from pannier.wire.identity import group_name

_KEY = "pannier-incarnation"


@dataclass(frozen=True)
class Identity:
    """One rank in one incarnation of a job."""

    job: str
    incarnation: str
    rank: int
    world_size: int
    host: str
    client: str
    """Random; one client's connections carry the same."""


@dataclass(frozen=True)
class Group:
    """Ranks that save together, as sorted global ranks."""

    ranks: tuple[int, ...]
    rank: int
    """This process's global rank."""

    @property
    def name(self) -> str:
        """Derived from the ranks."""
        return group_name(self.ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is DCP's coordinator rank, the first of the group."""
        return self.rank == self.ranks[0]


def is_alone(no_dist: bool) -> bool:
    """Whether this process saves by itself."""
    return no_dist or not dist.is_available() or not dist.is_initialized()


class World:
    """The ranks that a process group connects, or this process alone, for one incarnation.

    Counts the saves of each group. Thread-safe.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._default_group = None if alone else weakref.ref(dist.group.WORLD)
        self._lock = threading.Lock()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._identity: Identity | None = None

    def is_current(self) -> bool:
        """Whether torch.distributed is still the one this was made from."""
        if self._default_group is None:
            return True
        return dist.is_initialized() and self._default_group() is dist.group.WORLD

    def group(self, process_group: Any) -> Group:
        """The group of ``process_group`` (None: all ranks).

        Raises:
            InvalidRequestError: this rank isn't in it.
        """
        if self.alone:
            return Group((0,), 0)
        if process_group is None:
            return Group(tuple(range(self.size)), self.rank)
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidRequestError(
                f"rank {self.rank} is not in this process group: only its ranks may save with it"
            )
        try:
            ranks = sorted(dist.get_process_group_ranks(process_group))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise InvalidRequestError(
                f"process_group={process_group!r} is not a process group of this job: {error}"
            ) from error
        if self.rank not in ranks:
            raise InvalidRequestError(
                f"rank {self.rank} is not in process group {ranks}: only its ranks may save with it"
            )
        return Group(tuple(ranks), self.rank)

    def next_number(self, group: Group) -> int:
        """Takes the number of the group's next save."""
        with self._lock:
            number = self._numbers.get(group.ranks, 0) + 1
            self._numbers[group.ranks] = number
            return number

    def resume(self, group: Group, number: int) -> None:
        """Makes ``number`` the group's next, when this rank has missed some; never goes back."""
        with self._lock:
            self._numbers[group.ranks] = max(self._numbers.get(group.ranks, 0), number - 1)

    def identity(self, settings: Settings) -> Identity:
        """This rank's identity; the first rank to ask mints the incarnation for all.

        Raises:
            ConfigurationError: ranks contradict each other, or are on several
                hosts without a coordinator that all can reach.
            DeadlineError: the store doesn't answer.
        """
        with self._lock:
            if self._identity is None:
                self._identity = self._mint(settings)
            return self._identity

    def _mint(self, settings: Settings) -> Identity:
        host = socket.gethostname()
        own = {
            "job": settings.job or f"job-{secrets.token_hex(4)}",
            "incarnation": secrets.token_hex(8),
            "host": host,
            "rank": self.rank,
        }
        shared = own if self.alone else self._share(own, settings.plan_timeout)
        if settings.job is not None and shared["job"] != settings.job:
            raise ConfigurationError(
                f"PANNIER_JOB={settings.job} on rank {self.rank}, but {shared['job']} on rank "
                f"{shared['rank']} ({shared['host']}): give all ranks the same job"
            )
        if settings.embedded and settings.coordinator is None and shared["host"] != host:
            raise ConfigurationError(
                f"rank {self.rank} is on host {host}, rank {shared['rank']} on {shared['host']}, "
                "and the embedded daemons serve one host: run `pannier coordinator` where all "
                "hosts reach it and `pannier sidecar --coordinator HOST:PORT` on every host, then "
                "set PANNIER_SIDECAR (or PANNIER_COORDINATOR for embedded sidecars)"
            )
        return Identity(
            job=str(shared["job"]),
            incarnation=str(shared["incarnation"]),
            rank=self.rank,
            world_size=self.size,
            host=host,
            client=secrets.token_hex(8),
        )

    def _share(self, own: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        store = PrefixStore(_KEY, group_store(None))
        answer: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                # A store may live longer than a process group: the n-th
                # incarnation of one rank is the n-th of all.
                life = store.add(f"of/{self.rank}", 1)
                answer.put(store.compare_set(str(life), "", json.dumps(own)).decode())
            except RuntimeError as error:  # torch's DistStoreError
                answer.put(error)

        # The store's own timeout belongs to the user and is long.
        threading.Thread(target=ask, name="pannier-incarnation", daemon=True).start()
        try:
            winner: str | Exception = answer.get(timeout=timeout_s)
        except queue.Empty:
            winner = DeadlineError(f"no answer within {timeout_s:g} s")
        if isinstance(winner, Exception):
            raise DeadlineError(
                f"rank {self.rank} could not agree on an incarnation through the process group's "
                f"store, which rank 0 or its launcher serves: {winner}"
            ) from winner
        shared: dict[str, Any] = json.loads(winner)
        return shared
