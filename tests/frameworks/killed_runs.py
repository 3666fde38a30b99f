"""Trains with a framework on two ranks, kills them in the middle of a save, and starts them again.

A program reports its steps as :mod:`frameworks.progress` does, and saves every second one below ``ROOT``.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pannier.v1 import save_pb2
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import Ranks, run_ranks, start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import COMMITTED, all_in, await_save
from support.storage.bucket import hold_up
from support.storage.gcs_server import GcsServer

PROGRAMS: Final = Path(__file__).parent / "programs"
STEPS: Final = 8
INGESTED: Final = all_in(save_pb2.RANK_PHASE_INGESTED)


def steps(output: str) -> dict[int, str]:
    """Digest of each step that a rank has made."""
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) (\w+)$", output, re.M)}


def listed(root: str, env: Mapping[str, str]) -> list[str]:
    """Names of the committed checkpoints below a root, as ``pannier ls`` has them, oldest first."""
    done = pannier("ls", "--json", root, env=env)
    assert done.code == 0, done
    found = [each for each in done.json_lines() if each["state"] == "committed"]
    return [each["checkpoint"].removeprefix(f"{root}/") for each in found]


class Job:
    """A program that is trained uninterrupted, and killed and started again, in two directories.

    Args:
        name: of the directories below the bucket.
        checkpoint: name of a step's checkpoint.
        environment: added to that of all ranks.
    """

    def __init__(
        self,
        program: Path,
        name: str,
        daemons: Daemons,
        checkpoint: Callable[[int], str],
        **environment: str,
    ) -> None:
        self.root = f"gs://bucket/{name}"
        self._program = program
        self._daemons = daemons
        self._checkpoint = checkpoint
        self._environment = {
            **daemons.env(**daemons.environment),
            "STEPS": str(STEPS),
            **environment,
        }
        self._killed: dict[int, list[dict[int, str]]] = {}

    def env(self, root: str, **more: str) -> dict[str, str]:
        """What a rank has in its environment."""
        return {**self._environment, "ROOT": f"{self.root}/{root}", **more}

    def train(self, root: str, **more: str) -> list[str]:
        """Trains to the end; the ranks' outputs."""
        return run_ranks(
            self._program, 2, self.env(root, **more), 2 * BOUND_S, torchrun=False
        ).outputs

    def kill_in_a_save(self, root: str, server: GcsServer, go: Path) -> list[dict[int, str]]:
        """Kills all ranks after step 5: step 2 is committed, step 4 ingested and not uploaded.

        Returns the steps of each rank. The bucket takes uploads again when this returns.
        """
        go.mkdir()
        environment = self.env(root, PAUSE_AFTER="3,5", GO=str(go))
        address = self._daemons.coordinator_address
        with start_ranks(self._program, 2, environment, torchrun=False) as ranks:
            self._await_step(ranks, 3)
            first, second = (f"{self.root}/{root}/{self._checkpoint(step)}" for step in (2, 4))
            await_save(address, first, lambda status: status.state == COMMITTED)
            hold_up(server)
            (go / "3").touch()
            self._await_step(ranks, 5)
            await_save(address, second, INGESTED)
            ranks.kill()
            outputs = [ranks.output(rank) for rank in range(2)]
        assert listed(f"{self.root}/{root}", self._environment) == [self._checkpoint(2)]
        server.clear()
        return [steps(output) for output in outputs]

    def _await_step(self, ranks: Ranks, step: int) -> None:
        for rank in range(2):
            ranks.wait_for(f"\nstep {step} ", rank=rank, timeout=2 * BOUND_S)
