"""The identity of a save: job, incarnation, group and number.

In: torch.distributed as the trainer set it up. Out: values that are the same on
all ranks of a save. No collective; the process group's store is read once per
incarnation. Owned by a membership.
"""

import secrets
import socket
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client import torch_compat
from pannier.client.config import Settings
from pannier.client.embedded.daemon_spec import DaemonSpec, host_daemons
from pannier.client.embedded.rendezvous import Agreement, HostInfo, host_info, launch_id
from pannier.client.loading import highest_incarnation
from pannier.client.process_group import is_alone, launched_as
from pannier.client.ranks.group_store import GroupStore, join_start
from pannier.client.ranks.rank_hosts import default_hosts
from pannier.wire import object_names
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.object_names import group_name, split_checkpoint_id


@dataclass(frozen=True)
class Identity:
    """One rank in one incarnation of a job."""

    job: str
    incarnation: str
    rank: int
    world_size: int
    host: str
    client: str
    """Random; the same for all connections of one client."""
    launch: str = ""
    """The same for all starts of the job by its launcher; empty: not known."""


@dataclass(frozen=True)
class Group:
    """Ranks that save together: one process group's."""

    ranks: tuple[int, ...]
    """Sorted global ranks."""
    rank: int
    """This process's global rank."""
    process_group: str = ""
    """torch's name of the process group, the same on all its ranks; empty: the default one, or a rank alone."""

    @property
    def name(self) -> str:
        """Derived from the ranks and their process group."""
        return group_name(self.ranks, self.process_group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is DCP's coordinator rank, the first of the group."""
        return self.rank == self.ranks[0]


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
        self._numbers: dict[Group, int] = {}
        self._identity: Identity | None = None
        self._seen: dict[str, int | None] = {}
        self._agreement: Agreement | None = None
        """With the other ranks, on the coordinator of all hosts; None: this host's daemons have their own, or one
        is configured."""
        self.known_daemons: DaemonSpec | None = None
        """The daemons that :meth:`daemons` has returned; None: not called yet."""

    def is_current(self) -> bool:
        """Whether torch.distributed still has the default process group that this was made from."""
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
        if process_group in (None, dist.group.WORLD):
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
        # Two groups of the same ranks may save at the same time, from two threads.
        return Group(tuple(ranks), self.rank, torch_compat.group_name(process_group))

    def lone_group(self) -> Group:
        """The group of this rank alone."""
        return Group((self.rank,), self.rank)

    def next_number(self, group: Group) -> int:
        """Consumes the number of the group's next save."""
        with self._lock:
            number = self._numbers.get(group, 0) + 1
            self._numbers[group] = number
            return number

    def resume(self, group: Group, number: int) -> None:
        """Makes ``number`` the group's next when this rank missed saves; never lowers the next number."""
        with self._lock:
            self._numbers[group] = max(self._numbers.get(group, 0), number - 1)

    def identity(self, settings: Settings) -> Identity:
        """This rank's identity; the first rank to call this creates the incarnation for all.

        Raises:
            ConfigurationError: ranks contradict each other.
            DeadlineError: the store doesn't answer, or the rank that came first doesn't confirm the start.
        """
        with self._lock:
            if self._identity is None:
                self._identity = self._create_identity(settings)
            return self._identity

    @property
    def apart(self) -> bool:
        """Whether this is one of several processes of the job, and saves by itself."""
        return self.alone and (not is_alone(no_dist=False) or launched_as() is not None)

    def seen_incarnation(self, checkpoint_id: str) -> int | None:
        """The highest incarnation number below the checkpoint's root when this process first read there.

        None: it hasn't read there.
        """
        if self.apart:
            return None
        try:
            root, _ = split_checkpoint_id(checkpoint_id)
        except InvalidRequestError:
            return None  # the save is refused for this id
        with self._lock:
            if root not in self._seen:
                self._seen[root] = highest_incarnation.pop(root)
            return self._seen[root]

    def daemons(self, settings: Settings) -> DaemonSpec:
        """This host's embedded daemons, which share a coordinator with those of other hosts.

        For one thread at a time.

        Raises:
            PannierError: what :meth:`identity` and :meth:`pannier.client.embedded.rendezvous.Agreement.daemons` raise.
        """
        self.identity(settings)
        if self.known_daemons is None:
            agreement = self._agreement
            self.known_daemons = (
                host_daemons(settings) if agreement is None else agreement.daemons()
            )
        return self.known_daemons

    def _create_identity(self, settings: Settings) -> Identity:
        host = socket.gethostname()
        own: dict[str, Any] = {
            "job": settings.job or object_names.unnamed_job(),
            "incarnation": secrets.token_hex(8),
            "host": host,
            "rank": self.rank,
            "launch": "" if self.alone else launch_id(settings),
        }
        shared: dict[str, Any] = own
        if not self.alone:
            place = None
            if settings.embedded and settings.coordinator is None:
                place = host_info(self.rank, host, self.size, settings)
                own["host_info"] = asdict(place)
            hosts, why = default_hosts(), f"incarnation of rank {self.rank}"
            start = join_start(hosts, description=why, timeout_s=settings.plan_timeout)
            store = GroupStore(
                PrefixStore("incarnation", start.prefix(torch_compat.group_store(None))),
                hosts,
                description=why,
                timeout_s=settings.plan_timeout,
            )
            # A process may have several clients, or later ones with other settings.
            incarnation = start.next_number("", "incarnation")
            shared = store.claim(str(incarnation), own)
            self._check_same_daemons(place, shared, settings)
            if place is not None:
                first = HostInfo(**shared["host_info"])
                self._agreement = Agreement(
                    store, incarnation, place, first, size=self.size, settings=settings
                )
        if settings.job is not None and shared["job"] != settings.job:
            raise ConfigurationError(
                f"PANNIER_JOB={settings.job} on rank {self.rank}, but {shared['job']} on rank "
                f"{shared['rank']} ({shared['host']}): give all ranks the same job"
            )
        return Identity(
            job=str(shared["job"]),
            incarnation=str(shared["incarnation"]),
            rank=self.rank,
            world_size=self.size,
            host=host,
            client=secrets.token_hex(8),
            launch=str(shared["launch"]),
        )

    def _check_same_daemons(
        self, place: HostInfo | None, shared: dict[str, Any], settings: Settings
    ) -> None:
        """Raises ConfigurationError where one of this rank and the first one has a coordinator configured."""
        if settings.embedded and (place is None) is ("host_info" in shared):
            named = f"PANNIER_COORDINATOR={settings.coordinator}"
            raise ConfigurationError(
                f"rank {self.rank} has {'no PANNIER_COORDINATOR' if place else named}, unlike rank "
                f"{shared['rank']} ({shared['host']}): set it, or PANNIER_SIDECAR, for all ranks"
            )
