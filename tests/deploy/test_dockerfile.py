"""The Dockerfile: what its commands are to our command line, what goes into the images, its style."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pannier.cli.commands import coordinator, sidecar
from support.kubernetes.dockerfiles import Stage, stages
from support.kubernetes.manifests import DEPLOY, REPOSITORY, built, containers, pod_templates
from support.processes.cli import pannier
from support.processes.daemons import await_serving, clean_environment, short_directory
from support.processes.processes import Process

DOCKERFILE = REPOSITORY / "Dockerfile"
STAGES = stages(DOCKERFILE)
TARGETS = ("sidecar", "coordinator")


def test_hadolint_has_nothing_against_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_nobodys_root_and_runs_its_daemon(target: str) -> None:
    stage = STAGES[target]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.user), stage.user
    assert (stage.entrypoint, stage.command) == (("pannier",), (target,))
    assert stage.stop_signal == "SIGTERM"
    default = {"sidecar": sidecar, "coordinator": coordinator}[target].DEFAULT_ADDRESS
    assert stage.environment["PANNIER_ADDRESS"] == default


@pytest.mark.parametrize("target", TARGETS)
def test_a_registry_shows_what_an_image_is_and_of_which_version(target: str) -> None:
    prefix = "org.opencontainers.image."
    labels = {
        name.removeprefix(prefix): value
        for name, value in STAGES[target].labels.items()
        if name.startswith(prefix)
    }
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'version = "{labels["version"]}"' in project
    assert f'license = "{labels["licenses"]}"' in project
    assert (labels["title"], labels["revision"]) == (f"pannier-{target}", "${REVISION}")
    assert "PyTorch checkpoints" in labels["description"]


def test_manifests_run_the_images_as_the_user_they_have() -> None:
    user, _, group = STAGES["sidecar"].user.partition(":")
    assert STAGES["coordinator"].user == STAGES["sidecar"].user
    for template in pod_templates(built(DEPLOY / "overlays/gke-gpu")).values():
        own = template["spec"]["securityContext"]
        assert (str(own["runAsUser"]), str(own["runAsGroup"])) == (user, group)
        for each in containers(template):
            if each["name"] != "trainer":
                # They add to the image's entry point, and so does it.
                assert "command" not in each
                assert tuple(each["args"]) in {STAGES[target].command for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_and_is_found_healthy(target: str, tmp_path: Path) -> None:
    directory = short_directory()
    stage = STAGES[target]
    environment = in_directory(stage, directory)
    arguments = list(stage.command)
    if target == "sidecar":
        # All that an image can't know.
        arguments += ["--coordinator", "127.0.0.1:7070"]
    process = Process(
        target,
        [str(Path(sys.executable).with_name(stage.entrypoint[0])), *arguments],
        environment=clean_environment(environment),
        log=tmp_path / "daemon.log",
        cwd=tmp_path,
    )
    try:
        await_serving(environment["PANNIER_ADDRESS"], process=process)
        assert stage.healthcheck[0] == "pannier"
        well = pannier(*stage.healthcheck[1:], env=environment)
        assert (well.code, well.out) == (0, "serving\n")
        listed = pannier("status", env=environment)
        assert listed.code == 0, listed
        assert process.stop() == 0
        assert pannier(*stage.healthcheck[1:], env=environment).code == 3
    finally:
        process.close()
        subprocess.run(["rm", "-rf", str(directory)], check=True)


def in_directory(stage: Stage, directory: Path) -> dict[str, str]:
    """An image's environment, with our own directories for those that only the image has."""
    return {
        name: value.replace("/run/pannier", f"{directory}/run").replace("/spool", f"{directory}/s")
        for name, value in stage.environment.items()
        if name.startswith("PANNIER_")
    }


def test_versions_are_those_of_the_lock_and_torch_is_the_coordinators_alone() -> None:
    for stage in STAGES.values():
        for instruction, text in stage.lines:
            if instruction == "RUN" and "pip" in text.split():
                assert "--constraint requirements.lock" in text
                assert "://" not in text
    (installed,) = (text for _, text in STAGES["sidecar-environment"].lines if "install" in text)
    assert "torch" not in installed
    assert not closure("gcs", "s3") & {"torch", "numpy"}
    assert {"torch", "numpy"} <= closure("torch", "gcs", "s3")
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (REPOSITORY / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    assert closure("torch", "gcs", "s3") - pinned == {"pannier"}


def test_the_context_has_what_the_build_needs() -> None:
    kept = [
        line.removeprefix("!").rstrip("/")
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert {"proto", "client", "service", "pyproject.toml", "requirements.lock"} <= set(kept)
    assert all((REPOSITORY / name).exists() for name in kept)


def closure(*extras: str) -> set[str]:
    """Names of the distributions that pannier with these extras has installed."""
    found: set[str] = set()
    wanted = [("pannier", frozenset(extras))]
    while wanted:
        name, asked = wanted.pop()
        if name in found and not asked:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            chosen = [{"extra": extra} for extra in asked] or [{"extra": ""}]
            if requirement.marker is None or any(requirement.marker.evaluate(c) for c in chosen):
                short = canonicalize_name(requirement.name)
                if short not in found or requirement.extras:
                    wanted.append((short, frozenset(requirement.extras)))
    # CUDA's libraries come with other builds of torch; the image has the CPU's.
    return {name for name in found if not name.startswith(("nvidia-", "cuda-", "triton"))}
