"""``pannier rm`` removes a checkpoint for good, whatever comes between."""

import asyncio
from pathlib import Path

import pytest

from pannier.attempts.decisions import read_decision
from pannier.attempts.metadata_swap import RemovedError, install
from pannier.common.fault_points import VARIABLE
from pannier.maintenance.delete_checkpoint import plan_removal, remove_checkpoint
from pannier.storage import open_store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import SaveAbortedError
from support.processes.cli import pannier
from support.processes.cli import pannier_here as here
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND, THIRD = (f"i1-inc-g0000000a-s{number}" for number in (1, 2, 3))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint that was saved twice, and aborted once."""
    directory = tmp_path / "run" / "step-1"
    write_attempt(directory, FIRST)
    write_attempt(directory, THIRD)
    write_decision(directory, SECOND, records_pb2.OUTCOME_ABORT)
    write(directory / object_names.data_file(SECOND, 0, 0), b"late")
    return directory


def test_everything_of_a_checkpoint_goes(place: Path) -> None:
    other = place.parent / "step-2"
    write_attempt(other, FIRST)
    kept = files_below(other)
    objects = files_below(place)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    result = here("rm", str(place), "--yes", "--json")
    assert result.code == 0, result
    # Besides what was there, each committed attempt's mark.
    assert result.json() == {
        "checkpoint": str(place),
        "attempts": [FIRST, SECOND, THIRD],
        "objects": len(objects) + 2,
        "bytes": result.json()["bytes"],
        "undecided": [],
    }
    assert result.json()["bytes"] >= size
    assert not place.exists()
    assert files_below(other) == kept
    again = here("rm", str(place), "--yes")
    assert (again.code, "no checkpoint" in again.err) == (1, True)


def test_it_asks_first(place: Path) -> None:
    before = files_below(place)
    result = pannier("rm", str(place))
    assert result.code == 1
    assert "Remove it for good?" in result.err
    assert "error: nothing was removed\nhint: with --yes" in result.err
    assert files_below(place) == before
    assert here("rm", str(place), "--json").code == 2
    assert files_below(place) == before


@pytest.mark.parametrize(
    "command", [("rm", "--yes"), ("gc", "--abandoned-after", "0"), ("recover", "--abort")]
)
def test_a_link_to_a_checkpoint_is_refused_with_its_own_name(
    place: Path, command: tuple[str, ...]
) -> None:
    """It would empty the directory and leave the link."""
    link = place.parent / "latest"
    link.symlink_to(place.name)
    before = files_below(place)
    result = here(command[0], str(link), *command[1:])
    assert (result.code, result.out) == (2, "")
    assert f"{link} is a symbolic link: use the name of the directory itself, {place}" in result.err
    assert files_below(place) == before
    assert link.is_symlink()


def test_a_link_in_a_root_is_no_checkpoint_of_it(place: Path) -> None:
    (place.parent / "latest").symlink_to(place.name)
    (line,) = here("ls", str(place.parent), "--json").json_lines()
    assert line["checkpoint"] == str(place)
    kept = ("--job", "job", "--keep-newest", "1")
    (line,) = here("retain", str(place.parent), *kept, "--json").json_lines()
    assert line["checkpoint"] == str(place)
    assert here("verify", str(place.parent / "latest")).code == 0


def test_a_foreign_checkpoint_is_refused(place: Path) -> None:
    write(place / ".metadata", b"somebody else's")
    before = files_below(place)
    result = here("rm", str(place), "--yes")
    assert (result.code, "not committed by Pannier" in result.err) == (1, True)
    assert files_below(place) == before


def test_a_save_under_way_stays(place: Path) -> None:
    under_way = "i1-inc-g0000000a-s4"
    write_attempt(place, under_way, commit=False)
    result = here("rm", str(place), "--yes", "--json")
    assert result.json()["undecided"] == [under_way]
    assert {name for name in files_below(place) if under_way not in name} == set()
    assert here("recover", str(place)).code == 0
    assert here("verify", str(place)).code == 0


@pytest.mark.parametrize(
    "at",
    [
        "sweep.removal.after:1",
        "sweep.removal.before:2",
        "sweep.metadata.before",
        "sweep.metadata.after",
        "sweep.leftover.after",
        "sweep.deletion.after:7",
        "sweep.decision.before:2",
        "sweep.decision.after:3",
    ],
)
def test_killed_on_the_way_it_is_whole_or_gone_and_ends_when_run_again(
    place: Path, at: str
) -> None:
    write(place / object_names.lease(THIRD, "abc"), b"{}")
    killed = pannier("rm", str(place), "--yes", env={VARIABLE: at})
    assert killed.code == -9, killed
    if (place / ".metadata").exists():
        assert here("verify", str(place)).code == 0
    else:
        # `recover` doesn't finish it as a commit.
        assert here("recover", str(place)).code == 0
        assert not (place / ".metadata").exists()
    left = files_below(place)
    result = here("rm", str(place), "--yes")
    assert result.code == (0 if left else 1), result
    assert not left or not place.exists()


def test_killed_before_it_removed_an_emptied_directory_it_ends_when_run_again(place: Path) -> None:
    """Objects go in parallel: the kill that follows one deletion hits others between two steps."""
    receipts = place / object_names.receipts_prefix(FIRST)
    for path in receipts.iterdir():
        path.unlink()
    result = here("rm", str(place), "--yes")
    assert result.code == 0, result
    assert not place.exists()


def test_a_coordinator_that_was_stopped_before_its_last_write_brings_nothing_back(
    place: Path,
) -> None:
    """Neither while the checkpoint is being removed nor afterwards."""

    async def run() -> None:
        store = open_store(str(place))
        decision = await read_decision(store, THIRD)
        assert decision is not None
        content = (place / ".metadata").read_bytes()
        plan = await plan_removal(store)
        await remove_checkpoint(store, plan, host="here")
        assert files_below(place) == set()
        write(place / object_names.metadata_candidate(THIRD), content)
        with pytest.raises(RemovedError):
            await install(store, decision)
        assert files_below(place) == set()

    asyncio.run(run())


def test_a_write_that_arrives_while_it_is_removed_is_taken_back(place: Path) -> None:
    content = (place / ".metadata").read_bytes()

    class Late(UnreliableStore):
        async def delete(self, key: str, *, generation: str | None = None) -> None:
            await super().delete(key, generation=generation)
            if key == object_names.decision(THIRD):
                write(place / ".metadata", content)

    async def run() -> None:
        store = Late(open_store(str(place)))
        await remove_checkpoint(store, await plan_removal(store), host="here")

    asyncio.run(run())
    assert files_below(place) == set()


def test_a_save_that_is_committed_meanwhile_stays(place: Path) -> None:
    newer = "i2-inc-g0000000a-s1"

    async def run() -> None:
        store = open_store(str(place))
        plan = await plan_removal(store)
        write_attempt(place, newer)
        with pytest.raises(SaveAbortedError, match="another save was committed"):
            await remove_checkpoint(store, plan, host="here")

    asyncio.run(run())
    assert here("verify", str(place)).code == 0
    assert here("gc", str(place), "--grace", "0").code == 0
    assert here("verify", str(place), "--json").json()["attempt"] == newer
    assert not list(place.glob(f"__{THIRD}_*"))


def test_a_decided_save_that_is_installed_meanwhile_is_removed_with_the_others(place: Path) -> None:
    newer = "i2-inc-g0000000a-s1"

    async def run() -> None:
        store = open_store(str(place))
        metadata = write_attempt(place, newer, commit=False)
        write_decision(place, newer, records_pb2.OUTCOME_COMMIT, metadata)
        plan = await plan_removal(store)
        assert newer in plan.pending
        # Its coordinator goes on while the user is asked.
        write(place / ".metadata", metadata)
        await remove_checkpoint(store, plan, host="here")

    asyncio.run(run())
    assert files_below(place) == set()
