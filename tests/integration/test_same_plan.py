"""Ranks that save by earlier plans write what ``dcp.save`` writes, and ask no process in the call."""

import json
from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.states.bits import differences
from support.states.contents import described, values

SCRIPT = Path(__file__).parent / "ranks" / "same_plan.py"
STEPS = range(1, 12)
THROUGH_TORCH = 5
"""Saved by ``dcp.save`` with our writer."""
ASKS = {3: ([], ["Plan"]), **{step: (["Plan"], ["Plan"]) for step in (7, 8, 9, 11)}}
"""Per step, what each rank calls from the training loop; else nothing."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("same-plan")
    with Daemons(directory) as daemons:
        env = daemons.env(
            ROOT=str(directory / "ours"),
            REFERENCE=str(directory / "torch"),
            REPORT=str(directory),
            PANNIER_PLAN_TIMEOUT="60",
        )
        run_ranks(SCRIPT, 2, env, timeout=150, torchrun=False)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_checkpoint_is_what_torch_writes(runs: Path, step: int) -> None:
    ours, torchs = (runs / side / f"step-{step}" for side in ("ours", "torch"))
    assert described(ours) == described(torchs)
    assert not differences(values(ours), values(torchs))


def test_no_process_is_asked_in_the_call_unless_something_changed(runs: Path) -> None:
    reports = [json.loads((runs / f"{rank}.json").read_text()) for rank in range(2)]
    for step in STEPS:
        if step == THROUGH_TORCH:
            continue
        for rank, report in enumerate(reports):
            calls = report[f"step-{step}"]
            if step in ASKS or step - 1 in ASKS:
                # A new plan may need more room, too, in each of the two sets of files.
                calls = [call for call in calls if call == "Plan"]
            assert calls == ASKS.get(step, ([], []))[rank], (step, rank)
