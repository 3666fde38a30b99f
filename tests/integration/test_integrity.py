"""Damage in storage is found: by ``pannier verify``, and while a checkpoint is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import Client, IntegrityError, InvalidRequestError, StorageError, StorageReader
from pannier.client.config import load_settings
from support.processes.cli import pannier_here as pannier
from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def roots(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A root on a file system and one in a bucket; each has two saves of the same structure."""
    local = tmp_path_factory.mktemp("saved") / "run"
    places = {"file": str(local), "gs": "gs://bucket/run"}
    with (
        Daemons(tmp_path_factory.mktemp("daemons"), environment=server.env) as daemons,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in daemons.env().items():
            patch.setenv(name, value)
        with Client(load_settings()) as client:
            for root in places.values():
                for step in (1, 2):
                    client.save(state(step), checkpoint_id=f"{root}/step-{step}")
    return places


def state(step: int) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(step)
    weights = torch.randn(300, 1000, generator=noise)
    return {"w": weights, "b": torch.ones(5) * step, "step": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(300, 1000), "b": torch.zeros(5), "step": 0}


@pytest.fixture(params=["file", "gs"])
def root(
    request: pytest.FixtureRequest,
    roots: dict[str, str],
    server: GcsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A copy of the saves, to be damaged."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    if request.param == "file":
        shutil.copytree(roots["file"], tmp_path / "run")
        return str(tmp_path / "run")
    fs = fsspec.filesystem("gs", token="anon", use_listings_cache=False)
    copy = f"bucket/{tmp_path.name}"
    for name in fs.find("bucket/run"):
        fs.pipe_file(name.replace("bucket/run", copy, 1), fs.cat_file(name))
    return f"gs://{copy}"


class Files:
    """The objects of one place, whatever it is."""

    def __init__(self, root: str) -> None:
        protocol, _, path = root.rpartition("://")
        options = {"token": "anon"} if protocol else {}
        self.fs = fsspec.filesystem(protocol or "file", use_listings_cache=False, **options)
        self.path = path

    def data(self, step: int) -> str:
        """The largest data file."""
        names = [name for name in self.fs.find(f"{self.path}/step-{step}") if "_0_0.dist" in name]
        assert len(names) == 1
        return str(names[0])


def flip(files: Files) -> None:
    name = files.data(1)
    data = bytearray(files.fs.cat_file(name))
    # Within the raw bytes of "w", where torch notices nothing.
    data[len(data) // 2] ^= 1
    files.fs.pipe_file(name, bytes(data))


def truncate(files: Files) -> None:
    name = files.data(1)
    files.fs.pipe_file(name, files.fs.cat_file(name)[:-5])


def remove(files: Files) -> None:
    files.fs.rm_file(files.data(1))


def swap(files: Files) -> None:
    one, other = files.data(1), files.data(2)
    first, second = files.fs.cat_file(one), files.fs.cat_file(other)
    assert len(first) == len(second)
    files.fs.pipe_file(one, second)
    files.fs.pipe_file(other, first)


@pytest.mark.parametrize(
    ("damage", "status", "error"),
    [
        (flip, "checksum", IntegrityError),
        (truncate, "size", IntegrityError),
        (remove, "missing", StorageError),
        (swap, "checksum", IntegrityError),
    ],
)
def test_damage_is_found_by_verify_and_while_loading(
    root: str, damage: Callable[[Files], None], status: str, error: type[Exception]
) -> None:
    place = f"{root}/step-1"
    files = Files(root)
    name = files.data(1).rpartition("/")[2]
    whole = pannier("verify", place, "--json")
    assert (whole.code, whole.json()["ok"]) == (0, True), whole
    damage(files)
    found = pannier("verify", place, "--json")
    assert (found.code, found.json()["ok"]) == (1, False)
    bad = {each["name"]: each["status"] for each in found.json()["files"] if each["status"] != "ok"}
    assert bad == {name: status}
    with Client(load_settings()) as client, pytest.raises(error, match=name):
        client.load(blank(), checkpoint_id=place, verify=True)
    with pytest.raises(dcp.api.CheckpointException, match=name):
        dcp.load(blank(), storage_reader=StorageReader(place, verify=True), no_dist=True)
    if damage is flip:
        # What makes the difference: without it, nothing is noticed.
        loaded = blank()
        dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
        assert not torch.equal(loaded["w"], state(1)["w"])


def test_a_whole_checkpoint_is_loaded_with_verification(root: str) -> None:
    for step in (1, 2):
        loaded = blank()
        with Client(load_settings()) as client:
            client.load(loaded, checkpoint_id=f"{root}/step-{step}", verify=True)
        assert torch.equal(loaded["w"], state(step)["w"])
        part = {"b": torch.zeros(5)}
        reader = StorageReader(f"{root}/step-{step}", verify=True, memory_bytes=1)
        dcp.load(part, storage_reader=reader, no_dist=True)
        assert torch.equal(part["b"], torch.ones(5) * step)
    leases = [name for name in Files(root).fs.find(Files(root).path) if "/leases/" in name]
    assert leases == []


def test_metadata_that_is_not_what_was_committed_is_refused(root: str) -> None:
    """A whole checkpoint's ``.metadata``, but of an earlier save."""
    files = Files(root)
    older = files.fs.cat_file(f"{files.path}/step-2/.metadata")
    files.fs.pipe_file(f"{files.path}/step-1/.metadata", older)
    reader = StorageReader(f"{root}/step-1", verify=True)
    # dcp.load of torch 2.9 keeps the reason to itself.
    why = r"can't be verified|not what was" if torch.__version__ >= "2.10" else None
    with pytest.raises(dcp.api.CheckpointException, match=why):
        dcp.load(blank(), storage_reader=reader, no_dist=True)
    assert pannier("verify", f"{root}/step-1").code == 1


def test_what_pannier_did_not_write_cannot_be_verified(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "plain", no_dist=True)
    loaded = blank()
    with Client(load_settings()) as client:
        with pytest.raises(InvalidRequestError, match="not written by Pannier"):
            client.load(loaded, checkpoint_id=tmp_path / "plain", verify=True)
        client.load(loaded, checkpoint_id=tmp_path / "plain")
    assert torch.equal(loaded["w"], state(1)["w"])
