"""How ranks settle which host has the coordinator: threads play them, on a store of this process."""

import hashlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pannier.client.config import Settings
from pannier.client.embedded import network, rendezvous
from pannier.client.embedded.certificates import TlsBundle, issue
from pannier.client.embedded.daemon_spec import environment, job_daemons, tls_texts, write_files
from pannier.client.embedded.rendezvous import Agreement, HostInfo, Rendezvous
from pannier.client.ranks.group_store import GroupStore
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.common import timeouts
from pannier.common.daemon_record import DaemonRecord, decisive_variables
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, DeadlineError, UnavailableError
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S

SETTINGS = Settings(plan_timeout=BOUND_S)
TLS = TlsBundle(cert="cert", key="key", ca="ca")


def host_info(rank: int, place: str) -> HostInfo:
    return HostInfo(rank, f"node-{place}", place, f"10.0.0.{ord(place)}")


@pytest.fixture(autouse=True)
def convened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HostInfo, str | None]]:
    """Who has started a coordinator, and towards whom."""
    found: list[tuple[HostInfo, str | None]] = []

    def convene(own: HostInfo, towards: str | None, settings: Settings) -> Rendezvous:
        found.append((own, towards))
        return Rendezvous("w", "job j", "10.0.0.1:7070", own, TLS)

    monkeypatch.setattr(rendezvous, "_start_coordinator", convene)
    monkeypatch.setattr(timeouts, "LEADER_S", 2.5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    return found


class Ranks:
    """Ranks at the given places; those at no place don't come."""

    def __init__(self, places: str, first: int = 0, settings: Settings = SETTINGS) -> None:
        self.store = dist.HashStore()
        self.hosts = [
            None if place == "." else host_info(r, place) for r, place in enumerate(places)
        ]
        self.first = self.hosts[first]
        self._settings = settings
        self._agreements: dict[int, Agreement] = {}

    def meet(self, rank: int) -> Rendezvous | None:
        own = self.hosts[rank]
        assert own is not None
        assert self.first is not None
        store = GroupStore(
            self.store, RankHosts(rank), description=f"rank {rank}", timeout_s=BOUND_S
        )
        agreement = Agreement(
            store, 1, own, self.first, size=len(self.hosts), settings=self._settings
        )
        return self._agreements.setdefault(rank, agreement).rendezvous()

    def run(self) -> list[Rendezvous | Exception | None]:
        """The result of each rank that comes."""

        def caught(rank: int) -> Rendezvous | Exception | None:
            try:
                return self.meet(rank)
            except Exception as error:  # noqa: BLE001 - for the test to look at
                return error

        ranks = [rank for rank, each in enumerate(self.hosts) if each is not None]
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(caught, ranks))


def test_ranks_of_one_host_need_no_meeting(convened: list[Any]) -> None:
    assert Ranks("aaa", first=1).run() == [None, None, None]
    assert convened == []


@pytest.mark.parametrize(("places", "first"), [("aab", 0), ("abb", 1), ("abc", 2), ("aaab", 1)])
def test_rank_0s_host_has_the_coordinator_of_several(
    places: str, first: int, convened: list[tuple[HostInfo, str | None]]
) -> None:
    ranks = Ranks(places, first)
    found = ranks.run()
    ((own, towards),) = convened
    assert own == ranks.hosts[0]
    # So that it listens on the address by which that host reaches it.
    assert towards in {
        each.address for each in ranks.hosts if each and each.runtime_dir_id != own.runtime_dir_id
    }
    first = found[0]
    assert isinstance(first, Rendezvous)
    assert (first.leader, first.coordinator) == (own, "10.0.0.1:7070")
    for each in found:
        assert isinstance(each, Rendezvous)
        assert (each.start_id, each.leader, each.tls.key) == ("w", own, "key")


def test_the_first_rank_decides_when_rank_0_does_not_save(
    convened: list[tuple[HostInfo, str | None]],
) -> None:
    ranks = Ranks(".bcb", first=2)
    found = ranks.run()
    assert [own for own, _ in convened] == [ranks.hosts[2]]
    assert all(isinstance(each, Rendezvous) and each.leader.rank == 2 for each in found)


def test_a_rank_that_may_be_elsewhere_is_expected_there(
    convened: list[tuple[HostInfo, str | None]],
) -> None:
    # Rank 2 hasn't come: it isn't known to be on this host.
    found = Ranks("aa.").run()
    assert [towards for _, towards in convened] == [None]
    assert all(isinstance(each, Rendezvous) for each in found)


def test_ranks_that_met_on_loopback_are_on_one_host(
    convened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    ranks = Ranks("aab")
    late, ranks.hosts[2] = ranks.hosts[2], None
    assert ranks.run() == [None, None]
    assert convened == []
    # Two containers with one network: had it come sooner, both would have been served.
    ranks.hosts[2] = late
    with pytest.raises(ConfigurationError, match=r"rank 2 \(node-b\).*PANNIER_RUNTIME_DIR"):
        ranks.meet(2)


def test_the_launcher_is_believed_and_nothing_is_asked(
    convened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert Ranks("aa.").run() == [None, None]
    assert convened == []
    (one, other) = Ranks("ab").run()
    assert one is None
    assert isinstance(other, ConfigurationError)
    for word in ("LOCAL_WORLD_SIZE=3", "node-a", "node-b", "PANNIER_RUNTIME_DIR"):
        assert word in str(other)


def test_all_ranks_learn_at_once_why_there_is_no_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Rendezvous:
        raise UnavailableError("port 7070 is taken")

    monkeypatch.setattr(rendezvous, "_start_coordinator", fail)
    found = Ranks("abb").run()
    assert [type(each) for each in found] == [UnavailableError, *2 * [ConfigurationError]]
    for each in found[1:]:
        assert "rank 0 (node-a): port 7070 is taken" in str(each)


def test_only_a_success_is_final_so_the_next_save_agrees_again(
    monkeypatch: pytest.MonkeyPatch, convened: list[Any]
) -> None:
    """The port was taken for the first two saves."""
    start, tries = rendezvous._start_coordinator, iter([True, True, False])

    def taken_twice(*arguments: Any) -> Rendezvous:
        if next(tries):
            raise OSError("port 7070 is taken")
        return start(*arguments)

    monkeypatch.setattr(rendezvous, "_start_coordinator", taken_twice)
    for ranks in (Ranks("aab"), Ranks("bab", first=1)):
        tries = iter([True, True, False])
        for _ in range(2):
            failed = ranks.run()
            assert [type(each) for each in failed] == [OSError, *2 * [ConfigurationError]]
        found = ranks.run()
        assert all(isinstance(each, Rendezvous) for each in found)
        # That one stays, though no more coordinators can be started.
        assert ranks.run() == found


def test_the_first_rank_leads_again_where_rank_0_does_not_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Rendezvous:
        raise UnavailableError("port 7070 is taken")

    ranks = Ranks(".bc", first=1)
    with monkeypatch.context() as patched:
        patched.setattr(rendezvous, "_start_coordinator", fail)
        assert [type(each) for each in ranks.run()] == [UnavailableError, ConfigurationError]
    assert all(isinstance(each, Rendezvous) for each in ranks.run())


def test_a_rank_that_comes_twice_is_not_taken_for_two(convened: list[Any]) -> None:
    """Rank 2, elsewhere, comes late; the others have asked before."""
    ranks = Ranks("aab", settings=Settings(plan_timeout=0.3))
    with pytest.raises(DeadlineError):
        ranks.meet(1)
    with pytest.raises(DeadlineError):
        ranks.meet(1)
    found = ranks.run()
    assert all(isinstance(each, Rendezvous) for each in found)


def test_a_wait_ends_with_a_name() -> None:
    ranks = Ranks("ab.", settings=Settings(plan_timeout=0.3))
    with pytest.raises(
        DeadlineError, match=r"rank 1 \(node-b\) waited 0\.3 s for rank 0 to report"
    ):
        ranks.meet(1)


def test_what_was_decided_stays(convened: list[Any]) -> None:
    ranks = Ranks("ab")
    first, later = ranks.run(), ranks.run()
    assert len(convened) == 1
    for one, other in zip(first, later, strict=True):
        assert isinstance(one, Rendezvous)
        assert isinstance(other, Rendezvous)
        assert (one.start_id, one.leader, one.tls.cert) == (
            other.start_id,
            other.leader,
            other.tls.cert,
        )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PANNIER_JOB": "llama", "SLURM_JOB_ID": "7"}, "job llama"),
        ({"TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "7"}, "run r"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "slurm 7"),
        ({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}, "at node-0:29500"),
    ],
)
def test_a_job_is_known_again(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PANNIER_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.job_key(Settings()) == words
    assert rendezvous.launch_id(Settings()) == hashlib.sha256(words.encode()).hexdigest()[:16]


def test_a_job_on_one_host_is_not_taken_for_another_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PANNIER_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous.launch_id(Settings()) == ""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rendezvous.launch_id(Settings()) == ""


def test_daemons_of_an_earlier_start_are_used_again(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they were killed, unless their port is taken or they store elsewhere."""
    settings = Settings(runtime_dir=sockets)
    own, address = HostInfo(0, "node-a", "a", None), f"127.0.0.1:{free_port()}"
    directory = addresses.job_dir(sockets, "job j", "w", "where it was before")
    directory.mkdir()
    standing = Rendezvous("w", "job j", address, HostInfo(3, "node-a", "a", None), TLS)
    server, _ = issue("127.0.0.1")
    files = {**tls_texts(server), "rendezvous.json": json.dumps(asdict(standing))}
    pair = job_daemons(settings, directory, listen=address, files=files)
    write_files(pair)
    kept = decisive_variables(environment(settings, pair))
    DaemonRecord.of_this_process(kept, exits_idle=True).write(directory)

    def found(
        settings: Settings = settings, job: str = "job j"
    ) -> tuple[Rendezvous, TlsBundle] | None:
        return rendezvous._find_earlier(settings, job, own)

    again = found()
    assert again is not None
    assert (again[0].start_id, again[0].coordinator, again[0].leader) == ("w", address, own)
    assert (again[0].tls.key, again[1]) == ("key", server)
    assert found(Settings(runtime_dir=sockets, listen=address)) is not None
    assert found(Settings(runtime_dir=sockets, listen="127.0.0.1:1")) is None
    assert found(job="job k") is None
    with socket.create_server(network.split_address(address)):
        assert found() is None
        assert f"{directory} can't be used again: " in caplog.text
        assert "; this start uses others" in caplog.text
        monkeypatch.setattr(rendezvous, "is_serving", lambda _: True)
        with monkeypatch.context() as patched:
            patched.setattr(network, "probe_daemon", lambda *_: "")
            assert found() is not None
    # They live, but can't be reached at the address that they had.
    assert found() is None
    assert f"{address}: Connection refused" in caplog.text
    monkeypatch.setattr(rendezvous, "is_serving", lambda _: False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert found() is None


def test_the_next_training_at_an_address_is_no_other_start_of_the_last(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name both are known by the address and port of rank 0's host."""
    key, address = "at node-0:29500", f"127.0.0.1:{free_port()}"
    settings, own = Settings(runtime_dir=sockets), HostInfo(0, "node-a", "a", None)
    directory = addresses.job_dir(sockets, key, "w", "a")
    directory.mkdir()
    standing = json.dumps(asdict(Rendezvous("w", key, address, own, TLS)))
    files = {**tls_texts(TLS), "rendezvous.json": standing}
    pair = job_daemons(settings, directory, listen=address, files=files)
    write_files(pair)
    kept = decisive_variables(environment(settings, pair))
    DaemonRecord.of_this_process(kept, exits_idle=True).write(directory)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert rendezvous._find_earlier(settings, key, own) is None
    # torchrun has restarted its workers, or the user named the address.
    assert rendezvous._find_earlier(Settings(runtime_dir=sockets, listen=address), key, own)
    with monkeypatch.context() as patched:
        patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert rendezvous._find_earlier(settings, key, own) is not None
    # A later incarnation of the process that has used it.
    monkeypatch.setattr(rendezvous, "_started_here", {"w"})
    assert rendezvous._find_earlier(settings, key, own) is not None


def test_a_host_that_cannot_reach_the_coordinator_keeps_no_private_key(sockets: Path) -> None:
    """It starts no daemons, which would remove the key when they exit."""
    _, tls = issue("127.0.0.1")
    address = f"127.0.0.1:{free_port()}"
    leader = HostInfo(0, "node-a", "a", None)
    with pytest.raises(UnavailableError, match=rf"host node-b \(rank 1\) can't reach .* {address}"):
        rendezvous.join(
            Settings(runtime_dir=sockets),
            Rendezvous("w", "job j", address, leader, tls),
            HostInfo(1, "node-b", "b", None),
        )
    assert [path for path in sockets.rglob("*") if path.is_file()] == []


def test_an_address_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"PANNIER_LISTEN=192\.0\.2\.7:7070: .* on host"):
        network.check_free("192.0.2.7:7070")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="in use"):
            network.check_free(address)
