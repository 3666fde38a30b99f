"""Which saves of an earlier start ``latest(include="ingested")`` waits for."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pannier.client.config import load_settings
from pannier.client.resume import ingested_saves
from pannier.client.resume.ingested_saves import IngestedSaves, Unfinished
from pannier.client.resume.latest import find_latest
from pannier.client.resume.sidecar_status import SidecarStatus
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.storage.checkpoints import write, write_attempt, write_decision

NESTED = "checkpoint-*/dcp"


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checkpoints that were committed from storage, as ``pannier recover`` would."""
    done: list[str] = []

    def commit(found: Unfinished, deadline: Deadline) -> str:
        done.append(found.directory.url)
        write_attempt(Path(found.directory.url), found.attempt, ranks=1, files=1)
        return ""

    monkeypatch.setattr(ingested_saves, "_commit", commit)
    monkeypatch.setattr(timeouts, "INGESTED_COMMIT_S", 0.0)
    monkeypatch.setattr(timeouts, "INGESTED_POLL_S", 0.01)
    return done


def saved(root: Path, step: int, attempt: str, at: float, **how: Any) -> str:
    directory = root / f"checkpoint-{step}" / "dcp"
    write_attempt(directory, attempt, ranks=1, files=1, **how)
    os.utime(directory / object_names.manifest(attempt), (at, at))
    return str(directory)


def ingested(tmp_path: Path) -> IngestedSaves:
    settings = load_settings(sidecar=f"unix://{tmp_path}/none.sock")
    return IngestedSaves(SidecarStatus(lambda: settings), lambda: None)


def newest(tmp_path: Path) -> str | None:
    return find_latest(
        tmp_path / "run", pattern=NESTED, include="ingested", ingested=ingested(tmp_path)
    )


def test_one_deeper_than_one_level_is_found_by_the_pattern(
    tmp_path: Path, committed: list[str]
) -> None:
    """The newest by the starts' times, though its directory numbers incarnations by itself."""
    root = tmp_path / "run"
    saved(root, 20, "i2-one-g0000000a-s2", 100)
    # Of the first start too, and older than what it committed: it is not waited for.
    saved(root, 10, "i1-one-g0000000a-s1", 90, commit=False)
    aborted = saved(root, 40, "i1-two-g0000000a-s2", 220, commit=False)
    write_decision(Path(aborted), "i1-two-g0000000a-s2", records_pb2.OUTCOME_ABORT)
    left = saved(root, 15, "i1-two-g0000000a-s1", 200, commit=False)
    assert newest(tmp_path) == left
    assert committed == [left]


def test_without_any_the_newest_committed_one_is_used(tmp_path: Path, committed: list[str]) -> None:
    root = tmp_path / "run"
    saved(root, 20, "i1-one-g0000000a-s2", 100)
    there = saved(root, 15, "i1-two-g0000000a-s1", 200)
    # Elsewhere: the pattern doesn't match it.
    write_attempt(root / "step-1", "i9-two-g0000000a-s9", commit=False)
    assert newest(tmp_path) == there
    assert committed == []


def test_one_that_recover_cannot_commit_is_logged_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = saved(tmp_path / "run", 15, "i1-two-g0000000a-s1", 200, commit=False)

    def recover(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        # The wait ends once it has failed.
        monkeypatch.setattr(timeouts, "INGESTED_SIGN_S", 0.0)
        return subprocess.CompletedProcess(command, 1, "", "the bucket is read-only\n")

    monkeypatch.setattr(subprocess, "run", recover)
    monkeypatch.setattr(timeouts, "INGESTED_COMMIT_S", 0.0)
    monkeypatch.setattr(timeouts, "INGESTED_POLL_S", 0.01)
    assert newest(tmp_path) is None
    assert (
        f"{left} is no checkpoint yet, and not used: its receipts are all in storage, but `pannier recover` "
        "failed: the bucket is read-only"
    ) in caplog.text


REMOVED: dict[str, Callable[[Path, str], None]] = {
    "marked": lambda place, attempt: write(place / object_names.removal_mark(attempt), b"{}"),
    "removed up to its decision": lambda place, attempt: (
        place / object_names.manifest(attempt)
    ).unlink(),
}


@pytest.mark.parametrize("how", REMOVED)
def test_one_that_was_committed_and_is_being_removed_is_not_waited_for(
    tmp_path: Path, committed: list[str], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Its ``.metadata`` goes first, its decision last."""
    older = saved(tmp_path / "run", 10, "i1-one-g0000000a-s1", 100)
    left = Path(saved(tmp_path / "run", 20, "i1-one-g0000000a-s2", 110))
    (left / object_names.METADATA).unlink()
    REMOVED[how](left, "i1-one-g0000000a-s2")
    assert newest(tmp_path) == older
    assert committed == []
    assert "not used" not in caplog.text


def test_one_that_another_program_has_replaced_is_not_waited_for(
    tmp_path: Path, committed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    older = saved(tmp_path / "run", 10, "i1-one-g0000000a-s1", 100)
    left = Path(saved(tmp_path / "run", 20, "i1-one-g0000000a-s2", 110))
    decided = (left / object_names.decision("i1-one-g0000000a-s2")).stat().st_mtime
    write(left / object_names.METADATA, b"another program's")
    os.utime(left / object_names.METADATA, (decided + 1, decided + 1))
    assert newest(tmp_path) == older
    assert committed == []
    assert "not used" not in caplog.text


def test_one_that_is_about_to_replace_another_programs_is_waited_for(
    tmp_path: Path, committed: list[str]
) -> None:
    left = saved(tmp_path / "run", 20, "i1-one-g0000000a-s2", 110)
    decided = (Path(left) / object_names.decision("i1-one-g0000000a-s2")).stat().st_mtime
    write(Path(left) / object_names.METADATA, b"another program's")
    os.utime(Path(left) / object_names.METADATA, (decided - 1, decided - 1))
    assert newest(tmp_path) == left
    assert committed == [left]
