"""The pods of an overlay of deploy/, changed as a user would, on hosts that are network namespaces."""

import json
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.actors.scripted_sidecar import wait_until
from support.kubernetes import pods
from support.kubernetes.images import Image
from support.kubernetes.manifests import DEPLOY, Object, built, pod_templates
from support.kubernetes.pods import Pod
from support.network.certificates import Authority
from support.network.netns import Network
from support.processes.daemons import short_directory
from support.processes.steering import TRAINER, order
from support.storage.gcs_server import GcsServer

SETTINGS = {
    "HOSTS": "1",
    "PANNIER_JOB": "run",
    "PANNIER_ALLOW": "gs://bucket/run",
    # By the formulas, for 48 MiB of a rank.
    "SPOOL_SIZE": "99Mi",
    "SIDECAR_MEMORY": "338Mi",
}
"""What a user changes, and nothing else."""
_USER = """
patches:
  - target: {{kind: Job, name: train}}
    patch: |-
      - op: add
        path: /spec/template/spec/securityContext
        value:
          runAsNonRoot: true
          runAsUser: {uid}
          runAsGroup: {uid}
          fsGroup: {uid}
          seccompProfile: {{type: RuntimeDefault}}
"""


def check_available() -> None:
    """Skips a test on a machine that can't run pods."""
    if why := pods.unavailable():
        pytest.skip(f"no pods on this machine: {why}")


class Job:
    """One of the jobs that use the node's sidecar.

    Args:
        name: of the job; its checkpoints go below ``gs://bucket/<name>``.
        uid: user of its pods.
    """

    def __init__(self, cluster: "Cluster", name: str, uid: int) -> None:
        self.name = name
        self.uid = uid
        self.go = cluster.directory / f"go-{name}"
        self.go.mkdir()
        self.token = secrets.token_hex(32)
        self._cluster = cluster
        self._token = cluster.directory / f"{name}.token"
        self._token.write_text(self.token + "\n")
        self.file = cluster.directory / f"{name}.json"
        self.file.write_text(
            json.dumps(
                {
                    "tokens": [self.token],
                    "allow": [f"gs://bucket/{name}"],
                    "spool_budget": "99MiB",
                }
            )
        )
        patch = _USER.format(uid=uid)
        self.objects = cluster.built("per-node", {"PANNIER_JOB": name}, patch, f"job-{name}")

    def pod(self) -> Pod:
        """A new one, on the host of the node's sidecar."""
        return self._cluster.pod_of(
            self.objects,
            "Job/train",
            "trainer",
            called=f"{self.name}-{len(list(self._cluster.directory.glob(self.name + '-*')))}",
            secrets={f"pannier-token.{self.name}": {"token": self._token}},
            go=self.go,
            root=f"gs://bucket/{self.name}",
        )

    def save(self, step: int, mib: int = 8) -> None:
        """Lets the trainer save."""
        order(self.go, step, 0, mib=mib)


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
        images: Mapping[str, Image],
    ) -> None:
        self.bucket = bucket
        self._images = images
        self.directory = directory
        self.go = directory / "go"
        self.go.mkdir()
        self.objects = self.built(overlay, settings, patches, "deploy")
        authority = Authority(directory / "ca")
        self._secrets: dict[str, dict[str, Path]] = {"pannier-jobs": {}}
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
        self.names: dict[str, str] = {}
        """Besides the coordinator's Service: names that pods know, with addresses."""
        self.coordinator = self.pod("Deployment/pannier-coordinator", "coordinator")

    def built(
        self, overlay: str, settings: Mapping[str, str], patches: str, folder: str
    ) -> list[Object]:
        """Objects of a copy of deploy/ in ``folder``, with other settings."""
        deploy = self.directory / folder
        shutil.copytree(DEPLOY, deploy)
        path = deploy / "overlays" / overlay / "settings.env"
        text = path.read_text()
        for name, value in {**SETTINGS, **settings}.items():
            text = re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", text)
        path.write_text(text)
        with (path.parent / "kustomization.yaml").open("a") as file:
            file.write(patches)
        return built(path.parent)

    def pod(self, made_by: str, host: str, called: str = "", index: int = 0) -> Pod:
        """The pod that this object makes, on a host; where it makes several, the one of this index."""
        return self.pod_of(
            self.objects,
            made_by,
            host,
            called=called or made_by.rpartition("/")[2],
            secrets=self._secrets,
            go=self.go,
            root="gs://bucket/run",
            index=index,
        )

    def pod_of(
        self,
        objects: list[Object],
        made_by: str,
        host: str,
        *,
        called: str,
        secrets: Mapping[str, Mapping[str, Path]],
        go: Path,
        root: str,
        index: int = 0,
    ) -> Pod:
        """The same with other objects, name, secrets, orders and places of checkpoints."""
        pod = Pod(
            called,
            pod_templates(objects)[made_by],
            objects,
            self.directory,
            prefix=self._network.prefix(host),
            address=self._network.address(host),
            secrets=secrets,
            host=self.directory / "node",
            hosts={
                "pannier-coordinator": self._network.address("coordinator"),
                # The kubelet writes a pod's own name, which here is the machine's.
                platform.node(): self._network.address(host),
                **self.names,
            },
            downward={
                "spec.nodeName": f"node-{index}",
                "status.podIP": self._network.address(host),
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
                "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": str(index),
            },
            more_mounts=[(str(go), "/go", False)],
            images=self._images,
        )
        self._stack.enter_context(pod)
        for each in (*pod.first, *pod.main):
            # The bucket is another one than Google's, and so is the training.
            each.extra.update(self.bucket.env)
            if each.name == "trainer":
                each.command = ["python", str(TRAINER)]
                each.extra.update(GO="/go", ROOT=root, SIGTERM="exit")
        return pod

    def serve(self, node: Pod, *jobs: Job) -> None:
        """The Secret pannier-jobs has these, and the kubelet brings them to the sidecar."""
        (source,) = (
            volume["secret"]
            for volume in node.template["spec"]["volumes"]
            if volume["name"] == "pannier-jobs"
        )
        self._secrets["pannier-jobs"] = {job.file.name: job.file for job in jobs}
        node.volumes.replace("pannier-jobs", source, self._secrets["pannier-jobs"])

    def save(self, step: int, mib: int = 8) -> None:
        """Lets the trainer save."""
        order(self.go, step, 0, mib=mib)


@contextmanager
def cluster(
    overlay: str,
    network: Network,
    bucket: GcsServer,
    patches: str = "",
    images: Mapping[str, Image] = {},
    **settings: str,
) -> Iterator[Cluster]:
    directory = short_directory()
    directory.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        stack.callback(bucket.clear)
        yield Cluster(overlay, settings, patches, network, bucket, directory, stack, images)


def said(pod: Pod, container: str, *lines: str, timeout: float = 40) -> None:
    """Returns when a container has written all of these lines."""
    process = pod[container].process
    wait_until(lambda: all(line in process.log() for line in lines), timeout)


def await_ingested(sidecar: pods.Container, step: int) -> None:
    """Returns when the rank may die."""
    line = re.compile(rf"/step-{step}, rank 0 .* is ingested")
    wait_until(lambda: line.search(sidecar.process.log()) is not None, 30)


def confined(container: pods.Container) -> None:
    """It is PID 1, not root, without capabilities, and its file system can't be written."""
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
