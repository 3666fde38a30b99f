"""A rank of the chaos test: saves in turn, and records what it handed over and each outcome.

In: where it belongs, and a file that says after which save to stop. Out: a line of JSON per event
in its log, written before the next thing happens, so that a SIGKILL loses nothing. It judges
nothing itself.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pannier.wire.errors import PannierError, SaveAbortedError, SaveSkippedError
from support.chaos import states as chaos_states
from support.processes import clocks


@dataclass(frozen=True)
class Trainer:
    """The settings of one rank."""

    root: str
    """Checkpoints go below it."""
    seed: int
    incarnation: int
    """Counted by the harness, from 0."""
    world: int
    rank: int
    port: int
    """Where the ranks meet."""
    log: str
    stop: str
    """File with the number of the last save, once there is to be one."""
    pace_s: float
    """Between two saves."""
    end_s: float
    """Deadline of what is under way after the last one."""
    environment: dict[str, str]
    clock_s: float = 0.0
    """How wrong its host's wall clock is."""
    hurry: str = ""
    """File with a timeout in seconds: as long as it is there, saves have that one."""


def checkpoint_id(root: str, seed: int, incarnation: int, number: int) -> str:
    """Where a save goes: to an id of its own, or to one of three that are used again and again."""
    if number % 3 == 0:
        return f"{root}/again-{(seed + number // 3) % 3}"
    return f"{root}/step-{incarnation}-{number}"


class Log:
    """One rank's log. Thread-safe: a line is one write."""

    def __init__(self, trainer: Trainer) -> None:
        self._fd = os.open(trainer.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._who = {
            "incarnation": trainer.incarnation,
            "rank": trainer.rank,
            "world": trainer.world,
        }

    def write(self, event: str, **fields: Any) -> None:
        # Of the clock that all hosts of the test have in common.
        line = json.dumps({"event": event, "at": time.monotonic(), **self._who, **fields})
        os.write(self._fd, f"{line}\n".encode())


def _outcome(error: BaseException | None) -> tuple[str, str]:
    if error is None:
        return "committed", ""
    if isinstance(error, SaveSkippedError):
        return "skipped", str(error)
    if isinstance(error, SaveAbortedError):
        return "aborted", str(error)
    return "doubt", f"{type(error).__name__}: {error}"


def _last(stop: Path) -> int | None:
    return int(stop.read_text()) if stop.exists() else None


def _hurry(trainer: Trainer) -> float | None:
    try:
        return float(Path(trainer.hurry).read_text()) if trainer.hurry else None
    except FileNotFoundError:
        return None


def _move_to_its_host(clock_s: float) -> None:
    """Gives this process another wall clock, and so another kernel."""
    if not clock_s:
        return
    from pannier.common import machine

    clocks.shift(clock_s)
    kernel = machine.boot_id
    machine.boot_id = lambda: f"{kernel()}{clock_s:+g}"


def train(trainer: Trainer) -> int:
    """Runs the rank to its end; the exit status."""
    os.environ.update(trainer.environment)
    _move_to_its_host(trainer.clock_s)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from pannier.client import Client
    from pannier.client.config import load_settings

    log, stop = Log(trainer), Path(trainer.stop)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{trainer.port}",
        rank=trainer.rank,
        world_size=trainer.world,
    )
    mesh = init_device_mesh("cpu", (trainer.world,))
    log.write("ready", pid=os.getpid())
    handles = []
    with Client(load_settings()) as client:
        number = 0
        while (last := _last(stop)) is None or number < last:
            number += 1
            target = checkpoint_id(trainer.root, trainer.seed, trainer.incarnation, number)
            state = chaos_states.of_rank(
                trainer.incarnation, number, trainer.world, trainer.rank, mesh
            )
            log.write("begin", number=number, id=target, crc=chaos_states.checksums(state))
            try:
                handle = client.async_save(state, checkpoint_id=target, timeout=_hurry(trainer))
            except PannierError as error:
                log.write(
                    "raised", number=number, id=target, error=f"{type(error).__name__}: {error}"
                )
            else:
                log.write("staged", number=number, id=target, save=handle.status().id)
                chaos_states.scribble(state)
                handles.append((number, target, handle))
                handle.add_done_callback(
                    lambda done, number=number, target=target: log.write(
                        "ended",
                        number=number,
                        id=target,
                        outcome=_outcome(done.exception())[0],
                        error=_outcome(done.exception())[1],
                        attempt=handle_attempt(done),
                        transport=done.status().transport,
                    )
                )
            time.sleep(trainer.pace_s)
        deadline = time.monotonic() + trainer.end_s
        for number, target, handle in handles:
            if not handle.wait(max(0.0, deadline - time.monotonic())):
                log.write("hangs", number=number, id=target, error=str(handle.status()))
    log.write("done")
    dist.destroy_process_group()
    return 0


def handle_attempt(handle: Any) -> str:
    """Name of the attempt in storage, as far as the handle knows."""
    return str(handle.status().attempt)


def command(trainer: Trainer) -> list[str]:
    """Arguments of a Python process that is this rank."""
    return ["-m", "support.chaos.trainer", json.dumps(asdict(trainer))]


if __name__ == "__main__":
    sys.exit(train(Trainer(**json.loads(sys.argv[1]))))
