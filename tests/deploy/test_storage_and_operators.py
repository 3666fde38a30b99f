"""deploy/storage.md and deploy/other-workloads.md: their commands run, their YAML is rendered, on copies of deploy/."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes.manifests import (
    DEPLOY,
    Object,
    built,
    container,
    containers,
    daemons,
    environment,
    named,
    needs_kubectl,
    pod_templates,
)
from support.kubernetes.schemas import problems, releases
from support.markdown import anchors, links

STORAGE = (DEPLOY / "storage.md").read_text()
OPERATORS = (DEPLOY / "other-workloads.md").read_text()
SECRET = "pannier-storage"


def yaml_blocks(page: str) -> list[Any]:
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(re.sub(f"^{indent}", "", text, flags=re.M)) for indent, text in blocks]


def run_commands(page: str, directory: Path) -> None:
    """What the page has after ``$``, in a copy of deploy/."""
    needs_kubectl()
    shutil.copytree(DEPLOY, directory / "deploy")
    for command in re.findall(r"^ *\$ (.*)$", page, re.MULTILINE):
        subprocess.run(["bash", "-ec", command], cwd=directory, check=True, capture_output=True)


def changed(folder: Path, **fields: list[Any]) -> list[Object]:
    """Objects of an overlay with more of these fields."""
    path = folder / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text())
    for name, more in fields.items():
        kustomization[name] = [*kustomization.get(name, []), *more]
    path.write_text(yaml.safe_dump(kustomization))
    objects = built(folder)
    (release,) = releases(1)
    assert [problem for each in objects for problem in problems(each, release)] == []
    return objects


@pytest.mark.parametrize("page", ["storage.md", "other-workloads.md"])
def test_what_a_page_names_is_there(page: str) -> None:
    text = (DEPLOY / page).read_text()
    assert f"({page})" in (DEPLOY / "README.md").read_text()
    for name in re.findall(r"`((?:components|overlays)/[\w-]+)", text):
        assert (DEPLOY / name).is_dir(), name
    for target, anchor in links(text):
        where = DEPLOY / target if target else DEPLOY / page
        assert where.exists(), target
        assert not anchor or anchor in anchors(where.read_text()), f"{page}: {anchor}"


def test_a_job_on_eks_has_its_role_its_bucket_and_its_nodes(tmp_path: Path) -> None:
    run_commands(STORAGE, tmp_path)
    folder = tmp_path / "deploy/overlays/my-eks"
    text = "".join(yaml.safe_dump(each) for each in built(folder))
    assert "s3://my-bucket/my-job" in text
    assert not re.search("BUCKET|REGISTRY|llama", text)
    role, nodes, _, pull = yaml_blocks(STORAGE)
    # `components/gpu` where the page says that it stands.
    path = folder / "kustomization.yaml"
    gpu = re.sub(r"(.*/)(indexed-job)", r"\1gpu\n\1\2", path.read_text())
    path.write_text(gpu)
    objects = changed(folder, patches=[*role["patches"], *nodes["patches"], *pull["patches"]])
    account = named(objects, "ServiceAccount", "pannier")
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith("role/pannier")
    assert account["imagePullSecrets"] == [{"name": "registry"}]
    template = pod_templates(objects)["Job/train"]
    selector = template["spec"]["nodeSelector"]
    assert selector == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    # The account is that of all pods, and what Pod Identity's agent gives them may be fetched.
    accounts = {each["spec"]["serviceAccountName"] for each in pod_templates(objects).values()}
    assert accounts == {"pannier"}
    egress = named(objects, "NetworkPolicy", "pannier-coordinator")["spec"]["egress"]
    assert "169.254.170.23/32" in str(egress)


@pytest.mark.parametrize(
    "overlay", ["gke-gpu", "gke-tpu", "indexed-job", "leaderworkerset", "node", "per-node"]
)
def test_daemons_and_trainers_get_the_secret_as_variables_and_files(
    overlay: str, tmp_path: Path
) -> None:
    needs_kubectl()
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    path = tmp_path / "deploy/overlays" / overlay / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text())
    at = -1 if overlay != "node" else len(kustomization["components"])
    kustomization["components"].insert(at, "../../components/storage")
    path.write_text(yaml.safe_dump(kustomization))
    objects = changed(path.parent)
    seen = []
    for where, template in pod_templates(objects).items():
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert volumes[SECRET]["secret"] == {"secretName": SECRET, "defaultMode": 0o440}, where
        for each in containers(template):
            if each["name"] in ("directories", "sidecar-is-ready"):
                continue
            seen.append(each["name"])
            assert each["envFrom"] == [{"secretRef": {"name": SECRET}}], each["name"]
            mounts = {mount["name"]: mount for mount in each["volumeMounts"]}
            assert mounts[SECRET]["mountPath"] == "/etc/pannier/storage"
            assert mounts[SECRET]["readOnly"]
    daemons_here = {"coordinator", "pannier"} if overlay != "per-node" else set()
    assert set(seen) == daemons_here | ({"trainer"} if overlay != "node" else set())


def test_the_page_shows_where_the_component_stands(tmp_path: Path) -> None:
    needs_kubectl()
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (components,) = (block for block in yaml_blocks(STORAGE) if "components" in block)
    folder = tmp_path / "deploy/overlays/indexed-job"
    path = folder / "kustomization.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **components}))
    for _, template, _ in daemons(changed(folder)):
        assert SECRET in str(template["spec"]["volumes"])


def test_a_foreign_pod_with_the_parts_of_the_page_has_a_sidecar(tmp_path: Path) -> None:
    """As Kubeflow, KubeRay and Volcano make it: another container's name, and nothing else of ours."""
    run_commands(OPERATORS, tmp_path)
    objects = changed(tmp_path / "deploy/my-pods")
    source = named(objects, "PodTemplate", "trainer")["template"]
    trainer = container(source, "trainer")
    (own,) = yaml_blocks(OPERATORS)
    # One truth: what the page shows is what the overlays' trainers have.
    for name in ("env", "volumeMounts"):
        assert all(each in trainer[name] for each in own[name]), name
    table = OPERATORS.partition("| of the pod |")[2].partition("\n\n")[0]
    paths = [path.split(".") for path in re.findall(r"`((?:metadata|spec)\.\w+)`", table)]
    pod: dict[str, Any] = {"metadata": {}, "spec": {}}
    for top, field in paths:
        pod[top][field] = source[top][field]
    pod["spec"]["containers"] = [{"name": "node", "image": "theirs:v1", **own}]
    pod["spec"]["restartPolicy"] = "OnFailure"
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "theirs", "namespace": "training"},
        "spec": {"template": pod},
    }
    for release in releases():
        assert problems(job, release) == []
    (sidecar,) = pod["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("pannier", "Always")
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    assert {m["name"] for each in containers(pod) for m in each["volumeMounts"]} == volumes
    variables = environment(pod["spec"]["containers"][0], objects)
    downward = {"status.podIP": "10.0.0.7", "spec.nodeName": "node-0"}
    theirs = environment(sidecar, objects, downward)
    assert variables["PANNIER_SIDECAR"] == theirs["PANNIER_ADDRESS"]
    assert variables["PANNIER_JOB"] == "my-job"
    assert theirs["PANNIER_ALLOW"] == "gs://my-bucket/my-job"
    # What the sidecar calls, and who lets it in.
    named(objects, "Service", theirs["PANNIER_COORDINATOR"].partition(":")[0])
    labels = pod["metadata"]["labels"].items()
    for name in ("pannier-coordinator", "pannier-trainer"):
        (entry,) = named(objects, "NetworkPolicy", name)["spec"]["ingress"]
        (peer,) = entry["from"]
        assert peer["podSelector"]["matchLabels"].items() <= labels, name
