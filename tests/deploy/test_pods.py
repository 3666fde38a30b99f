"""The pods of deploy/ as they are: users, modes, volumes, probes, drain and grace, with real signals."""

import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from support import pods
from support.bucket import check_whole, hold_up, listed
from support.certificates import Authority
from support.daemons import short_directory
from support.gcs_server import GcsServer
from support.manifests import DEPLOY, REPOSITORY, built, pod_templates
from support.netns import HERE, Network
from support.pods import Pod
from support.scripted_sidecar import wait_until

TRAINER = REPOSITORY / "tests/support/steered_trainer.py"
SETTINGS = {
    "HOSTS": '"1"',
    "PANNIER_JOB": "run",
    "PANNIER_ALLOW": "gs://bucket/run",
    # By the formulas, for MIB of a rank.
    "SPOOL_SIZE": "99Mi",
    "SIDECAR_MEMORY": "338Mi",
}
"""What a user changes, and nothing else."""
MIB = 48


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := pods.unavailable():
        pytest.skip(f"no pods on this machine: {why}")
    with Network("trainer", "coordinator") as made:
        yield made


@pytest.fixture(scope="module")
def bucket(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs"), host=network.address(HERE)) as server:
        yield server


class Cluster:
    """The pods of one overlay: a coordinator's, and one host's."""

    def __init__(
        self,
        overlay: str,
        settings: Mapping[str, str],
        patches: str,
        network: Network,
        bucket: GcsServer,
        directory: Path,
        stack: ExitStack,
    ) -> None:
        self.bucket = bucket
        self.directory = directory
        self.go = directory / "go"
        self.go.mkdir()
        deploy = directory / "deploy"
        shutil.copytree(DEPLOY, deploy)
        path = deploy / "overlays" / overlay / "settings.yaml"
        text = path.read_text()
        for name, value in {**SETTINGS, **settings}.items():
            text = re.sub(rf"(?m)^  {name}: .*$", f"  {name}: {value}", text)
        path.write_text(text)
        with (path.parent / "kustomization.yaml").open("a") as file:
            file.write(patches)
        self.objects = built(path.parent)
        authority = Authority(directory / "ca")
        self._secrets = {}
        for name, called in (
            ("coordinator", "pannier-coordinator"),
            ("sidecar", "pannier-sidecar"),
        ):
            files = authority.issue(name, host=called)
            self._secrets[f"pannier-{name}-tls"] = {
                "tls.crt": files.cert,
                "tls.key": files.key,
                "ca.crt": files.ca,
            }
        self._network = network
        self._stack = stack
        self.coordinator = self.pod("Deployment/pannier-coordinator", "coordinator")

    def pod(self, made_by: str, host: str) -> Pod:
        """The pod that this object makes, on a host."""
        pod = Pod(
            made_by.rpartition("/")[2],
            pod_templates(self.objects)[made_by],
            self.objects,
            self.directory,
            prefix=self._network.prefix(host),
            address=self._network.address(host),
            secrets=self._secrets,
            host=self.directory / "node",
            hosts={"pannier-coordinator": self._network.address("coordinator")},
            downward={
                "spec.nodeName": "node-0",
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0",
                "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "0",
            },
            more_mounts=[(str(self.go), "/go", False)],
        )
        self._stack.enter_context(pod)
        for each in (*pod.first, *pod.main):
            # The bucket is another one than Google's, and so is the training.
            each.extra.update(self.bucket.env)
            if each.name == "trainer":
                each.command = ["python", str(TRAINER)]
                each.extra.update(GO="/go", ROOT="gs://bucket/run", SIGTERM="exit")
        return pod

    def save(self, step: int, mib: int = 8) -> None:
        """Lets the trainer save, and returns when it has staged."""
        new = self.go / "new"
        new.write_text(f'{{"mib": {mib}}}')
        new.rename(self.go / f"{step}-0")


@contextmanager
def cluster(
    overlay: str, network: Network, bucket: GcsServer, patches: str = "", **settings: str
) -> Iterator[Cluster]:
    directory = short_directory()
    directory.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        stack.callback(bucket.clear)
        yield Cluster(overlay, settings, patches, network, bucket, directory, stack)


def said(pod: Pod, container: str, *lines: str, timeout: float = 40) -> None:
    """Returns when a container has written all of these lines."""
    process = pod[container].process
    wait_until(lambda: all(line in process.log() for line in lines), timeout)


def test_a_pod_trains_and_saves_as_the_manifests_have_it(
    network: Network, bucket: GcsServer
) -> None:
    with cluster("gke-gpu", network, bucket) as made:
        made.coordinator.start()
        made.coordinator["coordinator"].await_probe("startupProbe")
        host = made.pod("JobSet/train", "trainer")
        host.start()
        # As many at a time as the sizes are for.
        hold_up(bucket)
        made.save(1, MIB)
        made.save(2, MIB)
        said(host, "trainer", "step 1 staged", "step 2 staged")
        bucket.clear()
        said(host, "trainer", "step 1 committed", "step 2 committed")
        check_whole(bucket, "gs://bucket/run/step-2")
        sidecar, trainer = host["pannier"], host["trainer"]
        if sidecar.memory is not None:
            assert 2 * MIB << 20 < sidecar.memory.peak < 338 << 20
        status = sidecar.run("pannier", "status", "--json").json()
        assert [rank["transport"] for save in status["saves"] for rank in save["ranks"]] == [
            "mapped"
        ] * 2
        confined(sidecar)
        confined(made.coordinator["coordinator"])
        for each, name in ((sidecar, "sidecar"), (made.coordinator["coordinator"], "coordinator")):
            assert [
                each.probe(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")
            ] == ["SERVING"] * 3, name
            # What the image's HEALTHCHECK does, and an operator.
            assert each.run("pannier", "health").code == 0
            assert each.run("pannier", "status").code == 0
        # Nothing but the sidecar's own has been written, and that is its user's alone.
        volumes = host.volumes.paths
        assert modes(volumes["pannier-spool"]) == {(65532, 0o700), (65532, 0o600)}
        assert modes(volumes["pannier-socket"]) == {(65532, 0o700), (65532, 0o600)}
        assert not [path for path in volumes["pannier-tmp"].rglob("*") if not path.is_dir()]
        # A trainer may not write there, but connect.
        assert trainer.run("touch", "/run/pannier/sidecar/x").code != 0
        assert host.terminate() == {"trainer": 143, "pannier": 0}
        assert made.coordinator.terminate() == {"coordinator": 0}


def test_sigterm_in_the_middle_of_a_save(network: Network, bucket: GcsServer) -> None:
    """To the coordinator, which is moved, and to all of a pod, which is deleted.

    Its trainer is root, as the README says how.
    """
    (as_root,) = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    with cluster("gke-gpu", network, bucket, as_root) as made:
        coordinator = made.coordinator["coordinator"]
        made.coordinator.start()
        host = made.pod("JobSet/train", "trainer")
        host.start()
        sidecar, trainer = host["pannier"], host["trainer"]
        made.save(1)
        said(host, "trainer", "step 1 committed")
        hold_up(bucket)
        made.save(2)
        said(host, "trainer", "step 2 staged")
        await_ingested(sidecar, 2)
        assert psutil.Process(trainer.pid).uids().effective == 0
        # The Deployment's pod ends, and another one comes.
        assert made.coordinator.terminate() == {"coordinator": 0}
        assert coordinator.probe("livenessProbe") == "UNAVAILABLE"
        assert [sidecar.probe(f"{kind}Probe") for kind in ("liveness", "readiness")] == [
            "SERVING"
        ] * 2
        coordinator.start()
        coordinator.await_probe("startupProbe")
        bucket.clear()
        said(host, "trainer", "step 2 committed")

        hold_up(bucket)
        made.save(3)
        said(host, "trainer", "step 3 staged")
        # The pod is deleted: first the trainer, which leaves when it has handed over what it saves.
        trainer.signal(signal.SIGTERM)
        assert trainer.wait(30) == 143
        sidecar.signal(signal.SIGTERM)
        sidecar.await_probe("readinessProbe", "NOT_SERVING")
        assert sidecar.probe("livenessProbe") == "SERVING"
        draining = sidecar.run("pannier", "health")
        assert (draining.code, draining.out) == (1, "not_serving\n")
        assert sidecar.run("pannier", "status", "--json").json()["daemon_state"] == "draining"
        bucket.clear()
        # Long before PANNIER_GRACE is over: nothing is left to upload.
        assert sidecar.wait(60) == 0
        wait_until(lambda: "run/step-3/.metadata" in listed(bucket, "run/step-3"), 30)
        check_whole(bucket, "gs://bucket/run/step-3")


def test_what_the_grace_period_leaves_is_taken_up_before_the_next_start(
    network: Network, bucket: GcsServer
) -> None:
    """A sidecar alone starts again in its pod, on what is in the emptyDir."""
    with cluster("leaderworkerset", network, bucket, PANNIER_GRACE='"1"') as made:
        made.coordinator.start()
        host = made.pod("LeaderWorkerSet/train", "trainer")
        host.start()
        sidecar = host["pannier"]
        hold_up(bucket)
        made.save(1)
        said(host, "trainer", "step 1 staged")
        await_ingested(sidecar, 1)
        sidecar.signal(signal.SIGTERM)
        assert sidecar.wait(20) == 0
        assert "is left behind, ingested" in sidecar.process.log()
        assert sidecar.probe("startupProbe") == "UNAVAILABLE"
        sidecar.start()
        # Until it has recovered, no trainer that waits for it would start.
        sidecar.await_probe("startupProbe")
        assert "took up 1 ranks of earlier saves" in sidecar.process.log()
        bucket.clear()
        said(host, "trainer", "step 1 committed")
        check_whole(bucket, "gs://bucket/run/step-1")


def test_one_sidecar_for_all_pods_of_a_node(network: Network, bucket: GcsServer) -> None:
    with cluster("per-node", network, bucket) as made:
        made.coordinator.start()
        node = made.pod("DaemonSet/pannier-sidecar", "trainer")
        host = made.pod("Job/train", "trainer")
        node.start()
        host.start()
        sidecar = node["pannier"]
        made.save(1)
        said(host, "trainer", "step 1 committed")
        status = sidecar.run("pannier", "status", "--json").json()
        (rank,) = status["saves"][0]["ranks"]
        assert (rank["transport"], rank["host"], status["host"]) == (
            "mapped",
            rank["host"],
            "node-0",
        )
        confined(sidecar)
        # Below directories that belong to root, as a node's do, and that are this job's alone.
        top = made.directory / "node"
        assert modes(top / "var/pannier/run") == {(65532, 0o700), (65532, 0o600)}
        assert modes(top / "run/pannier/run") == {(65532, 0o700), (65532, 0o600)}
        assert os.stat(top / "run/pannier/run").st_uid == 0
        # It is updated while trainers go on; they save with the next one.
        assert node.terminate() == {"pannier": 0}
        node.start()
        made.save(2)
        said(host, "trainer", "step 2 committed")


def await_ingested(sidecar: pods.Container, step: int) -> None:
    """Returns when the rank may die."""
    line = re.compile(rf"/step-{step}, rank 0 .* is ingested")
    wait_until(lambda: line.search(sidecar.process.log()) is not None, 30)


def confined(container: pods.Container) -> None:
    """It is PID 1, nobody's root, without capabilities, and its file system can't be written."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{container.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["NSpid"].split()[-1] == "1"
    assert status["Uid"].split() == ["65532"] * 4
    assert status["Groups"].split() == ["65532"]
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
    assert status["NoNewPrivs"] == "1"
    for path in ("/x", "/etc/x", "/run/x"):
        refused = container.run("touch", path)
        assert "Read-only file system" in refused.err, refused


def modes(path: Path) -> set[tuple[int, int]]:
    """Owners and permissions of all that is in a volume."""
    found = set()
    for each in path.rglob("*"):
        status = each.lstat()
        found.add((status.st_uid, status.st_mode & 0o777))
    return found
