"""deploy/README.md: its commands run, or say what they need; what it names is there."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from pannier.sidecar.multi_job.job_config import KNOWN, JobDirectory
from pannier.v1 import status_pb2
from pannier.wire.auth_token import TokenFile
from support.kubernetes.manifests import (
    DEPLOY,
    NAMESPACE,
    NODE_NAMESPACE,
    REPOSITORY,
    built,
    needs_kubectl,
    pod_templates,
)
from support.kubernetes.schemas import problems, releases
from support.markdown import anchors, links

README = (DEPLOY / "README.md").read_text()
PROMPT = re.compile(r"^\s*(\w*)\$ (.*)$", re.MULTILINE)


def lines() -> list[tuple[str, str]]:
    """Where a command runs, and the command."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    assert all(PROMPT.match(line) for block in blocks for line in block.strip("\n ").splitlines())
    return PROMPT.findall("\n".join(blocks))


def test_a_command_is_run_here_or_says_what_it_needs() -> None:
    here = ("cp", "sed", "kubectl kustomize", "umask", "printf", "python3 -m pip wheel")
    known = {"": here, "engine": ("docker",)}
    known["cluster"] = ("kubectl", "gcloud", "grpcurl", "make test-cluster", "for each in tls.crt")
    known["slurm"] = ("sbatch", "srun")
    found = lines()
    assert len(found) > 10
    for where, command in found:
        assert command.startswith(known[where]), command


def test_the_commands_that_need_nothing_do_what_they_say(tmp_path: Path) -> None:
    needs_kubectl()
    for overlay in ("gke-gpu", "gke-tpu"):
        shutil.rmtree(tmp_path / "deploy", ignore_errors=True)
        shutil.copytree(DEPLOY, tmp_path / "deploy")
        shown = {}
        for where, command in lines():
            # The wheel is built by tests/unit/test_packaging.py.
            if where or "pip wheel" in command:
                continue
            done = subprocess.run(
                ["bash", "-c", command.replace("gke-gpu", overlay, 1)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            if command.startswith("kubectl kustomize"):
                # What will be applied.
                shown[command.split()[2].rpartition("/")[2]] = done.stdout
        assert shown.keys() == {"mine", "my-node", "my-job"}
        (release,) = releases(1)
        for name, text in shown.items():
            objects = list(yaml.safe_load_all(text))
            assert [problem for each in objects for problem in problems(each, release)] == []
            assert not re.search(r"BUCKET|REGISTRY|llama", text), name
            assert "my-registry/my-project/pannier-sidecar:0.1.0" in text
        assert "gs://my-bucket/my-job" in shown["mine"]
        assert "path: /run/pannier/jobs/my-job\n" in shown["my-job"]
        (job,) = JobDirectory(tmp_path / "jobs").read().values()
        assert (job.name, job.allow) == ("my-job", ("gs://my-bucket/my-job",))
        assert job.digests == {TokenFile(tmp_path / "my-job.token").digest()}
        assert (tmp_path / "jobs").stat().st_mode & 0o077 == 0


def test_the_patch_for_another_port_adds_it(tmp_path: Path) -> None:
    needs_kubectl()
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "overlays" / "gke-gpu"
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (patch,) = [block for block in blocks if "NetworkPolicy" in block]
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write(patch)
    command = ["kubectl", "kustomize", str(overlay)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in yaml.safe_load_all(text)
        if each["kind"] == "NetworkPolicy"
    }
    ports = policies["pannier-coordinator"]["egress"][0]["ports"]
    assert ports[-1] == {"port": 4317, "protocol": "TCP"}


def test_the_table_of_a_jobs_file_is_what_is_read() -> None:
    table = README.partition("| field of a job's file |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == set(KNOWN)


def test_the_account_that_the_bucket_is_opened_for_is_the_daemons() -> None:
    (namespace, account) = re.findall(r"/subject/ns/([\w-]+)/sa/([\w-]+)", README)[0]
    for pod in pod_templates(built(DEPLOY / "overlays/gke-gpu")).values():
        assert pod["spec"]["serviceAccountName"] == account
    assert namespace == NAMESPACE
    assert set(re.findall(r"kubectl -n (\S+)", README)) == {NAMESPACE, NODE_NAMESPACE}


def test_what_it_says_of_grpcurl_is_what_the_test_of_a_cluster_does() -> None:
    (called,) = (command for _, command in lines() if command.startswith("grpcurl"))
    assert (
        called.rpartition("/")[2]
        in status_pb2.DESCRIPTOR.services_by_name["Status"].methods_by_name
    )
    (secret,) = (command for _, command in lines() if command.startswith("for each"))
    script = (REPOSITORY / "tests/cluster/run.sh").read_text()
    words = " ".join(script.replace('"$work/', "").replace('"', "").split())
    for flags in (
        "-cert tls.crt -key tls.key -cacert ca.crt -authority pannier-coordinator",
        called.rpartition(" ")[2],
    ):
        assert flags in called
        assert flags in words
    template = 'go-template={{index .data \\"$each\\" | base64decode}}'
    assert template in secret
    assert template in script


def test_what_it_names_is_there() -> None:
    for name in set(re.findall(r"`((?:components|overlays)/[\w-]+)", README)):
        assert (DEPLOY / name).is_dir(), name
    for overlay in DEPLOY.glob("overlays/*/"):
        if overlay.name != "mine":
            assert overlay.name in README, overlay
    pages = [DEPLOY / "README.md", DEPLOY / "restarts.md"]
    for page in pages:
        text = page.read_text()
        for name in re.findall(r"`((?:components|overlays)/[\w-]+)", text):
            assert (DEPLOY / name).is_dir(), name
        for target, anchor in links(text):
            where = DEPLOY / target if target else page
            assert where.exists(), target
            assert not anchor or anchor in anchors(where.read_text()), f"{page.name}: {anchor}"
    images = (DEPLOY / "overlays/gke-gpu/kustomization.yaml").read_text()
    assert "newTag: 0.1.0" in images
    assert 'version = "0.1.0"' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_table_of_sizes_is_what_the_settings_have() -> None:
    settings, disk = (of_overlay(name) for name in ("gke-gpu", "indexed-job"))
    rows = re.findall(r"^\| `([A-Z_]+)`(.*?) \|.*\| (\w+) \|$", README, re.MULTILINE)
    said = {(name, about): value for name, about, value in rows}
    assert said == {
        ("SPOOL_SIZE", ""): settings["SPOOL_SIZE"],
        ("SIDECAR_MEMORY", ", spool in memory"): settings["SIDECAR_MEMORY"],
        ("SIDECAR_MEMORY", ", spool on a disk"): disk["SIDECAR_MEMORY"],
        ("PANNIER_GRACE", ""): settings["PANNIER_GRACE"],
        ("TRAINER_MEMORY", ", `TRAINER_CPU`"): settings["TRAINER_MEMORY"],
        ("RESTARTS", ""): settings["RESTARTS"],
        ("TERMINATION_GRACE", ""): settings["TERMINATION_GRACE"],
    }


def of_overlay(name: str) -> dict[str, str]:
    lines = (DEPLOY / "overlays" / name / "settings.env").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))
