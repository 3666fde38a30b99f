"""Two emulated hosts and what runs on them, over links that can be cut.

Each host has a real sidecar with a spool of its own and half of the ranks; one real coordinator
serves both. All speak to one GCS server. What goes between two of them, but for the ranks
and their own sidecar, goes over a :class:`support.chaos_links.Link`.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import grpc

from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from support import chaos_trainer
from support.chaos_links import Links
from support.chaos_nursery import Child, Nursery
from support.chaos_schedule import HOSTS, LINKS
from support.daemons import (
    Daemon,
    await_serving,
    clean_environment,
    memory_directory,
    short_directory,
)
from support.gcs_server import GcsServer
from support.ranks import free_port
from support.stretch import FACTOR, stretched

BUCKET = "bucket"
PLAN_TIMEOUT_S = 8.0
SAVE_TIMEOUT_S = 15.0
END_S = SAVE_TIMEOUT_S + 20.0
"""From the last save until every handle has said how it ended."""
PACE_S = 0.15


class Incarnation:
    """One life of the ranks."""

    def __init__(self, number: int, world: int, children: list[Child], stop: Path) -> None:
        self.number = number
        self.world = world
        self.children = children
        self.stop = stop

    @property
    def ended(self) -> bool:
        return all(child.ended.is_set() for child in self.children)

    def host(self, rank: int) -> int:
        return host_of(rank, self.world)


def host_of(rank: int, world: int) -> int:
    """Where a rank lives: the first half on the first host."""
    return rank * HOSTS // world


def transport_of(rank: int, seed: int) -> str:
    """A third of the seeds streams, in a third all is mapped, in a third both are mixed."""
    streams = seed % 3 == 0 or (seed % 3 == 1 and rank % 2 == 1)
    return "streamed" if streams else "auto"


class Cluster:
    """``with Cluster(...) as cluster``: daemons are ready; no rank is started yet.

    Args:
        directory: for logs, which stay.
        seed: of the ids that are saved to.
        name: of the place in the bucket; of this cluster alone.
    """

    def __init__(
        self, directory: Path, seed: int, name: str, nursery: Nursery, server: GcsServer
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.root = f"gs://{BUCKET}/{name}"
        self.server = server
        self.incarnations: list[Incarnation] = []
        self._nursery = nursery
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
        spools = memory_directory()
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
            self._environment("coordinator to storage"),
            self.directory,
        )

    def _sidecar(self, host: int, address: str) -> Daemon:
        coordinator = self.links[f"sidecar {host} to coordinator"].address
        arguments = ["sidecar", "--address", address, "--coordinator", coordinator]
        arguments += ["--spool", str(self.spools[host]), "--host", f"node-{host}", "--grace", "5"]
        environment = self._environment(f"sidecar {host} to storage")
        return Daemon(f"sidecar {host}", address, arguments, environment, self.directory)

    def _environment(self, link: str) -> dict[str, str]:
        return clean_environment({"STORAGE_EMULATOR_HOST": f"http://{self.links[link].address}"})

    # Ranks.

    def start_ranks(self, world: int) -> Incarnation:
        """Begins a new incarnation."""
        number = len(self.incarnations)
        stop = self.directory / f"stop-{number}"
        port = free_port()
        children = []
        for rank in range(world):
            trainer = chaos_trainer.Trainer(
                root=self.root,
                seed=self.seed,
                incarnation=number,
                world=world,
                rank=rank,
                port=port,
                log=str(self._events(number, rank)),
                stop=str(stop),
                pace_s=PACE_S,
                end_s=stretched(END_S),
                environment={
                    "PANNIER_SIDECAR": self.sidecars[host_of(rank, world)].address,
                    "PANNIER_JOB": "chaos",
                    "PANNIER_TRANSPORT": transport_of(rank, self.seed),
                    "PANNIER_PLAN_TIMEOUT": str(stretched(PLAN_TIMEOUT_S)),
                    "PANNIER_SAVE_TIMEOUT": str(stretched(SAVE_TIMEOUT_S)),
                },
            )
            name = f"rank {rank} of incarnation {number}"
            log = self.directory / f"rank-{number}-{rank}.log"
            arguments = chaos_trainer.encoded(trainer)
            children.append(
                self._nursery.start(name, "support.chaos_nursery:run_rank", arguments, log)
            )
        incarnation = Incarnation(number, world, children, stop)
        self.incarnations.append(incarnation)
        return incarnation

    def _events(self, incarnation: int, rank: int) -> Path:
        return self.directory / f"events-{incarnation}-{rank}.jsonl"

    def event_logs(self) -> list[Path]:
        """What all ranks of all incarnations wrote down."""
        return sorted(self.directory.glob("events-*.jsonl"))

    def _kill_ranks(self) -> None:
        import signal

        for incarnation in self.incarnations:
            for child in incarnation.children:
                child.signal(signal.SIGKILL)
                child.ended.wait(10)

    # What an operator would see.

    def statuses(self) -> str:
        """What each daemon says of its undecided saves, for people."""
        told = []
        for daemon in self.daemons:
            try:
                saves = undecided(daemon.address)
            except grpc.RpcError as error:
                told.append(f"{daemon.name}: {error}")
                continue
            told += [f"{daemon.name}: {_line(save)}" for save in saves] or [
                f"{daemon.name}: nothing undecided"
            ]
        return "\n".join(told)


_UNDECIDED = (
    save_pb2.SAVE_STATE_PLANNING,
    save_pb2.SAVE_STATE_STAGING,
    save_pb2.SAVE_STATE_INGESTED,
    save_pb2.SAVE_STATE_UPLOADING,
    save_pb2.SAVE_STATE_IN_DOUBT,
)


def undecided(address: str) -> list[save_pb2.SaveStatus]:
    """Saves that a daemon says are under way. Raises grpc.RpcError when it doesn't answer."""
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        request = status_pb2.ListSavesRequest(states=_UNDECIDED, limit=100)
        return list(stub.ListSaves(request, timeout=5 * FACTOR, wait_for_ready=True).saves)


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
