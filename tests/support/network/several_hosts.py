"""Several hosts for a job: network namespaces with a hostname, a runtime directory and a spool each.

Nothing of Pannier is configured on them but these directories, since the file system is one.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from support.network.netns import Network
from support.processes import fork_server, processes
from support.processes.daemons import clean_environment, memory_directory, short_directory
from support.processes.processes import Process, python

RENDEZVOUS = 29400
"""Port of the store by which a job's processes find each other."""


class Host:
    """One of them, by the name that it has in the network."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.address = network.address(name)
        self.runtime_dir = short_directory()
        self.spool = memory_directory()
        self.space = network.space(name)
        self._prefix = network.prefix(name)

    def command(self, *words: str) -> list[str]:
        """Words of a command, as those of one that runs on the host."""
        named = f'hostname {self.name} && exec "$@"'
        return [*self._prefix, "unshare", "--uts", "sh", "-c", named, "sh", *words]

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        return {
            **clean_environment(),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"pn{os.getpid()}",
            "PANNIER_RUNTIME_DIR": str(self.runtime_dir),
            "PANNIER_SPOOL": str(self.spool),
            **more,
        }

    def daemons(self) -> dict[str, list[psutil.Process]]:
        """The embedded daemons that run here: by the name of their directory, ``pannier up`` first."""
        found: dict[str, list[psutil.Process]] = {}
        for path in sorted(self.runtime_dir.glob("**/up.pid")):
            try:
                supervisor = psutil.Process(int(path.read_text()))
                found[path.parent.name] = [supervisor, *supervisor.children()]
            except (psutil.NoSuchProcess, FileNotFoundError, ValueError):
                continue
        return found

    def daemon(self, name: str) -> psutil.Process:
        """The one that is a ``pannier`` NAME."""
        return next(
            process
            for listed in self.daemons().values()
            for process in listed
            if name in process.cmdline()
        )

    def kill(self) -> None:
        """All daemons at once, as when the host is lost; returns when they are gone."""
        processes.end(process for listed in self.daemons().values() for process in listed)

    def close(self) -> None:
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        shutil.rmtree(self.spool, ignore_errors=True)


def listeners(process: psutil.Process) -> list[str]:
    """Addresses of its TCP sockets that listen, as in its own network's table."""
    sockets = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                host, port = words[1].split(":")
                # Words in the machine's order; of an IPv4 address in an IPv6 socket, the last one.
                number = bytes.fromhex(host)[-4:][::-1]
                found.append(f"{'.'.join(map(str, number))}:{int(port, 16)}")
    return found


class Job:
    """A script's ranks on the hosts, one on each, which find each other by the first one's store."""

    _outputs = "*.log"
    """Pattern of the files that the ranks write."""

    def __init__(
        self, hosts: Sequence[Host], script: Path, logs: Path, environment: Mapping[str, str] = {}
    ) -> None:
        self._logs = logs
        logs.mkdir(parents=True)
        self.agents = {
            host.name: self._start(rank, hosts, script, environment)
            for rank, host in enumerate(hosts)
        }
        """By host: its rank, or the process that starts its ranks."""

    def _start(
        self, rank: int, hosts: Sequence[Host], script: Path, environment: Mapping[str, str]
    ) -> Process:
        host = hosts[rank]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(RENDEZVOUS),
            "TORCHELASTIC_RUN_ID": "job",
        }
        return Process(
            f"rank on {host.name}",
            python(str(script)),
            environment=host.environment({**variables, **environment}),
            log=self._logs / f"{host.name}.log",
            imported=fork_server.TORCH,
            host=(host.space, host.name),
        )

    def output(self) -> str:
        """What all ranks have written so far."""
        parts = sorted(self._logs.glob(self._outputs))
        return "\n".join(
            f"--- {part.relative_to(self._logs)}\n{part.read_text(errors='replace')}"
            for part in parts
        )

    def wait_for(self, text: str, times: int = 1, timeout: float = 150) -> None:
        """Returns when ``text`` was written so often."""
        deadline = time.monotonic() + timeout
        while True:
            # Before the output is read: they may write it and end.
            ended = all(agent.returncode is not None for agent in self.agents.values())
            if self.output().count(text) >= times:
                return
            if ended or time.monotonic() > deadline:
                logs = "\n".join(agent.log() for agent in self.agents.values())
                raise AssertionError(
                    f"{text!r} should come {times} times:\n{self.output()}\n{logs}"
                )
            time.sleep(0.05)

    def wait(self, timeout: float = 150) -> str:
        """All ranks have ended well; what they wrote."""
        deadline = time.monotonic() + timeout
        while True:
            codes = {name: agent.returncode for name, agent in self.agents.items()}
            if all(code == 0 for code in codes.values()):
                return self.output()
            if any(codes.values()) or time.monotonic() > deadline:
                logs = "\n".join(agent.log() for agent in self.agents.values())
                raise AssertionError(f"they ended with {codes}\n{self.output()}\n{logs}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to all agents and ranks at once."""
        for agent in self.agents.values():
            agent.kill()

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


class TorchrunJob(Job):
    """torchrun on each of the hosts.

    Args:
        ranks: by host.
        arguments: more of torchrun's.
    """

    _outputs = "*/*/attempt_*/*/std*.log"

    def __init__(
        self,
        hosts: Sequence[Host],
        *where: Path,
        ranks: Sequence[int],
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        self._ranks = ranks
        self._arguments = arguments
        super().__init__(hosts, *where, environment=environment)

    def _start(
        self, rank: int, hosts: Sequence[Host], script: Path, environment: Mapping[str, str]
    ) -> Process:
        host = hosts[rank]
        command = [
            *("-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
            *(f"--nproc-per-node={self._ranks[rank]}", "--rdzv-backend=c10d", "--rdzv-id=job"),
            f"--rdzv-endpoint={hosts[0].address}:{RENDEZVOUS}",
            f"--rdzv-conf=is_host={int(not rank)},join_timeout=120",
            f"--local-addr={host.address}",
            *("--redirects=3", f"--log-dir={self._logs / host.name}"),
            *(*self._arguments, str(script)),
        ]
        return Process(
            f"torchrun on {host.name}",
            host.command(*python(*command)),
            environment=host.environment(environment),
            log=self._logs / f"{host.name}.log",
        )


class Hosts:
    """``with Hosts(network, "a", "b") as hosts``; at the end all that runs on them is killed."""

    def __init__(self, network: Network, *names: str) -> None:
        self._before = {*psutil.pids()}
        self.all = [Host(name, network) for name in names]
        self._jobs: list[Job] = []

    def run(self, job: Job) -> Job:
        """The job, which is ended with the hosts."""
        self._jobs.append(job)
        return job

    def keep_logs(self) -> None:
        """For the report of a failed test."""
        for host in self.all:
            logs = host.runtime_dir.glob("**/*.log")
            processes.keep_logs(
                [(f"daemons of {host.name}, {path.parent.name}", path.read_text()) for path in logs]
            )

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for job in self._jobs:
            job.close()
        self.keep_logs()
        processes.end(processes.marked(self._before))
        for host in self.all:
            host.close()
