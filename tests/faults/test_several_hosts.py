"""Jobs on three hosts with nothing configured: their embedded daemons find each other.

The hosts are network namespaces with hostnames, runtime directories and spools of their own.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier import client
from pannier.client.embedded import network as addresses_of_hosts
from pannier.v1 import save_pb2
from pannier.wire import addresses
from support.actors.block_reader import BlockReader, Checkpoint, committed
from support.actors.scripted_sidecar import wait_until
from support.network.netns import HERE, Network, network_or_skip
from support.network.several_hosts import Hosts, Job, TorchrunJob, listeners
from support.processes.cli import pannier
from support.processes.ranks import free_port
from support.processes.watching import COMMITTED, all_in, await_save, listed
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(400)

NAMES = ("a", "b", "c")
FULL = torch.arange(12_000.0).reshape(120, 100)
HELD = r"uploadType=resumable.*step-1%2F__i[^_]*_{}_"
"""Uploads of a rank's large file, by which those of the first save are recognised."""
INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)

TRAIN = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from pannier import client

life, flags = os.environ.get("TORCHELASTIC_RESTART_COUNT"), Path(os.environ["FLAGS"])
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(12_000.0).reshape(120, 100)
state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 0}

def save(step, more=0):
    state["step"] = step
    if more:
        state["more"] = distribute_tensor(torch.ones(more, 1 << 20), mesh, [Shard(0)])
    return client.async_save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}", timeout=90)

def say(what):
    print(f"<{what}>", flush=True)

def wait(name):
    while not (flags / name).exists():
        time.sleep(0.05)
"""
TWICE = """
save(1).result()
say("saved 1")
wait("go on")
save(2).result()
say("saved 2")
client.close()
dist.destroy_process_group()
"""
RESTARTED = """
if life == "0":
    handle = save(1, more=12)
    say("staged 1")
    wait("die")
    os._exit(3)
save(2).result()
say("saved 2")
client.close()
dist.destroy_process_group()
"""
LEFT = """
handle = save(1, more=12)
say("staged 1")
time.sleep(600)
"""
RESUMED = """
save(2).result()
say("saved 2")
wait("go on")
client.close()
dist.destroy_process_group()
"""
OTHERS = """
save(2).result()
others = dist.new_group([1, 2])
if rank:
    w = torch.ones(3 << 20)
    path = f"{os.environ['ROOT']}/step-1"
    client.async_save({"w": w}, checkpoint_id=path, process_group=others, timeout=90)
    say("staged 1")
wait("close")
say(f"closing {rank}")
client.close()
say(f"closed {rank}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip(*NAMES) as made:
        yield made


@pytest.fixture
def hosts(network: Network) -> Iterator[Hosts]:
    with Hosts(network, *NAMES) as made:
        yield made


@pytest.fixture
def server(network: Network, tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "gcs", host=network.address(HERE)) as running:
        yield running


class Place:
    """Where a job's script lies, where its checkpoints go, and what lets it continue."""

    def __init__(self, directory: Path, root: str, **environment: str) -> None:
        self._directory = directory
        self.root = root
        self._flags = directory / "flags"
        self._flags.mkdir()
        self._environment = {"ROOT": root, "FLAGS": str(self._flags), **environment}

    def job(self, hosts: Hosts, body: str, kind: type[Job] = Job, **options: object) -> Job:
        name = f"job-{len(list(self._directory.glob('job-*')))}"
        (self._directory / name).mkdir()
        script = self._directory / name / "train.py"
        script.write_text(TRAIN + body)
        among = options.pop("among", hosts.all)
        logs = self._directory / name / "logs"
        environment = {**self._environment, **options.pop("environment", {})}  # type: ignore[dict-item]
        return hosts.run(kind(among, script, logs, environment=environment, **options))  # type: ignore[arg-type]

    def order(self, what: str) -> None:
        (self._flags / what).touch()


def check(root: str, *steps: int) -> None:
    """The checkpoints are whole, for plain DCP as well where it reads the file system."""
    for step in steps:
        state = {"w": torch.zeros_like(FULL), "step": 0}
        client.load(state, checkpoint_id=f"{root}/step-{step}", verify=True)
        assert torch.equal(state["w"], FULL)  # type: ignore[arg-type]
        assert state["step"] == step
        if not root.startswith("gs:"):
            plain = {"w": torch.zeros_like(FULL)}
            dcp.load(plain, checkpoint_id=f"{root}/step-{step}", no_dist=True)
            assert torch.equal(plain["w"], FULL)


def read_from_peers(hosts: Hosts, checkpoint: Path, peers: Mapping[str, str]) -> None:
    """Each host's sidecar gets a block from the spool of the next one, by the job's own certificates."""
    names = sorted(path.name for path in checkpoint.glob("__i*.distcp"))
    attempt = names[0][2:].rpartition("_")[0].rpartition("_")[0]
    loaded = Checkpoint(str(checkpoint), attempt, [], "load")
    readers, files = [], []
    for host in hosts.all:
        (name,) = host.daemons()
        socket = addresses.embedded_sidecar(host.runtime_dir / name)
        located = BlockReader(socket, loaded).locate(names)
        assert (located.host, located.peer_address) == (host.name, peers[host.name])
        assert located.peer_tls
        files += committed(loaded.id, attempt, [located.files[0].name])
        readers.append(socket)
    loaded = Checkpoint(str(checkpoint), attempt, files, "load")
    for own, socket in enumerate(readers):
        with BlockReader(socket, loaded, hosts=list(peers.items()), own=own) as reader:
            other = (own + 1) % len(readers)
            reader.request(0, file=other, holders=[other])
            block = reader.next()
            assert block.source == hosts.all[other].name
            data = (checkpoint / files[other].name).read_bytes()
            assert reader.content(block) == data[: block.size]


@pytest.mark.slow
def test_torchrun_on_three_hosts_needs_nothing_else(hosts: Hosts, tmp_path: Path) -> None:
    a = hosts.all[0]
    place = Place(tmp_path, str(tmp_path / "run"))
    job = place.job(hosts, TWICE, TorchrunJob, ranks=[2, 1, 1])
    job.wait_for("<saved 1>", 4)
    # One coordinator, on rank 0's host, and nothing listens on TCP but that and what peers read from.
    coordinator = a.daemon("coordinator")
    (address,) = listeners(coordinator)
    assert address.startswith(f"{a.address}:")
    peers = {}
    for host in hosts.all:
        (daemons,) = host.daemons().values()
        assert len(daemons) == (3 if host is a else 2)
        (peers[host.name],) = listeners(daemons[-1])
        assert peers[host.name].startswith(f"{host.address}:")
        for each in daemons[:-1]:
            assert listeners(each) == ([address] if each == coordinator else [])
        for path in host.runtime_dir.glob("job-*/*"):
            if path.is_file() and "PRIVATE" in path.read_text():
                assert path.stat().st_mode & 0o777 == 0o600
        assert "PRIVATE" not in "".join(p.read_text() for p in host.runtime_dir.glob("**/*.log"))
    assert "PRIVATE" not in job.output()
    # A client without a certificate of this job is refused.
    assert addresses_of_hosts.probe_port(address, 2) == ""
    with pytest.raises(AssertionError, match=r"handshake|Socket closed|reset|UNAVAILABLE|Deadline"):
        await_save(address, f"{place.root}/step-1", lambda save: True, timeout=10)
    read_from_peers(hosts, Path(place.root) / "step-1", peers)
    # The coordinator is killed, and started again where the others look for it.
    coordinator.kill()
    place.order("go on")
    job.wait()
    assert listeners(a.daemon("coordinator")) == [address]
    check(place.root, 1, 2)


@pytest.mark.slow
@pytest.mark.extended
def test_restarted_workers_save_with_the_daemons_that_still_upload(
    hosts: Hosts, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    a, b, _ = hosts.all
    place = Place(tmp_path, "gs://bucket/again", **server.env)
    server.fault(kind="status", method="POST", path=HELD.format("[01]"), times=-1)
    job = place.job(
        *(hosts, RESTARTED, TorchrunJob),
        among=[a, b],
        ranks=[1, 1],
        arguments=["--max-restarts=1", "--monitor-interval=0.5"],
        # Else torch's ranks may read each other's earlier addresses from torchrun's own store.
        environment={
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # Held by the daemons of the first start, which the second one uses.
            "PANNIER_LISTEN": (address := f"{a.address}:7071"),
        },
    )
    job.wait_for("<staged 1>", 2)
    (name,) = a.daemons()
    coordinator = addresses.embedded_coordinator(a.runtime_dir / name)
    await_save(coordinator, f"{place.root}/step-1", INGESTED)
    place.order("die")
    job.wait()
    assert listeners(a.daemon("coordinator")) == [address]
    check(place.root, 2)
    # What the earlier incarnation had handed over is committed by its own daemons.
    states = {save.checkpoint_id: save.state for save in listed(coordinator).saves}
    assert states[f"{place.root}/step-1"] != COMMITTED
    server.clear()
    await_save(coordinator, f"{place.root}/step-1", lambda save: save.state == COMMITTED)
    check(place.root, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("abc", "bc"),
        pytest.param("ab", "b", marks=pytest.mark.extended),
        pytest.param("ab", "ab", marks=pytest.mark.extended),
    ],
    ids=["moved", "alone", "same"],
)
def test_what_was_ingested_is_committed_when_the_job_is_started_again(
    hosts: Hosts,
    server: GcsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
) -> None:
    """Daemons are killed on hosts a and b; host c, if it takes part, keeps a sidecar without coordinator."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    named = {host.name: host for host in hosts.all}
    a, b, _ = hosts.all
    place = Place(tmp_path, "gs://bucket/moved", **server.env)
    # Rank 0 and the coordinator are on a.
    server.fault(kind="status", method="POST", path=HELD.format("[12]"), times=-1)
    job = place.job(hosts, LEFT, among=[named[name] for name in first])
    job.wait_for("<staged 1>", len(first))
    (earlier,) = a.daemons()
    save = f"{place.root}/step-1"
    coordinator = addresses.embedded_coordinator(a.runtime_dir / earlier)
    await_save(coordinator, save, INGESTED)
    await_save(coordinator, save, lambda s: s.ranks[0].phase == save_pb2.RANK_PHASE_DURABLE)
    job.kill()
    a.kill()
    b.kill()
    server.clear()
    among = [named[name] for name in second]
    again = place.job(hosts, RESUMED, among=among)
    again.wait_for("<saved 2>", len(among))
    # Daemons of one start: the supervisor, a sidecar, and on rank 0's host a coordinator.
    (name,) = (name for name, each in among[0].daemons().items() if len(each) == 3)
    assert (name == earlier) == (second == "ab")
    assert (name == b.runtime_dir.name) == (second == "b")
    directory = among[0].runtime_dir / ("" if second == "b" else name)
    coordinator = addresses.embedded_coordinator(directory)
    await_save(coordinator, save, lambda s: s.state == COMMITTED)
    place.order("go on")
    again.wait()
    check(place.root, 1, 2)


@pytest.mark.slow
def test_where_daemons_end_with_the_trainer_the_coordinators_host_waits_for_the_others(
    hosts: Hosts, server: GcsServer, tmp_path: Path
) -> None:
    place = Place(tmp_path, "gs://bucket/others", **server.env)
    server.fault(kind="status", method="POST", path=HELD.format("[12]"), times=-1)
    job = place.job(hosts, OTHERS, environment={"SLURM_JOB_ID": "7"})
    job.wait_for("<staged 1>", 2)
    (name,) = hosts.all[0].daemons()
    coordinator = addresses.embedded_coordinator(hosts.all[0].runtime_dir / name)
    save = f"{place.root}/step-1"
    await_save(coordinator, save, INGESTED)
    place.order("close")
    job.wait_for("<closing ", 3)
    # Rank 0 has no part in that save, but its host has the coordinator.
    time.sleep(2)
    assert "<closed " not in job.output()
    server.clear()
    assert job.wait().count("<closed ") == 3
    assert pannier("ls", save, env=server.env).code == 0


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_coordinator_says_so_at_once(
    hosts: Hosts, tmp_path: Path
) -> None:
    place = Place(tmp_path, str(tmp_path / "run"))
    # An address that host a has, and that the others have no way to.
    listen = f"127.0.0.1:{free_port()}"
    job = place.job(hosts, TWICE, environment={"PANNIER_LISTEN": listen})
    wait_until(
        lambda: all(job.agents[name].returncode not in (None, 0) for name in "bc"), timeout=90
    )
    output = " ".join(job.output().split())
    for host in hosts.all[1:]:
        assert f"host {host.name} (rank " in output
    for word in (listen, "host of rank 0", "Connection refused", "firewall", "PANNIER_LISTEN"):
        assert word in output
