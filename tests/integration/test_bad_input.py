"""What can't be saved is refused at once, by name; nothing of it is visible and the next save works."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import (
    BusyError,
    Client,
    InvalidRequestError,
    SaveAbortedError,
    SaveSkippedError,
    UnavailableError,
    VersionMismatchError,
)
from pannier.client.config import load_settings
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons, await_serving, clean_environment
from support.processes.processes import Process, python
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

SCRIPT = Path(__file__).parent / "ranks" / "bad_input.py"
AT_ONCE_S = 30.0
"""Under load; nothing here may wait for a deadline."""
CASES: dict[str, Sequence[str]] = {
    # Words that the error on every rank has.
    "two types": ("model.key", "rank 0", "rank 1"),
    "two sizes": ("model.key", "rank 0", "rank 1"),
    "two dtypes": ("model.key", "float64", "float32"),
    "missing shard": ("model.weight",),
    "overlapping shards": ("model.weight", "overlap"),
    "shard out of bounds": ("model.weight",),
    "two names": ("a.b",),
    "sparse": ("model.bad", "sparse"),
    "meta": ("model.bad", "meta"),
    "nested tensor": ("model.bad", "nested"),
    "partial": ("model.bad", "Partial"),
    "unpicklable": ("model.bad", "broken on purpose"),
    "too big a message": ("limit",),
    "own global plan": ("OwnGlobalPlan", "--planner"),
    "planner data": ("OwnPlannerData", "planner_data"),
    "outside": ("-outside/step-1", "--allow"),
    "dots": ("..",),
    "symlink": ("link/step-1", "--allow"),
    "other scheme": ("ftp://",),
    "no permission": ("/sys/kernel/pannier", "not permitted"),
    "below a file": ("a-file", "not a directory"),
    "missing bucket": ("gs://missing", "404"),
    "denied": ("gs://denied", "403"),
}
ONE_RANKS_FAULT = ("sparse", "meta", "nested tensor", "unpicklable", "too big a message")
OWN_EXCEPTION = {"unpicklable": "TypeError", "two names": "ValueError"}
"""What torch or the state itself raises, by case: it reaches the caller of that rank as it is."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Root of the checkpoints, and what each of two ranks reports."""
    directory = tmp_path_factory.mktemp("bad")
    root = directory / "run"
    root.mkdir()
    (directory / "elsewhere").mkdir()
    (root / "link").symlink_to(directory / "elsewhere")
    allow = [str(root), "/sys/kernel", "gs://missing", "gs://denied"]
    with (
        GcsServer(directory / "gcs", buckets=["denied"]) as server,
        Daemons(directory, allow=allow, environment=server.env) as daemons,
    ):
        server.fault(kind="status", status=403, path="denied", times=-1)
        env = daemons.env(ROOT=str(root), REPORT=str(directory))
        run_ranks(SCRIPT, 2, env, torchrun=False)
    return root, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_clear_error_at_once_on_every_rank(
    run: tuple[Path, list[dict[str, Any]]], case: str
) -> None:
    _, ranks = run
    for found in (report[case] for report in ranks):
        own = OWN_EXCEPTION.get(case, InvalidRequestError.__name__)
        assert found["type"] in (SaveAbortedError.__name__, own), found
        for word in CASES[case]:
            assert word in found["message"], found
        # The message above the limits takes its time to be made.
        assert found["seconds"] < (BOUND_S if case == "too big a message" else AT_ONCE_S)
    if case in ONE_RANKS_FAULT:
        assert ranks[1][case]["type"] == OWN_EXCEPTION.get(case, InvalidRequestError.__name__)
        assert ranks[0][case]["failures"] == [1]
        assert "rank 1" in ranks[0][case]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_next_save_works(run: tuple[Path, list[dict[str, Any]]], case: str) -> None:
    root, ranks = run
    assert [report[f"after {case}"] for report in ranks] == [{"type": ""}, {"type": ""}]
    state = {"weight.1": torch.zeros(10)}
    dcp.load(state, checkpoint_id=root / f"after {case}", no_dist=True)
    assert torch.equal(state["weight.1"], torch.ones(10))


@pytest.mark.slow
def test_nothing_half_made_is_visible(run: tuple[Path, list[dict[str, Any]]]) -> None:
    root, _ = run
    visible = {path.parent.name for path in root.parent.rglob(".metadata")}
    assert visible == {f"after {case}" for case in CASES}
    # What had been uploaded of a failed save is deleted after the ranks know of the failure.
    wait_until(lambda: {path.parent.name for path in root.parent.rglob("*.distcp")} == visible)
    assert not list(root.glob("link/*"))


def saving(daemons: Daemons, **settings: Any) -> Client:
    return Client(load_settings(sidecar=daemons.sidecar_address, job="test", **settings))


def test_no_sidecar_at_the_address(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/no.sock"
    with Client(load_settings(sidecar=address, job="test")) as client:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"no\.sock"):
            client.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1")
        assert time.monotonic() - began < AT_ONCE_S
    assert not list(tmp_path.iterdir())


def test_a_sidecar_that_comes_up_later_is_found_by_the_next_save(tmp_path: Path) -> None:
    with Daemons(tmp_path, start=False) as daemons, saving(daemons) as client:
        with pytest.raises(UnavailableError):
            client.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1")
        daemons.coordinator.start()
        daemons.sidecar.start()
        client.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-2")
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("old", ["sidecar", "coordinator"])
def test_daemons_of_another_version_are_named(tmp_path: Path, old: str) -> None:
    with Daemons(tmp_path, start=False) as daemons:
        for daemon in (daemons.coordinator, daemons.sidecar):
            if daemon.name.startswith(old):
                continue
            daemon.start(ready=False)
        other = daemons.sidecar if old == "sidecar" else daemons.coordinator
        patched = "import pannier.wire.version as v; v.WIRE_VERSION = 99; "
        patched += "from pannier.cli.main import main; main()"
        process = Process(
            f"other {old}",
            python("-c", patched, *other.arguments),
            environment=clean_environment(),
            log=tmp_path / "other.log",
        )
        try:
            for daemon in (daemons.coordinator, daemons.sidecar):
                await_serving(daemon.address)
            client = saving(daemons)
            began = time.monotonic()
            with client, pytest.raises((VersionMismatchError, SaveAbortedError)) as caught:
                client.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1").result(
                    BOUND_S
                )
            assert time.monotonic() - began < AT_ONCE_S
            for word in ("version", "99", old):
                assert word in str(caught.value)
        finally:
            process.close()
        assert not (tmp_path / "step-1" / ".metadata").exists()


@pytest.mark.parametrize(
    ("checkpoint_id", "says"),
    [
        *(("", "path"), ("/", "'/'"), ("gs://", "gs://"), ("gs://bucket", "gs://bucket")),
        *(("s3://bucket/../x", "'s3://bucket/../x'"), (None, "checkpoint_id")),
    ],
)
def test_a_malformed_id_is_refused_before_anything_is_sent(
    tmp_path: Path, checkpoint_id: str, says: str
) -> None:
    # No sidecar is there to be asked.
    with Client(load_settings(sidecar=f"unix://{tmp_path}/no.sock", job="test")) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.async_save({"w": torch.ones(2)}, checkpoint_id=checkpoint_id)
        assert says in str(caught.value)


def test_an_id_that_storage_has_no_place_for_is_refused(daemons: Daemons, tmp_path: Path) -> None:
    ids = ["gs://b//x", "nothing://a/b", "memory://a/b", "file://a/b", "/a/\n/b"]
    with saving(daemons) as client:
        for checkpoint_id in ids:
            with pytest.raises(InvalidRequestError) as caught:
                client.async_save({"w": torch.ones(2)}, checkpoint_id=checkpoint_id)
            assert repr(checkpoint_id) in str(caught.value)
        client.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1")


@pytest.fixture
def full_spool(tmp_path: Path) -> Iterator[tuple[Client, GcsServer]]:
    """A client whose first save fills the sidecar's spool until the server's delays are released."""
    with (
        GcsServer(tmp_path / "gcs") as server,
        Daemons(
            tmp_path, environment=server.env, sidecar_arguments=["--spool-budget", "15000000"]
        ) as daemons,
        # It is the spool that is full, not the memory of failed saves that is still freed.
        saving(daemons, max_in_flight=4) as client,
    ):
        client.save({"w": torch.ones(2)}, checkpoint_id="gs://bucket/run/step-0")
        server.fault(
            kind="delay", method="POST", path="uploadType=resumable", seconds=BOUND_S, times=-1
        )
        yield client, server
        server.clear()


def test_a_full_spool_is_waited_for_skipped_or_raised(
    full_spool: tuple[Client, GcsServer],
) -> None:
    client, server = full_spool
    state = {"w": torch.ones(2_500_000)}
    first = client.async_save(state, checkpoint_id="gs://bucket/run/step-1")
    assert first.staging_completion.done()
    while not first.status().bytes_ingested:
        assert not first.wait(0.01)
    raising = client.async_save(state, checkpoint_id="gs://bucket/run/step-2", on_busy="raise")
    with pytest.raises((BusyError, SaveAbortedError), match="spool") as caught:
        raising.result(BOUND_S)
    assert "free" in str(caught.value)
    skipped = client.async_save(state, checkpoint_id="gs://bucket/run/step-3", on_busy="skip")
    with pytest.raises(SaveSkippedError, match="spool"):
        skipped.result(BOUND_S)
    assert not first.done()
    waiting = client.async_save(state, checkpoint_id="gs://bucket/run/step-4")
    server.release()
    assert first.result(BOUND_S).attempt.endswith("-s2")
    assert waiting.result(BOUND_S).attempt.endswith("-s5")
    client.wait_all(BOUND_S)


def test_what_never_fits_into_the_spool_is_refused_with_both_sizes(
    full_spool: tuple[Client, GcsServer],
) -> None:
    client, _ = full_spool
    state = {"w": torch.ones(5_000_000)}
    with pytest.raises(SaveAbortedError, match="15000000") as caught:
        client.save(state, checkpoint_id="gs://bucket/run/too-big", on_busy="wait")
    assert caught.value.failures[0].kind == "SPOOL"
