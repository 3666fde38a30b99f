"""Ranks whose structures change independently of each other lose no save, and wait for no plan in vain."""

from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "changing_structures.py"


def run(directory: Path, sizes: str, structures: str, saves: int, *, timeout: float) -> None:
    with Daemons(directory) as daemons:
        env = daemons.env(
            ROOT=str(directory / "root"),
            SIZES=sizes,
            STRUCTURES=structures,
            SAVES=str(saves),
            PANNIER_PLAN_TIMEOUT="60",
        )
        largest = max(map(int, sizes.split(",")))
        print(run_ranks(SCRIPT, largest, env, timeout=timeout, torchrun=False).outputs[0])


def test_ranks_whose_structures_change_independently_lose_no_save(tmp_path: Path) -> None:
    """A data loader's buffer beside the model, on two ranks: lost by the third save once."""
    run(tmp_path, "2", "3", 6, timeout=120)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [3, 8])
def test_many_saves_of_changing_structures_lose_none(tmp_path: Path, size: int) -> None:
    run(tmp_path, str(size), "2,3,6", 10, timeout=570)
