"""Values that can't be saved or loaded as they are: each error names the key, and what is wrong with it."""

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pannier import client
from pannier.wire.errors import InvalidRequestError, StorageError
from support.actors.staged_saves import StagedSaves
from support.processes.absent_ranks import alone_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def sharded(rows: int) -> DTensor:
    """Rank 0's part of a tensor of 8 rows over two ranks."""
    return DTensor.from_local(
        torch.ones(rows, 3),
        init_device_mesh("cpu", (2,)),
        [Shard(0)],
        run_check=False,
        shape=torch.Size((8, 3)),
        stride=(3, 1),
    )


@pytest.mark.parametrize("objects", [{}, {"step": 1}], ids=["tensors alone", "with an object"])
@pytest.mark.parametrize("earlier", [0, 2], ids=["first save", "by a cached plan"])
def test_a_local_tensor_of_another_shape_than_its_plan_is_refused_by_key(
    earlier: int, objects: dict[str, Any]
) -> None:
    with alone_of(2, 0):
        saves = StagedSaves()
        for _ in range(earlier):
            saves.release(saves.stage({"m": {"w": sharded(4)}, **objects}))
        with pytest.raises(
            InvalidRequestError, match=r"'m\.w' can't be saved: .*\(4, 3\) by its plan.* \(3, 3\)"
        ):
            saves.stage({"m": {"w": sharded(3)}, **objects})
        saves.close()


@pytest.mark.parametrize("left", [0, 4096])
@pytest.mark.parametrize("elements", [3000, 1 << 20], ids=["small", "large"])
@pytest.mark.parametrize("view", ["whole", "part", "columns"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["first save", "by a cached plan"])
def test_a_tensor_whose_storage_was_cut_is_refused_by_key(
    earlier: int, view: str, elements: int, left: int
) -> None:
    def state() -> dict[str, Any]:
        whole = torch.ones(2, elements)
        part = {"whole": whole, "part": whole[1], "columns": whole[:, ::2]}[view]
        return {"a": torch.ones(5), "m": {"w": part}}

    saves = StagedSaves()
    for _ in range(earlier):
        saves.release(saves.stage(state()))
    cut = state()
    cut["m"]["w"].untyped_storage().resize_(left)
    why = "cut to 4096 bytes, of which it needs" if left else "freed"
    with pytest.raises(InvalidRequestError, match=rf"'m\.w' can't be saved: its storage was {why}"):
        saves.stage(cut)
    saves.close()


def test_views_and_expanded_tensors_are_no_cut_ones() -> None:
    saves = StagedSaves()
    whole = torch.arange(60.0).reshape(6, 10)
    state = {"row": whole[5], "column": whole[:, 9], "wide": whole[5, 9].expand(1000)}
    for _ in range(2):
        save = saves.stage(state)
        assert torch.equal(save.contents()["wide", (0,)], state["wide"])
        saves.release(save)
    saves.close()


class Tagged(torch.Tensor):
    """A subclass that torch's allow-list doesn't have."""


def test_a_tensor_subclass_is_warned_of_at_the_save_and_named_at_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pannier.client.staging.stager._checked_types", set())
    state = {"m": {"w": torch.arange(6.0).as_subclass(Tagged)}, "plain": torch.ones(2)}
    saves = StagedSaves()
    with caplog.at_level(logging.WARNING, "pannier"):
        for _ in range(2):
            saves.release(saves.stage(state))
    saves.close()
    (warning,) = caplog.messages
    assert "'m.w' is saved as a Tagged" in warning
    assert "add_safe_globals" in warning
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    target = {"m": {"w": torch.zeros(6)}}
    with pytest.raises(
        InvalidRequestError, match=r"'m\.w' of .*\.distcp.*Tagged.*add_safe_globals"
    ):
        client.load(target, checkpoint_id=tmp_path, no_dist=True)
    with torch.serialization.safe_globals([Tagged]):
        client.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["m"]["w"].tolist() == list(range(6))


def test_an_object_that_cannot_be_unpickled_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("gone_module")
    exec("class Settings: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "gone_module", module)
    dcp.save({"run": {"settings": module.Settings()}}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.delitem(sys.modules, "gone_module")
    with pytest.raises(
        InvalidRequestError,
        match=r"'run\.settings' of .* can't be loaded from __0_0\.distcp: .*gone_module",
    ):
        client.load({"run": {"settings": None}}, checkpoint_id=tmp_path, no_dist=True)


def test_a_file_as_checkpoint_or_root_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({}, file)
    with pytest.raises(StorageError, match=r"it is a file.*torch\.load"):
        client.load({"a": torch.ones(1)}, checkpoint_id=file, no_dist=True)
    for call in (client.latest, client.list):
        with pytest.raises(InvalidRequestError, match="is a file"):
            call(file)
