"""How the embedded daemons of several hosts come together: one host's coordinator serves all.

In: notes in the process group's store. Out: None where all ranks are on one host, else where the
coordinator is and the certificate it wants to see. Rank 0's host has it, or that of the first rank
that saves when rank 0 doesn't. Decided once per incarnation, by one rank for all. Blocking.
"""

import json
import logging
import os
import secrets
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded import former_daemons, launcher, network
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
from pannier.client.embedded.pg_store import RankStore
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, DeadlineError, PannierError, UnavailableError
from pannier.wire.tls import Tls

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""How long the others are waited for: rank 0 to decide, or a rank that is on another host."""
_UP_S: Final = 60.0
"""Until a coordinator whose sidecar is there has come up: it imports torch."""
_REACH_S: Final = 5.0
"""Until a coordinator that doesn't answer counts as out of reach."""
_MEETING: Final = "meeting.json"
"""In the directory of the pair with the coordinator: what its host tells the others, a key included."""
_ADVICE: Final = "or run `pannier coordinator` where all hosts reach it and set PANNIER_COORDINATOR"


@dataclass(frozen=True)
class HostInfo:
    """Where a rank is."""

    rank: int
    host: str
    """For people."""
    place: str
    """See :func:`hosts.place`."""
    address: str | None
    """Its host's, as seen from the store's host; None: not known, or not needed."""


@dataclass(frozen=True)
class Rendezvous:
    """What all ranks of an incarnation know of its coordinator."""

    word: str
    """Random."""
    job: str
    """What stays the same when the job is started again."""
    coordinator: str
    """``host:port``."""
    at: HostInfo
    """The rank whose host has it."""
    papers: TlsBundle
    """For those who call it."""


def host_info(rank: int, host: str, size: int, settings: Settings) -> HostInfo:
    """This rank's, of ``size`` ranks. Raises ConfigurationError: the runtime directory can't be used."""
    launcher.make_private_dir(settings.runtime_dir)
    address = None
    if not network.all_ranks_here(size):
        address = network.own_address([os.environ.get("MASTER_ADDR")])
    return HostInfo(rank, host, network.runtime_dir_id(settings.runtime_dir), address)


def agree(
    notes: RankStore, life: int, own: HostInfo, first: HostInfo, *, size: int, settings: Settings
) -> Rendezvous | None:
    """Settles where the coordinator is, with the other ranks of the incarnation.

    Args:
        life: number of the incarnation in the store.
        own: this rank's spot.
        first: that of the rank which wrote to the store first.
        size: number of ranks.

    Raises:
        ConfigurationError: the rank that decides can't have a coordinator that others reach, or the
            launcher is wrong about who is on this host.
        DeadlineError: nobody has decided.
    """
    apart = first.place != own.place
    if network.all_ranks_here(size):
        if apart:
            raise ConfigurationError(
                f"LOCAL_WORLD_SIZE={os.environ['LOCAL_WORLD_SIZE']} says that all ranks are on one "
                f"host, but rank {own.rank} ({own.host}) doesn't see the runtime directory of rank "
                f"{first.rank} ({first.host}): give all the same PANNIER_RUNTIME_DIR, {_ADVICE}"
            )
        return None
    key = f"{life}/meeting"
    told = notes.read(key)
    if told is None:
        if apart:
            notes.claim(f"{life}/apart", json.dumps(asdict(own)))
        else:
            notes.count(f"{life}/together", 1)
        if _leads(notes, life, own, first):
            return _lead(notes, life, own, first, size=size, settings=settings)
        told = notes.poll(lambda: notes.read(key), settings.plan_timeout)
    if told is None:
        leader = notes.read(f"{life}/lead") or first.rank
        raise DeadlineError(
            f"rank {own.rank} ({own.host}) waited {settings.plan_timeout:g} s for rank {leader} to "
            "say which host has the coordinator: does that rank still run?"
        )
    meeting = _decoded(told)
    if meeting is None and apart:
        raise ConfigurationError(
            f"rank {own.rank} ({own.host}) doesn't see the runtime directory of rank {first.rank} "
            f"({first.host}), and came too late to be expected elsewhere than on that host: give all "
            f"the same PANNIER_RUNTIME_DIR, {_ADVICE}"
        )
    return meeting


def join(settings: Settings, meeting: Rendezvous, own: HostInfo) -> DaemonSpec:
    """This host's daemons for a job on several hosts, for :func:`embedded.ensure`.

    Raises:
        UnavailableError: the coordinator can't be reached from here.
        ConfigurationError: the runtime directory can't be used.
    """
    directory = _directory(settings, meeting, own)
    where = meeting.coordinator
    if own.place == meeting.at.place:
        return job_daemons(settings, directory, listen=where)
    pair = job_daemons(settings, directory, coordinator=where)
    if launcher.is_up(pair):
        return pair
    launcher.make_private_dir(directory)
    files = write_tls_files(directory, meeting.papers)
    write_record(pair)
    if why := network.probe_daemon(where, Tls(*files), _REACH_S):
        host = meeting.at.host
        raise UnavailableError(
            f"host {own.host} (rank {own.rank}) can't reach this job's coordinator at {where}, which "
            f"runs on {host}, the host of rank {meeting.at.rank}: {why}. Let the hosts connect to "
            f"each other (firewall), name an address and port of {host} that the others reach by "
            f"PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return former_daemons.with_former_daemons(
        settings, pair, meeting.job, successor=where, files=files
    )


# By the one rank that decides.


def _leads(notes: RankStore, life: int, own: HostInfo, first: HostInfo) -> bool:
    if own.rank not in (0, first.rank):
        return False
    key = f"{life}/lead"
    if own.rank != 0 and notes.poll(lambda: notes.read(key), PATIENCE_S) is not None:
        return False
    return notes.claim(key, str(own.rank)) == str(own.rank)


def _lead(
    notes: RankStore, life: int, own: HostInfo, first: HostInfo, *, size: int, settings: Settings
) -> Rendezvous | None:
    def look() -> str | None:
        """Another host's address, perhaps "", or "here" when all ranks are on this one."""
        apart = first if first.place != own.place else None
        if apart is None and (told := notes.read(f"{life}/apart")) is not None:
            apart = HostInfo(**json.loads(told))
        if apart is not None:
            return apart.address or ""
        return "here" if notes.count(f"{life}/together") >= size else None

    key = f"{life}/meeting"
    try:
        towards = notes.poll(look, PATIENCE_S)
        if towards is None and addresses.is_loopback(os.environ.get("MASTER_ADDR", "")):
            # Of ranks that haven't come nothing is known; but they couldn't have met elsewhere.
            towards = "here"
        meeting = None if towards == "here" else _convene(own, towards, settings)
    except PannierError as error:
        # The others are told at once, not by a deadline.
        notes.claim(key, json.dumps({"problem": f"rank {own.rank} ({own.host}): {error}"}))
        raise
    notes.claim(key, _encoded(meeting))
    return meeting


_led_lock = threading.Lock()
_led: tuple[Settings, Rendezvous, TlsBundle] | None = None
"""What this process has convened: it serves the later incarnations of its job, too."""


def _convene(own: HostInfo, towards: str | None, settings: Settings) -> Rendezvous:
    """Has the coordinator of all hosts run beside this rank, at an address that is theirs to reach."""
    global _led
    with _led_lock:
        job = job_key(settings)
        if _led is not None and (_led[0], _led[1].job) == (settings, job):
            meeting, papers = replace(_led[1], at=own), _led[2]
        else:
            meeting, papers = _standing(settings, job, own) or _new(settings, job, own, towards)
        directory = _directory(settings, meeting, own)
        pair = job_daemons(settings, directory, listen=meeting.coordinator)
        launcher.make_private_dir(directory)
        write_tls_files(directory, papers)
        write_private_file(directory / _MEETING, _encoded(meeting))
        write_record(pair)
        beside = addresses.embedded_coordinator(directory)
        launcher.ensure(
            settings, former_daemons.with_former_daemons(settings, pair, job, successor=beside)
        )
        if why := launcher.await_listening(pair, meeting.coordinator, _UP_S):
            raise UnavailableError(
                f"the embedded coordinator does not listen on {meeting.coordinator}: {why}; if that "
                f"can't be, name another address by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
            )
        _log.info("this host's coordinator at %s serves all hosts", meeting.coordinator)
        _led = settings, meeting, papers
        return meeting


def _standing(settings: Settings, job: str, own: HostInfo) -> tuple[Rendezvous, TlsBundle] | None:
    """What an earlier start of the job has left here, running or killed, if that will do."""
    for directory in reversed(addresses.job_dirs(settings.runtime_dir, job, own.host)):
        try:
            pair = read_record(directory)
            if (
                pair is None
                or not pair.serves_others
                or launcher.differing_variables(settings, pair)
            ):
                continue
            meeting = _decoded((directory / _MEETING).read_text())
            papers = TlsBundle(*(path.read_text() for path in tls_files(directory)))
            if meeting is None or settings.listen not in (None, meeting.coordinator):
                continue
            if not launcher.is_up(pair):
                network.check_free(meeting.coordinator)
        except FileNotFoundError:  # They are just leaving.
            continue
        except (ValueError, ConfigurationError) as error:
            _log.warning("the daemons in %s can't be used again: %s", directory, error)
            continue
        return replace(meeting, at=own), papers
    return None


def _new(
    settings: Settings, job: str, own: HostInfo, towards: str | None
) -> tuple[Rendezvous, TlsBundle]:
    address = settings.listen
    if address is None:
        address = _free_address(own, towards)
    else:
        network.check_free(address)
    papers, callers = issue(network.split_address(address)[0])
    return Rendezvous(secrets.token_hex(3), job, address, own, callers), papers


def _free_address(own: HostInfo, towards: str | None) -> str:
    host = network.own_address([towards, os.environ.get("MASTER_ADDR")])
    if host is None:
        raise ConfigurationError(
            f"host {own.host} has no address that other hosts could reach its coordinator by: name "
            f"one by PANNIER_LISTEN=HOST:PORT, {_ADVICE}"
        )
    return network.join_address(host, network.free_port(host))


def job_key(settings: Settings) -> str:
    """What is the same when the job is started again, as far as that can be known."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    for kind, word in (
        ("job", settings.job),
        ("run", None if run == "none" else run),
        ("slurm", os.environ.get("SLURM_JOB_ID")),
    ):
        if word:
            return f"{kind} {word}"
    return f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _directory(settings: Settings, meeting: Rendezvous, own: HostInfo) -> Path:
    # Of one place, perhaps with several names, that has the certificate to serve with.
    host = meeting.at.host if own.place == meeting.at.place else own.host
    return addresses.job_dir(settings.runtime_dir, meeting.job, meeting.word, host)


def _encoded(meeting: Rendezvous | None) -> str:
    return json.dumps(None if meeting is None else asdict(meeting))


def _decoded(text: str) -> Rendezvous | None:
    told = json.loads(text)
    if told is None:
        return None
    if "problem" in told:
        raise ConfigurationError(f"the hosts have no coordinator in common: {told['problem']}")
    return Rendezvous(
        **{**told, "at": HostInfo(**told["at"]), "papers": TlsBundle(**told["papers"])}
    )
