"""A sidecar in this process between a scripted coordinator and scripted trainers."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.server import Sidecar
from pannier.storage import Store
from support.actors.loops import LoopThread
from support.actors.scripted import ScriptedCoordinator, Trainer
from support.processes.daemons import memory_directory, short_directory
from support.processes.stretch import BOUND_S
from support.storage.directories import files_below


class Host:
    """One host: a sidecar, its coordinator, and trainers on demand."""

    def __init__(
        self, coordinator: ScriptedCoordinator, sockets: Path, memory: Path, name: str
    ) -> None:
        self.name = name
        self.coordinator = coordinator
        self.address = f"unix://{sockets}/s.sock"
        self.spool = memory / "spool"
        self.root = memory / "root"
        self.loop = LoopThread()
        """The sidecar's."""
        self.sidecar: Sidecar
        self._trainers: list[Trainer] = []

    def start(self, *, store: Callable[[str], Store] | None = None, **settings: object) -> Sidecar:
        config = SidecarConfig(
            address=self.address,
            coordinator=self.coordinator.address,
            spool=self.spool,
            host=self.name,
            **settings,  # type: ignore[arg-type]
        )
        self.sidecar = Sidecar(config, store)
        self.loop.run(self.sidecar.__aenter__())
        return self.sidecar

    def end(self) -> None:
        """As SIGTERM whose grace period is over."""
        self.loop.run(self.sidecar.__aexit__())

    def stop(self) -> None:
        for trainer in self._trainers:
            trainer.die()
        if hasattr(self, "sidecar"):
            self.end()

    def trainer(self, rank: int = 0, ranks: tuple[int, ...] = (0,), **settings: str) -> Trainer:
        trainer = Trainer(self.address, rank=rank, ranks=ranks, host=self.name, **settings)
        self._trainers.append(trainer)
        trainer.connect()
        return trainer

    def id(self, step: int = 1) -> str:
        return f"{self.root}/step-{step}"

    def objects(self, step: int = 1) -> set[str]:
        """Keys of the objects of a checkpoint."""
        return files_below(Path(self.id(step)))


@contextmanager
def running_host(name: str = "node-0") -> Iterator[Host]:
    """One whose sidecar isn't started yet; all is ended and removed afterwards."""
    sockets, memory = short_directory(), memory_directory()
    try:
        with ScriptedCoordinator(f"unix://{sockets}/c.sock") as coordinator:
            made = Host(coordinator, sockets, memory, name)
            try:
                yield made
            finally:
                made.stop()
                made.loop.close()
    finally:
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


def await_true(condition: Callable[[], bool], what: str, timeout_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
