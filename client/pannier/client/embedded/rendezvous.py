"""How the embedded daemons of several hosts find each other: one host's coordinator serves all.

In: the process group's store, through which the ranks agree. Out: None if all ranks are on one host;
otherwise the coordinator's address and the client certificate for it. The coordinator runs on the host
of rank 0, or, if rank 0 doesn't save, of the first rank that does. One rank, the leader, decides once
per incarnation for all. Blocking.
"""

import hashlib
import json
import logging
import os
import secrets
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded import launcher, left_spools, network
from pannier.client.embedded.certificates import TlsBundle, issue
from pannier.client.embedded.daemon_spec import (
    DaemonSpec,
    job_daemons,
    read_record,
    tls_files,
    write_private_file,
    write_record,
    write_tls_files,
)
from pannier.client.ranks.group_store import GroupStore
from pannier.common import timeouts
from pannier.common.daemon_process import is_serving
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, DeadlineError, UnavailableError
from pannier.wire.tls import Tls

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
    """The host's IP address as seen from the store's host; None: not known, or not needed."""


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
    """This rank and its host. Raises ConfigurationError: the runtime directory can't be used.

    Args:
        size: number of ranks.
    """
    launcher.make_private_dir(settings.runtime_dir)
    address = None
    if not network.all_ranks_here(size):
        address = network.own_address([os.environ.get("MASTER_ADDR")])
    return HostInfo(rank, host, network.runtime_dir_id(settings.runtime_dir), address)


def agree(
    store: GroupStore,
    incarnation: int,
    own: HostInfo,
    first: HostInfo,
    *,
    size: int,
    settings: Settings,
) -> Rendezvous | None:
    """Agrees with the other ranks of the incarnation on the coordinator's host.

    Args:
        incarnation: number of the incarnation in the store.
        own: this rank.
        first: the rank that wrote to the store first.
        size: number of ranks.

    Raises:
        ConfigurationError: other hosts can't reach a coordinator on the leader's host, or
            LOCAL_WORLD_SIZE is wrong.
        DeadlineError: no rank has decided.
    """
    apart = first.runtime_dir_id != own.runtime_dir_id
    if network.all_ranks_here(size):
        if apart:
            raise ConfigurationError(
                f"LOCAL_WORLD_SIZE={os.environ['LOCAL_WORLD_SIZE']} says that all ranks are on one "
                f"host, but rank {own.rank} ({own.host}) doesn't see the runtime directory of rank "
                f"{first.rank} ({first.host}): give all the same PANNIER_RUNTIME_DIR, {_ADVICE}"
            )
        return None
    key = f"{incarnation}/rendezvous"
    answer = store.read(key)
    if answer is None:
        if apart:
            store.claim(f"{incarnation}/apart", json.dumps(asdict(own)))
        elif store.count(f"{incarnation}/calls/{own.rank}", 1) == 1:
            store.count(f"{incarnation}/together", 1)
        if _is_leader(store, incarnation, own, first):
            return _decide(store, incarnation, own, first, size=size, settings=settings)
        answer = store.poll(
            lambda: store.read(key) or _new_problem(store, incarnation, own), settings.plan_timeout
        )
    if answer is None:
        leader = store.read(f"{incarnation}/lead") or first.rank
        raise DeadlineError(
            f"rank {own.rank} ({own.host}) waited {settings.plan_timeout:g} s for rank {leader} to "
            "report which host runs the coordinator: does that rank still run?"
        )
    rendezvous = _decode(answer)
    if rendezvous is None and apart:
        raise ConfigurationError(
            f"rank {own.rank} ({own.host}) doesn't see the runtime directory of rank {first.rank} "
            f"({first.host}), and joined after it was decided that all ranks are on that host: give "
            f"all the same PANNIER_RUNTIME_DIR, {_ADVICE}"
        )
    return rendezvous


def _new_problem(store: GroupStore, incarnation: int, own: HostInfo) -> str | None:
    """Why the leader has failed, if this rank has not raised that yet; the next call tries again."""
    failures, raised = f"{incarnation}/failures", f"{incarnation}/raised/{own.rank}"
    count = store.count(failures)
    new = count - store.count(raised)
    if not new:
        return None
    store.count(raised, new)
    problem: str | None = store.read(f"{failures}/{count}")
    return problem


def join(settings: Settings, rendezvous: Rendezvous, own: HostInfo) -> DaemonSpec:
    """This host's daemons for a job on several hosts, for :func:`launcher.ensure`.

    Raises:
        UnavailableError: the coordinator can't be reached from here.
        ConfigurationError: the runtime directory can't be used.
    """
    directory = _directory(settings, rendezvous, own)
    address = rendezvous.coordinator
    if own.runtime_dir_id == rendezvous.leader.runtime_dir_id:
        return job_daemons(settings, directory, listen=address, peers=_peers(address, own))
    spec = job_daemons(settings, directory, coordinator=address, peers=_peers(address, own))
    if is_serving(directory):
        return spec

    def prepare() -> None:
        write_tls_files(directory, rendezvous.tls)
        write_record(spec)

    launcher.make_private_dir(directory)
    files = write_tls_files(directory, rendezvous.tls)
    if why := network.probe_daemon(address, Tls(*files), timeouts.COORDINATOR_START_S):
        host = rendezvous.leader.host
        raise UnavailableError(
            f"host {own.host} (rank {own.rank}) can't reach this job's coordinator at {address}, which "
            f"runs on {host}, the host of rank {rendezvous.leader.rank}: {why}. Let the hosts connect to "
            f"each other (firewall), name an address and port of {host} that the others can reach by "
            f"PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return replace(left_spools.with_left_spools(settings, spec), prepare=prepare)


def _is_leader(store: GroupStore, incarnation: int, own: HostInfo, first: HostInfo) -> bool:
    if own.rank not in (0, first.rank):
        return False
    key = f"{incarnation}/lead"
    leader: str | None = None
    if own.rank != 0:
        leader = store.poll(lambda: store.read(key), timeouts.LEADER_S)
    leader = leader or store.claim(key, str(own.rank))
    return leader == str(own.rank)


def _decide(
    store: GroupStore,
    incarnation: int,
    own: HostInfo,
    first: HostInfo,
    *,
    size: int,
    settings: Settings,
) -> Rendezvous | None:
    def look() -> str | None:
        """The address of another rank's host, "" if not known; "here": all ranks are on this host."""
        apart = first if first.runtime_dir_id != own.runtime_dir_id else None
        if apart is None and (answer := store.read(f"{incarnation}/apart")) is not None:
            apart = HostInfo(**json.loads(answer))
        if apart is not None:
            return apart.address or ""
        return "here" if store.count(f"{incarnation}/together") >= size else None

    key = f"{incarnation}/rendezvous"
    try:
        towards = store.poll(look, timeouts.LEADER_S)
        if towards is None and addresses.is_loopback(os.environ.get("MASTER_ADDR", "")):
            # Some ranks haven't reported; but over loopback they can only be on this host.
            towards = "here"
        rendezvous = None if towards == "here" else _start_coordinator(own, towards, settings)
    except Exception as error:
        # So that the other ranks fail at once, not at their deadline. Only a success is final: the next save
        # tries again.
        failures = f"{incarnation}/failures"
        problem = json.dumps({"problem": f"rank {own.rank} ({own.host}): {error}"})
        store.claim(f"{failures}/{store.count(failures) + 1}", problem)
        store.count(failures, 1)
        raise
    store.claim(key, _encode(rendezvous))
    return rendezvous


_started_lock = threading.Lock()
_started: tuple[Settings, Rendezvous, TlsBundle] | None = None
"""The coordinator that this process has started, which also serves later incarnations of its job."""


def _start_coordinator(own: HostInfo, towards: str | None, settings: Settings) -> Rendezvous:
    """Starts the coordinator of all hosts on this host, or finds it; other hosts can reach its address."""
    global _started
    with _started_lock:
        job = job_key(settings)
        if (
            _started is not None
            and (_started[0], _started[1].job) == (settings, job)
            and network.is_own(_started[1].coordinator)
        ):
            rendezvous, tls = replace(_started[1], leader=own), _started[2]
        else:
            rendezvous, tls = _find_earlier(settings, job, own) or _new(settings, job, own, towards)
        directory = _directory(settings, rendezvous, own)
        spec = job_daemons(
            settings,
            directory,
            listen=rendezvous.coordinator,
            peers=_peers(rendezvous.coordinator, own),
        )

        def prepare() -> None:
            write_tls_files(directory, tls)
            write_private_file(directory / _RECORD, _encode(rendezvous))
            write_record(spec)

        spec = replace(left_spools.with_left_spools(settings, spec), prepare=prepare)
        launcher.ensure(settings, spec)
        if why := launcher.await_listening(
            spec, rendezvous.coordinator, timeouts.COORDINATOR_START_S
        ):
            raise UnavailableError(
                f"the embedded coordinator does not listen on {rendezvous.coordinator}: {why}; name "
                f"another address by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
            )
        _log.info("this host's coordinator at %s serves all hosts", rendezvous.coordinator)
        _started = settings, rendezvous, tls
        return rendezvous


def _find_earlier(
    settings: Settings, job: str, own: HostInfo
) -> tuple[Rendezvous, TlsBundle] | None:
    """The coordinator of an earlier start of the job on this host, running or killed, if it is that and answers."""
    for directory in reversed(addresses.job_dirs(settings.runtime_dir, job)):
        try:
            spec = read_record(directory)
            if (
                spec is None
                or not spec.serves_others
                or launcher.differing_variables(settings, spec)
            ):
                continue
            rendezvous = _decode((directory / _RECORD).read_text())
            tls = TlsBundle(*(path.read_text() for path in tls_files(directory)))
            if rendezvous is None or settings.listen not in (None, rendezvous.coordinator):
                continue
            if settings.listen is None and not _is_same_job(job):
                continue
            if not is_serving(directory):
                network.check_free(rendezvous.coordinator)
            elif why := network.probe_daemon(
                rendezvous.coordinator, Tls(*tls_files(directory)), timeouts.COORDINATOR_START_S
            ):
                raise ConfigurationError(f"{rendezvous.coordinator}: {why}")
        except FileNotFoundError:  # they are exiting
            continue
        except (ValueError, ConfigurationError) as error:
            _log.warning(
                "the daemons in %s can't be used again: %s; this start uses others",
                directory,
                error,
            )
            continue
        return replace(rendezvous, leader=own), tls
    return None


def _new(
    settings: Settings, job: str, own: HostInfo, towards: str | None
) -> tuple[Rendezvous, TlsBundle]:
    address = settings.listen
    if address is None:
        address = _free_address(own, towards)
    else:
        network.check_free(address)
    tls, callers = issue(network.split_address(address)[0])
    return Rendezvous(secrets.token_hex(3), job, address, own, callers), tls


def _free_address(own: HostInfo, towards: str | None) -> str:
    host = network.own_address([towards, os.environ.get("MASTER_ADDR")])
    if host is None:
        raise ConfigurationError(
            f"host {own.host} has no address by which other hosts could reach its coordinator: name "
            f"one by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return network.join_address(host, network.free_port(host))


def _peers(coordinator: str, own: HostInfo) -> str | None:
    """Where the other hosts can reach this host's sidecar; None: it isn't known."""
    host = network.own_address([network.split_address(coordinator)[0]]) or own.address
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


def _directory(settings: Settings, rendezvous: Rendezvous, own: HostInfo) -> Path:
    return addresses.job_dir(
        settings.runtime_dir, rendezvous.job, rendezvous.start_id, own.runtime_dir_id
    )


def _encode(rendezvous: Rendezvous | None) -> str:
    return json.dumps(None if rendezvous is None else asdict(rendezvous))


def _decode(text: str) -> Rendezvous | None:
    answer = json.loads(text)
    if answer is None:
        return None
    if "problem" in answer:
        raise ConfigurationError(f"the hosts have no coordinator in common: {answer['problem']}")
    return Rendezvous(
        **{**answer, "leader": HostInfo(**answer["leader"]), "tls": TlsBundle(**answer["tls"])}
    )
