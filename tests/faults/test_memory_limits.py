"""The memory limit of a container: saves stay within it, and say so, where the kernel would kill a process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.client import Client
from pannier.client.config import load_settings
from support.processes.cgroups import MemoryLimit, limited
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import listed
from support.states.dcp_readers import plain_load

MIB = 1 << 20
HALF = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@pytest.fixture
def container(request: pytest.FixtureRequest) -> Iterator[MemoryLimit]:
    made = limited(request.node.name[:32], HALF)
    if made is None:
        pytest.skip("this machine lets the test make no control group")
    yield made
    made.close()


_TRAINER = """
import logging, os
from pathlib import Path
Path(os.environ["MEMBERS"]).write_text("0")  # this process
import torch
from pannier import client
from pannier.common.cgroup import memory_limit
logging.basicConfig(level=logging.WARNING)
size = 96 << 20
weights = torch.ones(size // 4)
root = os.environ["ROOT"]
client.save({"w": torch.ones(size // 10)}, checkpoint_id=f"{root}/small")  # starts the daemons
# Room for one and a half times the state.
limit = memory_limit().used + size * 3 // 2 + (64 << 20)
Path(os.environ["LIMIT"]).write_text(str(limit))
handles = []
for step in range(4):
    weights.fill_(float(step))
    handles.append(client.async_save({"w": weights}, checkpoint_id=f"{root}/step-{step}"))
for handle in handles:
    handle.result(BOUND_S)
"""


def test_a_job_whose_container_has_no_memory_for_two_saves_saves_one_at_a_time(
    container: MemoryLimit, embedded: Path, tmp_path: Path
) -> None:
    environment = {
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "MEMBERS": str(container.members),
        "LIMIT": str(container.file),
        "ROOT": str(tmp_path),
    }
    script = _TRAINER.replace("BOUND_S", str(BOUND_S))
    # Not forked from a process whose pages count to another group.
    with start_ranks(script, 1, environment, torchrun=False, forked=False) as ranks:
        finished = ranks.wait(3 * BOUND_S)
    try:
        assert container.kills == 0, finished.outputs
        (said,) = finished.check().outputs
        assert "saves can't overlap: each waits until the one before is in storage" in said
        assert "MiB more for the ranks of this host, and " in said
        assert "in memory (the memory limit of control group " in said
        assert "memory limit of the sidecar: " in pannier("status").out
        assert "; the memory limit of control group " in " ".join(pannier("doctor").out.split())
        for step in range(4):
            blank = {"w": torch.zeros(24 * MIB)}
            plain_load(blank, f"{tmp_path}/step-{step}")
            assert torch.equal(blank["w"], torch.full((24 * MIB,), float(step)))
    finally:
        pannier("down")


def test_a_sidecar_with_less_memory_than_its_spool_may_have_keeps_the_spool_to_that(
    container: MemoryLimit, tmp_path: Path
) -> None:
    """As with ``SIDECAR_MEMORY`` below ``SPOOL_SIZE``. It pays for the files into which trainers stage."""
    with Daemons(tmp_path, start=False, sidecar_arguments=("--spool-budget", "1GiB")) as daemons:
        container.file.write_text(str(256 * MIB))
        daemons.sidecar.prefix = ("sh", "-c", 'echo 0 > "$0"; exec "$@"', str(container.members))
        daemons.sidecar.forked = False
        for daemon in (daemons.coordinator, daemons.sidecar):
            daemon.start()
        said = daemons.sidecar.log()
        assert f"the spool {daemons.spool}/0 may have 1.0 GiB, but the memory limit of" in said
        assert "is 256.0 MiB" in said
        assert "(Kubernetes: SIDECAR_MEMORY)" in said
        assert "(SPOOL_SIZE, --spool-budget)" in said
        settings = load_settings(sidecar=daemons.sidecar_address, job="test")
        with Client(settings) as client:
            handles = [
                client.async_save({"w": torch.ones(20 * MIB)}, checkpoint_id=tmp_path / str(step))
                for step in range(4)
            ]
            for handle in handles:
                handle.result(BOUND_S)
        assert container.kills == 0
        # The trainer is in another group.
        assert container.peak > 80 * MIB
        status = listed(daemons.sidecar_address)
        assert status.memory_limit == 256 * MIB
        assert status.spool_capacity_bytes < 256 * MIB
        (check,) = (
            each
            for each in pannier("doctor", "--address", daemons.sidecar_address, "--json").json()[
                "checks"
            ]
            if each["name"] == "spool"
        )
        assert check["result"] == "warning"
        assert "the memory limit of control group" in check["found"]
        assert "it is kept to" in check["hint"]
        # What the kernel does to one that exceeds the limit.
        daemons.sidecar.kill()
        daemons.sidecar.start()
        (line,) = (each for each in daemons.sidecar.log().splitlines() if "was killed" in each)
        assert daemons.sidecar_address in line
        assert "is 256.0 MiB" in line
        assert "the kernel has killed 0 processes there for lack of memory" in line
