"""Loads of several ranks and hosts: each byte comes from the nearest copy, and from the bucket once."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.actors.scripted_sidecar import wait_until
from support.network.certificates import Authority
from support.processes.daemons import Daemons, await_serving
from support.processes.ranks import reserved_port, run_ranks, start_ranks
from support.processes.stretch import BOUND_S
from support.storage.bucket import data_bytes, data_reads
from support.storage.gcs_server import GcsServer

ROOT = "gs://bucket/shared"

STATE = """
import os
own = os.environ["SIDECARS"].split()[int(os.environ["RANK"])]
if own == "none":
    # Nor is there an embedded one.
    os.environ.pop("PANNIER_SIDECAR", None)
else:
    os.environ["PANNIER_SIDECAR"] = own
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from pannier import client
from pannier.common import timeouts

timeouts.FETCH_STALL_S = float(os.environ.get("STALL", "600"))
timeouts.FETCH_SLOW_S = timeouts.STORED_STALL_S = timeouts.STORED_FIRST_STALL_S = 600
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if WORLD > 1:
    dist.init_process_group("gloo")

def numbers(count, seed):
    # Bytes that are not the same in any two blocks.
    return torch.arange(count, dtype=torch.int32) * 31 + seed

def shared(value):
    return distribute_tensor(value, init_device_mesh("cpu", (WORLD,)), [Shard(0)])

def state(filled):
    found = {"large": numbers(10 << 20, 1), "step": {"count": 7 if filled else 0}}
    found |= {f"small {number}": numbers(1 << 18, number) for number in range(12)}
    if os.environ["KIND"] == "sharded":
        found["split"] = shared(numbers(6 << 20, 3).view(-1, 1 << 10))
    if not filled:
        for value in found.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return found

def check(found):
    for key, value in state(True).items():
        if isinstance(value, torch.Tensor):
            whole = [getattr(each, "full_tensor", lambda: each)() for each in (value, found[key])]
            assert torch.equal(*whole), key
        else:
            assert found[key] == value, key
"""
SAVING = (
    STATE
    + """
client.save(state(True), checkpoint_id=os.environ["PLACE"])
client.close()
"""
)
LOADING = (
    STATE
    + """
import json
found = state(False)
result = client.load(found, checkpoint_id=os.environ["PLACE"])
check(found)
if not RANK:
    print("RESULT", json.dumps([dict(result.files), dict(result.bytes), str(result)]))
"""
)
BY_TORCH = (
    STATE
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
dcp.save(state(True), storage_writer=FsspecWriter(os.environ["PLACE"]))
"""
)
UNIQUE = (40 << 20) + 12 * (1 << 20)
"""Bytes of the tensors that all ranks have."""


class Hosts:
    """Three hosts' sidecars, which serve each other."""

    def __init__(self, directory: Path, server: GcsServer) -> None:
        self.server = server
        self.daemons = Daemons(directory, sidecars=3, environment=server.env, start=False)
        self.files = Authority(directory / "ca").issue("sidecar")
        self._reserved = [reserved_port() for _ in self.daemons.sidecars]
        for daemon, port in zip(self.daemons.sidecars, self._reserved, strict=True):
            address = f"127.0.0.1:{port.getsockname()[1]}"
            daemon.arguments += ["--peers", address, *self.files.flags]
            # A machine that stalls isn't a peer that does.
            daemon.constants = {
                f"pannier.common.timeouts.{name}": BOUND_S
                for name in (
                    "BLOCK_STALL_S",
                    "BLOCK_FIRST_STALL_S",
                    "BLOCK_SLOW_S",
                    "BLOCKS_KEPT_S",
                )
            }

    def close(self) -> None:
        for port in self._reserved:
            port.close()

    def environment(self, place: str, hosts: Sequence[int], kind: str) -> dict[str, str]:
        addresses = [self.daemons.sidecars[host].address if host >= 0 else "none" for host in hosts]
        return self.daemons.env(
            **self.server.env,
            **self.files.environment,
            PLACE=place,
            KIND=kind,
            SIDECARS=" ".join(addresses),
            PANNIER_JOB="shared",
            PANNIER_RUNTIME_DIR=str(self.daemons.directory / "none"),
        )

    def save(self, place: str, hosts: Sequence[int], kind: str = "replicated") -> None:
        run_ranks(SAVING, len(hosts), self.environment(place, hosts, kind), torchrun=False)

    def load(self, place: str, hosts: Sequence[int], kind: str = "replicated") -> "Loaded":
        environment = self.environment(place, hosts, kind)
        return Loaded(run_ranks(LOADING, len(hosts), environment, torchrun=False).outputs)

    def read(self, place: str) -> int:
        return data_bytes(self.server, place.removeprefix("gs://bucket/"))


class Loaded:
    """What the first rank of a load printed."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self.output = "\n".join(outputs)
        found = re.search(r"^RESULT (.*)$", outputs[0], re.MULTILINE)
        assert found is not None, self.output
        result: Any = json.loads(found[1])
        self.files, self.bytes, self.text = Counter(result[0]), Counter(result[1]), result[2]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"), server)
    with closing(made), made.daemons:
        daemons = (made.daemons.coordinator, *made.daemons.sidecars)
        for daemon in daemons:
            daemon.start(ready=False)
        for daemon in daemons:
            await_serving(daemon.address, process=daemon.process)
        yield made


def test_ranks_of_one_host_read_each_byte_of_the_bucket_once(hosts: Hosts) -> None:
    place = f"{ROOT}/one-host"
    hosts.save(place, [0, 0])
    loaded = hosts.load(place, [1] * 4)
    assert UNIQUE <= hosts.read(place) <= 1.05 * UNIQUE
    assert loaded.bytes.keys() == {"bucket", "node-1"}
    assert UNIQUE <= loaded.bytes["bucket"] <= 1.05 * UNIQUE
    assert loaded.bytes.total() >= 4 * UNIQUE


def test_hosts_read_each_byte_of_the_bucket_once_and_the_rest_from_each_other(hosts: Hosts) -> None:
    place = f"{ROOT}/two-hosts"
    hosts.save(place, [0, 0])
    loaded = hosts.load(place, [1, 2, 1, 2])
    assert UNIQUE <= hosts.read(place) <= 1.05 * UNIQUE
    assert loaded.bytes.keys() == {"bucket", "node-1", "node-2"}


def test_what_another_hosts_spool_has_comes_from_there(hosts: Hosts) -> None:
    place = f"{ROOT}/spools"
    hosts.save(place, [0, 1], "sharded")
    for world in ([1, 0], [2, 0, 1, 1]):
        loaded = hosts.load(place, world, "sharded")
        assert not hosts.read(place), loaded.output
        assert {"own spool", "node-0", "node-1"} >= loaded.bytes.keys() >= {"node-0", "node-1"}


@pytest.mark.extended
@pytest.mark.parametrize("world", [[1, 0], [0, 2, 1, 1], [2, 1, 0, 2, 1, 0]], ids=len)
def test_fewer_and_more_ranks_have_all_from_the_spools(hosts: Hosts, world: list[int]) -> None:
    place = f"{ROOT}/worlds-{len(world)}"
    hosts.save(place, [0, 0, 0, 0, 1, 1, 1, 1], "sharded")
    loaded = hosts.load(place, world, "sharded")
    assert not hosts.read(place), loaded.output


def test_a_rank_without_a_sidecar_reads_from_those_of_other_hosts(hosts: Hosts) -> None:
    place = f"{ROOT}/visitor"
    hosts.save(place, [0])
    loaded = hosts.load(place, [0, -1])
    assert not hosts.read(place), loaded.output
    assert loaded.bytes.keys() == {"own spool", "node-0"}


@pytest.fixture(scope="module")
def by_torch(server: GcsServer) -> str:
    """A checkpoint of two ranks, which no spool has."""
    place = f"{ROOT}/torch"
    environment = {**server.env, "PLACE": place, "KIND": "replicated", "SIDECARS": "none none"}
    run_ranks(BY_TORCH, 2, environment, torchrun=False)
    return place


def test_what_torch_saved_is_read_once_too(hosts: Hosts, by_torch: str) -> None:
    loaded = hosts.load(by_torch, [1, 2, 1])
    assert UNIQUE <= hosts.read(by_torch) <= 1.05 * UNIQUE
    assert loaded.bytes["bucket"] <= 1.05 * UNIQUE


@pytest.mark.parametrize("what", ["kill", "pause"])
def test_a_sidecar_that_is_killed_or_stopped_in_the_middle_delays_the_load(
    daemons: Daemons, server: GcsServer, by_torch: str, what: str
) -> None:
    environment = daemons.env(
        **server.env,
        PLACE=by_torch,
        KIND="replicated",
        SIDECARS=" ".join([daemons.sidecar_address] * 2),
        STALL="1",
    )
    before = len(data_reads(server, "shared/torch"))
    server.fault(kind="delay", method="GET", path="distcp", seconds=BOUND_S, times=-1)
    with start_ranks(LOADING, 2, environment, torchrun=False) as running:
        wait_until(lambda: len(data_reads(server, "shared/torch")) > before)
        getattr(daemons.sidecar, what)()
        server.clear()
        server.release()
        loaded = Loaded(running.wait(BOUND_S).check().outputs)
    assert loaded.bytes["bucket"] > UNIQUE
    assert "are read from storage" in loaded.output
