"""deploy/slurm's scripts, as they are, on three hosts with stand-ins for Slurm's commands."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.wire.version import WIRE_VERSION
from support.kubernetes.manifests import DEPLOY
from support.network.certificates import Authority
from support.network.netns import Network, network_or_skip
from support.network.slurm import Allocation
from support.processes import processes
from support.processes.processes import Process

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
"""Seven processes import torch."""

NAMES = ("a", "b", "c")
FULL = torch.arange(12_000.0).reshape(120, 100)

TRAIN = """
import os
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from pannier import client

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(12_000.0).reshape(120, 100)
state = {"w": distribute_tensor(full, mesh, [Shard(0)])}
for step in (1, 2):
    client.async_save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}")
client.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip(*NAMES) as made:
        yield made


@pytest.fixture
def allocation(network: Network, tmp_path: Path) -> Iterator[Allocation]:
    before = {*psutil.pids()}
    job = f"pannier-{processes.SESSION}-7"
    own = [Path("/tmp", job), Path("/dev/shm", job)]
    yield Allocation(network, NAMES, tmp_path / "slurm", own)
    processes.end(processes.marked(before))
    for path in own:
        shutil.rmtree(path)


def batch(allocation: Allocation, script: str, directory: Path, **environment: str) -> str:
    """What ``sbatch`` would run, to its end; all that was written."""
    (directory / "train.py").write_text(TRAIN)
    process = Process(
        script,
        ["bash", str(DEPLOY / "slurm" / script)],
        environment=allocation.environment({"ROOT": str(directory / "run"), **environment}),
        log=directory / "batch.log",
        cwd=directory,
    )
    try:
        code = process.wait(300)
        assert code == 0, process.log()
        return process.log()
    finally:
        process.close()


def check(directory: Path) -> None:
    for step in (1, 2):
        state = {"w": torch.zeros_like(FULL)}
        dcp.load(state, checkpoint_id=directory / "run" / f"step-{step}", no_dist=True)
        assert torch.equal(state["w"], FULL)


def left(before: set[int]) -> list[psutil.Process]:
    return [*processes.marked(before)]


@pytest.mark.slow
def test_nothing_is_set_up_and_the_step_ends_after_the_commit(
    allocation: Allocation, tmp_path: Path
) -> None:
    before = {*psutil.pids()}
    job = Path("/tmp", f"pannier-{allocation.job_id}")
    batch(
        *(allocation, "embedded.sbatch", tmp_path),
        # Where these directories are by default is the machine's own.
        PANNIER_RUNTIME_DIR=str(job / f"v{WIRE_VERSION}"),
        PANNIER_SPOOL=str(Path("/dev/shm", job.name)),
    )
    # Slurm has killed the daemons with the step.
    assert left(before) == []
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("secured", [True, False])
def test_daemons_in_steps_of_their_own_upload_what_is_left_and_leave(
    allocation: Allocation, tmp_path: Path, secured: bool
) -> None:
    before = {*psutil.pids()}
    if secured:
        environment = Authority(tmp_path / "ca").issue("host", host=NAMES[0]).environment
    else:
        environment = {"PANNIER_INSECURE_LISTEN": "1"}
    log = batch(allocation, "sidecars.sbatch", tmp_path, **environment)
    assert left(before) == []
    assert log.count(": attached to the coordinator at a:7070") == 3
    assert "forcing job termination" not in log
    # Memory that no later job of the host would give back.
    spool = Path("/dev/shm", f"pannier-{allocation.job_id}")
    assert [*allocation.used(spool)] == []
    check(tmp_path)


def test_the_scripts_name_what_the_readme_names() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for path in (DEPLOY / "slurm").iterdir():
        assert f"slurm/{path.name}" in readme
        assert os.access(path, os.R_OK)
