"""``pannier gc`` removes what is left behind, says why, and leaves all that may be needed."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from pannier.maintenance.superseded import sweep_checkpoint
from pannier.storage import DeniedError, HeldError, ObjectInfo, Store, open_store
from pannier.storage.base import UnreachableError
from pannier.storage.local.store import LocalStore
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.processes.cli import Result
from support.processes.cli import pannier_here as pannier
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND, THIRD = "i1-inc-g0000000a-s1", "i1-inc-g0000000a-s2", "i2-inc-g0000000a-s1"
NOW = ("--grace", "0", "--abandoned-after", "0")


def of(directory: Path, attempt: str) -> set[str]:
    """All objects of an attempt."""
    return {
        name
        for name in files_below(directory)
        if name.startswith((f"__{attempt}_", f".pannier/{attempt}/"))
    }


def age(directory: Path, seconds: float) -> None:
    """Everything in there was last written so long ago."""
    then = time.time() - seconds
    for path in directory.rglob("*"):
        os.utime(path, (then, then))


def lines(result: Result, action: str) -> list[dict[str, Any]]:
    assert result.code == 0, result
    return [line for line in result.json_lines() if line["action"] == action]


def lease(directory: Path, attempt: str, *, renew_s: float = 30, token: str = "abc") -> Path:
    message = records_pb2.Lease(
        attempt=attempt, host="node-1", pid=7, holder=token, renew_s=renew_s
    )
    path = directory / object_names.lease(attempt, token)
    write(path, json_format.MessageToJson(message).encode())
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run" / "step-1"


def test_nothing_is_left_behind_by_a_committed_save(place: Path) -> None:
    write_attempt(place, FIRST)
    before = files_below(place)
    assert pannier("gc", str(place.parent), *NOW, "--json").out == ""
    assert files_below(place) == before
    assert "nothing to remove" in pannier("gc", str(place.parent)).out


def test_leftovers_of_an_aborted_attempt_go_but_for_the_decision(place: Path) -> None:
    write_attempt(place, FIRST)
    kept = files_below(place)
    write_attempt(place, SECOND, commit=False)
    write_decision(place, SECOND, records_pb2.OUTCOME_ABORT)
    left = of(place, SECOND) - {object_names.decision(SECOND)}
    dry = pannier("gc", str(place.parent), "--dry-run", "--json")
    assert {line["name"] for line in lines(dry, "would-remove")} == left
    assert left < files_below(place)
    done = lines(pannier("gc", str(place.parent), "--json"), "removed")
    assert {line["name"] for line in done} == left
    assert {(line["reason"], line["attempt"]) for line in done} == {("aborted", SECOND)}
    assert all(line["bytes"] > 0 and line["checkpoint"] == str(place) for line in done)
    assert files_below(place) == kept | {object_names.decision(SECOND)}


def test_a_late_upload_of_an_aborted_attempt_goes(place: Path) -> None:
    write_decision(place, FIRST, records_pb2.OUTCOME_ABORT)
    late = place / object_names.data_file(FIRST, 1, 0)
    write(late, b"late")
    (line,) = lines(pannier("gc", str(place.parent), "--json"), "removed")
    assert (line["name"], line["bytes"]) == (late.name, 4)
    assert files_below(place) == {object_names.decision(FIRST)}


def test_the_decision_of_an_aborted_attempt_goes_when_it_is_old_and_alone(place: Path) -> None:
    write_attempt(place, SECOND)
    kept = files_below(place)
    never = place.parent / "step-2"
    write_decision(place, FIRST, records_pb2.OUTCOME_ABORT)
    for directory, attempt in ((place, THIRD), (never, FIRST)):
        write_decision(directory, attempt, records_pb2.OUTCOME_ABORT)
        write(directory / object_names.data_file(attempt, 0, 0), b"late")
    assert len(lines(pannier("gc", str(place.parent), "--json"), "removed")) == 2
    assert lines(pannier("gc", str(place.parent), "--json"), "removed") == []
    age(place.parent, 86_401)
    # Something came late once more.
    write(place / object_names.data_file(THIRD, 1, 0), b"late")
    removed = lines(pannier("gc", str(place.parent), "--json"), "removed")
    assert {(line["name"], line["reason"]) for line in removed} == {
        (object_names.decision(FIRST), "aborted"),
        (object_names.data_file(THIRD, 1, 0), "aborted"),
    }
    assert files_below(place) == kept | {object_names.decision(THIRD)}
    assert not never.exists()
    (line,) = lines(pannier("gc", str(place.parent), "--json"), "removed")
    assert line["name"] == object_names.decision(THIRD)
    assert files_below(place) == kept
    assert pannier("verify", str(place)).code == 0


def test_a_superseded_attempt_goes_after_its_grace_period(place: Path) -> None:
    write_attempt(place, FIRST)
    write_attempt(place, SECOND)
    age(place, 10_000)
    (kept,) = lines(pannier("gc", str(place), "--json"), "kept")
    assert (kept["attempt"], "grace period" in kept["reason"]) == (FIRST, True)
    mark = place / object_names.superseded_mark(FIRST)
    assert mark.exists()
    assert pannier("verify", str(place)).code == 0
    assert lines(pannier("gc", str(place), "--json"), "removed") == []
    os.utime(mark, (time.time() - 3601,) * 2)
    left = of(place, FIRST)
    (*_, last) = removed = lines(pannier("gc", str(place), "--json"), "removed")
    assert {line["name"] for line in removed} == left
    assert last["name"] == object_names.decision(FIRST)
    assert {line["reason"] for line in removed} == {"superseded"}
    assert of(place, FIRST) == set()
    assert json.loads(pannier("verify", str(place), "--json").out)["attempt"] == SECOND


def test_a_dry_run_marks_nothing(place: Path) -> None:
    write_attempt(place, FIRST)
    write_attempt(place, SECOND)
    before = files_below(place.parent)
    assert lines(pannier("gc", str(place), "--dry-run", "--json"), "kept")
    assert files_below(place.parent) == before


def test_a_superseded_attempt_stays_as_long_as_a_reader_holds_it(place: Path) -> None:
    write_attempt(place, FIRST)
    write_attempt(place, SECOND)
    held = lease(place, FIRST)
    (kept,) = lines(pannier("gc", str(place), *NOW, "--json"), "kept")
    assert "process 7 on node-1 is reading it" in kept["reason"]
    assert object_names.data_file(FIRST, 0, 0) in files_below(place)
    os.utime(held, (time.time() - 91,) * 2)
    removed = lines(pannier("gc", str(place), *NOW, "--json"), "removed")
    assert {line["reason"] for line in removed} == {"superseded", "lease"}
    assert of(place, FIRST) == set()
    assert not held.exists()
    assert pannier("verify", str(place)).code == 0


def test_an_undecided_attempt_is_given_up_when_it_is_old(place: Path) -> None:
    write_attempt(place, FIRST, commit=False)
    (place / object_names.receipt(FIRST, 1)).unlink()
    (place / object_names.metadata_candidate(FIRST)).unlink()
    before = files_below(place)
    (kept,) = lines(pannier("gc", str(place), "--json"), "kept")
    assert "a save may be in progress" in kept["reason"]
    assert files_below(place) == before
    age(place, 86_401)
    dry = lines(pannier("gc", str(place), "--dry-run", "--json"), "would-remove")
    assert files_below(place) == before == {line["name"] for line in dry}
    removed = lines(pannier("gc", str(place), "--json"), "removed")
    assert {line["reason"] for line in removed} == {"abandoned"}
    assert files_below(place) == {object_names.decision(FIRST)}


def test_an_attempt_that_can_be_committed_is_never_given_up(place: Path) -> None:
    write_attempt(place, FIRST, commit=False)
    before = files_below(place)
    (kept,) = lines(pannier("gc", str(place), *NOW, "--json"), "kept")
    assert "pannier recover" in kept["reason"]
    assert files_below(place) == before
    assert pannier("recover", str(place)).code == 0
    assert pannier("verify", str(place)).code == 0


def test_a_decided_commit_is_never_removed(place: Path) -> None:
    write_attempt(place, FIRST)
    (place / ".metadata").unlink()
    age(place, 1e6)
    before = files_below(place)
    (kept,) = lines(pannier("gc", str(place), *NOW, "--json"), "kept")
    assert "pannier recover" in kept["reason"]
    assert files_below(place) == before


def test_data_files_without_any_record_go_when_they_are_old(place: Path) -> None:
    write(place / object_names.data_file(FIRST, 0, 0), b"data")
    assert lines(pannier("gc", str(place), "--json"), "removed") == []
    age(place, 86_401)
    (line,) = lines(pannier("gc", str(place), "--json"), "removed")
    assert (line["reason"], line["bytes"]) == ("abandoned", 4)
    assert files_below(place) == {object_names.decision(FIRST)}


def test_a_foreign_checkpoint_is_not_touched(place: Path) -> None:
    """Neither a copy without records nor one that a plain writer put over ours."""
    write_attempt(place, FIRST)
    write_attempt(place, SECOND, commit=False)
    write_decision(place, SECOND, records_pb2.OUTCOME_ABORT)
    write(place / ".metadata", b"somebody else's")
    copy = place.parent / "copy"
    write(copy / ".metadata", b"a copy's")
    write(copy / object_names.data_file(FIRST, 0, 0), b"data")
    age(place.parent, 1e6)
    before = files_below(place.parent)
    kept = lines(pannier("gc", str(place.parent), *NOW, "--json"), "kept")
    assert {line["checkpoint"] for line in kept} == {str(place), str(copy)}
    assert files_below(place.parent) == before


def test_a_needed_file_stays_even_if_its_attempt_was_aborted(place: Path) -> None:
    """The second guard: what .metadata says counts more than what the records say."""
    write_attempt(place, FIRST)
    content = (place / ".metadata").read_bytes()
    other = content.replace(FIRST.encode(), SECOND.encode())
    write_attempt(place, SECOND, commit=False)
    write_decision(place, SECOND, records_pb2.OUTCOME_ABORT)
    write_decision(place, FIRST, records_pb2.OUTCOME_COMMIT, other)
    write(place / ".metadata", other)
    before = files_below(place)
    (kept,) = lines(pannier("gc", str(place), *NOW, "--json"), "kept")
    assert "refers to" in kept["reason"]
    assert files_below(place) == before


@pytest.mark.parametrize("attempt", [FIRST, SECOND])
def test_where_a_decision_is_damaged_nothing_goes(place: Path, attempt: str) -> None:
    write_attempt(place, FIRST)
    write_attempt(place, SECOND)
    (place / object_names.decision(attempt)).write_bytes(b"{")
    age(place, 1e6)
    before = files_below(place)
    (kept,) = lines(pannier("gc", str(place), *NOW, "--json"), "kept")
    assert (kept["attempt"], "is damaged" in kept["reason"]) == (None, True)
    assert files_below(place) == before


def test_temporary_files_go_when_they_are_old(place: Path) -> None:
    write_attempt(place, FIRST)
    kept = files_below(place)
    left = [place / ".pannier-0123.tmp", place / ".pannier-lock", place / ".pannier/clock-1"]
    for path in left:
        write(path, b"")
    assert lines(pannier("gc", str(place), "--json"), "removed") == []
    age(place, 86_401)
    removed = lines(pannier("gc", str(place), "--json"), "removed")
    assert {line["name"] for line in removed} == {str(p.relative_to(place)) for p in left}
    assert {line["reason"] for line in removed} == {"upload", "temporary"}
    assert files_below(place) == kept


def test_ages_must_not_be_negative(place: Path) -> None:
    assert pannier("gc", str(place), "--grace", "-1").code == 2
    assert pannier("gc", str(place), "--abandoned-after", "nan").code == 2


def test_a_superseded_file_that_is_still_needed_stays(place: Path) -> None:
    """A .metadata from elsewhere may refer to an older attempt's files."""
    write_attempt(place, FIRST)
    content = (place / ".metadata").read_bytes()
    write_attempt(place, SECOND)
    write_decision(place, SECOND, records_pb2.OUTCOME_COMMIT, content + b"#")
    write(place / ".metadata", content + b"#")
    data = {name for name in files_below(place) if name.endswith(".distcp")}
    for dry in (("--dry-run",), ()):
        result = pannier("gc", str(place), *NOW, *dry, "--json")
        (kept,) = lines(result, "kept")
        assert (kept["attempt"], "refers to" in kept["reason"]) == (FIRST, True)
        assert data <= files_below(place)


def test_what_was_removed_before_an_error_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = place.parent / "step-2"
    for each in (place, other):
        write_decision(each, FIRST, records_pb2.OUTCOME_ABORT)
        write(each / object_names.data_file(FIRST, 0, 0), b"late")
    late = object_names.data_file(FIRST, 0, 0)
    refuse_deletions(monkeypatch, other, late, DeniedError("no"))
    result = pannier("gc", str(place.parent), "--json")
    assert (result.code, "error: no" in result.err) == (3, True)
    removed, kept = result.json_lines()
    assert (removed["action"], removed["checkpoint"]) == ("removed", str(place))
    assert (kept["action"], kept["checkpoint"], kept["attempt"]) == ("kept", str(other), FIRST)
    assert kept["reason"] == "no"
    assert files_below(other) == {object_names.decision(FIRST), object_names.data_file(FIRST, 0, 0)}


def refuse_deletions(
    monkeypatch: pytest.MonkeyPatch, place: Path, name: str, error: Exception
) -> None:
    """Storage doesn't delete the object of this name at ``place``."""
    delete = LocalStore.delete

    async def refuse(self: LocalStore, key: str, *, generation: str | None = None) -> None:
        if (self.url, key) == (str(place), name):
            raise error
        await delete(self, key, generation=generation)

    monkeypatch.setattr(LocalStore, "delete", refuse)


def test_a_file_under_a_hold_keeps_nothing_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, other = object_names.data_file(FIRST, 0, 0), place.parent / "step-2"
    for attempt in (FIRST, SECOND, THIRD):
        write_attempt(place, attempt)
    write_decision(other, FIRST, records_pb2.OUTCOME_ABORT)
    write(other / held, b"late")
    refuse_deletions(monkeypatch, place, held, HeldError("under a hold"))
    result = pannier("gc", str(place.parent), *NOW, "--json")
    assert (result.code, "error: under a hold" in result.err) == (3, True), result
    (kept,) = [line for line in result.json_lines() if line["action"] == "kept"]
    assert kept["checkpoint"] == str(place)
    assert (kept["attempt"], kept["reason"]) == (FIRST, "under a hold")
    assert of(place, SECOND) == set()
    assert of(other, FIRST) == {object_names.decision(FIRST)}
    assert pannier("verify", str(place)).code == 0
    monkeypatch.undo()
    assert lines(pannier("gc", str(place), *NOW, "--json"), "removed")
    assert of(place, FIRST) == set()


def test_a_coordinator_hears_of_a_file_under_a_hold(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again, after all else is removed."""
    held = object_names.data_file(FIRST, 0, 0)
    for attempt in (FIRST, SECOND, THIRD):
        write_attempt(place, attempt)
    refuse_deletions(monkeypatch, place, held, HeldError("under a hold"))

    async def main() -> None:
        store = open_store(str(place))
        with pytest.raises(HeldError):
            await sweep_checkpoint(store, grace_s=0)
        await store.close()

    asyncio.run(main())
    assert held in of(place, FIRST)
    assert of(place, SECOND) == set()


def test_a_store_that_does_not_answer_ends_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each other checkpoint would wait for it, too."""
    others = [place, place.parent / "step-2"]
    for each in others:
        write_decision(each, FIRST, records_pb2.OUTCOME_ABORT)
        write(each / object_names.data_file(FIRST, 0, 0), b"late")
    before = files_below(place.parent)
    late = object_names.data_file(FIRST, 0, 0)
    refuse_deletions(monkeypatch, place, late, UnreachableError("no answer"))
    result = pannier("gc", str(place.parent), "--json")
    assert (result.code, "error: no answer" in result.err) == (3, True), result
    (kept,) = result.json_lines()
    assert (kept["action"], kept["checkpoint"]) == ("kept", str(place))
    assert files_below(place.parent) == before


def test_a_decision_that_is_the_last_of_a_removed_checkpoint_goes(place: Path) -> None:
    """The removal was killed before its last step."""
    metadata = write_attempt(place, FIRST)
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_file() and path != place / object_names.decision(FIRST):
            path.unlink()
    assert metadata
    result = pannier("gc", str(place.parent), "--json")
    assert [line["reason"] for line in lines(result, "removed")] == ["removed"]
    assert files_below(place) == set()


class Between(UnreliableStore):
    """Something comes between the sweep's listing and its first mark."""

    def __init__(self, inner: Store, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self._then = then

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if key.endswith("/superseded"):
            await asyncio.to_thread(self._then)
        return await super().create(key, data)


def test_a_sweep_beside_a_removal_leaves_no_mark(place: Path) -> None:
    """It would look like a save in progress."""
    write_attempt(place, FIRST)
    write_attempt(place, SECOND)

    async def run() -> None:
        store = Between(open_store(str(place)), lambda: pannier("rm", str(place), "--yes"))
        await sweep_checkpoint(store, grace_s=3600)

    asyncio.run(run())
    assert files_below(place) == set()


@pytest.mark.parametrize("mark", [object_names.removal_mark, object_names.superseded_mark])
def test_a_mark_without_its_attempt_is_no_save_in_progress(
    place: Path, mark: Callable[[str], str]
) -> None:
    """Its writer was killed, or another process removed the attempt while it was written."""
    write_attempt(place, SECOND)
    kept = files_below(place)
    write(place / mark(FIRST), b"{}")
    alone = place.parent / "step-2"
    write(alone / mark(FIRST), b"{}")
    (line,) = pannier("ls", str(place.parent), "--json").json_lines()
    assert (line["checkpoint"], line["state"]) == (str(place), "committed")
    assert pannier("recover", str(place.parent), "--json").out == ""
    removed = lines(pannier("gc", str(place.parent), "--json"), "removed")
    assert {(line["checkpoint"], line["name"], line["reason"]) for line in removed} == {
        (str(place), mark(FIRST), "removed"),
        (str(alone), mark(FIRST), "removed"),
    }
    assert files_below(place) == kept
    assert not alone.exists()
    write(place / mark(FIRST), b"{}")
    result = pannier("rm", str(place), "--yes", "--json")
    assert result.json()["undecided"] == []
    assert not place.exists()
