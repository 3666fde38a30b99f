"""What deploy/ says: overlays built by kustomize, and what the objects in them mean for a process.

In: an overlay's folder. Out: objects as dicts, their pods, and a container's environment with
what ConfigMaps and the downward API put into it. kustomize is kubectl's.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
NODE = "node"
"""The overlay of what the jobs of a node share: it has no trainers."""
WITH_TRAINERS = [name for name in OVERLAYS if name != NODE]
WITH_DAEMONS = [name for name in OVERLAYS if name != "per-node"]
"""The others' pods use the daemons of NODE."""
NAMESPACE = "training"
NODE_NAMESPACE = "pannier"

Object = dict[str, Any]
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "m": 0.001}


def needs_kubectl() -> None:
    """Skips a test on a machine without kubectl; fails it in CI, which has one."""
    if shutil.which("kubectl") is None:
        if os.environ.get("CI"):
            pytest.fail("kubectl is missing: the overlays in deploy/ can't be built")
        pytest.skip("kubectl isn't installed: the overlays in deploy/ can't be built")


def built(folder: Path) -> list[Object]:
    """All objects of an overlay."""
    needs_kubectl()
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def overlaid(
    directory: Path,
    overlay: str,
    *components: str,
    first: Sequence[str] = (),
    chosen: Mapping[str, str] = {},
    **fields: object,
) -> list[Object]:
    """Objects of a copy of an overlay that has further components, and other settings and fields.

    Args:
        components: after the overlay's own; first: before them.
        chosen: lines of settings.env.
    """
    if not (directory / "deploy").exists():
        shutil.copytree(DEPLOY, directory / "deploy")
    number = len(list(directory.glob("deploy/overlays/own-*")))
    folder = directory / "deploy/overlays" / f"own-{number}"
    shutil.copytree(DEPLOY / "overlays" / overlay, folder)
    path = folder / "kustomization.yaml"
    kustomization = {**yaml.safe_load(path.read_text()), **fields}
    kustomization["components"] = [
        *(f"../../components/{name}" for name in first),
        *kustomization["components"],
        *(f"../../components/{name}" for name in components),
    ]
    path.write_text(yaml.safe_dump(kustomization))
    text = (folder / "settings.env").read_text()
    if "namePrefix" in fields:
        text = text.replace("=llama", f"={fields['namePrefix']}job")
    for name, value in chosen.items():
        text = re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", text)
    (folder / "settings.env").write_text(text)
    return built(folder)


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def settings(objects: Sequence[Object]) -> dict[str, str]:
    """What an overlay's settings.env says. Its ConfigMap has a hash in its name."""
    (found,) = (
        o
        for o in of_kind(objects, "ConfigMap")
        if "PANNIER_ALLOW" in o["data"] or "HOSTS" in o["data"]
    )
    data: dict[str, str] = found["data"]
    return data


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def namespace(overlay: str) -> str:
    """Where an overlay's objects go."""
    return NODE_NAMESPACE if overlay == NODE else NAMESPACE


def pod_templates(objects: Sequence[Object]) -> dict[str, Object]:
    """Templates of pods, by "kind/name" of the object that makes them."""
    return {
        f"{each['kind']}/{each['metadata']['name']}": template
        for each in objects
        for template in _templates(each)
    }


def admits(peer: Object, labels: Mapping[str, str]) -> bool:
    """Whether a NetworkPolicy's ``podSelector`` is that of a pod with these labels."""
    wanted = peer.get("matchLabels", {})
    for each in peer.get("matchExpressions", []):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(wanted.items() <= labels.items())


def containers(template: Object) -> Iterator[Object]:
    """All of a pod, those that start first first."""
    yield from template["spec"].get("initContainers", [])
    yield from template["spec"]["containers"]


def container(template: Object, name: str) -> Object:
    (found,) = (each for each in containers(template) if each["name"] == name)
    return found


def daemons(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Where, template and container of each of our daemons."""
    for where, template in pod_templates(objects).items():
        for each in containers(template):
            if each.get("args", [""])[0] in ("sidecar", "coordinator"):
                yield f"{where}/{each['name']}", template, each


def environment(
    one: Object, objects: Sequence[Object], downward: Mapping[str, str] = {}
) -> dict[str, str]:
    """A container's environment.

    Args:
        downward: values of the pod's own fields, by their path.
    """
    found: dict[str, str] = {}
    for each in one.get("env", []):
        source = each.get("valueFrom", {})
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            data = named(objects, "ConfigMap", reference["name"])["data"]
            if reference.get("optional") and reference["key"] not in data:
                continue
            value = data[reference["key"]]
        elif "fieldRef" in source:
            value = downward[source["fieldRef"]["fieldPath"]]
        else:
            assert not source, f"{each['name']} comes from {source}"
            value = each["value"]
        assert isinstance(value, str), f"{each['name']}={value!r}: Kubernetes takes strings only"
        # Of those that come earlier.
        found[each["name"]] = _expanded(value, found)
    return found


def arguments(one: Object, variables: Mapping[str, str]) -> list[str]:
    """Command and arguments of a container, with what $(NAME) stands for."""
    words = [*one.get("command", []), *one.get("args", [])]
    return [_expanded(word, variables) for word in words]


def quantity(text: str | int) -> float:
    """Of Kubernetes: ``33Gi``, ``500m``, ``4``."""
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    assert match is not None, text
    return int(match[1]) * _UNITS[match[2]]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)


def _templates(each: Object) -> Iterator[Object]:
    spec = each.get("spec", {})
    if each["kind"] in ("Deployment", "DaemonSet", "Job"):
        yield spec["template"]
    elif each["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield job["template"]["spec"]["template"]
    elif each["kind"] == "LeaderWorkerSet":
        yield spec["leaderWorkerTemplate"]["workerTemplate"]
