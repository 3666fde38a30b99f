"""Ranks save in several groups; however they drift apart, that save ends by name on all of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "groups.py"
CULPRIT = "1"
DRIFTS = {
    # What goes wrong on rank 1: what is raised there, and the words that say what it was.
    "skip": ("SaveSkippedError", "in flight|staging memory"),
    "busy": ("BusyError", "staging memory"),
    "create_local_plan": ("LookupError", "broken on purpose"),
    "finish_plan": ("LookupError", "broken on purpose"),
    "resolve_data": ("LookupError", "broken on purpose"),
    "interrupt": ("KeyboardInterrupt", ""),
    "state_dict": ("LookupError", "stateful"),
    "unpicklable": ("TypeError", "thing"),
    "not a mapping": ("InvalidRequestError", "int"),
    "on_busy": ("InvalidRequestError", "on_busy"),
    "timeout": ("InvalidRequestError", "timeout"),
    "stager": ("InvalidRequestError", "async_stager"),
    "collectives": ("InvalidRequestError", "use_collectives"),
    "writer": ("InvalidRequestError", "storage_writer"),
    "no id": ("InvalidRequestError", "checkpoint_id"),
    "malformed id": ("InvalidRequestError", "gs://"),
}


@dataclass(frozen=True)
class Run:
    ranks: list[dict[str, Any]]
    """What each rank reports, by name of the save."""
    root: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("groups")
    root = directory / "run"
    with Daemons(directory) as daemons:
        env = daemons.env(ROOT=str(root), REPORT=str(directory), PANNIER_PLAN_TIMEOUT="60")
        run_ranks(SCRIPT, 4, env, timeout=150, torchrun=False)
    return Run([json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)], root)


def keys(checkpoint: Path) -> set[str]:
    return set(dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.mark.slow
@pytest.mark.timeout(240)  # The first one waits for the run.
def test_saves_of_several_groups_are_under_way_at_once(run: Run) -> None:
    members = {
        "world": (0, 1, 2, 3),
        "pair-0": (0, 1),
        "pair-1": (2, 3),
        "cross-0": (0, 2),
        "cross-1": (1, 3),
    }
    attempts = set()
    for name, ranks in members.items():
        assert keys(run.root / "at-once" / name) == {"shared", *(f"weight.{r}" for r in ranks)}
        names = {run.ranks[rank]["at once"][name] for rank in ranks}
        assert len(names) == 1
        attempts |= names
    assert len(attempts) == len(members), "attempts of different groups have the same name"
    state = {"weight.3": torch.zeros(50)}
    dcp.load(state, checkpoint_id=run.root / "at-once" / "cross-1", no_dist=True)
    assert torch.equal(state["weight.3"], torch.full((50,), 3.0))


@pytest.mark.slow
def test_threads_may_save_in_different_groups(run: Run) -> None:
    for rank, report in enumerate(run.ranks):
        assert [found["type"] for found in report["threads"]] == ["", ""], report["threads"]
        for name in (f"pair-{rank // 2}", f"cross-{rank % 2}"):
            assert f"weight.{rank}" in keys(run.root / f"threads-{name}")


@pytest.mark.slow
def test_two_groups_of_the_same_ranks_save_from_two_threads(run: Run) -> None:
    attempts = set()
    for rank, report in enumerate(run.ranks):
        for name, found in zip(("first", "second"), report["twins"], strict=True):
            assert [save["type"] for save in found["saves"]] == [""] * 5, found
            attempts |= {save["attempt"] for save in found["saves"]}
            for number in range(5):
                checkpoint = run.root / f"twins-{name}-{rank // 2}-{number}"
                assert f"weight.{rank}" in keys(checkpoint)
    assert len(attempts) == 2 * 2 * 5


@pytest.mark.slow
def test_a_rank_outside_the_group_raises_and_the_group_saves(run: Run) -> None:
    for rank in (2, 3):
        found = run.ranks[rank]["outside"]
        assert found["type"] == "InvalidRequestError"
        assert f"rank {rank}" in found["message"]
    for rank in (0, 1):
        assert run.ranks[rank]["outside"]["type"] == ""
    assert keys(run.root / "outside") == {"shared", "weight.0", "weight.1"}


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS)
def test_what_goes_wrong_on_one_rank_ends_the_save_on_all_by_name(run: Run, drift: str) -> None:
    kind, words = DRIFTS[drift]
    here, there = run.ranks[1][drift], run.ranks[0][drift]
    assert here["type"] == kind, here
    assert any(word in here["message"] for word in words.split("|")), here
    assert there["type"] == ("SaveSkippedError" if drift == "skip" else "SaveAbortedError"), there
    assert "SaveAbortedError" in there["bases"]
    assert list(there["failures"]) == [CULPRIT], there
    assert f"rank {CULPRIT}" in there["message"]
    assert any(word in there["message"] for word in words.split("|")), there
    assert not (run.root / drift / ".metadata").exists()


@pytest.mark.slow
def test_a_skip_is_reported_as_a_skip_and_the_save_in_its_way_continues(run: Run) -> None:
    assert run.ranks[0]["skip"]["failures"] == {CULPRIT: "SKIPPED"}
    for drift in ("skip", "busy"):
        assert [each["type"] for each in run.ranks[1][drift]["others"]] == ["", ""]
        assert (run.root / f"beside-{drift}-1" / ".metadata").exists()


@pytest.mark.slow
def test_ranks_that_save_to_different_ids_are_named_with_their_values(run: Run) -> None:
    for rank in (0, 1):
        found = run.ranks[rank]["other id"]
        assert found["type"] == "SaveAbortedError"
        for word in ("rank 0", "rank 1", "other id", "elsewhere"):
            assert word in found["message"]
    for name in ("other id", "elsewhere"):
        assert not (run.root / name / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize("drift", [*DRIFTS, "other id"])
def test_the_next_save_is_in_step_and_others_are_not_disturbed(run: Run, drift: str) -> None:
    after = [run.ranks[rank][f"after {drift}"] for rank in (0, 1)]
    assert [found["type"] for found in after] == ["", ""], after
    assert after[0]["attempt"] == after[1]["attempt"]
    assert keys(run.root / f"after {drift}") == {"shared", "weight.0", "weight.1"}
    beside = [run.ranks[rank][f"beside {drift}"] for rank in (2, 3)]
    assert [found["type"] for found in beside] == ["", ""], beside


@pytest.mark.slow
def test_every_save_takes_one_number_whatever_its_end(run: Run) -> None:
    order = [*DRIFTS, "other id"]
    numbers = [
        int(run.ranks[0][name]["attempt"].rpartition("-s")[2])
        for name in ("good-0", *(f"after {drift}" for drift in order))
    ]
    first = numbers[0]
    assert numbers == [first + 2 * i for i in range(len(numbers))]


@pytest.mark.slow
def test_nothing_of_a_failed_save_stays_in_its_place(run: Run) -> None:
    left = [
        path
        for drift in (*DRIFTS, "other id")
        for path in (run.root / drift).glob("*")
        if path.name != ".pannier"
    ]
    assert not left
