"""A job of two hosts loses one to an eviction, with the README's loop, torchrun and the manifests' pods.

The test does what the kubelet and the Job's controller do: a container that ends with another code than 0 starts again
in its pod (``restartPolicy: OnFailure``), a pod that is deleted is replaced, and one that has succeeded is
done for good.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kubernetes.cluster import Cluster, check_available, cluster, said
from support.kubernetes.manifests import REPOSITORY, arguments, environment
from support.kubernetes.pods import Pod
from support.network.netns import HERE, Network
from support.storage.gcs_server import GcsServer

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
HOSTS = ("host-0", "host-1")
START_S = 120.0
"""Four processes import torch."""
TRAIN = """
import os, signal, time
import torch, torch.distributed as dist
from pannier import client

dist.init_process_group("gloo")
root, rank = os.environ["ROOT"], dist.get_rank()
state = {"w": torch.zeros(1 << 16), "step": 0}
if newest := client.latest(root):
    client.load(state, checkpoint_id=newest)
print("resumes after step", state["step"], flush=True)
model = torch.nn.Linear(8, 8)

HANDLER
for step in range(state["step"] + 1, 1_000_000):
    state["step"] = step
    state["w"] += 1
    if step == 3:
        client.save(state, checkpoint_id=f"{root}/step-{step}")
    print("step", step, flush=True)
LEAVE
    time.sleep(0.1)
"""


def train() -> str:
    """A loop with the README's lines for preemption: what comes before it, and what is in it."""
    readme = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (fragment,) = (each for each in blocks if each.startswith("# Preemption"))
    handler, marker, leave = fragment.partition("stop = ")
    handler = "notices = []\n" + handler
    return TRAIN.replace("HANDLER", handler).replace(
        "LEAVE", textwrap.indent(marker + leave, "    ")
    )


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    check_available()
    with Network("coordinator", *HOSTS) as made:
        yield made


@pytest.fixture
def bucket(network: Network, tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "gcs", host=network.address(HERE)) as server:
        yield server


def pod(made: Cluster, index: int, called: str) -> Pod:
    """Of a training host: the manifest's command, with the train.py above."""
    new = made.pod("Job/train", HOSTS[index], called, index)
    trainer = new["trainer"]
    words = arguments(trainer.spec, environment(trainer.spec, made.objects, new.downward))
    trainer.command = [word.replace("train.py", "/go/train.py") for word in words]
    return new


LOOPS = {
    "README": train,
    "make test-cluster": (REPOSITORY / "tests/cluster/component/train.py").read_text,
}


@pytest.mark.parametrize(
    ("loop", "evicted"), [("README", 0), ("README", 1), ("make test-cluster", 1)]
)
def test_a_job_that_loses_a_host_goes_on_at_the_step_at_which_it_stopped(
    loop: str, evicted: int, network: Network, bucket: GcsServer
) -> None:
    with cluster("indexed-job", network, bucket, HOSTS="2") as made:
        made.names.update({f"train-{i}.train": network.address(h) for i, h in enumerate(HOSTS)})
        (made.go / "train.py").write_text(LOOPS[loop]())
        made.coordinator.start()
        made.coordinator["coordinator"].await_probe("startupProbe")
        hosts = [pod(made, index, f"train-{index}") for index in range(2)]
        for each in hosts:
            each.start()
        for each in hosts:
            said(each, "trainer", "resumes after step 0", timeout=START_S)
        said(hosts[0], "trainer", "pannier: saved ", timeout=START_S)

        remains = hosts[1 - evicted]
        # Deleted: SIGTERM to torchrun, then to the sidecar, which drains.
        hosts[evicted].terminate()
        code = remains["trainer"].wait(START_S)
        log = remains["trainer"].process.log()
        stopped = re.findall(r"^(?:leaves at )?step (\d+)$", log, re.MULTILINE)[-1]
        assert remains.template["spec"]["restartPolicy"] == "OnFailure"
        assert code != 0, "the pod is Completed: nothing starts its trainer again"

        remains["trainer"].start()
        new = pod(made, evicted, f"train-{evicted}-new")
        new.start()
        for each in (remains, new):
            said(each, "trainer", f"resumes after step {stopped}\n", timeout=START_S)
