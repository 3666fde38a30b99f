"""A short run of the chaos test; ``make chaos`` runs as many seeds as there is time for."""

from pathlib import Path

import pytest

from support.chaos.run import Chaos
from support.processes.stretch import stretched

SEEDS = [8, 3]
"""One of them streams, with the other all is mapped."""
SECONDS = 14.0
ACT = "expired_saves"
"""What comes last with both."""


@pytest.fixture(scope="module")
def chaos_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.slow
@pytest.mark.timeout(stretched(300))
@pytest.mark.parametrize("seed", [SEEDS[0], pytest.param(SEEDS[1], marks=pytest.mark.extended)])
def test_nothing_that_was_handed_over_is_lost_whatever_goes_wrong(
    chaos_directory: Path, seed: int
) -> None:
    with Chaos(chaos_directory) as chaos:
        outcome = chaos.run_seed(seed, SECONDS, ACT)
    again = f"again: make chaos SEEDS={seed} SECONDS={SECONDS:g} ACT={ACT}"
    assert outcome.ok, "\n".join([again, *outcome.happened, *outcome.problems])
    # A run in which nothing is saved shows nothing.
    assert outcome.counts["committed"] >= 5, outcome.counts
