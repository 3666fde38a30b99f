"""Pods as a kubelet runs them, of what deploy/ says, without Kubernetes: real processes, users, mounts.

In: objects of an overlay and a host, which is a network namespace. Out: containers with exactly the
arguments, environment, user, groups, volumes, file modes and memory limits of the manifest, started and ended in
Kubernetes' order, and probed at the pod's address. An image is one of support.kubernetes.images where the
pod is given it, else this machine's own installation, with what the Dockerfile sets. Needs root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.kubernetes.dockerfiles import Stage, stages
from support.kubernetes.images import Image
from support.kubernetes.manifests import REPOSITORY, Object, arguments, environment, quantity
from support.network import netns
from support.processes.cgroups import MemoryLimit, limited
from support.processes.cli import Result
from support.processes.processes import MARKER, SESSION, Process

STAGES: Final = stages(REPOSITORY / "Dockerfile")
READY_S: Final = 60.0


def unavailable() -> str:
    """Why this machine can't do it; empty when it can."""
    missing = [name for name in ("unshare", "nsenter", "mount") if shutil.which(name) is None]
    return f"there is no {missing[0]!r}" if missing else netns.unavailable()


class Volumes:
    """The directories behind a pod's volumes, with the modes that Kubernetes gives them.

    Args:
        directory: below which they are made.
        secrets: files of Secrets, by name of the Secret.
        host: stands for the node's root where a path of the node is mounted.
    """

    def __init__(
        self,
        template: Object,
        directory: Path,
        secrets: Mapping[str, Mapping[str, Path]],
        host: Path,
    ) -> None:
        self._group = template["spec"]["securityContext"]["fsGroup"]
        self._mounted: list[Path] = []
        self.paths: dict[str, Path] = {}
        for volume in template["spec"].get("volumes", []):
            path = directory / volume["name"]
            if "hostPath" in volume:
                path = host / volume["hostPath"]["path"][1:]
                if volume["hostPath"]["type"] == "Directory":
                    assert path.is_dir(), f"the pod would wait for {path} of the node"
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
            elif "secret" in volume:
                self._secret(path, volume["secret"], secrets[volume["secret"]["secretName"]])
            else:
                self._empty(path, volume["emptyDir"])
            self.paths[volume["name"]] = path

    def close(self) -> None:
        for path in self._mounted:
            # Containers that still end have it in mount namespaces of their own.
            subprocess.run(["umount", "--lazy", path], check=True)
        self._mounted.clear()

    def _empty(self, path: Path, volume: Object) -> None:
        path.mkdir(parents=True)
        if volume.get("medium") == "Memory":
            size = int(quantity(volume["sizeLimit"]))
            options = f"size={size}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
            self._mounted.append(path)
        os.chown(path, 0, self._group)
        path.chmod(0o2777)

    def replace(self, name: str, volume: Object, files: Mapping[str, Path]) -> None:
        """The Secret behind a volume has other files now; the kubelet brings them in."""
        self._secret(self.paths[name], volume, files)

    def _secret(self, path: Path, volume: Object, files: Mapping[str, Path]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        version = path / f"..2026_11_{len(list(path.glob('..2026*'))) + 1:02}"
        version.mkdir()
        for name, source in files.items():
            shutil.copy(source, version / name)
            os.chown(version / name, 0, self._group)
            (version / name).chmod(volume["defaultMode"])
            if not (path / name).is_symlink():
                (path / name).symlink_to(Path("..data", name))
        (path / "..data_tmp").symlink_to(version.name)
        (path / "..data_tmp").rename(path / "..data")
        for each in path.iterdir():
            if each.is_symlink() and not each.exists():
                each.unlink()
        for each in (version, path):
            os.chown(each, 0, self._group)
            each.chmod(0o2755)


class Container:
    """One container of a pod; may be started again after it has ended."""

    def __init__(self, pod: "Pod", spec: Object) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self._pod = pod
        self._process: Process | None = None
        self.extra: dict[str, str] = {}
        """Variables that the manifest doesn't have; may be changed before :meth:`start`."""
        image = spec["image"].rpartition("/")[2].partition(":")[0].removeprefix("pannier-")
        self._image = pod.images.get(image)
        self._settings: Image | Stage | None = self._image or STAGES.get(image)
        self.memory: MemoryLimit | None = None
        """What its limit allows, while it runs; None: it has none, or this machine can't."""
        self.command: list[str] | None = None
        """In place of the manifest's; of the trainer, which isn't ours."""

    @property
    def environment(self) -> dict[str, str]:
        image = self._settings.environment if self._settings is not None else {}
        own = environment(self.spec, self._pod.objects, self._pod.downward)
        if self._image is None:
            own["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        return {**image, **own, **self.extra, MARKER: SESSION}

    @property
    def process(self) -> Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        """Of PID 1 of the container, as it is seen from here."""
        runtime = psutil.Process(self.process.pid)
        deadline = time.monotonic() + READY_S
        while not (children := runtime.children()):
            assert time.monotonic() < deadline, self.process.log()
            time.sleep(0.01)
        return children[0].pid

    def start(self) -> None:
        self.close()
        spec = self._pod.template["spec"]
        own = {**spec["securityContext"], **self.spec["securityContext"]}
        words = arguments(self.spec, environment(self.spec, self._pod.objects, self._pod.downward))
        if self._settings is not None and "command" not in self.spec:
            words = [*self._settings.entrypoint, *words]
        limit = self.spec.get("resources", {}).get("limits", {}).get("memory")
        if limit is not None:
            self.memory = limited(f"{self._pod.name}-{self.name}", int(quantity(limit)))
        config = {
            "arguments": self.command or words,
            "environment": self.environment,
            "user": own["runAsUser"],
            "group": own["runAsGroup"],
            "groups": [own["fsGroup"]],
            "capabilities": own["capabilities"].get("add", []),
            "mounts": [
                (str(self._pod.volumes.paths[m["name"]]), m["mountPath"], m.get("readOnly", False))
                for m in self.spec.get("volumeMounts", [])
            ]
            + self._pod.more_mounts,
            "read_only": own.get("readOnlyRootFilesystem", False),
            "image": str(self._image.root) if self._image is not None else None,
            "visible": _visible(),
            "hosts": self._pod.hosts,
            "root": str(self._pod.directory / f"root-{self.name}"),
        }
        Path(str(config["root"])).mkdir(exist_ok=True)
        path = self._pod.directory / f"{self.name}.json"
        path.write_text(json.dumps(config))
        runtime = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
        # A process that writes 0 moves itself. Before the network's namespace, which hides these files.
        join: list[str] = []
        if self.memory is not None:
            join = ["sh", "-c", 'echo 0 > "$0"; exec "$@"', str(self.memory.members)]
        self._process = Process(
            f"{self._pod.name} {self.name}",
            [
                *(*join, *self._pod.prefix, *runtime),
                *(sys.executable, "-m", "support.kubernetes.container", str(path)),
            ],
            environment={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
            log=self._pod.directory / f"{self.name}.log",
        )

    def probe(self, name: str) -> str:
        """Answer to one of its gRPC probes: a status' name, or a code's."""
        probe = self.spec[name]
        target = f"{self._pod.address}:{probe['grpc']['port']}"
        with grpc.insecure_channel(target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
            try:
                answer = stub.Check(request, timeout=probe.get("timeoutSeconds", 1))
            except grpc.RpcError as error:
                return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def await_probe(self, name: str, answer: str = "SERVING", timeout: float = READY_S) -> None:
        """Returns when the probe says so. Raises AssertionError with the log when it doesn't."""
        deadline = time.monotonic() + timeout
        while (answered := self.probe(name)) != answer:
            assert self.process.returncode is None, self.process.log()
            assert time.monotonic() < deadline, f"{name}: {answered}\n{self.process.log()}"
            time.sleep(0.05)

    def run(self, *words: str) -> Result:
        """``kubectl exec``: another process in the container."""
        space = ["--mount", "--pid", "--net", "--root", "--wdns=/tmp"]
        own = self._pod.template["spec"]["securityContext"]
        user = [f"--setuid={own['runAsUser']}", f"--setgid={own['runAsGroup']}"]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", *space, *user, "env", "-i", *variables, *words],
            capture_output=True,
            text=True,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def signal(self, number: signal.Signals) -> None:
        """To PID 1 of the container, from the node, as the kubelet's runtime does it."""
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Exit status."""
        return self.process.wait(timeout)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class Pod:
    """``with Pod(...) as pod``: its containers aren't started yet.

    Args:
        prefix: of commands that run on its host; address: the host's.
        downward: its own fields that containers ask for.
        hosts: names that its containers know, with addresses.
        more_mounts: besides the manifest's: source, target, read-only.
        images: of containers, by the last part of their name without ``pannier-``.
    """

    def __init__(
        self,
        name: str,
        template: Object,
        objects: Sequence[Object],
        directory: Path,
        *,
        prefix: Sequence[str],
        address: str,
        secrets: Mapping[str, Mapping[str, Path]],
        host: Path,
        hosts: Mapping[str, str] = {},
        downward: Mapping[str, str] = {},
        more_mounts: Sequence[tuple[str, str, bool]] = (),
        images: Mapping[str, Image] = {},
    ) -> None:
        self.name = name
        self.template = template
        self.objects = objects
        self.directory = directory / name
        self.prefix = prefix
        self.address = address
        self.downward = downward
        self.hosts = "127.0.0.1 localhost\n" + "".join(f"{ip} {n}\n" for n, ip in hosts.items())
        self.more_mounts = list(more_mounts)
        self.images = images
        self.directory.mkdir(parents=True)
        self.volumes = Volumes(template, self.directory / "volumes", secrets, host)
        spec = template["spec"]
        self.first = [Container(self, each) for each in spec.get("initContainers", [])]
        self.main = [Container(self, each) for each in spec["containers"]]

    def __getitem__(self, name: str) -> Container:
        (found,) = (each for each in (*self.first, *self.main) if each.name == name)
        return found

    def start(self) -> None:
        """Everything that comes before the main containers, then those."""
        for each in self.first:
            each.start()
            if each.spec.get("restartPolicy") == "Always":
                each.await_probe("startupProbe")
            else:
                assert each.wait(READY_S) == 0, each.process.log()
        for each in self.main:
            each.start()

    def terminate(self) -> dict[str, int]:
        """As a deleted pod ends; exit statuses by container. SIGKILL is reported as 137."""
        deadline = time.monotonic() + self.template["spec"]["terminationGracePeriodSeconds"]
        native = [c for c in self.first if c.spec.get("restartPolicy") == "Always"]
        ended = {}
        for each in (*self.main, *reversed(native)):
            if each.process.returncode is None:
                each.signal(signal.SIGTERM)
            try:
                ended[each.name] = each.wait(max(0.0, deadline - time.monotonic()))
            except AssertionError:
                each.close()
                ended[each.name] = 137
        return ended

    def __enter__(self) -> "Pod":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in (*self.main, *self.first):
            each.close()
        self.volumes.close()


def _visible() -> list[str]:
    """What stands for the image's files: the system's programs and libraries, and our installation."""
    system = [name for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if os.path.lexists(name)]
    own = {sys.prefix, sys.base_prefix, str(REPOSITORY)}
    return [*system, *sorted(own, key=len)]
