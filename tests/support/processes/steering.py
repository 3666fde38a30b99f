"""The test's side of :mod:`support.processes.steered_trainer`."""

import json
import re
from pathlib import Path
from typing import Final

from support.actors.scripted_sidecar import wait_until
from support.processes.ranks import Ranks
from support.processes.stretch import BOUND_S

TRAINER: Final = Path(__file__).parent / "steered_trainer.py"


def order(directory: Path, step: int, rank: int, **arguments: float) -> None:
    """Lets a steered trainer save a step."""
    new = directory / f"new-{step}-{rank}"
    new.write_text(json.dumps(arguments))
    new.rename(directory / f"{step}-{rank}")


def outcome(ranks: Ranks, step: int, rank: int, *, timeout: float = BOUND_S) -> str:
    """``committed``, or why not."""
    line = re.compile(rf"^step {step} (committed|failed: .*)\n", re.MULTILINE)
    wait_until(lambda: line.search(ranks.output(rank)) is not None, timeout)
    found = line.search(ranks.output(rank))
    assert found is not None
    return found[1]
