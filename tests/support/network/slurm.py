"""Stand-ins for Slurm's commands: steps run on network namespaces, and end as Slurm ends them.

``srun`` runs a command on each host at once, with the host's name, /etc/hosts and directories of its
own; whatever the command leaves behind is killed. ``scontrol show hostnames`` prints the names.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from support.network.netns import Network
from support.processes.daemons import clean_environment
from support.processes.processes import SESSION

_STEP = "SLURM_STEP_ID"
_SH = """
hostname "$1"; shift
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift
exec "$@"
"""
"""Arguments: the name, pairs of what is mounted where, ``--``, the command."""


class Allocation:
    """A job's hosts.

    Args:
        directory: gets the commands, and what is each host's own.
        own: directories, made here, that are another on each host.
    """

    def __init__(
        self, network: Network, names: Sequence[str], directory: Path, own: Sequence[Path]
    ) -> None:
        self.job_id = f"{SESSION}-7"
        self._names = list(names)
        self._directory = directory
        self._bin = directory / "bin"
        self._bin.mkdir(parents=True)
        hosts = directory / "hosts"
        lines = [f"{network.address(name)} {name}" for name in names]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        allocation = {}
        for name in names:
            mounts = [str(hosts), "/etc/hosts"]
            for path in own:
                path.mkdir(mode=0o700, exist_ok=True)
                private = directory / name / path.relative_to("/")
                private.mkdir(parents=True, mode=0o700)
                mounts += [str(private), str(path)]
            prefix = [*network.prefix(name), "unshare", "--uts", "--mount", "sh", "-c", _SH, "sh"]
            allocation[name] = [*prefix, name, *mounts, "--"]
        (directory / "allocation.json").write_text(json.dumps(allocation))
        for command in ("srun", "scontrol"):
            path = self._bin / command
            path.write_text(
                f"#!/bin/sh\nexec {sys.executable} {__file__} {directory}/allocation.json "
                f'{command} "$@"\n'
            )
            path.chmod(0o755)

    def used(self, path: Path) -> Iterator[Path]:
        """What lies in one of the hosts' own directories, on any host."""
        for name in self._names:
            yield from (self._directory / name / path.relative_to("/")).iterdir()

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """What ``sbatch`` gives to a script."""
        path = [str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **clean_environment(),
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_NAME": "llama",
            "SLURM_JOB_NODELIST": ",".join(self._names),
            "SLURM_NNODES": str(len(self._names)),
            "SLURM_GPUS_ON_NODE": "1",
            **more,
        }


def srun(allocation: dict[str, list[str]], words: Sequence[str]) -> int:
    """Exit status: the first that isn't 0."""
    options = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    options.add_argument("--overlap", action="store_true")
    options.add_argument("--nodes", type=int)
    options.add_argument("--ntasks", type=int)
    options.add_argument("--nodelist")
    # Slurm's own defaults, which a cluster may change: tasks don't end each other.
    options.add_argument("--wait", type=int, choices=[0])
    options.add_argument("--kill-on-bad-exit", type=int, choices=[0])
    options.add_argument("command", nargs=argparse.REMAINDER)
    given = options.parse_args(words)
    names = given.nodelist.split(",") if given.nodelist else list(allocation)[: given.nodes]
    step = f"{os.getpid()}"
    environment = {**os.environ, _STEP: step}
    tasks = [
        subprocess.Popen(
            [*allocation[name], *given.command],
            env={**environment, "SLURMD_NODENAME": name},
            start_new_session=True,
        )
        for name in names
    ]

    def kill(number: int, frame: object) -> None:
        # As _srun_signal_mgr of Slurm's src/srun/libsrun/srun_job.c: neither signal reaches a task.
        os.write(2, b"srun: forcing job termination\n")
        for task in tasks:
            with suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, kill)
    # Not one long wait, which a signal that came just before would not end.
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
    codes = [task.returncode for task in tasks]
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_STEP) == step:
                process.kill()
    return next((code for code in codes if code), 0)


def main() -> int:
    allocation = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[2] == "srun":
        return srun(allocation, sys.argv[3:])
    show, hostnames, names = sys.argv[3:]
    assert (show, hostnames) == ("show", "hostnames")
    print("\n".join(names.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
