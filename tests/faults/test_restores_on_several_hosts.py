"""Jobs on three hosts that are started again, with nothing configured: what they read from the bucket.

The hosts are network namespaces with hostnames, runtime directories and spools of their own. The daemons
that the first start left on them have its checkpoint.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.network.netns import HERE, Network, network_or_skip
from support.network.several_hosts import Host, Hosts, Job
from support.storage.bucket import data_bytes, data_reads
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(400)

MIB = 1 << 20
PREFIX = "restores/step-1"
PLACE = f"gs://bucket/{PREFIX}"

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
timeouts.STORED_STALL_S = timeouts.STORED_FIRST_STALL_S = 600
launcher._pannier = lambda: [sys.executable, os.environ["DAEMONS"]]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))

def state(seed):
    w = torch.arange(6 << 20, dtype=torch.int32).view(-1, 1024) * seed
    found = {f"replica {n}": torch.arange(1 << 20, dtype=torch.int32) * seed + n for n in range(6)}
    return {"w": distribute_tensor(w, mesh, [Shard(0)]), "step": seed, **found}
"""
DAEMONS = """
import sys
from pannier.cli.commands import up
from pannier.cli.main import main
from pannier.common import timeouts

timeouts.BLOCK_STALL_S = timeouts.BLOCK_FIRST_STALL_S = timeouts.BLOCK_SLOW_S = 600
up._PANNIER = [sys.executable, __file__]
main()
"""
SAVE = """
client.save(state(3), checkpoint_id=os.environ["PLACE"])
print("<saved>", flush=True)
time.sleep(600)
"""
LOAD = """
found, want = state(0), state(3)
result = client.load(found, checkpoint_id=os.environ["PLACE"])
for key, value in want.items():
    whole = [getattr(each, "full_tensor", lambda: each)() for each in (value, found[key])]
    assert torch.equal(*map(torch.as_tensor, whole)), key
if not rank:
    print("RESULT", json.dumps([dict(result.bytes), str(result)]), flush=True)
dist.destroy_process_group()
"""
REPLICATED = SHARDED = 24 * MIB


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip("a", "b", "c") as made:
        yield made


@pytest.fixture
def server(network: Network, tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "gcs", host=network.address(HERE)) as running:
        yield running


@pytest.fixture
def hosts(network: Network) -> Iterator[Hosts]:
    with Hosts(network, "a", "b", "c") as made:
        yield made


def start(
    hosts: Hosts, among: Sequence[Host], directory: Path, server: GcsServer, body: str
) -> Job:
    place = directory / f"job-{len(list(directory.glob('job-*')))}"
    place.mkdir()
    (place / "train.py").write_text(TRAIN + body)
    daemons = directory / "daemons.py"
    daemons.write_text(DAEMONS)
    environment = {**server.env, "PLACE": PLACE, "PANNIER_JOB": "restores", "DAEMONS": str(daemons)}
    return hosts.run(Job(among, place / "train.py", place / "logs", environment=environment))


def load(
    hosts: Hosts, among: Sequence[Host], directory: Path, server: GcsServer
) -> tuple["Counter[str]", str]:
    """Bytes by source, and the output."""
    output = start(hosts, among, directory, server, LOAD).wait()
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    assert found is not None, output
    return Counter(json.loads(found[1])[0]), output


def test_only_what_no_host_holds_is_read_from_the_bucket(
    hosts: Hosts, server: GcsServer, tmp_path: Path
) -> None:
    job = start(hosts, hosts.all, tmp_path, server, SAVE)
    job.wait_for("<saved>", 3)
    job.kill()
    a, b, c = hosts.all
    # All processes of the job are restarted, and ranks have other hosts.
    found, output = load(hosts, [b, c, a], tmp_path, server)
    assert not data_reads(server, PREFIX), output
    assert found.keys() == {"own spool", "a", "b", "c"}
    # One host is replaced by an empty one, without daemons: it reads from the others by their certificate.
    c.kill()
    for directory in (c.runtime_dir, c.spool):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    found, output = load(hosts, hosts.all, tmp_path, server)
    lost = (REPLICATED + SHARDED) / 3
    assert 0 < data_bytes(server, PREFIX) <= 1.1 * lost, output
    assert found.keys() >= {"own spool", "a", "b", "bucket"}
