"""A second save to the same id: the first is whole until then, and is removed once no process reads it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from pannier.client import CheckpointExistsError, Client, StorageReader, StorageWriter
from pannier.client.config import load_settings
from pannier.common import timeouts
from pannier.common.fault_points import VARIABLE
from support.processes.cli import pannier_here as pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GRACE_S = 1.0
SIZE = 1000


@pytest.fixture(scope="module")
def daemons(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(
        tmp_path_factory.mktemp("overwrite"),
        environment=server.env,
        coordinator_arguments=["--grace-superseded", str(GRACE_S)],
    ) as running:
        yield running


@pytest.fixture(params=["file", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "run" / "step-1")
    return f"gs://bucket/{tmp_path.name}/step-1"


def version(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), float(number))}


def objects(place: str) -> list[str]:
    protocol, _, path = place.rpartition("://")
    options = {"token": "anon"} if protocol else {}
    fs = fsspec.filesystem(protocol or "file", use_listings_cache=False, **options)
    return [str(name).partition("step-1/")[2] for name in fs.find(path)]


def of(place: str, attempt: str) -> list[str]:
    return [name for name in objects(place) if attempt in name]


def until(reached: Callable[[], bool], what: str) -> None:
    """Polls storage, which sends no notification of changes, until ``reached``."""
    end = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < end, f"not within {BOUND_S} s: {what}"
        time.sleep(0.05)


def test_a_job_without_its_incarnation_records_saves_the_new_bytes(
    daemons: Daemons, server: GcsServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**daemons.env(), **server.env, "PANNIER_JOB": "job"}.items():
        monkeypatch.setenv(name, value)
    root = place.rpartition("/")[0]
    fs, path = fsspec.url_to_fs(root, **({"token": "anon"} if "://" in root else {}))
    attempts = []
    for number in (1, 2):
        # A new incarnation each.
        with Client(load_settings()) as client:
            attempts.append(client.save(version(number), checkpoint_id=place).attempt)
        fs.invalidate_cache()
        # As `cp -r run/*` does, or a rule that removes what is old.
        fs.rm(f"{path}/.pannier/incarnations", recursive=True)
    loaded = {"w": torch.zeros(SIZE)}
    dcp.load(loaded, storage_reader=StorageReader(place))
    assert torch.equal(loaded["w"], version(2)["w"])
    assert attempts[0] != attempts[1]
    assert pannier("verify", place).code == 0


class Halting(DefaultLoadPlanner):
    """Stops in the middle of a load until its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()
        self.go_on = threading.Event()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.reading.set()
        assert self.go_on.wait(BOUND_S)
        return super().resolve_tensor(read_item)


def another_jobs(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("PANNIER_JOB", "another")
    return Client(load_settings())


def test_a_checkpoint_is_replaced_by_its_own_job_or_on_request(
    client: Client, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.save(version(1), checkpoint_id=place)
    client.save(version(2), checkpoint_id=place)
    with pytest.raises(CheckpointExistsError, match=r"overwrite=False.*overwrite=True"):
        client.async_save(version(3), checkpoint_id=place, overwrite=False).result()
    with another_jobs(monkeypatch) as other:
        # At once, from the call: nothing was planned yet.
        with pytest.raises(FileExistsError, match="of job test, and this is job another"):
            other.async_save(version(4), checkpoint_id=place)
        with pytest.raises(CheckpointException, match="of job test, and this is job another"):
            dcp.save(version(5), storage_writer=StorageWriter(place, client=other))
        assert torch.equal(load_version(place), version(2)["w"])
        other.save(version(6), checkpoint_id=place, overwrite=True)
        assert torch.equal(load_version(place), version(6)["w"])
        other.save(version(7), checkpoint_id=place)
    with pytest.raises(CheckpointExistsError, match="of job another, and this is job test"):
        client.save(version(8), checkpoint_id=place)
    monkeypatch.setenv("PANNIER_JOB", "test")
    with Client(load_settings()) as restarted:
        writer = StorageWriter(place, client=restarted, overwrite=True)
        assert writer.overwrite is True
        dcp.save(version(9), storage_writer=writer)
    assert torch.equal(load_version(place), version(9)["w"])


def test_a_checkpoint_of_torchs_own_is_replaced_on_request(client: Client, tmp_path: Path) -> None:
    place = tmp_path / "run" / "step-1"
    dcp.save(version(1), checkpoint_id=place, no_dist=True)
    with pytest.raises(CheckpointExistsError, match="Pannier didn't write"):
        client.save(version(2), checkpoint_id=place)
    assert torch.equal(load_version(str(place)), version(1)["w"])
    client.save(version(3), checkpoint_id=place, overwrite=True)
    assert torch.equal(load_version(str(place)), version(3)["w"])


def load_version(place: str) -> torch.Tensor:
    loaded = version(0)
    dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
    return loaded["w"]


def test_an_overwritten_checkpoint_stays_under_its_reader_and_goes_afterwards(
    client: Client, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LEASE_RENEW_S", 3.0)
    first = client.save(version(1), checkpoint_id=place)
    loaded, planner = version(0), Halting()
    problems: list[BaseException] = []

    def load() -> None:
        try:
            # In small pieces: what comes after the halt is not read ahead.
            reader = StorageReader(place, memory_bytes=1)
            client.load(loaded, storage_reader=reader, planner=planner)
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            problems.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        assert planner.reading.wait(BOUND_S)
        (held,) = [name for name in objects(place) if "/leases/" in name]
        assert first.attempt in held
        second = client.save(version(2), checkpoint_id=place)
        began = time.monotonic()
        until(lambda: f".pannier/{first.attempt}/superseded" in objects(place), "the mark")
        # Longer than the grace period, and than the lease lives without being renewed.
        while time.monotonic() - began < max(GRACE_S, 3 * timeouts.LEASE_RENEW_S) + 0.5:
            assert [name for name in of(place, first.attempt) if name.endswith(".distcp")]
            time.sleep(0.1)
    finally:
        planner.go_on.set()
        loading.join(BOUND_S)
    assert problems == []
    assert torch.equal(loaded["w"], version(1)["w"])
    until(lambda: of(place, first.attempt) == [], "the superseded attempt is removed")
    assert of(place, second.attempt)
    assert not [name for name in objects(place) if "/leases/" in name]
    assert pannier("verify", place).code == 0
    client.load(loaded, checkpoint_id=place, verify=True)
    assert torch.equal(loaded["w"], version(2)["w"])


def load_and_look() -> None:
    """Run by each rank: which leases are there while it reads."""
    import os
    from pathlib import Path
    from typing import Any

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from pannier import client

    dist.init_process_group("gloo")
    leases = Path(os.environ["PLACE"]) / ".pannier" / "leases"
    seen = []

    class Looking(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            seen.append(len(list(leases.iterdir())))
            dist.barrier()
            return super().resolve_tensor(read_item)

    found = {"w": torch.zeros(int(os.environ["SIZE"]))}
    client.load(found, checkpoint_id=os.environ["PLACE"], planner=Looking(), verify=True)
    assert torch.equal(found["w"], torch.ones_like(found["w"]))
    assert seen == [1], seen
    dist.barrier()
    assert not leases.exists()
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_takes_the_lease_for_all(client: Client, tmp_path: Path) -> None:
    place = str(tmp_path / "run" / "step-1")
    client.save(version(1), checkpoint_id=place)
    run_ranks(load_and_look, 2, {"PLACE": place, "SIZE": str(SIZE)}, torchrun=False)


def test_the_first_is_read_until_the_second_is_committed(
    client: Client, server: GcsServer, tmp_path: Path
) -> None:
    place = f"gs://bucket/{tmp_path.name}/step-1"

    def large(number: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((3 << 20,), float(number))}

    client.save(large(1), checkpoint_id=place)
    # Its data file, unlike a reader's lease.
    server.fault(
        kind="delay", method="POST", path="uploadType=resumable", seconds=BOUND_S, times=-1
    )
    seen = []
    try:
        handle = client.async_save(large(2), checkpoint_id=place)
        while not handle.done():
            loaded = large(0)
            dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
            seen.append(loaded["w"].unique().tolist())
            server.release()
    finally:
        server.clear()
    handle.result(BOUND_S)
    assert seen[0] == [1.0]
    assert all(one in ([1.0], [2.0]) for one in seen), seen
    assert seen == sorted(seen)


def test_a_coordinator_killed_while_it_sweeps_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "run" / "step-1")
    with Daemons(
        tmp_path / "daemons",
        coordinator_arguments=["--grace-superseded", "0"],
        environment={VARIABLE: "sweep.deletion.after:1"},
    ) as daemons:
        for name, value in daemons.env().items():
            monkeypatch.setenv(name, value)
        with Client(load_settings()) as client:
            first = client.save(version(1), checkpoint_id=place)
            handle = client.async_save(version(2), checkpoint_id=place)
            assert daemons.coordinator.process.wait(BOUND_S) == -signal.SIGKILL
            whole = pannier("verify", place, "--json")
            assert whole.code == 0, whole
            del daemons.coordinator.environment[VARIABLE]
            daemons.coordinator.start()
            second = handle.result(BOUND_S)
            assert whole.json()["attempt"] == second.attempt
            # It resumes the commit, and the removal with it, or got the report of it before.
            assert pannier("gc", str(tmp_path / "run"), "--grace", "0").code == 0
    assert of(place, first.attempt) == []
    assert pannier("verify", place, "--json").json()["attempt"] == second.attempt
    loaded = version(0)
    dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
    assert torch.equal(loaded["w"], version(2)["w"])
