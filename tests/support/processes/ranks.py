"""Training ranks for tests: a script run by several processes with a process group's environment."""

import inspect
import secrets
import shutil
import socket
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from support.processes import fork_server
from support.processes.daemons import clean_environment, short_directory
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S


@dataclass(frozen=True)
class Finished:
    """How the ranks ended."""

    returncodes: list[int]
    """By rank; one entry, the launcher's, under torchrun."""
    outputs: list[str]
    """Standard output and error by rank."""

    def check(self) -> "Finished":
        """Raises AssertionError with the outputs unless all ended well."""
        if any(self.returncodes):
            texts = "\n".join(f"--- rank {i}\n{text}" for i, text in enumerate(self.outputs))
            raise AssertionError(f"exit statuses {self.returncodes}\n{texts}")
        return self


Script = Path | str | Callable[[], object]


def _source(script: Script) -> str:
    if isinstance(script, Path):
        return script.read_text()
    if isinstance(script, str):
        return textwrap.dedent(script)
    return textwrap.dedent(inspect.getsource(script)) + f"\n\n{script.__name__}()\n"


class Ranks:
    """Ranks that run; ``with start_ranks(...) as ranks``.

    Under torchrun one rank's death ends all, as in real life; started directly, the
    others live on, and :attr:`processes` are the ranks.
    """

    def __init__(self, processes: list[Process], outputs: list[Path], directory: Path) -> None:
        self.processes = processes
        self._outputs = outputs
        self._directory = directory

    def output(self, rank: int) -> str:
        """What the rank has written so far."""
        path = self._outputs[rank]
        if path.is_dir():  # torchrun's log directory: <run>/attempt_0/<rank>/
            parts = sorted(path.glob(f"*/attempt_0/{rank}/std*.log"), reverse=True)
            return "".join(part.read_text(errors="replace") for part in parts)
        return path.read_text(errors="replace")

    def wait_for(self, text: str, *, rank: int = 0, timeout: float = BOUND_S) -> None:
        """Returns when the rank has written ``text``."""
        deadline = time.monotonic() + timeout
        while True:
            # Before its output is read: a rank may write it and end.
            ended = all(process.returncode is not None for process in self.processes)
            if text in self.output(rank):
                return
            if ended or time.monotonic() > deadline:
                why = "ended" if ended else f"did not within {timeout} s"
                everything = "\n".join(self.output(i) for i in range(len(self._outputs)))
                raise AssertionError(
                    f"rank {rank} should write {text!r} but {why}:\n{everything}\n"
                    + self.processes[0].log()
                )
            time.sleep(0.02)

    def wait(self, timeout: float) -> Finished:
        """Raises AssertionError with the outputs when one still runs at the deadline."""
        deadline = time.monotonic() + timeout
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except AssertionError as error:
                texts = "\n".join(
                    f"--- rank {i}\n{self.output(i)}" for i in range(len(self._outputs))
                )
                raise AssertionError(f"{error}\n{texts}") from None
        outputs = [self.output(rank) for rank in range(len(self._outputs))]
        if len(self.processes) == 1 and any(codes):
            outputs.append(self.processes[0].log())
        return Finished(codes, outputs)

    def kill(self) -> None:
        """SIGKILL to all at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago, of those that the kernel gives to no connection."""
    connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Not by `random`: tests seed it.
        port = connections - 1 - secrets.randbelow(min(20_000, connections - 1024))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def reserved_port() -> socket.socket:
    """Keeps a TCP port of 127.0.0.1 for a gRPC server until it is closed; connections get no such port."""
    reserved = socket.socket()
    # A server with the same option may listen there, as long as this socket doesn't.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def rank_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """What all ranks have in their environment."""
    return {
        **clean_environment(),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **extra,
    }


def start_ranks(
    script: Script,
    nproc: int,
    env: Mapping[str, str] = {},
    *,
    torchrun: bool = True,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
    forked: bool = True,
) -> Ranks:
    """Starts ``nproc`` ranks.

    Args:
        script: a file, source text, or a function without arguments that imports
            all it uses.
        env: added to a clean environment.
        torchrun: through ``torch.distributed.run``; else as plain processes with
            the variables that ``init_process_group`` reads.
        rank_env: more variables by rank; only without torchrun.
        forked: from a fork server; else each from an interpreter of its own.
    """
    directory = short_directory()
    path = directory / "ranks.py"
    path.write_text(_source(script))
    environment = rank_environment(env)
    if torchrun:
        assert rank_env is None, "rank_env needs torchrun=False"
        logs = directory / "logs"
        logs.mkdir()
        command = python("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
        command += [f"--nproc-per-node={nproc}", "--redirects=3", f"--log-dir={logs}", str(path)]
        process = Process("torchrun", command, environment=environment, log=directory / "run.log")
        return Ranks([process], [logs] * nproc, directory)
    port = str(free_port())
    processes = []
    for rank in range(nproc):
        own = {
            **environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **(rank_env(rank) if rank_env else {}),
        }
        log = directory / f"rank-{rank}.log"
        process = Process(
            f"rank {rank}",
            python(str(path)),
            environment=own,
            log=log,
            imported=fork_server.TORCH if forked else (),
        )
        processes.append(process)
    return Ranks(processes, [directory / f"rank-{rank}.log" for rank in range(nproc)], directory)


def run_ranks(
    script: Script,
    nproc: int,
    env: Mapping[str, str] = {},
    timeout: float = 120,
    *,
    torchrun: bool = True,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
) -> Finished:
    """Runs ranks to their end; arguments as of :func:`start_ranks`.

    Raises AssertionError with all outputs unless every rank exits with 0 within
    ``timeout`` seconds; nothing of them is left then.
    """
    with start_ranks(script, nproc, env, torchrun=torchrun, rank_env=rank_env) as ranks:
        return ranks.wait(timeout).check()


_IN_TURN = """
import sys
from support.processes.worlds import in_turn

in_turn([{scenarios}])
"""


def run_in_turn(
    scenarios: Sequence[tuple[int, Callable[[], object]]],
    env: Mapping[str, str] = {},
    timeout: float = 120,
) -> set[str]:
    """Several functions in the same ranks, one after the other, since starting ranks takes seconds.

    Each comes with its number of ranks, and finds a process group of that many. Functions import
    all they use. Returns the names of those that passed on all their ranks; the first that doesn't
    is the last that runs, and its traceback is printed.
    """
    source = "\n\n".join(textwrap.dedent(inspect.getsource(each)) for _, each in scenarios)
    calls = ", ".join(f"({size}, {each.__name__})" for size, each in scenarios)
    nproc = max(size for size, _ in scenarios)
    with start_ranks(
        source + _IN_TURN.format(scenarios=calls), nproc, env, torchrun=False
    ) as ranks:
        finished = ranks.wait(timeout)
    if any(finished.returncodes):
        print("\n".join(f"--- rank {i}\n{text}" for i, text in enumerate(finished.outputs)))
    return {
        each.__name__
        for size, each in scenarios
        if all(f"passed {each.__name__}\n" in text for text in finished.outputs[:size])
    }
