"""What keeps ranks in step without the process group, and what happens when they fall out of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "in_step.py"
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    ranks: list[dict[str, Any]]
    """What each rank reports."""
    root: Path

    def said(self, name: str) -> list[Any]:
        """How the save ended, by rank."""
        return [rank[name] for rank in self.ranks]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("in-step")
    root = directory / "run"
    with Daemons(directory) as daemons:
        env = daemons.env(ROOT=str(root), REPORT=str(directory), PANNIER_PLAN_TIMEOUT="12")
        run_ranks(SCRIPT, 2, env, timeout=150, torchrun=False)
    return Run([json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)], root)


def test_torchs_plan_cache_is_neither_read_nor_filled(run: Run) -> None:
    for rank in run.ranks:
        for found in rank["in turn"]:
            assert found["after"] == found["before"]
        # There was something to be read: torch's saves in between had filled it.
        assert not any(rank["in turn"][0]["before"].values())
        assert rank["in turn"][2]["before"]["_cached_save_plan"]


@pytest.mark.parametrize("step", range(3))
def test_saves_in_turn_with_torch_hold_their_own_values(run: Run, step: int) -> None:
    ours = {f"weight.{rank}": torch.zeros(8, dtype=torch.bfloat16) for rank in range(2)}
    ours["shared"] = torch.zeros(5, dtype=torch.int64)
    theirs = {f"weight.{rank}": torch.zeros(8) for rank in range(2)}
    theirs["shared"] = torch.zeros(5)
    for name, state, weight, shared in (
        ("ours", ours, 10.0 + step, 20 + step),
        ("theirs", theirs, 30.0 + step, step),
    ):
        place = run.root / f"{name}-{step}"
        stored = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
        dcp.load(state, checkpoint_id=place, no_dist=True)
        for key, value in state.items():
            assert stored[key].properties.dtype is value.dtype
            wanted = shared if key == "shared" else weight
            assert torch.equal(value, torch.full_like(value, wanted)), (name, key)


def test_nothing_reaches_the_process_group_once_the_ranks_know_each_other(run: Run) -> None:
    for rank in run.ranks:
        assert rank["counts"]["steady"] == {"world": 0, "pair": 0}
        # What is counted can be seen.
        assert rank["counts"]["seen"] == {"world": 1, "pair": 1, "Store.add": 1}
    for step in range(3):
        for name in ("world", "pair"):
            assert (run.root / f"steady-{name}-{step}" / ".metadata").exists()


def test_a_rank_that_leaves_calls_out_is_named_and_joins_again(run: Run) -> None:
    for name in ("alone-1", "alone-2"):
        found = run.ranks[0][name]
        assert found["type"] == "SaveAbortedError"
        assert "rank 1" in found["message"]
        assert "was not called" in found["message"]
        assert found["failures"] == [1]
        assert name not in run.ranks[1]
        assert not (run.root / name / ".metadata").exists()
    for name in ("again-1", "again-2"):
        assert run.said(name) == ["", ""]
        assert (run.root / name / ".metadata").exists()


def test_ranks_of_different_worlds_are_named_with_their_values(run: Run) -> None:
    for found in run.said("two worlds"):
        assert found["type"] == "SaveAbortedError"
        assert "has a world size of" in found["message"]
        for rank, size in ((0, 2), (1, 3)):
            assert f"rank {rank} (host node-0)" in found["message"]
            assert f"of {size}" in found["message"]
        assert found["failures"] == [0, 1]
    assert not list(run.root.glob("two worlds/*.distcp"))
    assert not (run.root / "two worlds" / ".metadata").exists()
    assert run.said("one world") == ["", ""]
    assert (run.root / "one world" / ".metadata").exists()


@pytest.mark.parametrize(
    ("hosts", "transport"),
    [
        (1, "mapped"),
        pytest.param(2, "streamed", marks=pytest.mark.extended),
        pytest.param(1, "streamed", marks=pytest.mark.extended),
        pytest.param(2, "mapped", marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_saves_by_a_cached_plan_fails_one_save_of_all_after_missed_calls(
    tmp_path: Path, hosts: int, transport: str
) -> None:
    """Its sidecar knows of the missed saves by the other rank, or finds out by the coordinator."""
    root = tmp_path / "run"
    with Daemons(tmp_path, sidecars=hosts) as daemons:
        addresses = [daemons.sidecars[rank % hosts].address for rank in range(2)]
        env = daemons.env(
            ROOT=str(root),
            REPORT=str(tmp_path),
            SIDECARS=" ".join(addresses),
            PANNIER_PLAN_TIMEOUT="10",
            PANNIER_TRANSPORT=transport,
        )
        run_ranks(SCRIPT.with_name("missed_calls.py"), 2, env, timeout=150, torchrun=False)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [one.pop(f"step-{step}")[1] for step in (2, 3)] == [[1], [1]]
    for rank in (one, other):
        message, failures = rank.pop("step-4")
        assert "missed save calls" in message
        assert failures == [1]
    assert "with number 5" in message
    assert not (root / "step-4" / ".metadata").exists()
    assert one == other
    for step in (5, 6):
        assert one[f"step-{step}"].endswith(f"-s{step}")
        state = {f"weight.{rank}": torch.zeros(1000) for rank in range(2)}
        notes: dict[str, Any] = {f"note.{rank}": None for rank in range(2)}
        dcp.load(state | notes, checkpoint_id=root / f"step-{step}", no_dist=True)
        for value in state.values():
            assert torch.equal(value, torch.full_like(value, float(step)))
