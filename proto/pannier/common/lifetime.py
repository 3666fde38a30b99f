"""What may end the embedded daemons together with the process that started them.

In: /proc and the environment of their supervisor, which has the cgroup and the namespaces of the trainer that
started it. Out: the first thing that may kill what a process leaves behind; None only where the
kernel and systemd show that nothing does. The table in docs/operations.md lists the judgements. Blocking: systemd
may be asked.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pannier.common import timeouts

_INITIAL: Final = {"pid": "pid:[4026531836]", "cgroup": "cgroup:[4026531835]"}
"""The machine's first namespaces, whose inode numbers are fixed:
https://github.com/torvalds/linux/blob/v6.12/include/linux/proc_ns.h (PROC_PID_INIT_INO, PROC_CGROUP_INIT_INO)."""
_SCHEDULERS: Final = re.compile(
    r"KUBERNETES_SERVICE_HOST|ECS_CONTAINER_METADATA_URI(_V4)?|container"
    # Batch systems: Slurm, PBS, LSF, HTCondor, Grid Engine, Flux, OAR, Cobalt, LoadLeveler, Fujitsu's.
    r"|SLURM_JOB_ID|PBS_JOBID|LSB_JOBID|_CONDOR_(JOB_AD|SCRATCH_DIR)|SGE_JOB_SPOOL_DIR|FLUX_JOB_ID"
    r"|OAR_JOB_ID|COBALT_JOBID|LOADL_STEP_ID|PJM_JOBID"
    # Training services: AWS Batch, SageMaker, Vertex AI, Azure ML.
    r"|AWS_BATCH_JOB_ID|SM_TRAINING_ENV|TRAINING_JOB_NAME|CLOUD_ML_JOB_ID|AZUREML_RUN_ID"
    # CI runners, which end the processes that a step leaves.
    r"|CI|GITHUB_ACTIONS|GITLAB_CI|JENKINS_(URL|NODE_COOKIE)|BUILDKITE|TF_BUILD|TEAMCITY_VERSION"
)
_SLICE: Final = re.compile(r"[^/]+\.slice")
_SESSION: Final = re.compile(r"session-[^/]+\.scope")
"""Of a login; systemd-logind keeps its processes after the logout, unless it is configured to kill them."""
_ASK_LOGIND: Final = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "KillUserProcesses"),
)


def ended_by(environment: Mapping[str, str], proc: Path = Path("/proc")) -> str | None:
    """What may end this process when the one that started it ends; None: known to be nothing.

    Args:
        environment: this process's.
        proc: where the proc file system is mounted.
    """
    for name in environment:
        if environment[name] and _SCHEDULERS.fullmatch(name):
            return f"the scheduler or runner that has set {name}"
    try:
        for kind, initial in _INITIAL.items():
            if os.readlink(proc / "self/ns" / kind) != initial:
                return f"the container or sandbox that has this {kind} namespace"
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError as error:
        return f"what /proc doesn't show ({error})"
    for line in lines:
        # Of cgroup v1 one line for each hierarchy, of v2 one in all; both where both are mounted.
        path = line.split(":", 2)[-1]
        if not _is_kept(path):
            return f"what manages the cgroup {path}"
    return None if lines else "what /proc/self/cgroup doesn't show"


def _is_kept(cgroup: str) -> bool:
    """Whether a cgroup is known to outlast each process in it: the root, a slice, or a login session."""
    *slices, last = cgroup.strip("/").split("/")
    if not all(_SLICE.fullmatch(part) for part in slices):
        return False
    if _SESSION.fullmatch(last):
        return bool(slices) and _sessions_are_kept()
    return (not last and not slices) or bool(_SLICE.fullmatch(last))


def _sessions_are_kept() -> bool:
    """Whether systemd-logind leaves processes alone after their user's logout. False: not known.

    Asked, since the default is the distribution's choice:
    https://github.com/systemd/systemd/blob/v256/man/logind.conf.xml (KillUserProcesses).
    """
    try:
        answer = subprocess.run(
            _ASK_LOGIND,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeouts.LOGIND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.stdout.split() == [b"b", b"false"]
