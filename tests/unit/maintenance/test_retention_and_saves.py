"""Retention leaves a save alone that is decided, but not yet installed."""

import asyncio
from pathlib import Path

import pytest

from pannier.attempts.decisions import read_decision
from pannier.attempts.metadata_swap import install
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.retention_run import Outcome, retain
from pannier.storage import open_store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below

FIRST, SECOND, OTHER = (f"i1-inc-g0000000a-s{number}" for number in (1, 2, 3))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """step-1 was saved twice: the second COMMIT is decided, but its ``.metadata`` isn't installed."""
    write_attempt(tmp_path / "step-1", FIRST)
    metadata = write_attempt(tmp_path / "step-1", SECOND, commit=False)
    write_decision(tmp_path / "step-1", SECOND, records_pb2.OUTCOME_COMMIT, metadata)
    write_attempt(tmp_path / "step-2", OTHER)
    return tmp_path


async def retain_newest(root: Path) -> dict[str, Outcome]:
    outcomes = await retain(open_store, str(root), Policy(newest=1), job="job", host="here")
    return {each.checkpoint.name: each for each in outcomes}


@pytest.mark.parametrize("standing", [True, False], ids=["overwrites", "is the first"])
def test_a_commit_that_is_about_to_be_installed_stays(root: Path, standing: bool) -> None:
    place = root / "step-1"
    if not standing:
        (place / object_names.METADATA).unlink()
        write(place / object_names.removal_mark(FIRST), b"{}")
    before = files_below(place)

    async def run() -> None:
        outcome = (await retain_newest(root)).get("step-1")
        assert (outcome is not None) == standing
        assert outcome is None or (outcome.spared and "decided, but not finished" in outcome.why)
        assert files_below(place) == before
        store = open_store(str(place))
        decision = await read_decision(store, SECOND)
        assert decision is not None
        await install(store, decision)
        candidate = place / object_names.metadata_candidate(SECOND)
        assert (place / object_names.METADATA).read_bytes() == candidate.read_bytes()
        assert (await retain_newest(root))["step-1"].reasons == ()

    asyncio.run(run())
    assert not place.exists()


def test_a_commit_that_cannot_be_installed_any_more_keeps_nothing(root: Path) -> None:
    write(root / "step-1" / object_names.removal_mark(SECOND), b"{}")
    assert asyncio.run(retain_newest(root))["step-1"].reasons == ()
    assert not (root / "step-1").exists()
