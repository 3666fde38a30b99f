"""What a trainer finds of other incarnations before it saves, and carries to the coordinator."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.client import Client, latest
from pannier.client import load as load_checkpoint
from pannier.client.config import Settings
from pannier.client.identity import World
from pannier.client.loading import highest_incarnation
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names
from support.actors.scripted_sidecar import ScriptedSidecar
from support.storage.checkpoints import write


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highest_incarnation, "_seen", {})


def numbered(root: Path, *numbers: int) -> Path:
    for number in numbers:
        write(root / object_names.incarnation_record(number), b"{}")
    return root


def seen(root: Path, world: World | None = None) -> int | None:
    return (world or World(alone=True)).seen_incarnation(str(root / "step-1"))


def test_latest_and_load_see_the_highest_number(tmp_path: Path) -> None:
    assert seen(tmp_path) is None
    latest(tmp_path)
    assert seen(tmp_path) == 0
    numbered(tmp_path, 3, 12)
    write(tmp_path / object_names.incarnations_prefix() / "13", b"")
    latest(f"file://{tmp_path}/")
    assert seen(tmp_path) == 12
    torch.distributed.checkpoint.save(
        {"w": torch.ones(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True
    )
    load_checkpoint({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "step-1")
    assert seen(tmp_path) == 12


def test_the_first_look_counts_until_a_world_saves_there(tmp_path: Path) -> None:
    latest(numbered(tmp_path, 1))
    latest(numbered(tmp_path, 2))
    world = World(alone=True)
    assert seen(tmp_path, world) == 1
    # Its own record is there by now: what is looked at later is for later worlds.
    latest(numbered(tmp_path, 3))
    assert seen(tmp_path, world) == 1
    assert seen(tmp_path) == 3
    assert seen(tmp_path) is None


def test_a_root_that_cannot_be_listed_can_be_loaded_from(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save(
        {"w": torch.ones(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True
    )
    state = {"w": torch.zeros(1)}

    def refused(self: Any) -> None:
        raise PermissionError("no list")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsspec.implementations.local.LocalFileSystem.ls", refused)
        load_checkpoint(state, checkpoint_id=tmp_path / "step-1")
    assert torch.equal(state["w"], torch.ones(1))
    assert seen(tmp_path) is None


def test_saves_carry_it(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    latest(numbered(tmp_path, 5))
    with Client(Settings(sidecar=sidecar.address)) as client:
        client.prepare({"w": torch.ones(1)}, tmp_path)
        client.prepare({"w": torch.ones(1)}, tmp_path / "elsewhere")
    first, other = (each.context for each in sidecar.asked(sidecar_pb2.PlanRequest))
    assert (first.seen_incarnation, first.apart) == (5, False)
    assert not other.HasField("seen_incarnation")


def test_one_of_several_processes_saves_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(alone=True)
    assert not world.apart
    latest(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world.apart
    assert seen(tmp_path, world) is None
