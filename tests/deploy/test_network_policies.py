"""NetworkPolicies admit the job's own pods, and every label of the job reaches all that look for it.

A cluster that enforces policies drops what none admits: trainers would wait for each other for ever. A cluster
without such a network plugin never shows it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.kubernetes.manifests import (
    DEPLOY,
    NODE,
    OVERLAYS,
    admits,
    built,
    of_kind,
    overlaid,
    pod_templates,
    settings,
)

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MAY_CONNECT = {"coordinator": {"trainer", "sidecar"}, "trainer": {"trainer"}}
"""To pods of a component: those of these, as far as an overlay has them."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_policy_admits_the_pods_that_must_reach_its_own(overlay: str) -> None:
    objects = built(DEPLOY / "overlays" / overlay)
    pods = [each["metadata"]["labels"] for each in pod_templates(objects).values()]
    policies = of_kind(objects, "NetworkPolicy")
    assert policies
    for policy in policies:
        name = policy["metadata"]["name"]
        guarded = [each for each in pods if admits(policy["spec"]["podSelector"], each)]
        assert {each[COMPONENT] for each in guarded} == {name.removeprefix("pannier-")}
        admitted: set[str] = set()
        for source in (source for entry in policy["spec"]["ingress"] for source in entry["from"]):
            found = {each[COMPONENT] for each in pods if admits(source["podSelector"], each)}
            assert found, f"{name} admits no pod: {source}"
            admitted |= found
        there = {each[COMPONENT] for each in pods}
        assert admitted == MAY_CONNECT[name.removeprefix("pannier-")] & there, name


@pytest.mark.parametrize("monitoring", ["monitoring", "monitoring-gke"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_labels_and_selectors_have_the_jobs_name(
    overlay: str, monitoring: str, tmp_path: Path
) -> None:
    objects = overlaid(tmp_path, overlay, first=(monitoring,))
    job = "pannier" if overlay == NODE else settings(objects)["PANNIER_JOB"]
    found = [(each["kind"], *value) for each in objects for value in labels(each, "")]
    assert len(found) >= 5
    assert [each for each in found if each[2] != job] == []


def labels(part: object, path: str) -> Iterator[tuple[str, str]]:
    """Where the label of the job is in an object, and its value."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == INSTANCE:
                yield path, value
            yield from labels(value, f"{path}.{key}")
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from labels(value, f"{path}.{index}")


def test_what_a_replacement_selects_is_there_by_its_exact_name() -> None:
    """kustomize takes no regular expression here, and passes over what selects nothing."""
    kustomizations = {
        path: yaml.safe_load(path.read_text()) for path in DEPLOY.glob("*/*/kustomization.yaml")
    }
    there = {
        (each["kind"], each["metadata"]["name"])
        for path, kustomization in kustomizations.items()
        for resource in kustomization.get("resources", [])
        if (path.parent / resource).is_file()
        for each in yaml.safe_load_all((path.parent / resource).read_text())
    }
    seen = 0
    for path, kustomization in kustomizations.items():
        for replacement in kustomization.get("replacements", []):
            source = replacement["source"]
            assert (source["kind"], source["name"]) in there | {("ConfigMap", "pannier")}, path
            for target in replacement["targets"]:
                select = target["select"]
                assert select.keys() <= {"kind", "name"}, path
                kinds = {kind for kind, name in there if name == select.get("name", name)}
                assert select["kind"] in kinds, f"{path.parent.name}: {select} selects nothing"
                seen += 1
    assert seen > 20


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_setting_of_an_overlay_is_read(overlay: str, tmp_path: Path) -> None:
    """By a container that takes it from the ConfigMap, or by a replacement that writes it elsewhere."""
    lines = (DEPLOY / "overlays" / overlay / "settings.env").read_text().splitlines()
    before = dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))
    chosen = {}
    for number, (name, value) in enumerate(before.items(), 7001):
        chosen[name] = re.sub(r"\d+|$", str(number), value, count=1)
    objects = overlaid(tmp_path, overlay, chosen=chosen)
    assert settings(objects) == chosen
    text = yaml.safe_dump([each for each in objects if each["kind"] != "ConfigMap"])
    for name, value in chosen.items():
        assert f"key: {name}\n" in text or value in text, name
