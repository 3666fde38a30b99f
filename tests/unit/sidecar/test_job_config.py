"""The files of ``--jobs``: what they say, what is refused, and that one of them never harms another."""

import json
from pathlib import Path

import pytest

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.job_config import MOST, JobDirectory, read_job
from pannier.wire import auth_token
from pannier.wire.errors import ConfigurationError
from support.actors.nodes import JobFiles

TOKEN = "b2" * 16
GOOD = {"tokens": [TOKEN], "allow": ["gs://bucket/llama"]}


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    return JobFiles(tmp_path / "jobs")


def test_a_job_is_what_its_file_says(files: JobFiles) -> None:
    old = "c3" * 16
    files.add(
        "llama-7b",
        tokens=[TOKEN, old],
        allow=["gs://bucket/llama", "/nfs/llama"],
        coordinator="coordinator.llama:7070",
        spool_budget="1.5GiB",
        memory="64MiB",
    )
    files.add("gpt", **GOOD | {"tokens": ["d4" * 16]})
    jobs = JobDirectory(files.directory).read()
    assert jobs.keys() == {"gpt", "llama-7b"}
    job = jobs["llama-7b"]
    assert job.digests == {auth_token.digest(TOKEN), auth_token.digest(old)}
    assert job.allow == ("gs://bucket/llama", "/nfs/llama")
    assert (job.coordinator, job.spool_budget) == ("coordinator.llama:7070", 3 << 29)
    assert (job.memory, jobs["gpt"].memory) == (64 << 20, None)
    assert (jobs["gpt"].coordinator, jobs["gpt"].spool_budget) == (None, None)
    assert TOKEN not in repr(jobs)
    assert str(auth_token.digest(TOKEN)) not in repr(jobs)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not JSON"),
        (f'{{"tokens": ["{TOKEN}"', "not JSON at line 1"),
        ("[" * 30000, "not JSON"),
        ("[]", "no JSON object"),
        (GOOD | {"token": TOKEN}, "'token' is none of tokens, allow"),
        ({"allow": ["/x"]}, '"tokens" is empty'),
        (GOOD | {"tokens": TOKEN}, '"tokens" is not a list'),
        (GOOD | {"tokens": [1]}, '"tokens" is not a list'),
        (GOOD | {"tokens": ["secret"]}, '"tokens" has a token of 6 characters'),
        ({"tokens": [TOKEN]}, '"allow" is empty'),
        (GOOD | {"allow": "gs://bucket"}, '"allow" is not a list'),
        (GOOD | {"allow": ["ftp://x"]}, '"allow": .*ftp'),
        (GOOD | {"allow": ["gs://b/../c"]}, '"allow": .*contains'),
        (GOOD | {"coordinator": "nowhere"}, '"coordinator"=.nowhere'),
        (GOOD | {"coordinator": 7070}, '"coordinator" is not a string'),
        (GOOD | {"spool_budget": "much"}, '"spool_budget": .much. is not a size'),
        (GOOD | {"spool_budget": 0}, '"spool_budget": .0. is not a positive'),
        (GOOD | {"spool_budget": True}, '"spool_budget" is not a size'),
        (GOOD | {"memory": "much"}, '"memory": .much. is not a size'),
        ("x" * (65 << 10), "at most 65536"),
    ],
)
def test_a_file_that_makes_no_sense_says_where_and_harms_no_other(
    files: JobFiles,
    content: str | dict[str, object],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files.add("good", **GOOD | {"tokens": ["e5" * 16]})
    files.write("bad", content if isinstance(content, str) else json.dumps(content))
    jobs = JobDirectory(files.directory)
    assert jobs.read().keys() == {"good"}
    with pytest.raises(ConfigurationError, match=problem):
        read_job(files.directory / "bad.json")
    (said,) = jobs.problems.values()
    assert f"{files.directory}/bad.json" in said
    jobs.read()
    assert sum("bad.json" in record.getMessage() for record in caplog.records) == 1, "said once"
    for secret in (TOKEN, "secret"):
        assert secret not in caplog.text + said
    files.add("bad", **GOOD)
    assert jobs.read().keys() == {"bad", "good"}
    assert jobs.problems == {}


@pytest.mark.parametrize("name", ["-x", ".x", "a b", "x" * 64, "é"])
def test_what_can_be_no_job_is_none(files: JobFiles, name: str) -> None:
    files.write(name, json.dumps(GOOD))
    assert JobDirectory(files.directory).read() == {}


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(GOOD))
    path.chmod(0o660)
    jobs = JobDirectory(tmp_path)
    assert jobs.read() == {}
    assert "mode 0660" in jobs.problems["llama.json"]
    # A Secret's: root's, with a group.
    path.chmod(0o440)
    assert jobs.read().keys() == {"llama"}


def test_a_damaged_file_leaves_the_job_as_it_was(files: JobFiles) -> None:
    files.add("llama", **GOOD)
    jobs = JobDirectory(files.directory)
    before = jobs.read()
    files.write("llama", "{")
    assert jobs.read() == before
    assert jobs.problems.keys() == {"llama.json"}
    files.remove("llama")
    assert jobs.read() == {}
    assert jobs.problems == {}


def test_a_directory_that_is_away_for_a_moment_takes_no_job_away(files: JobFiles) -> None:
    files.add("llama", **GOOD)
    jobs = JobDirectory(files.directory)
    before = jobs.read()
    aside = files.directory.rename(files.directory.with_name("aside"))
    assert jobs.read() == before
    assert jobs.problems
    aside.rename(files.directory)
    assert jobs.read() == before
    assert not jobs.problems


def test_two_jobs_never_share_a_token(files: JobFiles) -> None:
    files.add("first", **GOOD)
    jobs = JobDirectory(files.directory)
    assert jobs.read().keys() == {"first"}
    files.add("thief", **GOOD | {"tokens": ["f6" * 16, TOKEN]})
    # Who had it goes on.
    assert jobs.read().keys() == {"first"}
    assert "also one of first" in jobs.problems["thief.json"]
    # Of two new jobs it could be either.
    assert JobDirectory(files.directory).read() == {}


def test_a_job_that_gets_anothers_token_goes_on_with_its_own(files: JobFiles) -> None:
    own = {name: str(number) * 32 for number, name in enumerate("abc")}
    for name in "ab":
        files.add(name, **GOOD | {"tokens": [own[name]]})
    jobs = JobDirectory(files.directory)
    before = jobs.read()
    files.add("a", **GOOD | {"tokens": [own["b"]], "memory": "64MiB"})
    assert jobs.read() == before
    assert "also one of b" in jobs.problems["a.json"]
    assert jobs.problems.keys() == {"a.json"}
    # Nor does a new job get the token that the first one goes on with.
    files.add("c", **GOOD | {"tokens": [own["c"], own["a"]]})
    assert jobs.read() == before
    assert "also one of a" in jobs.problems["c.json"]
    files.add("a", **GOOD | {"tokens": ["d4" * 16]})
    assert jobs.read().keys() == {"a", "b", "c"}
    assert not jobs.problems


def test_there_are_not_more_than_a_host_can_have(files: JobFiles) -> None:
    for number in range(MOST + 1):
        files.add(f"job-{number:03}", **GOOD | {"tokens": [f"{number:032}"]})
    jobs = JobDirectory(files.directory)
    assert len(jobs.read()) == MOST
    refused = f"a node serves at most {MOST} jobs: this one is not served"
    assert jobs.problems[f"job-{MOST:03}.json"].endswith(refused)
    # A later one takes no job's place, whatever its name.
    files.add("a-new-one", **GOOD | {"tokens": ["a1" * 16]})
    assert jobs.read().keys() == {f"job-{number:03}" for number in range(MOST)}
    assert jobs.problems.keys() == {"a-new-one.json", f"job-{MOST:03}.json"}
    files.remove("job-007")
    assert "a-new-one" in jobs.read()


def test_a_sidecar_needs_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--jobs=.*none can't be read"):
        JobDirectory(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"address": "localhost:7070"}, "--address=localhost:7070 is not a unix"),
        ({"listen": "localhost:7071"}, "--listen doesn't go with --jobs"),
        ({"allow": ("/x",)}, "--allow doesn't go with --jobs"),
        ({"idle_exit_s": 1.0}, "--idle-exit doesn't go with --jobs"),
    ],
)
def test_what_does_not_go_with_jobs_is_refused(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SidecarConfig(spool=tmp_path, jobs=tmp_path, **settings)  # type: ignore[arg-type]


def test_a_sidecar_of_one_job_needs_its_coordinator(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--coordinator is missing"):
        SidecarConfig(spool=tmp_path)
    SidecarConfig(spool=tmp_path, jobs=tmp_path)
