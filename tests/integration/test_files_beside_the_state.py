"""Extra files of a save: with real daemons, read by plain tools."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from pannier import client as package
from pannier.client import (
    Client,
    InvalidRequestError,
    SaveAbortedError,
    SaveHandle,
    StorageError,
    StorageWriter,
)
from pannier.client.config import load_settings
from pannier.client.integrations.scratch_directory import ScratchDirectory
from pannier.wire import object_names
from support.processes.cli import pannier_here as pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture(scope="module")
def daemons(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("extra"), environment=server.env) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**daemons.env(), **server.env, "PANNIER_JOB": "extra"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(load_settings()) as made:
        yield made


@pytest.fixture(params=["file", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "run" / "step-1")
    return f"gs://bucket/{tmp_path.name}/step-1"


def plain(place: str) -> dict[str, bytes]:
    """What is there beside ``.metadata``, data files and records, by fsspec alone."""
    options = {"token": "anon", "use_listings_cache": False} if "://" in place else {}
    fs, path = fsspec.url_to_fs(place, **options)
    names = [str(name).partition(f"{path.strip('/')}/")[2] for name in fs.find(path)]
    return {
        name: fs.cat_file(f"{path}/{name}")
        for name in names
        if not (name == ".metadata" or object_names.attempt_of(name) or name.startswith(".pannier"))
    }


def test_they_are_there_with_the_checkpoint_and_replaced_with_it(
    client: Client, place: str
) -> None:
    first = {"meta.pt": b"first", "rng/0.pt": b"rng", "empty": b""}
    client.save(STATE, checkpoint_id=place, extra_files=first)
    assert plain(place) == first
    verified = pannier("verify", place)
    assert verified.code == 0, verified
    client.save(STATE, checkpoint_id=place, extra_files={"meta.pt": b"second"})
    assert plain(place) == {"meta.pt": b"second"}
    assert package.read_extra_file(place, "meta.pt") == b"second"
    with pytest.raises(StorageError, match=r"no extra file 'rng/0\.pt'; it has meta\.pt"):
        package.read_extra_file(place, "rng/0.pt")
    removed = pannier("rm", place, "--yes")
    assert removed.code == 0, removed
    assert plain(place) == {}
    with pytest.raises(StorageError, match="is no checkpoint"):
        package.read_extra_file(place, "meta.pt")


def test_a_load_reads_those_of_the_save_whose_state_it_reads(client: Client, place: str) -> None:
    first = {"meta.pt": b"first", "rng": b"1"}
    client.save({"w": torch.zeros(4)}, checkpoint_id=place, extra_files=first)

    class Replacing(DefaultLoadPlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            client.save(
                {"w": torch.ones(4)}, checkpoint_id=place, extra_files={"meta.pt": b"second"}
            )

    state = {"w": torch.full((4,), 9.0)}
    read = client.load(state, checkpoint_id=place, planner=Replacing(), extra_files=["meta.pt"])
    assert torch.equal(state["w"], torch.zeros(4))
    assert read.extra_files == {"meta.pt": b"first"}
    again = client.load(state, checkpoint_id=place, extra_files=lambda name: True)
    assert torch.equal(state["w"], torch.ones(4))
    assert again.extra_files == {"meta.pt": b"second"}
    assert again.attempt != read.attempt
    with pytest.raises(StorageError, match=r"no extra file 'rng'; it has meta\.pt"):
        client.load(state, checkpoint_id=place, extra_files=["rng"])
    with pytest.raises(InvalidRequestError, match=r"give a collection of names, as \['rng'\]"):
        client.load(state, checkpoint_id=place, extra_files="rng")


def test_what_a_framework_loads_in_parts_is_of_one_save(tmp_path: Path) -> None:
    scratch, other = (ScratchDirectory(tmp_path / name, str(tmp_path / "run")) for name in "ab")
    model, state = Path("step-1/model"), {"w": torch.zeros(4)}

    def save(value: float) -> None:
        other.save(model, {"w": torch.full((4,), value)})
        other.stage("step-1", []).result(BOUND_S)

    save(1.0)
    scratch.restore("step-1", lambda name: True)
    assert scratch.load(model, state)
    assert torch.equal(state["w"], torch.ones(4))
    save(2.0)
    with pytest.raises(StorageError, match="was replaced by another save while it was loaded"):
        scratch.load(model, state)
    scratch.restore("step-1", lambda name: True)
    assert scratch.load(model, state)
    package.close()


def test_a_framework_loads_what_this_process_is_saving_again(
    server: GcsServer, tmp_path: Path
) -> None:
    root, model = f"gs://bucket/{tmp_path.name}", Path("step-1/model")
    # Of a size whose upload can be delayed.
    state = {"w": torch.zeros(3 << 20)}
    # Accelerate's functions have one for each call.
    scratch, other = (ScratchDirectory(tmp_path / name, root) for name in "ab")
    file = scratch.directory / "step-1/value"
    file.parent.mkdir(parents=True)

    def save(value: float) -> SaveHandle:
        file.write_text(str(value))
        scratch.save(model, {"w": torch.full_like(state["w"], value)})
        return scratch.stage("step-1", [file])

    def save_slowly(value: float) -> None:
        server.fault(kind="delay", method="POST", path="uploadType=resumable", seconds=BOUND_S)
        assert not save(value).done()
        threading.Timer(0.5, server.release).start()

    save(1.0).result(BOUND_S)
    scratch.restore("step-1", lambda name: True)
    save_slowly(2.0)
    assert scratch.load(model, state)
    assert state["w"].unique().tolist() == [2.0]
    save_slowly(3.0)
    folder = other.restore("step-1", lambda name: True)
    assert (folder / "value").read_text() == "3.0"
    assert other.load(model, state)
    assert state["w"].unique().tolist() == [3.0]
    package.close()


def test_a_storage_writer_takes_them_too(client: Client, tmp_path: Path) -> None:
    place = str(tmp_path / "step-1")
    writer = StorageWriter(place, client=client, extra_files={"trainer_state.json": b"{}"})
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert plain(place) == {"trainer_state.json": b"{}"}
    writer.extra_files = None
    writer.reset(tmp_path / "step-2")
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert plain(str(tmp_path / "step-2")) == {}
    assert pannier("verify", place).code == 0


def test_a_file_of_a_foreign_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / "meta.pt").write_bytes(b"foreign")
    assert package.read_extra_file(tmp_path / "step-1", "meta.pt") == b"foreign"


RANKS = """
import json, os
import torch
import torch.distributed as dist
from pannier import client

dist.init_process_group("gloo")
rank, root = dist.get_rank(), os.environ["ROOT"]
state = {f"w{rank}": torch.full((1000,), float(rank))}
for step in (1, 2):
    own = {f"rng_state_{rank}.pth": b"rng %d" % rank, "same.json": b"{}"}
    if rank == 1:
        own["meta.json"] = json.dumps({"step": step}).encode()
    client.save(state, checkpoint_id=f"{root}/step-{step}", extra_files=own)
try:
    client.save(state, checkpoint_id=f"{root}/step-3", extra_files={"meta.json": b"%d" % rank})
except client.SaveAbortedError as error:
    print(error)
dist.destroy_process_group()
"""


def test_each_rank_may_give_some_but_no_two_contents_of_one(
    daemons: Daemons, server: GcsServer, tmp_path: Path
) -> None:
    root = f"gs://bucket/{tmp_path.name}"
    run = run_ranks(RANKS, 2, daemons.env(**server.env, ROOT=root), torchrun=False)
    run.check()
    for step in (1, 2):
        found = plain(f"{root}/step-{step}")
        assert json.loads(found.pop("meta.json")) == {"step": step}
        assert found == {
            "rng_state_0.pth": b"rng 0",
            "rng_state_1.pth": b"rng 1",
            "same.json": b"{}",
        }
    for rank in range(2):
        assert "give different contents for the extra file 'meta.json'" in run.outputs[rank]
    assert plain(f"{root}/step-3") == {}


def test_an_aborted_save_leaves_none(client: Client, tmp_path: Path) -> None:
    place = tmp_path / "run" / "step-1"
    (place / "logs").mkdir(parents=True)
    handle = client.async_save(STATE, checkpoint_id=place, extra_files={"logs": b"", "a": b"a"})
    with pytest.raises(SaveAbortedError, match="logs is a directory: give the extra file another"):
        handle.result(BOUND_S)
    assert plain(str(place)) == {}


@pytest.fixture
def confined(tmp_path: Path) -> Iterator[Client]:
    """A client of daemons that may write below ``tmp_path/run`` only."""
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "authorized_keys").write_bytes(b"theirs")
    with (
        Daemons(tmp_path, allow=[str(tmp_path / "run")]) as running,
        Client(load_settings(sidecar=running.sidecar_address, job="confined")) as client,
    ):
        yield client


@pytest.mark.parametrize("there", [True, False])
def test_an_extra_file_below_a_link_is_not_written_outside_of_the_allowed_root(
    confined: Client, tmp_path: Path, there: bool
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "step-1" / "rng").symlink_to(elsewhere)
    name = "rng/authorized_keys" if there else "rng/other"
    with pytest.raises(SaveAbortedError, match=f"{name}: a symbolic link is in the way"):
        confined.save(STATE, checkpoint_id=run / "step-1", extra_files={name: b"mine"})
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {
        "authorized_keys": b"theirs"
    }
    assert not (run / "step-1" / ".metadata").exists()
    confined.save(STATE, checkpoint_id=run / "step-2", extra_files={name: b"mine"})


def test_a_save_to_a_link_is_refused_with_the_name_of_the_directory(
    confined: Client, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    confined.save(STATE, checkpoint_id=run / "step-5")
    before = (run / "step-5" / ".metadata").read_bytes()
    (run / "latest").symlink_to("step-5")
    for _ in range(2):
        # The second time the plan is cached.
        with pytest.raises(SaveAbortedError, match=f"symbolic link: use .*{run}/step-5"):
            confined.async_save(STATE, checkpoint_id=run / "latest").result(BOUND_S)
    assert (run / "step-5" / ".metadata").read_bytes() == before
    confined.save(STATE, checkpoint_id=run / "step-6")
