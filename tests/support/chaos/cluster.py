"""Two emulated hosts and what runs on them, over links that can be cut.

Each host has a real sidecar with a spool of its own and half of the ranks; one real coordinator
serves both. All speak to one GCS server. What goes between two of them, but for the ranks
and their own sidecar, goes over a :class:`support.chaos.links.Link`.
"""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import grpc

from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from support.chaos import schedule as chaos_schedule
from support.chaos import trainer as chaos_trainer
from support.chaos.links import Links
from support.chaos.schedule import HOSTS, LINKS
from support.processes import clocks, fork_server
from support.processes.channels import OWN_CONNECTION
from support.processes.daemons import (
    Daemon,
    await_serving,
    clean_environment,
    memory_directory,
    short_directory,
)
from support.processes.processes import Process, python
from support.processes.ranks import free_port, rank_environment
from support.processes.stretch import stretched
from support.storage.gcs_server import GcsServer

BUCKET = "bucket"
PLAN_TIMEOUT_S = 8.0
SAVE_TIMEOUT_S = 15.0
END_S = SAVE_TIMEOUT_S + 20.0
"""From the last save until every handle has said how it ended."""
PACE_S = 0.15


class Incarnation:
    """One life of the ranks.

    Args:
        stop, hurry: see :class:`support.chaos.trainer.Trainer`.
    """

    def __init__(
        self, number: int, world: int, children: list[Process], stop: Path, hurry: Path
    ) -> None:
        self.number = number
        self.world = world
        self.children = children
        self.stop = stop
        self.hurry = hurry

    @property
    def ended(self) -> bool:
        return all(child.returncode is not None for child in self.children)

    def host(self, rank: int) -> int:
        return host_of(rank, self.world)


def host_of(rank: int, world: int) -> int:
    """Where a rank lives: the first half on the first host."""
    return rank * HOSTS // world


def transport_of(rank: int, seed: int) -> str:
    """A third of the seeds streams, in a third all is mapped, in a third both are mixed."""
    streams = seed % 3 == 0 or (seed % 3 == 1 and rank % 2 == 1)
    return "streamed" if streams else "auto"


def spools_directory(directory: Path, seed: int) -> Path:
    """Where the spools of a seed are: in memory, or, for every other seed, on a disk."""
    if seed % 2:
        return memory_directory()
    return Path(tempfile.mkdtemp(prefix="spools-", dir=directory))


class Cluster:
    """``with Cluster(...) as cluster``: daemons are ready; no rank is started yet.

    Args:
        directory: for logs, which stay.
        seed: of the ids that are saved to.
        name: of the place in the bucket; of this cluster alone.
    """

    def __init__(self, directory: Path, seed: int, name: str, server: GcsServer) -> None:
        self.directory = directory
        self.seed = seed
        self.root = f"gs://{BUCKET}/{name}"
        self.server = server
        self.clocks = chaos_schedule.clocks(seed)
        self.incarnations: list[Incarnation] = []
        self._jobs: list[Process] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Cluster":
        with ExitStack() as stack:
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _set_up(self, stack: ExitStack) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        sockets = short_directory()
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        spools = spools_directory(self.directory, self.seed)
        stack.callback(shutil.rmtree, spools, ignore_errors=True)
        stack.callback(self.server.clear)
        stack.callback(self._kill_ranks)
        links = stack.enter_context(Links())
        port = free_port()
        storage = int(self.server.url.rpartition(":")[2])
        self.links = {
            name: links.add(name, "127.0.0.1", port if name.endswith("coordinator") else storage)
            for name in LINKS
        }
        self.coordinator = self.make_coordinator("coordinator", port)
        self.spools = [spools / str(host) for host in range(HOSTS)]
        self.sidecars = [
            self._sidecar(host, f"unix://{sockets}/{host}.sock") for host in range(HOSTS)
        ]
        for daemon in self.daemons:
            stack.callback(daemon.close)
            daemon.start(ready=False)
        for daemon in self.daemons:
            await_serving(daemon.address, process=daemon.process)

    @property
    def daemons(self) -> list[Daemon]:
        return [self.coordinator, *self.sidecars]

    @property
    def current(self) -> Incarnation:
        return self.incarnations[-1]

    def make_coordinator(self, name: str, port: int) -> Daemon:
        """A coordinator, not started."""
        address = f"127.0.0.1:{port}"
        return Daemon(
            name,
            address,
            ["coordinator", "--address", address, "--host", name],
            self._environment("coordinator to storage", self.clocks[-1]),
            self.directory,
        )

    def _sidecar(self, host: int, address: str) -> Daemon:
        coordinator = self.links[f"sidecar {host} to coordinator"].address
        arguments = ["sidecar", "--address", address, "--coordinator", coordinator]
        arguments += ["--spool", str(self.spools[host]), "--host", f"node-{host}", "--grace", "5"]
        environment = self._environment(f"sidecar {host} to storage", self.clocks[host])
        return Daemon(f"sidecar {host}", address, arguments, environment, self.directory)

    def _environment(self, link: str, clock_s: float) -> dict[str, str]:
        endpoint = {"STORAGE_EMULATOR_HOST": f"http://{self.links[link].address}"}
        return clean_environment({**endpoint, **clocks.environment(clock_s)})

    # Ranks.

    def start_ranks(
        self,
        world: int,
        *,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
        save_timeout_s: float = SAVE_TIMEOUT_S,
    ) -> Incarnation:
        """Begins a new incarnation."""
        number = len(self.incarnations)
        stop, hurry = (self.directory / f"{name}-{number}" for name in ("stop", "hurry"))
        port = free_port()
        children = []
        timeouts = {
            "PANNIER_PLAN_TIMEOUT": str(stretched(plan_timeout_s)),
            "PANNIER_SAVE_TIMEOUT": str(stretched(save_timeout_s)),
        }
        for rank in range(world):
            trainer = self._trainer(
                rank, world, port, log=self._events(number, rank), stop=stop, environment=timeouts
            )
            trainer = replace(trainer, incarnation=number, hurry=str(hurry))
            name = f"rank {rank} of incarnation {number}"
            children.append(self._begin(name, trainer, f"rank-{number}-{rank}"))
        incarnation = Incarnation(number, world, children, stop, hurry)
        self.incarnations.append(incarnation)
        return incarnation

    def start_job(self, name: str, root: str) -> Incarnation:
        """Begins another job: a single rank, on the first host, with the same daemons."""
        stop = self.directory / f"stop-{name}"
        job = {"PANNIER_JOB": name}
        trainer = self._trainer(
            0, 1, free_port(), log=self.job_log(name), stop=stop, environment=job
        )
        trainer = replace(trainer, root=root)
        child = self._begin(f"the rank of job {name}", trainer, f"rank-{name}")
        self._jobs.append(child)
        return Incarnation(0, 1, [child], stop, Path())

    def job_log(self, name: str) -> Path:
        """What the rank of another job wrote down."""
        return self.directory / f"job-{name}.jsonl"

    def _trainer(
        self,
        rank: int,
        world: int,
        port: int,
        *,
        log: Path,
        stop: Path,
        environment: Mapping[str, str],
    ) -> chaos_trainer.Trainer:
        host = host_of(rank, world)
        return chaos_trainer.Trainer(
            root=self.root,
            seed=self.seed,
            incarnation=0,
            world=world,
            rank=rank,
            port=port,
            log=str(log),
            stop=str(stop),
            pace_s=PACE_S,
            end_s=stretched(END_S),
            environment={
                "PANNIER_SIDECAR": self.sidecars[host].address,
                "PANNIER_JOB": "chaos",
                "PANNIER_TRANSPORT": transport_of(rank, self.seed),
                "PANNIER_PLAN_TIMEOUT": str(stretched(PLAN_TIMEOUT_S)),
                "PANNIER_SAVE_TIMEOUT": str(stretched(SAVE_TIMEOUT_S)),
                **environment,
            },
            clock_s=self.clocks[host],
        )

    def _begin(self, name: str, trainer: chaos_trainer.Trainer, log: str) -> Process:
        return Process(
            name,
            python(*chaos_trainer.command(trainer)),
            environment=rank_environment(),
            log=self.directory / f"{log}.log",
            imported=fork_server.TORCH,
        )

    def _events(self, incarnation: int, rank: int) -> Path:
        return self.directory / f"events-{incarnation}-{rank}.jsonl"

    def event_logs(self) -> list[Path]:
        """What all ranks of all incarnations wrote down."""
        return sorted(self.directory.glob("events-*.jsonl"))

    def _kill_ranks(self) -> None:
        for child in (*self._jobs, *(c for each in self.incarnations for c in each.children)):
            child.close()

    # What an operator would see.

    def statuses(self) -> str:
        """What each daemon says of its undecided saves, for people."""
        lines = []
        for daemon in self.daemons:
            try:
                saves = undecided(daemon.address)
            except grpc.RpcError as error:
                lines.append(f"{daemon.name}: {error}")
                continue
            lines += [f"{daemon.name}: {_line(save)}" for save in saves] or [
                f"{daemon.name}: nothing undecided"
            ]
        return "\n".join(lines)


_UNDECIDED = (
    save_pb2.SAVE_STATE_PLANNING,
    save_pb2.SAVE_STATE_STAGING,
    save_pb2.SAVE_STATE_INGESTED,
    save_pb2.SAVE_STATE_UPLOADING,
    save_pb2.SAVE_STATE_IN_DOUBT,
)


def undecided(address: str) -> list[save_pb2.SaveStatus]:
    """Saves that a daemon says are under way. Raises grpc.RpcError when it doesn't answer."""
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        request = status_pb2.ListSavesRequest(states=_UNDECIDED, limit=100)
        return list(stub.ListSaves(request, timeout=stretched(5), wait_for_ready=True).saves)


def _line(save: save_pb2.SaveStatus) -> str:
    state = save_pb2.SaveState.Name(save.state).removeprefix("SAVE_STATE_")
    ranks = ", ".join(
        f"{rank.rank}:{save_pb2.RankPhase.Name(rank.phase).removeprefix('RANK_PHASE_')}"
        for rank in save.ranks
    )
    failures = "; ".join(f"rank {f.rank}: {f.message}" for f in save.failures)
    return (
        f"{save.id} to {save.checkpoint_id} ({save.attempt}) {state} [{ranks}] "
        f"waiting on {save.waiting_on.text!r} for {save.waiting_on.deadline_s:.0f} s {failures}"
    )
