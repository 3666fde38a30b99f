"""``pannier ls`` lists the checkpoints from storage alone."""

import json
import os
from pathlib import Path

import pytest

from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.processes.cli import pannier
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.gcs_server import GcsServer

ATTEMPT = "i1-inc-g0000000a-s3"


def test_checkpoints_of_every_standing(tmp_path: Path) -> None:
    write_attempt(tmp_path / "step-1", ATTEMPT, ranks=1, files=1, size=1000, decided_at=50.0)
    write_attempt(tmp_path / "step-2", "i1-inc-g0000000a-s4", commit=False)
    write_attempt(tmp_path / "step-3", "i1-inc-g0000000a-s5", commit=False)
    write_decision(tmp_path / "step-3", "i1-inc-g0000000a-s5", records_pb2.OUTCOME_ABORT)
    removed = "i1-inc-g0000000a-s6"
    write_attempt(tmp_path / "step-4", removed)
    write(tmp_path / "step-4" / object_names.removal_mark(removed), b"{}")
    write(tmp_path / "plain" / ".metadata", b"pickle")
    write(tmp_path / "plain" / "__0_0.distcp", b"12345")
    write(tmp_path / "notes" / "readme", b"not a checkpoint")
    write(tmp_path / ".pannier" / "incarnations" / "000000000001", b"{}")
    result = pannier("ls", str(tmp_path), "--json")
    assert result.code == 0, result
    lines = result.json_lines()
    found = {Path(line["checkpoint"]).name: line for line in lines}
    assert {name: line["state"] for name, line in found.items()} == {
        "step-1": "committed",
        "step-2": "undecided",
        "step-3": "aborted",
        "step-4": "removing",
        "plain": "foreign",
    }
    assert found["step-1"] == {
        "checkpoint": str(tmp_path / "step-1"),
        "state": "committed",
        "attempt": ATTEMPT,
        "bytes": 1000,
        "time": 50.0,
        "job": "job",
        "metrics": {},
        "kept_for": [],
    }
    order = [Path(line["checkpoint"]).name for line in lines]
    assert order == ["plain", "step-1", "step-2", "step-3", "step-4"], (
        "foreign ones, then the oldest, first"
    )
    assert (found["plain"]["attempt"], found["plain"]["bytes"]) == (None, 5)
    table = pannier("ls", str(tmp_path))
    assert table.code == 0
    assert ATTEMPT in next(line for line in table.out.splitlines() if "step-1" in line)


def test_a_metric_that_json_can_not_have_is_null(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    write_attempt(place, ATTEMPT)
    path = place / object_names.decision(ATTEMPT)
    decision = json.loads(path.read_bytes())
    path.write_text(json.dumps({**decision, "metrics": {"loss": "Infinity", "accuracy": 0.5}}))
    (line,) = pannier("ls", str(tmp_path), "--json").json_lines()
    assert line["metrics"] == {"loss": None, "accuracy": 0.5}


def test_the_order_is_that_of_the_saves_and_not_of_clocks(tmp_path: Path) -> None:
    """The second save was committed first, by a host whose clock is behind."""
    write_attempt(tmp_path / "step-200", "i1-inc-g0000000a-s10", decided_at=50.0)
    write_attempt(tmp_path / "step-100", "i1-inc-g0000000a-s9", decided_at=100.0)
    write_attempt(tmp_path / "step-300", "i2-inc-g0000000a-s1", decided_at=1.0)
    lines = pannier("ls", str(tmp_path), "--json").json_lines()
    names = [Path(line["checkpoint"]).name for line in lines]
    assert names == ["step-100", "step-200", "step-300"]


def test_the_attempt_is_the_one_that_metadata_belongs_to(tmp_path: Path) -> None:
    directory = tmp_path / "step-1"
    first = write_attempt(directory, ATTEMPT, size=1000, ranks=1, files=1)
    write_attempt(directory, "i2-inc-g0000000a-s1", size=2000, ranks=1, files=1)
    (line,) = pannier("ls", str(tmp_path), "--json").json_lines()
    assert (line["attempt"], line["bytes"]) == ("i2-inc-g0000000a-s1", 2000)
    # As it was before the second commit took effect.
    write(directory / object_names.METADATA, first)
    (line,) = pannier("ls", str(tmp_path), "--json").json_lines()
    assert (line["attempt"], line["bytes"]) == (ATTEMPT, 1000)


def test_checkpoints_are_found_at_any_depth_and_at_the_root_itself(tmp_path: Path) -> None:
    write_attempt(tmp_path, ATTEMPT, decided_at=1.0)
    write_attempt(tmp_path / "a" / "b", ATTEMPT, decided_at=2.0)
    lines = pannier("ls", str(tmp_path), "--json").json_lines()
    assert [line["checkpoint"] for line in lines] == [str(tmp_path), str(tmp_path / "a" / "b")]


def test_retain_says_where_its_job_comes_from(tmp_path: Path) -> None:
    result = pannier("retain", str(tmp_path), "--keep-newest", "1")
    assert result.code == 2, result
    assert "the trainers' PANNIER_JOB" in result.err
    assert f"below {tmp_path} are checkpoints of no job" in result.err
    write_attempt(tmp_path / "step-1", ATTEMPT)
    result = pannier("retain", str(tmp_path), "--keep-newest", "1")
    assert f"below {tmp_path} are checkpoints of job\n" in result.err
    assert (tmp_path / "step-1/.metadata").exists()


def test_a_pattern_chooses_checkpoints_for_ls_and_retain(tmp_path: Path) -> None:
    def nested(step: int, attempt: str, planned_at: float) -> None:
        directory = tmp_path / f"checkpoint-{step}" / "dcp"
        write_attempt(directory, attempt, ranks=1, files=1)
        os.utime(directory / object_names.manifest(attempt), (planned_at, planned_at))

    # The second start went on from before step 20; each directory numbers incarnations by itself.
    nested(20, "i1-one-g0000000a-s2", 100)
    nested(15, "i1-two-g0000000a-s1", 200)
    nested(30, "i1-two-g0000000a-s3", 210)
    write_attempt(tmp_path / "checkpoint-20", ATTEMPT)
    write_attempt(tmp_path / "step-1", ATTEMPT)
    here = ("--pattern", "checkpoint-*/dcp")

    def listed() -> list[str]:
        lines = pannier("ls", str(tmp_path), *here, "--json").json_lines()
        return [Path(line["checkpoint"]).relative_to(tmp_path).as_posix() for line in lines]

    assert listed() == ["checkpoint-20/dcp", "checkpoint-15/dcp", "checkpoint-30/dcp"]
    retained = pannier(
        *("retain", str(tmp_path), "--job", "job", "--keep-every", "10", "--json", *here)
    )
    kept = {
        Path(line["checkpoint"]).parent.name: line["kept_for"] for line in retained.json_lines()
    }
    assert kept == {
        "checkpoint-20": ["every 10"],
        "checkpoint-15": [],
        "checkpoint-30": ["newest", "every 10"],
    }
    assert listed() == ["checkpoint-20/dcp", "checkpoint-30/dcp"]
    assert (tmp_path / "step-1" / ".metadata").exists()
    table = pannier("ls", str(tmp_path), *here, "-o", "wide")
    assert "newest, every 10" in table.out
    none = pannier("ls", str(tmp_path), "--pattern", "run-*/dcp")
    assert (none.code, none.out) == (1, "")
    assert f"no checkpoints below {tmp_path} match run-*/dcp" in none.err
    other = pannier("retain", str(tmp_path), "--job", "other", *here)
    assert f"no checkpoints of job other as checkpoint-*/dcp below {tmp_path}" in other.err
    assert "there are some of job" in other.err
    for flags in (("ls", str(tmp_path)), ("retain", str(tmp_path), "--job", "job")):
        refused = pannier(*flags, "--pattern", "/absolute/*")
        assert refused.code == 2
        assert "pattern '/absolute/*' is not relative to the root" in refused.err


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_a_root_without_checkpoints_is_a_negative_result(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for flags in ((), ("--json",)):
        result = pannier("ls", str(tmp_path / name), *flags)
        assert (result.code, result.out) == (1, "")
        assert f"error: no checkpoints below {tmp_path / name}" in result.err
        assert "hint: ROOT is" in result.err


def test_a_damaged_decision_does_not_hide_other_checkpoints(tmp_path: Path) -> None:
    write_attempt(tmp_path / "bad", ATTEMPT)
    write(tmp_path / "bad" / object_names.decision(ATTEMPT), b"\xff{")
    write_attempt(tmp_path / "good", ATTEMPT)
    lines = pannier("ls", str(tmp_path), "--json").json_lines()
    states = {Path(line["checkpoint"]).name: line["state"] for line in lines}
    assert states == {"bad": "foreign", "good": "committed"}


def test_a_typo_of_a_url_is_refused() -> None:
    result = pannier("ls", "gs:/b/x")
    assert result.code == 2, result
    assert "use gs://b/x, or ./gs:/b/x" in " ".join(result.err.split())


@pytest.mark.parametrize("command", ["ls", "gc", "recover", "verify", "rm"])
def test_a_bucket_that_is_down_is_named_while_the_command_waits_and_given_up_soon(
    command: str, server: GcsServer
) -> None:
    server.fault(kind="status", status=503, times=-1)
    more = ["--yes"] if command == "rm" else []
    result = pannier(command, "gs://bucket/run", "--timeout", "3", *more, env=server.env)
    server.clear()
    assert result.code == 3, result
    waiting, problem, hint = result.err.splitlines()[-3:]
    assert waiting.startswith("waiting for gs://bucket/run, up to 3 s (--timeout): ")
    assert "503" in waiting
    assert problem.startswith("error: ")
    assert "503" in problem
    assert "try again later" in hint
    assert "credentials" not in hint
