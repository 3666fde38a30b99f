"""Hosts that are lost between ingestion and durability (``--replicas 1``): the host with the replica uploads for them.

In most tests the trainers are played, and hosts are sidecars on one machine; in the last, hosts are network
namespaces with trainers and their embedded daemons.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.v1 import save_pb2
from pannier.wire import addresses
from support.actors.hand import Party
from support.actors.mapped_clients import saving
from support.actors.scripted_sidecar import wait_until
from support.network.certificates import Authority
from support.network.netns import HERE, Network, network_or_skip
from support.network.several_hosts import Host, Hosts, Job
from support.processes.daemons import Daemon, Daemons, await_serving
from support.processes.ranks import reserved_port
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import ABORTED, COMMITTED, all_in, await_save, listed
from support.storage.bucket import check_whole, data_reads, hold_up
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(400)

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)
LARGE = 2 << 20
"""Floats of a rank whose data file is uploaded in pieces, which the test can hold up."""
NO_HOLDER = "no host of another failure domain is attached"


class Replicating:
    """Sidecars of two hosts that are each other's holder, at one coordinator."""

    def __init__(self, directory: Path, server: GcsServer, *arguments: str) -> None:
        tls = Authority(directory / "ca").issue("sidecar")
        self.server = server
        self.daemons = Daemons(directory, sidecars=2, environment=server.env, start=False)
        self._ports = [reserved_port() for _ in self.daemons.sidecars]
        for daemon, port in zip(self.daemons.sidecars, self._ports, strict=True):
            address = f"127.0.0.1:{port.getsockname()[1]}"
            daemon.arguments += ["--peers", address, *tls.flags, "--replicas", "1", *arguments]
        for name, seconds in (("TAKE_OVER_S", stretched(6)), ("NO_HOLDER_S", 1.0)):
            self.daemons.coordinator.constants[f"pannier.common.timeouts.{name}"] = seconds

    @property
    def all(self) -> Sequence[Daemon]:
        return (self.daemons.coordinator, *self.daemons.sidecars)

    def start(self) -> None:
        for daemon in self.all:
            daemon.start(ready=False)
        for daemon in self.all:
            await_serving(daemon.address, process=daemon.process)

    def party(self, incarnation: str) -> Party:
        sidecars = [each.address for each in self.daemons.sidecars]
        return Party(sidecars, incarnation=incarnation, words=[LARGE, LARGE])

    def lose(self, host: int) -> None:
        """All its processes, and its spool."""
        self.daemons.sidecars[host].kill()
        shutil.rmtree(self.daemons.spool / str(host))

    def ended(self, target: str) -> save_pb2.SaveStatus:
        def over(status: save_pb2.SaveStatus) -> bool:
            return status.state in (COMMITTED, ABORTED)

        return await_save(self.daemons.coordinator.address, target, over)

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self.server.clear()


@pytest.fixture
def hosts(tmp_path: Path, server: GcsServer) -> Iterator[Replicating]:
    with closing(Replicating(tmp_path, server)) as made, made.daemons:
        made.start()
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True], ids=["", "the coordinator, too"])
def test_what_a_lost_host_had_ingested_is_uploaded_by_the_host_with_its_replica(
    hosts: Replicating, restarted: bool
) -> None:
    target = f"gs://bucket/replicas/step-{1 + 10 * restarted}"
    hold_up(hosts.server)
    coordinator = hosts.daemons.coordinator
    with hosts.party("lost") as ranks:
        ranks.save(target, 1)
        # The holders report that they have all of it, and the senders where it is.
        status = await_save(
            coordinator.address,
            target,
            lambda s: (
                s.replicated_ranks == 2
                and all(rank.bytes_replicated > 4 * LARGE for rank in s.ranks)
            ),
        )
        assert {(rank.rank, rank.replica_host) for rank in status.ranks} == {
            (0, "node-1"),
            (1, "node-0"),
        }
        hosts.lose(1)
        ranks.hands[1].die()
        if restarted:
            coordinator.restart()
        else:
            # The host is awaited for a while, and operators see that nothing is lost.
            await_save(
                coordinator.address, target, lambda s: "node-0 has its replica" in s.waiting_on.text
            )
        hosts.server.clear()
        assert hosts.ended(target).state == COMMITTED
    taken = "rank 1 of node-1 is uploaded by node-0, which has its replica"
    assert taken in coordinator.log()
    check_whole(hosts.server, target)


def test_every_host_loads_the_committed_bytes_though_a_replica_received_others(
    hosts: Replicating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool's bytes change between the replica's read and the upload's, by a fault of memory or disk."""
    monkeypatch.delenv("PANNIER_TRANSPORT", raising=False)
    for name, value in hosts.server.env.items():
        monkeypatch.setenv(name, value)
    target = "gs://bucket/replicas/step-3"
    state = torch.arange(LARGE, dtype=torch.int32)
    hold_up(hosts.server)
    with saving(hosts.daemons) as client:
        handle = client.async_save({"w": state}, checkpoint_id=target, no_dist=True)
        await_save(hosts.daemons.coordinator.address, target, lambda s: s.replicated_ranks == 1)
        change(hosts.daemons.spool / "0", state[1000:1010].numpy().tobytes(), b"\xff" * 40)
        hosts.server.clear()
        handle.result(BOUND_S)
    state[1000:1010] = -1
    for sidecar in hosts.daemons.sidecars:
        wait_until(lambda address=sidecar.address: listed(address).local_copies)  # type: ignore[misc]
        found = {"w": torch.zeros_like(state)}
        with Client(load_settings(sidecar=sidecar.address, job="test")) as client:
            client.load(found, checkpoint_id=target, no_dist=True)
        assert torch.equal(found["w"], state), f"loaded at {sidecar.address}"


def change(spool: Path, old: bytes, new: bytes) -> None:
    """Overwrites the only place in a spool that has these bytes."""
    (path,) = [each for each in spool.rglob("*") if each.is_file() and old in each.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(old))
        file.write(new)


@pytest.mark.slow
def test_the_last_host_finishes_the_save_of_one_that_was_lost_with_the_coordinator(
    hosts: Replicating,
) -> None:
    """The holder's sidecar was restarted, too: it has the replica by its journal."""
    target = "gs://bucket/replicas/step-2"
    coordinator = hosts.daemons.coordinator
    # Uploads of rank 1 alone.
    hosts.server.fault(
        kind="status", method="POST", path="uploadType=resumable.*__i[^_]*_1_", status=503, times=-1
    )
    with hosts.party("alone") as ranks:
        ranks.save(target, 1)
        await_save(coordinator.address, target, lambda s: s.replicated_ranks == 2)
        coordinator.kill()
        hosts.lose(1)
        for hand in ranks.hands:
            hand.die()
        hosts.daemons.sidecars[0].restart()
        coordinator.start()
        hosts.server.clear()
        assert hosts.ended(target).state == COMMITTED
    check_whole(hosts.server, target)


@pytest.mark.slow
def test_without_another_failure_domain_a_save_is_as_without_replicas(
    tmp_path: Path, server: GcsServer
) -> None:
    target = "gs://bucket/replicas/step-4"
    made = Replicating(tmp_path, server, "--failure-domain", "rack-1")
    with closing(made), made.daemons:
        made.start()
        sidecars = made.daemons.sidecars
        wait_until(lambda: all(NO_HOLDER in each.log() for each in sidecars))
        with made.party("rack") as ranks:
            ranks.save(target, 1)
            status = made.ended(target)
        assert status.state == COMMITTED
        assert not status.replicated_ranks
        assert not any(rank.replica_host for rank in status.ranks)
        assert [each.log().count(NO_HOLDER) for each in sidecars] == [1, 1]
    check_whole(server, target)


MIB = 1 << 20
PREFIX = "lost/step-1"
PLACE = f"gs://bucket/{PREFIX}"
ROWS = 6 << 10
TRAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from pannier import client
from pannier.client.embedded import launcher
from pannier.common import timeouts

# A machine that stalls isn't a peer that does, nor are its daemons idle.
timeouts.FETCH_STALL_S = timeouts.FETCH_SLOW_S = timeouts.JOB_DAEMONS_IDLE_S = 600
launcher._pannier = lambda: [sys.executable, os.environ["DAEMONS"]]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

def state(seed):
    w = torch.arange(6 << 20, dtype=torch.int32).view(-1, 1024) * seed
    return {"w": distribute_tensor(w, mesh, [Shard(0)]), "step": seed}
"""
DAEMONS = """
import sys
from pannier.cli.commands import up
from pannier.cli.main import main
from pannier.common import timeouts

timeouts.BLOCK_STALL_S = timeouts.BLOCK_FIRST_STALL_S = timeouts.BLOCK_SLOW_S = 600
timeouts.TAKE_OVER_S = 2
up._PANNIER = [sys.executable, __file__]
main()
"""
SAVE = """
client.async_save(state(3), checkpoint_id=os.environ["PLACE"], timeout=300)
time.sleep(600)
"""
LOAD = """
found, want = state(0), state(3)
result = client.load(found, checkpoint_id=os.environ["PLACE"])
assert torch.equal(found["w"].to_local(), want["w"].to_local()) and found["step"] == 3
if not rank:
    print("RESULT", json.dumps(dict(result.bytes)), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip("a", "b", "c") as made:
        yield made


@pytest.fixture
def spaces(network: Network) -> Iterator[Hosts]:
    with Hosts(network, "a", "b", "c") as made:
        yield made


@pytest.mark.slow
def test_a_job_loses_neither_the_checkpoint_nor_its_fast_restart_with_a_host(
    network: Network, spaces: Hosts, tmp_path: Path
) -> None:
    with GcsServer(tmp_path / "gcs", host=network.address(HERE)) as server:
        hold_up(server)
        job = start(spaces, tmp_path, server, SAVE)
        coordinator = embedded_coordinator(spaces.all[0])
        await_save(coordinator, PLACE, lambda status: status.replicated_ranks == 3, timeout=150)
        # All processes of one host and its spool; then the trainers that wait for it.
        c = spaces.all[2]
        c.kill()
        job.kill()
        for directory in (c.runtime_dir, c.spool):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        server.clear()
        await_save(coordinator, PLACE, lambda status: status.state == COMMITTED)
        reader = FsspecReader(
            PLACE, endpoint_url=server.url, token="anon", skip_instance_cache=True
        )
        plain = {"w": torch.zeros(ROWS, 1024, dtype=torch.int32)}
        dcp.load(plain, storage_reader=reader, no_dist=True)
        assert torch.equal(
            plain["w"], torch.arange(ROWS << 10, dtype=torch.int32).view(ROWS, -1) * 3
        )

        # The host comes back empty: what its rank reads lies in the holder's spool.
        before = len(data_reads(server, PREFIX))
        output = start(spaces, tmp_path, server, LOAD).wait()
        assert len(data_reads(server, PREFIX)) == before, output
        found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
        assert found is not None, output
        assert json.loads(found[1]).keys() <= {"own spool", "a", "b"}


def start(hosts: Hosts, directory: Path, server: GcsServer, body: str) -> Job:
    place = directory / f"job-{len(list(directory.glob('job-*')))}"
    place.mkdir()
    (place / "train.py").write_text(TRAIN + body)
    daemons = directory / "daemons.py"
    daemons.write_text(DAEMONS)
    environment = {
        **server.env,
        "PLACE": PLACE,
        "PANNIER_JOB": "lost",
        "DAEMONS": str(daemons),
        "PANNIER_REPLICAS": "1",
    }
    return hosts.run(Job(hosts.all, place / "train.py", place / "logs", environment=environment))


def embedded_coordinator(host: Host) -> str:
    """Address of the job's, once its daemons run there."""
    wait_until(lambda: len(host.daemons()) == 1)
    (name,) = host.daemons()
    return addresses.embedded_coordinator(host.runtime_dir / name)
