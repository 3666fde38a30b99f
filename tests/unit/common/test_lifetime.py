"""What may end embedded daemons with their trainer, judged by a /proc and an environment that tests make."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pannier.common import lifetime

FIRST = {"pid": "pid:[4026531836]", "cgroup": "cgroup:[4026531835]"}


def played(proc: Path, *cgroups: str, **spaces: str) -> Path:
    """A /proc whose process is in these cgroups, and in these namespaces or the machine's first."""
    own = proc / "self"
    (own / "ns").mkdir(parents=True)
    for kind, name in {**FIRST, **spaces}.items():
        (own / "ns" / kind).symlink_to(name)
    (own / "cgroup").write_text("".join(f"{line}\n" for line in cgroups))
    return proc


def logind(monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception) -> list[Any]:
    """What systemd-logind says to KillUserProcesses; returns what it is asked."""
    asked: list[Any] = []

    def run(command: Any, **_: object) -> Any:
        asked.append(command)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


@pytest.mark.parametrize(
    "cgroups",
    [
        pytest.param(["0::/"], id="a machine without systemd"),
        pytest.param(["0::/user.slice/user-1000.slice"], id="a slice alone"),
        pytest.param(
            ["2:cpu,cpuacct:/", "1:name=systemd:/user.slice", "0::/user.slice"], id="cgroup v1"
        ),
        pytest.param(
            ["0::/user.slice/user-1000.slice/session-3.scope"], id="a login, a tmux or screen in it"
        ),
    ],
)
def test_daemons_are_known_to_survive_there(
    cgroups: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logind(monkeypatch, b"b false\n")
    assert lifetime.ended_by({"HOME": "/root"}, played(tmp_path, *cgroups)) is None


USER = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    "cgroup",
    [
        pytest.param("0::/system.slice/train.service", id="a unit"),
        pytest.param("0::/system.slice/cron.service", id="a cron job"),
        pytest.param(f"0::{USER}/app.slice/run-u7.service", id="systemd-run --user"),
        pytest.param(f"0::{USER}/app.slice/vte-spawn-1.scope", id="a desktop's terminal"),
        pytest.param(f"0::{USER}/tmux-spawn-1.scope", id="a tmux with a scope of its own"),
        pytest.param("0::/user.slice/user-1000.slice/run-r3.scope", id="systemd-run --scope"),
        pytest.param("0::/system.slice/docker-31d2.scope", id="docker --pid=host --cgroupns=host"),
        pytest.param("4:memory:/docker/31d2", id="docker on cgroup v1"),
        pytest.param("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-5.scope", id="a pod"),
        pytest.param("9:pids:/kubepods/burstable/pod1/5f", id="a pod on cgroup v1"),
        pytest.param("0::/system.slice/slurmstepd.scope/job_7/step_0", id="a Slurm step"),
        pytest.param("5:freezer:/slurm/uid_1000/job_7", id="a Slurm step on cgroup v1"),
        pytest.param("0::/session-3.scope", id="a session that isn't logind's"),
        pytest.param("0::/../../user.slice", id="a cgroup outside of the namespace's"),
    ],
)
def test_what_manages_a_cgroup_may_end_them(
    cgroup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logind(monkeypatch, b"b false\n")
    found = lifetime.ended_by({}, played(tmp_path, "1:name=systemd:/", cgroup))
    assert found == f"what manages the cgroup {cgroup.split(':', 2)[2]}"


@pytest.mark.parametrize(
    "answer",
    [b"b true\n", b"", FileNotFoundError("busctl"), subprocess.TimeoutExpired("busctl", 2)],
    ids=["kills them", "no answer", "no systemd", "a bus that hangs"],
)
def test_a_login_keeps_them_only_if_logind_says_so(
    answer: bytes | Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = logind(monkeypatch, answer)
    session = "0::/user.slice/user-0.slice/session-c1.scope"
    assert "session-c1.scope" in str(lifetime.ended_by({}, played(tmp_path, session)))
    ((command, *arguments),) = asked
    assert (command, arguments[-1]) == ("busctl", "KillUserProcesses")


@pytest.mark.parametrize("kind", ["pid", "cgroup"])
def test_a_container_may_end_them_also_without_a_mark(kind: str, tmp_path: Path) -> None:
    """Docker with --pid=host has the machine's PID namespace, but a cgroup namespace of its own."""
    proc = played(tmp_path, "0::/", **{kind: f"{kind}:[4026532001]"})
    assert lifetime.ended_by({}, proc) == f"the container or sandbox that has this {kind} namespace"


@pytest.mark.parametrize(
    "name",
    [
        *("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"),
        *("_CONDOR_JOB_AD", "SGE_JOB_SPOOL_DIR", "AWS_BATCH_JOB_ID", "TRAINING_JOB_NAME"),
        *("ECS_CONTAINER_METADATA_URI_V4", "CI", "GITHUB_ACTIONS", "JENKINS_URL", "container"),
    ],
)
def test_a_batch_system_or_a_runner_may_end_them(name: str, tmp_path: Path) -> None:
    proc = played(tmp_path, "0::/")
    assert lifetime.ended_by({name: ""}, proc) is None
    found = lifetime.ended_by({name: "7", f"MY_{name}": "1"}, proc)
    assert found == f"the scheduler or runner that has set {name}"


def test_what_proc_does_not_show_is_no_promise(tmp_path: Path) -> None:
    assert "what /proc doesn't show" in str(lifetime.ended_by({}, tmp_path))
    assert lifetime.ended_by({}, played(tmp_path)) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a PID namespace")
def test_a_real_pid_namespace_is_seen() -> None:
    code = "from pannier.common import lifetime; print(lifetime.ended_by({}))"
    python = os.path.join(sys.prefix, "bin", "python")
    command = ["unshare", "--pid", "--fork", "--mount-proc", python, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == "the container or sandbox that has this pid namespace\n"
