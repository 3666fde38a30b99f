"""``pannier recover`` ends what can be ended from storage alone, and names what is missing."""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crc32c
import pytest
from torch.distributed.checkpoint import FileSystemReader

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata import build_checked
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.maintenance import recover
from pannier.maintenance.recover import End
from pannier.storage import HeldError, open_store
from pannier.storage.base import UnreachableError
from pannier.storage.local.store import LocalStore
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    receipt_of,
    tensor,
    thing,
)
from support.processes.cli import pannier
from support.processes.cli import pannier_here as here
from support.processes.daemons import clean_environment
from support.processes.processes import MARKER, SESSION, python
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below

FIRST, SECOND = "i1-aa-g83b97b85-s1", "i1-aa-g83b97b85-s2"
OLDER = "i0-zz-g83b97b85-s9"


def planned(directory: Path) -> Manifest:
    """A real plan of two ranks with both receipts, as a coordinator that died before it committed."""
    plans = rank_plans(local_plan([tensor("w", 4)]), local_plan([tensor("b", 4), thing("step")]))
    attempt = object_names.Attempt.parse(FIRST)
    plan = make_global_plan(plans, FIRST)
    manifest = make_manifest(context(0, str(directory)), attempt, plans, plan)
    write(directory / object_names.manifest(FIRST), manifest.data)
    for rank in (0, 1):
        receipt = receipt_of(manifest.final_plan(rank), rank)
        write(directory / object_names.receipt(FIRST, rank), receipt.SerializeToString())
        for file in receipt.files:
            write(directory / file.name, bytes(file.size))
    return manifest


def give_extra_files(directory: Path, *files: tuple[str, int]) -> None:
    """A name and a checksum for each rank: extra files of its receipt."""
    for rank, (name, checksum) in enumerate(files):
        path = directory / object_names.receipt(FIRST, rank)
        receipt = records_pb2.Receipt.FromString(path.read_bytes())
        receipt.extra_files.add(name=name, crc32c=checksum)
        write(path, receipt.SerializeToString())


def test_an_attempt_whose_ranks_are_all_durable_is_committed(tmp_path: Path) -> None:
    place = tmp_path / "run" / "step-1"
    planned(place)
    result = pannier("recover", str(place), "--json")
    assert result.code == 0, result
    (line,) = result.json_lines()
    assert line.pop("time") > 0
    assert line == {
        "checkpoint": str(place),
        "attempt": FIRST,
        "found": "complete",
        "end": "committed",
        "dry_run": False,
        "missing": [],
        "reason": "",
    }
    metadata = FileSystemReader(place).read_metadata()
    assert set(metadata.state_dict_metadata) == {"w", "b", "step"}
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.save_id == FIRST
    assert pannier("verify", str(place)).code == 0
    again = pannier("recover", str(tmp_path / "run"))
    assert again.code == 0
    assert "no interrupted saves" in again.out


@pytest.mark.parametrize(
    ("left", "abort", "end"),
    [
        ("receipts", False, End.COMMITTED),
        ("a commit", False, End.COMMITTED),
        ("an abort", False, End.ABORTED),
        ("nothing of rank 1", False, End.UNDECIDED),
        ("nothing of rank 1", True, End.ABORTED),
        ("a torn decision", True, End.UNDECIDED),
        ("receipts, and a newer save", False, End.ABORTED),
        ("receipts, and another job's save", False, End.ABORTED),
        ("receipts, and a plain writer's checkpoint", False, End.ABORTED),
        ("receipts with two contents of a file", False, End.ABORTED),
        ("receipts with a file where a directory is", False, End.ABORTED),
        ("receipts, and a cut candidate", False, End.UNDECIDED),
        ("receipts, and a cut candidate", True, End.ABORTED),
        ("receipts with a malformed name, and a candidate", False, End.UNDECIDED),
        ("receipts with a malformed name, and a candidate", True, End.ABORTED),
        ("a commit, and a plain writer's checkpoint", False, End.REMOVED),
    ],
)
def test_the_end_is_foreseen(tmp_path: Path, left: str, abort: bool, end: End) -> None:
    place = tmp_path / "step-1"
    if left.startswith("a commit"):
        write_attempt(place, FIRST)
        (place / ".metadata").unlink()
    else:
        manifest = planned(place)
    if left == "an abort":
        write_decision(place, FIRST, records_pb2.OUTCOME_ABORT)
    elif left == "nothing of rank 1":
        (place / object_names.receipt(FIRST, 1)).unlink()
    elif left == "a torn decision":
        write(place / object_names.decision(FIRST), b"{")
    elif left == "receipts, and a newer save":
        write_attempt(place, SECOND)
    elif left == "receipts, and another job's save":
        write_attempt(place, OLDER)
        decision = place / object_names.decision(OLDER)
        decision.write_text(decision.read_text().replace('"job": "job"', '"job": "other"'))
    elif left.endswith("a plain writer's checkpoint"):
        write(place / ".metadata", b"by torch")
        os.utime(place / ".metadata", (1, 1))
    elif left == "receipts with two contents of a file":
        give_extra_files(place, ("config.json", 1), ("config.json", 2))
    elif left == "receipts with a file where a directory is":
        give_extra_files(place, ("tokens", 1))
        write(place / "tokens" / "vocabulary", b"")
    elif left == "receipts, and a cut candidate":
        write(place / object_names.metadata_candidate(FIRST), b"cut")
    elif left == "receipts with a malformed name, and a candidate":
        receipts = [receipt_of(manifest.final_plan(rank), rank) for rank in (0, 1)]
        candidate = build_checked(manifest.data, receipts)
        write(place / object_names.metadata_candidate(FIRST), candidate)
        give_extra_files(place, ("../config.json", 1))

    async def build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
        return build_checked(manifest, receipts)

    async def main() -> None:
        store = open_store(str(place))
        try:
            (found,) = await recover.find_interrupted(store)
            foreseen = await recover.predict_outcome(store, found, abort=abort)
            outcome = await recover.finish_attempt(
                store, found, build=build, host="here", abort=abort
            )
            assert (foreseen.end, outcome.end) == (end, end)
            assert foreseen.reason in outcome.reason
        finally:
            await store.close()

    asyncio.run(main())


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    planned(place)
    before = files_below(place)
    (line,) = pannier("recover", str(place), "--json", "--dry-run").json_lines()
    assert (line["end"], line["dry_run"]) == ("committed", True)
    assert files_below(place) == before


def test_a_candidate_is_committed_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    metadata = write_attempt(place, FIRST, commit=False)
    assert pannier("recover", str(place)).code == 0
    assert (place / ".metadata").read_bytes() == metadata
    assert pannier("verify", str(place)).code == 0


@pytest.mark.parametrize("damage", ["cut", "another attempt's"])
def test_a_damaged_candidate_is_not_committed(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "step-1"
    metadata = write_attempt(place, FIRST, commit=False)
    damaged = metadata.replace(b"s1_1_0", b"s2_1_0") if damage != "cut" else metadata[:-40]
    (place / object_names.metadata_candidate(FIRST)).write_bytes(damaged)
    result = pannier("recover", str(place), "--json")
    assert result.code == 1
    (line,) = result.json_lines()
    assert line["end"] == "undecided"
    assert object_names.metadata_candidate(FIRST) in line["reason"]
    assert not (place / ".metadata").exists()


@pytest.mark.parametrize(
    ("missing", "candidate"), [("torch", False), ("torch", True), ("numpy", False), ("numpy", True)]
)
def test_what_does_not_need_a_missing_library_is_done(
    tmp_path: Path, missing: str, candidate: bool
) -> None:
    place = tmp_path / "step-1"
    if candidate:
        write_attempt(place, FIRST, commit=False)
    else:
        planned(place)
    code = f"import sys; sys.modules[{missing!r}] = None; from pannier.cli.main import main; main()"
    done = subprocess.run(
        [*python("-c", code), "recover", str(place)],
        env={**clean_environment(), MARKER: SESSION},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    can = candidate or missing == "torch"
    assert done.returncode == (0 if can else 1), done
    assert (place / ".metadata").exists() == can
    if not can:
        assert "needs numpy" in done.stdout
        assert "pip install numpy" in done.stdout


def test_a_commit_that_was_decided_is_installed(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    metadata = write_attempt(place, FIRST)
    (place / ".metadata").unlink()
    (line,) = pannier("recover", str(place), "--json").json_lines()
    assert (line["found"], line["end"]) == ("commit", "committed")
    assert (place / ".metadata").read_bytes() == metadata


def test_what_an_aborted_attempt_left_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    write_attempt(place, FIRST, commit=False)
    write_decision(place, FIRST, records_pb2.OUTCOME_ABORT)
    (line,) = pannier("recover", str(place), "--json").json_lines()
    assert (line["found"], line["end"]) == ("abort", "aborted")
    assert files_below(place) == {object_names.decision(FIRST)}
    assert pannier("recover", str(place), "--json").out == ""


def test_an_undecided_attempt_is_shown_with_its_ranks_and_given_up_only_on_request(
    tmp_path: Path,
) -> None:
    root, place = tmp_path, tmp_path / "runs" / "step-2"
    kept = write_attempt(place, FIRST)
    write_attempt(place, SECOND, ranks=3, commit=False)
    (place / object_names.metadata_candidate(SECOND)).unlink()
    (place / object_names.receipt(SECOND, 1)).unlink()
    before = files_below(place)
    result = pannier("recover", str(root))
    assert result.code == 1, result
    assert "receipts are missing of host node-1: rank 1" in result.out
    assert "--abort" in result.out
    (line,) = pannier("recover", str(root), "--json").json_lines()
    assert line["checkpoint"] == str(place)
    assert (line["end"], line["missing"]) == ("undecided", [{"rank": 1, "host": "node-1"}])
    assert files_below(place) == before
    (line,) = pannier("recover", str(root), "--abort", "--json").json_lines()
    assert line["end"] == "aborted"
    assert not [name for name in files_below(place) if SECOND in name and "decision" not in name]
    assert (place / ".metadata").read_bytes() == kept
    assert pannier("verify", str(place)).code == 0


def test_a_complete_attempt_never_replaces_a_newer_one(tmp_path: Path) -> None:
    place = tmp_path / "step"
    write_attempt(place, FIRST, commit=False)
    newer = write_attempt(place, SECOND)
    (line,) = pannier("recover", str(place), "--json").json_lines()
    assert line["end"] == "aborted"
    assert "newer save" in line["reason"]
    assert (place / ".metadata").read_bytes() == newer
    assert not [name for name in files_below(place) if FIRST in name and "decision" not in name]


def test_what_a_plain_writer_put_there_since_stays(tmp_path: Path) -> None:
    place = tmp_path / "step"
    write_attempt(place, FIRST)
    write(place / ".metadata", b"by torch")
    assert pannier("recover", str(place), "--json").out == ""
    assert (place / ".metadata").read_bytes() == b"by torch"


def test_a_receipt_of_another_plan_is_no_receipt(tmp_path: Path) -> None:
    place = tmp_path / "step"
    manifest = planned(place)
    receipt = receipt_of(manifest.final_plan(1), 1)
    receipt.plan_id = f"{crc32c.crc32c(b'other'):x}"
    write(place / object_names.receipt(FIRST, 1), receipt.SerializeToString())
    result = pannier("recover", str(place), "--json")
    assert result.code == 1
    assert result.json()["end"] == "undecided"
    assert "the receipt of rank 1 (host node-1)" in result.json()["reason"]
    assert not (place / ".metadata").exists()


@pytest.mark.parametrize("abort", [False, True])
def test_a_malformed_receipt_of_what_torch_planned_is_no_obstacle_elsewhere(
    tmp_path: Path, abort: bool
) -> None:
    damaged, other = tmp_path / "step-1", tmp_path / "step-2"
    manifest = Manifest.make_external(
        context(0, str(damaged)),
        object_names.Attempt.parse(FIRST),
        {0: "node-0", 1: "node-1"},
        plan_pb2.GlobalMetadata(),
    )
    write(damaged / object_names.manifest(FIRST), manifest.data)
    for rank in (0, 1):
        receipt = records_pb2.Receipt(attempt=FIRST, rank=rank, host=f"node-{rank}")
        if rank == 1:
            receipt.files.add(name="elsewhere.distcp")
        write(damaged / object_names.receipt(FIRST, rank), receipt.SerializeToString())
    planned(other)
    result = here("recover", str(tmp_path), "--json", *(["--abort"] if abort else []))
    assert result.code == (0 if abort else 1), result
    lines = {Path(line["checkpoint"]).name: line for line in result.json_lines()}
    assert {name: line["end"] for name, line in lines.items()} == {
        "step-1": "aborted" if abort else "undecided",
        "step-2": "committed",
    }
    assert "the receipt of rank 1 (host node-1) is not " in lines["step-1"]["reason"]


def test_a_damaged_decision_is_reported_and_the_rest_is_done(tmp_path: Path) -> None:
    damaged, other = tmp_path / "step-1", tmp_path / "step-2"
    write_attempt(damaged, FIRST)
    write(damaged / object_names.decision(FIRST), b"{")
    write_attempt(other, FIRST, commit=False)
    result = pannier("recover", str(tmp_path), "--abort", "--json")
    assert result.code == 1
    ends = {Path(line["checkpoint"]).name: line["end"] for line in result.json_lines()}
    assert ends == {"step-1": "undecided", "step-2": "committed"}
    assert (damaged / ".metadata").exists()


def refuse(
    monkeypatch: pytest.MonkeyPatch, operation: str, place: Path, name: str, error: Exception
) -> None:
    """An operation with the object of this name at ``place`` fails."""
    original = getattr(LocalStore, operation)

    async def refused(self: LocalStore, key: str, *args: Any, **more: Any) -> Any:
        if (self.url, key) == (str(place), name):
            raise error
        return await original(self, key, *args, **more)

    monkeypatch.setattr(LocalStore, operation, refused)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("operation", "name", "shown"),
    [
        ("stat", object_names.METADATA, {"step-2": ("undecided", "refused")}),
        ("read", object_names.manifest(FIRST), {}),
    ],
)
def test_what_storage_refuses_at_one_checkpoint_is_no_obstacle_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    name: str,
    shown: dict[str, tuple[str, str]],
    dry: bool,
) -> None:
    places = [tmp_path / f"step-{number}" for number in (1, 2, 3)]
    for place in places:
        planned(place)
    refuse(monkeypatch, operation, places[1], name, HeldError("refused"))
    result = here("recover", str(tmp_path), "--json", *(["--dry-run"] if dry else []))
    ends = {
        Path(line["checkpoint"]).name: (line["end"], line["reason"]) for line in result.json_lines()
    }
    assert ends == {"step-1": ("committed", ""), "step-3": ("committed", ""), **shown}
    assert (result.code, "error: refused" in result.err) == (3, True), result
    assert [(place / ".metadata").exists() for place in places] == [not dry, False, not dry]


def test_what_was_done_before_storage_was_out_of_reach_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / f"step-{number}" for number in (1, 2, 3)]
    for place in places:
        planned(place)
    refuse(monkeypatch, "stat", places[1], object_names.METADATA, UnreachableError("no answer"))
    result = here("recover", str(tmp_path), "--json")
    assert (result.code, "error: no answer" in result.err) == (3, True), result
    (line,) = result.json_lines()
    assert (line["checkpoint"], line["end"]) == (str(places[0]), "committed")
    # Each other one would wait for it, too.
    assert not (places[2] / ".metadata").exists()
