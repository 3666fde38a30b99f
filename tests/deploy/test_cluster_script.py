"""tests/cluster/run.sh, which is run on real clusters, in front of a played one; and shellcheck on all scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from support.actors.scripted_sidecar import wait_until
from support.kubernetes.manifests import (
    DEPLOY,
    REPOSITORY,
    Object,
    container,
    containers,
    environment,
    needs_kubectl,
    pod_templates,
    settings,
)
from support.kubernetes.schemas import problems, releases
from support.processes.daemons import clean_environment
from support.processes.processes import Process

SCRIPT = REPOSITORY / "tests/cluster/run.sh"
SCRIPTS = [SCRIPT, *DEPLOY.glob("*/*.sh"), *DEPLOY.glob("slurm/*.sbatch"), REPOSITORY / ".ci/run"]
IMAGES = {
    "SIDECAR": "registry:5000/pannier-sidecar:1",
    "COORDINATOR": "registry:5000/pannier-coordinator:2",
    "TRAINER": "registry:5000/own/trainer:3",
}
CHECKS = (
    r"applied deploy/overlays/",
    r"a checkpoint is committed: step-\d+",
    r"a rank was killed: ",
    r"a pod was deleted: ",
    r"the coordinator was deleted: ",
    r"grpcurl lists the saves",
    r"the policies keep a stranger's pod out",
)


class Played:
    """The script's environment: played programs before those of the machine."""

    def __init__(self, directory: Path, **settings: str) -> None:
        needs_kubectl()
        self.directory = directory
        (directory / "calls").touch()
        real = str(shutil.which("kubectl"))
        for name in ("kubectl", "grpcurl"):
            self._program(
                name, f'exec {sys.executable} -m support.kubernetes.played_kubectl {name} "$@"'
            )
        # Attempts are counted, not seconds.
        self._program("sleep", f"exec {shutil.which('sleep')} 0.2")
        self.environment = clean_environment(
            {
                **IMAGES,
                "ROOT": "gs://bucket/tests/",
                "PLAYED": str(directory),
                "REAL_KUBECTL": real,
                "PYTHONPATH": str(REPOSITORY / "tests"),
                "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
                "TMPDIR": str(directory),
                **settings,
            }
        )

    def run(self) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [SCRIPT], env=self.environment, capture_output=True, text=True, check=False
        )
        self.check_removed()
        return done

    def check_removed(self) -> None:
        """Nothing of the job is left, neither in the cluster nor here."""
        state = json.loads((self.directory / "state.json").read_text())
        assert state["namespaces"] == []
        assert not list(self.directory.glob("tmp.*"))
        forwards = self.directory / "forwards"
        if forwards.exists():
            wait_until(lambda: not psutil.pid_exists(int(forwards.read_text())), 30)

    def objects(self) -> list[Object]:
        return list(yaml.safe_load_all((self.directory / "objects.yaml").read_text()))

    def _program(self, name: str, text: str) -> None:
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("overlay", "fault"),
    [
        ("indexed-job", "no cert-manager"),
        pytest.param("gke-gpu", "", marks=pytest.mark.extended),
        pytest.param("leaderworkerset", "", marks=pytest.mark.extended),
    ],
)
def test_a_cluster_that_does_all_passes_each_check_and_is_left_as_it_was(
    overlay: str, fault: str, tmp_path: Path
) -> None:
    storage = tmp_path / "storage.env"
    storage.write_text("AWS_ACCESS_KEY_ID=one\nAWS_ENDPOINT_URL=http://minio:9000\n")
    played = Played(
        tmp_path,
        OVERLAY=overlay,
        FAULT=fault,
        STORAGE_ENV=str(storage),
        STORAGE_PORT="9000",
    )
    done = played.run()
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^ok +\d+ s  (.*)$", done.stdout, re.MULTILINE)
    assert len(said) == len(CHECKS), done.stdout
    for line, check in zip(said, CHECKS, strict=True):
        assert re.match(check, line)
    objects = played.objects()
    (release,) = releases(1)
    assert [problem for each in objects for problem in problems(each, release)] == []
    (namespace,) = {each["metadata"]["namespace"] for each in objects}
    assert settings(objects)["PANNIER_ALLOW"] == f"gs://bucket/tests/{namespace}"
    templates = pod_templates(objects).values()
    images = {each["image"] for template in templates for each in containers(template)}
    assert images == {*IMAGES.values()}
    secrets = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Secret"}
    for template in templates:
        for each in containers(template):
            (source,) = each["envFrom"]
            data = secrets[source["secretRef"]["name"]]["data"]
            assert set(data) == {"AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"}
    (template,) = (t for where, t in pod_templates(objects).items() if where.endswith("/train"))
    trainer = container(template, "trainer")
    assert trainer["workingDir"] == "/test"
    assert ("Certificate" in {each["kind"] for each in objects}) == (not fault)
    downward = dict.fromkeys(
        (
            "metadata.annotations['batch.kubernetes.io/job-completion-index']",
            "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
        ),
        "1",
    )
    assert environment(trainer, objects, downward)["ROOT"] == f"gs://bucket/tests/{namespace}"
    (egress,) = (
        o["spec"]["egress"][0]["ports"]
        for o in objects
        if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == "pannier-coordinator"
    )
    assert egress[-1] == {"port": 9000, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("fault", "within", "said"),
    [
        ("nothing is committed", "4", "no checkpoint was committed: not within 4 s"),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (
                ("trainers stay down", "4", "the trainer of train-1-a didn't start again"),
                ("no pod is replaced", "4", "no pod replaced train-1-a"),
                ("policies aren't enforced", "300", "a stranger's pod isn't kept out"),
            )
        ),
    ],
)
def test_what_a_cluster_does_not_do_is_said_with_the_pods_logs(
    fault: str, within: str, said: str, tmp_path: Path
) -> None:
    done = Played(tmp_path, FAULT=fault, WITHIN=within).run()
    assert done.returncode == 1
    assert f"FAILED: {said}" in done.stderr
    assert "--- pod/train-0-a\nresumes after step " in done.stderr
    assert "all that deploy/README.md promises" not in done.stdout


def test_an_interrupted_run_removes_its_namespace(tmp_path: Path) -> None:
    played = Played(tmp_path, FAULT="nothing is committed", WITHIN="3000")
    process = Process("script", [str(SCRIPT)], environment=played.environment, log=tmp_path / "log")
    try:
        wait_until(lambda: "pannier ls" in (tmp_path / "calls").read_text(), 120)
        psutil.Process(process.pid).terminate()
        assert process.wait(120) == 143, process.log()
    finally:
        process.close()
    played.check_removed()


def test_without_a_root_and_images_it_says_what_to_give() -> None:
    done = subprocess.run(
        ["make", "test-cluster", "ROOT=gs://bucket/tests"],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    text = SCRIPT.read_text()
    read = {*re.findall(r"\$\{([A-Z_]+):-", text)}
    assert read == {*re.findall(r"^  ([A-Z_]+)  ", done.stderr, re.MULTILINE)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_against_it(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
