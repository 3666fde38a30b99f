"""How the embedded daemons of several hosts find each other: one host's coordinator serves all.

In: the process group's store, through which the ranks agree. Out: None if all ranks are on one host;
otherwise the coordinator's address and the client certificate for it. The coordinator runs on the host
of rank 0, or, if rank 0 doesn't save, of the first rank that does. Blocking.
"""

import hashlib
import json
import logging
import os
import secrets
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from pannier.client.config import Settings
from pannier.client.embedded import launcher, network
from pannier.client.embedded.certificates import TlsBundle, issue
from pannier.client.embedded.daemon_spec import (
    DaemonSpec,
    host_daemons,
    job_daemons,
    read_record,
    tls_files,
    tls_texts,
)
from pannier.client.ranks.group_store import GroupStore, StoreCall, poll
from pannier.common import timeouts
from pannier.common.daemon_process import is_serving
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, DeadlineError, UnavailableError

_log = logging.getLogger(__name__)

_RECORD: Final = "rendezvous.json"
"""The rendezvous, with a private key, in the directory of the daemons with the coordinator."""
_AT: Final = "at "
"""Begins the key of a job that has no name: the address of its launcher's store follows."""
_ADVICE: Final = "or run `pannier coordinator` where all hosts reach it and set PANNIER_COORDINATOR"


@dataclass(frozen=True)
class HostInfo:
    """A rank and its host."""

    rank: int
    host: str
    """Hostname, for messages."""
    runtime_dir_id: str
    """See :func:`pannier.client.embedded.network.runtime_dir_id`; equal: the same host."""
    address: str | None
    """The host's IP address as seen from the store's host; None: it has none, or it isn't needed."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Rendezvous:
    """What all ranks of an incarnation know of its coordinator."""

    start_id: str
    """Random; identifies this start of the job."""
    job: str
    """See :func:`job_key`."""
    coordinator: str
    """``host:port``."""
    leader: HostInfo
    """The rank whose host runs the coordinator."""
    tls: TlsBundle
    """For clients of the coordinator."""


def host_info(rank: int, host: str, size: int, settings: Settings) -> HostInfo:
    """This rank and its host.

    Args:
        size: number of ranks.

    Raises:
        ConfigurationError: the runtime directory can't be used.
    """
    launcher.make_private_dir(settings.runtime_dir)
    address = None
    if not network.all_ranks_here(size):
        address = network.own_address([os.environ.get("MASTER_ADDR")])
    return HostInfo(rank, host, network.runtime_dir_id(settings.runtime_dir), address)


class Agreement:
    """The ranks of an incarnation agree on the host that runs the coordinator of all. For one thread at a time.

    One rank, the leader, decides; only a success is final. After a failure, which all ranks raise, the leader tries
    again at its next call.

    Args:
        store: where the ranks agree.
        incarnation: number of the incarnation in the store.
        this_rank: and its host.
        first_rank: the rank that wrote to the store first.
        size: number of ranks.
    """

    def __init__(
        self,
        store: GroupStore,
        incarnation: int,
        this_rank: HostInfo,
        first_rank: HostInfo,
        *,
        size: int,
        settings: Settings,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._this_rank = this_rank
        self._first_rank = first_rank
        self._size = size
        self._settings = settings
        self._is_apart = first_rank.runtime_dir_id != this_rank.runtime_dir_id
        self._has_reported = False
        """Whether this rank has reported where it is."""
        self._failures = 0
        """Those of the leader that this rank has raised."""

    def daemons(self) -> DaemonSpec:
        """This host's daemons, which share a coordinator with those of other hosts if there are any.

        Raises:
            PannierError: what :meth:`rendezvous` and :func:`join` raise.
        """
        rendezvous = self.rendezvous()
        if rendezvous is None:
            return host_daemons(self._settings)
        return join(self._settings, rendezvous, self._this_rank)

    def rendezvous(self) -> Rendezvous | None:
        """What the ranks have agreed on; None: all are on this host.

        Raises:
            ConfigurationError: other hosts can't reach a coordinator on the leader's host, or
                LOCAL_WORLD_SIZE is wrong.
            DeadlineError: no rank has decided.
        """
        this_rank, first_rank = self._this_rank, self._first_rank
        if network.all_ranks_here(self._size):
            if self._is_apart:
                raise ConfigurationError(
                    f"LOCAL_WORLD_SIZE={os.environ['LOCAL_WORLD_SIZE']} says that all ranks are on one "
                    f"host, but {this_rank} doesn't see the runtime directory of "
                    f"{first_rank}: give all the same PANNIER_RUNTIME_DIR, {_ADVICE}"
                )
            return None
        outcome = self._store.run(self._report_place)
        if outcome is None and self._store.run(self._leads):
            return self._decide()
        if outcome is None:
            timeout_s = self._settings.plan_timeout
            outcome = self._store.run(lambda store: poll(lambda: self._outcome(store), timeout_s))
        if outcome is None:
            leader = self._store.run(lambda store: store.get(self._key("leader")))
            raise DeadlineError(
                f"{this_rank} waited {self._settings.plan_timeout:g} s for rank "
                f"{first_rank.rank if leader is None else leader} to "
                "report which host runs the coordinator: does that rank still run?"
            )
        if outcome["problem"]:
            self._failures = outcome["failures"]
            raise ConfigurationError(
                f"the hosts have no coordinator in common: {outcome['problem']}"
            )
        if outcome["rendezvous"] is None and self._is_apart:
            raise ConfigurationError(
                f"{this_rank} doesn't see the runtime directory of "
                f"{first_rank}, and joined after it was decided that all ranks are on that host: give "
                f"all the same PANNIER_RUNTIME_DIR, {_ADVICE}"
            )
        return None if outcome["rendezvous"] is None else _decode(outcome["rendezvous"])

    def _report_place(self, store: StoreCall) -> Any:
        """Reports where this rank is, unless the leader has decided; returns its outcome."""
        outcome = self._outcome(store)
        if outcome is None and not self._has_reported:
            # Before the call: a rank that is counted twice would stand for another, elsewhere.
            self._has_reported = True
            if self._is_apart:
                store.claim(self._key("elsewhere"), asdict(self._this_rank))
            else:
                store.count(self._key("here"), 1)
        return outcome

    def _outcome(self, store: StoreCall) -> Any:
        """The leader's; None: it has none yet but failures that this rank has raised."""
        outcome = store.get(self._key("outcome"))
        is_raised = bool(outcome and outcome["problem"]) and outcome["failures"] <= self._failures
        return None if is_raised else outcome

    def _leads(self, store: StoreCall) -> bool:
        """Whether this rank decides: rank 0, or, if that doesn't save, the first rank that does."""
        rank, key = self._this_rank.rank, self._key("leader")
        if rank not in (0, self._first_rank.rank):
            return False
        if rank and poll(lambda: store.get(key), timeouts.LEADER_S) == 0:
            return False
        return bool(store.claim(key, rank) == rank)

    def _decide(self) -> Rendezvous | None:
        try:
            rendezvous = self._start()
        except Exception as error:
            # So that the other ranks fail at once, not at their deadline.
            self._failures += 1
            self._report(problem=f"{self._this_rank}: {error}")
            raise
        self._report(rendezvous=None if rendezvous is None else asdict(rendezvous))
        return rendezvous

    def _report(self, *, problem: str = "", rendezvous: dict[str, Any] | None = None) -> None:
        outcome = {"problem": problem, "failures": self._failures, "rendezvous": rendezvous}
        self._store.put(self._key("outcome"), outcome)

    def _start(self) -> Rendezvous | None:
        """Starts the coordinator if there are several hosts."""

        def look(store: StoreCall) -> str | None:
            """The address of another rank's host, "" if not known; "here": all ranks are on this host."""
            elsewhere = (
                asdict(self._first_rank) if self._is_apart else store.get(self._key("elsewhere"))
            )
            if elsewhere is not None:
                return elsewhere["address"] or ""
            return "here" if store.count(self._key("here")) >= self._size else None

        towards = self._store.run(lambda store: poll(lambda: look(store), timeouts.LEADER_S))
        # Where some ranks haven't reported: over loopback they can only be on this host.
        is_loopback = addresses.is_loopback(os.environ.get("MASTER_ADDR", ""))
        if towards == "here" or (towards is None and is_loopback):
            return None
        return _start_coordinator(self._this_rank, towards, self._settings)

    def _key(self, name: str) -> str:
        return f"{self._incarnation}/{name}"


def join(settings: Settings, rendezvous: Rendezvous, this_rank: HostInfo) -> DaemonSpec:
    """This host's daemons for a job on several hosts, for :func:`launcher.ensure`.

    Raises:
        UnavailableError: the coordinator can't be reached from here.
        ConfigurationError: the runtime directory can't be used.
    """
    directory = _directory(settings, rendezvous, this_rank)
    address = rendezvous.coordinator
    peers = _peers(address, this_rank)
    if this_rank.runtime_dir_id == rendezvous.leader.runtime_dir_id:
        return job_daemons(settings, directory, listen=address, peers=peers)
    tls = rendezvous.tls
    spec = job_daemons(settings, directory, coordinator=address, peers=peers, files=tls_texts(tls))
    if is_serving(directory):
        return spec
    if why := network.probe_daemon(
        address, tls.channel_credentials(), timeouts.COORDINATOR_START_S
    ):
        host = rendezvous.leader.host
        raise UnavailableError(
            f"host {this_rank.host} (rank {this_rank.rank}) can't reach this job's coordinator at {address}, which "
            f"runs on {host}, the host of rank {rendezvous.leader.rank}: {why}. Let the hosts connect to "
            f"each other (firewall), name an address and port of {host} that the others can reach by "
            f"PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return spec


_start_lock: Final = threading.Lock()
_started_here: Final[set[str]] = set()
"""Start ids of coordinators that this process has used: they also serve later incarnations of its job."""


def _start_coordinator(this_rank: HostInfo, towards: str | None, settings: Settings) -> Rendezvous:
    """Starts the coordinator of all hosts on this host, or finds it; other hosts can reach its address."""
    with _start_lock:
        job = job_key(settings)
        rendezvous, tls = _find_earlier(settings, job, this_rank) or _new(
            settings, job, this_rank, towards
        )
        address = rendezvous.coordinator
        spec = job_daemons(
            settings,
            _directory(settings, rendezvous, this_rank),
            listen=address,
            peers=_peers(address, this_rank),
            files={**tls_texts(tls), _RECORD: json.dumps(asdict(rendezvous))},
        )
        launcher.ensure(settings, spec)
        if why := launcher.await_listening(spec, address, timeouts.COORDINATOR_START_S):
            raise UnavailableError(
                f"the embedded coordinator does not listen on {address}: {why}; name "
                f"another address by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
            )
        _log.info("this host's coordinator at %s serves all hosts", address)
        _started_here.add(rendezvous.start_id)
        return rendezvous


def _find_earlier(
    settings: Settings, job: str, this_rank: HostInfo
) -> tuple[Rendezvous, TlsBundle] | None:
    """The coordinator of an earlier start of the job on this host, running or killed, if it is that and answers."""
    for directory in reversed(addresses.job_dirs(settings.runtime_dir, job)):
        try:
            rendezvous = _decode(json.loads((directory / _RECORD).read_text()))
            tls = TlsBundle(*(path.read_text() for path in tls_files(directory)))
            if not _may_use(settings, directory, rendezvous):
                continue
            address = rendezvous.coordinator
            if not is_serving(directory):
                network.check_free(address)
            elif why := network.probe_daemon(
                address, tls.channel_credentials(), timeouts.COORDINATOR_START_S
            ):
                raise ConfigurationError(f"{address}: {why}")
        except FileNotFoundError:  # they are exiting
            continue
        except (ValueError, ConfigurationError) as error:
            _log.warning(
                "the daemons in %s can't be used again: %s; this start uses others",
                *(directory, error),
            )
            continue
        return replace(rendezvous, leader=this_rank), tls
    return None


def _may_use(settings: Settings, directory: Path, rendezvous: Rendezvous) -> bool:
    """Whether the coordinator of an earlier start, or of this process, is the one that these settings ask for."""
    spec = read_record(directory)
    if spec is None or not spec.serves_others:
        return False
    difference = launcher.compare(settings, spec)
    if difference is None or difference.variables:
        return False
    if settings.listen is not None:
        return settings.listen == rendezvous.coordinator
    return rendezvous.start_id in _started_here or _is_same_job(rendezvous.job)


def _new(
    settings: Settings, job: str, this_rank: HostInfo, towards: str | None
) -> tuple[Rendezvous, TlsBundle]:
    address = settings.listen
    if address is None:
        address = _free_address(this_rank, towards)
    else:
        network.check_free(address)
    tls, callers = issue(network.split_address(address)[0])
    return Rendezvous(secrets.token_hex(3), job, address, this_rank, callers), tls


def _free_address(this_rank: HostInfo, towards: str | None) -> str:
    host = network.own_address([towards, os.environ.get("MASTER_ADDR")])
    if host is None:
        raise ConfigurationError(
            f"host {this_rank.host} has no address by which other hosts could reach its coordinator: name "
            f"one by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return network.join_address(host, network.free_port(host))


def _peers(coordinator: str, this_rank: HostInfo) -> str | None:
    """Where the other hosts can reach this host's sidecar; None: it isn't known."""
    host = network.own_address([network.split_address(coordinator)[0]]) or this_rank.address
    try:
        return None if host is None else network.join_address(host, network.free_port(host))
    except ConfigurationError as error:
        _log.info("other hosts read nothing from this one's sidecar: %s", error)
        return None


def job_key(settings: Settings) -> str:
    """Identifies the job across its starts, as far as its environment allows."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    for kind, name in (
        ("job", settings.job),
        ("run", None if run == "none" else run),
        ("slurm", os.environ.get("SLURM_JOB_ID")),
    ):
        if name:
            return f"{kind} {name}"
    return f"{_AT}{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _is_same_job(job: str) -> bool:
    """Whether an earlier start with this :func:`job_key` was one of the same job.

    The next training on these hosts mostly has the same address and port; torchrun says whether it restarts workers:
    https://docs.pytorch.org/docs/2.13/elastic/run.html (environment variables).
    """
    return not job.startswith(_AT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch_id(settings: Settings) -> str:
    """Hash of :func:`job_key`, by which a coordinator knows earlier starts of the job; empty: not known."""
    key = job_key(settings)
    if key.startswith(_AT) and addresses.is_loopback(os.environ.get("MASTER_ADDR", "localhost")):
        return ""  # Each host may have such a job.
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _directory(settings: Settings, rendezvous: Rendezvous, this_rank: HostInfo) -> Path:
    return addresses.job_dir(
        settings.runtime_dir, rendezvous.job, rendezvous.start_id, this_rank.runtime_dir_id
    )


def _decode(content: dict[str, Any]) -> Rendezvous:
    leader, tls = HostInfo(**content["leader"]), TlsBundle(**content["tls"])
    return Rendezvous(**{**content, "leader": leader, "tls": tls})
