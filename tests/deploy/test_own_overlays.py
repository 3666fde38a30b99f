"""What users change in an overlay of their own: sizes in any form, and ConfigMaps and Secrets beside ours."""

import re
from pathlib import Path

import pytest

from support.kubernetes.manifests import (
    WITH_TRAINERS,
    Object,
    container,
    named,
    of_kind,
    overlaid,
    pod_templates,
)
from support.kubernetes.schemas import problems, releases

POD = {
    "Job": "/spec/template/spec",
    "JobSet": "/spec/replicatedJobs/0/template/spec/template/spec",
    "LeaderWorkerSet": "/spec/leaderWorkerTemplate/workerTemplate/spec",
}
"""Where a workload has the spec of its pods."""
OWN = """
- op: add
  path: {pod}/volumes/-
  value: {{name: data, configMap: {{name: app}}}}
- op: add
  path: {pod}/volumes/-
  value: {{name: key, secret: {{secretName: login}}}}
- op: add
  path: {pod}/volumes/-
  value:
    name: both
    projected: {{sources: [{{configMap: {{name: app}}}}, {{secret: {{name: login}}}}]}}
- op: add
  path: {pod}/volumes/-
  value: {{name: cache, persistentVolumeClaim: {{claimName: cache}}}}
- op: add
  path: {pod}/imagePullSecrets
  value: [{{name: login}}]
- op: add
  path: {pod}/containers/0/envFrom
  value: [{{configMapRef: {{name: app}}}}, {{secretRef: {{name: login}}}}]
- op: add
  path: {pod}/initContainers/0/envFrom
  value: [{{configMapRef: {{name: app}}}}, {{secretRef: {{name: login}}}}]
- op: add
  path: {pod}/containers/0/env/-
  value: {{name: MODE, valueFrom: {{configMapKeyRef: {{name: app, key: mode}}}}}}
- op: add
  path: {pod}/initContainers/0/env/-
  value: {{name: WORD, valueFrom: {{secretKeyRef: {{name: login, key: word}}}}}}
"""
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: cache}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
"""


def workload(objects: list[Object]) -> Object:
    (found,) = (each for each in objects if each["kind"] in POD)
    return found


@pytest.mark.parametrize("overlay", WITH_TRAINERS)
def test_sizes_and_names_may_be_written_as_kubernetes_takes_them(
    overlay: str, tmp_path: Path
) -> None:
    for cpu, job in (("7.5", "2024"), ("7500m", "1e3"), ("16", "true")):
        objects = overlaid(tmp_path, overlay, chosen={"TRAINER_CPU": cpu, "PANNIER_JOB": job})
        template = next(
            each for where, each in pod_templates(objects).items() if where.endswith("/train")
        )
        assert container(template, "trainer")["resources"]["requests"]["cpu"] == cpu
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == job
        (release,) = releases(1)
        assert [problem for each in objects for problem in problems(each, release)] == []


@pytest.mark.parametrize("prefix", ["", "a-"])
@pytest.mark.parametrize("overlay", WITH_TRAINERS)
def test_configmaps_and_secrets_of_a_users_own_are_found_by_the_pods(
    overlay: str, prefix: str, tmp_path: Path
) -> None:
    """Generated ones get a hash, and all get the prefix: pods would wait for a name that isn't there."""
    (kind,) = (each for each in POD if each == workload(overlaid(tmp_path, overlay))["kind"])
    folder = tmp_path / "deploy/claim"
    folder.mkdir()
    (folder / "claim.yaml").write_text(CLAIM)
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nresources: [claim.yaml]\n"
    )
    objects = overlaid(
        *(tmp_path, overlay, "../claim"),
        configMapGenerator=[
            {"name": "pannier", "envs": ["settings.env"]},
            {"name": "app", "literals": ["mode=fast"]},
        ],
        secretGenerator=[{"name": "login", "literals": ["word=x"]}],
        patches=[{"target": {"kind": kind, "name": "train"}, "patch": OWN.format(pod=POD[kind])}],
        **({"namePrefix": prefix} if prefix else {}),
    )
    text = str(workload(objects))
    for held, key, times in (("ConfigMap", "app", 5), ("Secret", "login", 6)):
        (own,) = (
            o for o in of_kind(objects, held) if o["metadata"]["name"].startswith(prefix + key)
        )
        name = own["metadata"]["name"]
        assert re.fullmatch(rf"{prefix}{key}-[a-z0-9]{{10}}", name)
        assert text.count(f"'{name}'") == times, text
        assert f"'{key}'" not in text
    named(objects, "PersistentVolumeClaim", f"{prefix}cache")
    assert f"'claimName': '{prefix}cache'" in text
