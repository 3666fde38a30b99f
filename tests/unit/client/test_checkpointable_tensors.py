"""DCP's ``CheckpointableTensor``: a plain tensor that says which part of a global one it is."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier import client as pannier_client
from pannier.client.client import Client
from pannier.client.config import Settings
from pannier.client.planning import state_fingerprint
from pannier.client.planning.state_fingerprint import fingerprint
from pannier.client.staging.arena import ArenaPool
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.plan_columns import decode_column
from support.actors.scripted import attempt_of
from support.actors.scripted_sidecar import ScriptedSidecar
from support.actors.staged import plan, stage_all, write_checkpoint
from support.actors.staged_saves import StagedSaves

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
torch_2_14 = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch 2.14 brought CheckpointableTensor"
)


def part(at: int, value: float = 1.0, rows: int = 2) -> torch.Tensor:
    """Rows ``at`` and following of a global tensor of 8 rows."""
    tensor: Any = torch.full((rows, 3), value)
    tensor.global_shape = (8, 3)
    tensor.global_offsets = ((at, 0),)
    tensor.local_offsets = ((0, 0),)
    tensor.local_sizes = ((rows, 3),)
    return tensor


def padded(values: torch.Tensor) -> torch.Tensor:
    """All 8 rows in two shards of other order, with a row between them that belongs to none."""
    tensor: Any = torch.full((9, 3), -1.0)
    tensor[:5], tensor[6:] = values[3:], values[:3]
    tensor.global_shape = [8, 3]
    tensor.global_offsets = [[3, 0], [0, 0]]
    tensor.local_offsets = [[0, 0], [6, 0]]
    tensor.local_sizes = [[5, 3], [3, 3]]
    return tensor


@pytest.fixture
def sidecar(sidecar: ScriptedSidecar) -> ScriptedSidecar:
    def name_attempt(request: sidecar_pb2.PlanRequest) -> None:
        sidecar.attempt = attempt_of(request.context.save)

    sidecar.on["Plan"] = name_attempt
    return sidecar


@pytest.fixture
def client(sidecar: ScriptedSidecar) -> Iterator[Client]:
    made = Client(Settings(sidecar=sidecar.address))
    yield made
    with suppress(PannierError):
        made.close()


def without(name: str) -> torch.Tensor:
    tensor = part(0)
    delattr(tensor, name)
    return tensor


OTHERS = {
    "other offsets": lambda: part(4),
    "a plain one": lambda: torch.ones(2, 3),
    "not described in full": lambda: without("local_sizes"),
    "shards of another whole": lambda: described(global_shape=(10, 3)),
    "one of two shards": lambda: described(
        global_offsets=((0, 0), (4, 0)),
        local_offsets=((0, 0), (1, 0)),
        local_sizes=((1, 3), (1, 3)),
    ),
    "no shards": lambda: described(global_offsets=(), local_offsets=(), local_sizes=()),
    "a wrong description": lambda: described(global_offsets=None),
}


def described(**attributes: Any) -> torch.Tensor:
    tensor = part(0)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_the_description_belongs_to_the_structure(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_fingerprint, "_DESCRIBE_SHARDS", True)
    before = fingerprint({"w": part(0), "b": torch.zeros(1)})
    assert before is not None
    assert before.values({"w": part(0, 2.0), "b": torch.ones(1)}) is not None
    other = {"w": change(), "b": torch.zeros(1)}
    assert before.values(other) is None
    # In the other direction, too.
    after = fingerprint(other)
    assert after is None or after.values({"w": part(0), "b": torch.ones(1)}) is None


def test_a_description_that_is_changed_in_place_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_fingerprint, "_DESCRIBE_SHARDS", True)
    state = {"w": padded(torch.ones(8, 3))}
    seen = fingerprint(state)
    assert seen is not None
    assert seen.values(state) is not None
    state["w"].global_offsets[0][0] = 4  # type: ignore[attr-defined]
    assert seen.values(state) is None


@torch_2_14
def test_other_offsets_are_planned_again(client: Client, sidecar: ScriptedSidecar) -> None:
    for number, at in enumerate((0, 4, 0, 4)):
        client.save({"w": part(at)}, checkpoint_id=f"/x/{number}")
    first, second = sidecar.asked(sidecar_pb2.PlanRequest)
    assert decode_column(first.plan.items.chunk_offset) == [0, 0]
    assert decode_column(second.plan.items.chunk_offset) == [4, 0]
    claims = [each.claim.digest for each in sidecar.asked(sidecar_pb2.HandOverRequest)]
    assert claims == ["", "", first.digest, second.digest]


@torch_2_14
def test_the_same_offsets_need_no_planner(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.save({"w": part(2)}, checkpoint_id="/x/1")
    monkeypatch.setattr("pannier.client.planning.plan_cache.PlannerRun", None)
    client.save({"w": part(2, 5.0)}, checkpoint_id="/x/2")
    (given,) = sidecar.asked(sidecar_pb2.PlanRequest)
    assert decode_column(given.plan.items.size) == [8, 3]


@torch_2_14
def test_shards_are_staged_as_the_global_tensor_and_loaded(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    planning = plan({"w": padded(whole), "b": torch.ones(2)})
    pool = ArenaPool(1)
    staged, arena = stage_all(planning, pool)
    write_checkpoint(tmp_path, planning.message, planning.items, staged)
    pool.release(arena)
    pool.close()
    plain = {"w": torch.zeros(8, 3), "b": torch.zeros(2)}
    pannier_client.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["w"], whole)
    # Into other shards, with what is between them left alone.
    target = padded(torch.zeros(8, 3))
    pannier_client.load({"w": target}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target, padded(whole))
    rows = part(5, rows=3)
    pannier_client.load({"w": rows}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(rows, whole[5:])


@torch_2_14
def test_each_save_has_the_values_and_places_of_its_step() -> None:
    """Of one tensor object, which is changed, described otherwise, and is a parameter."""
    saves = StagedSaves()
    weight: Any = torch.nn.Parameter(part(0))
    described_as(weight, part(0))
    shards: Any = padded(torch.zeros(8, 3))
    planned = []
    for step, at in enumerate((0, 0, 6, 6, 0)):
        weight.data.fill_(step)
        weight.global_offsets = ((at, 0),)
        whole = torch.full((8, 3), float(step)) + torch.arange(3)
        shards.copy_(padded(whole))
        save = saves.stage({"w": weight, "s": shards})
        found = save.contents()
        assert {key for key in found if key[0] == "w"} == {("w", (at, 0))}
        assert torch.equal(found["w", (at, 0)], weight.detach())
        assert torch.equal(found["s", (3, 0)], whole[3:])
        assert torch.equal(found["s", (0, 0)], whole[:3])
        saves.release(save)
        planned.append(save.was_planned)
    saves.close()
    assert planned == [True, False, True, False, False]


def described_as(tensor: Any, other: Any) -> None:
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(tensor, name, getattr(other, name))


WRONG: list[dict[str, Any]] = [
    {"global_offsets": ((7, 0),)},
    {"global_offsets": ((0, 0), (2, 0))},
    {"global_offsets": None},
    {"global_shape": (8,)},
    {"local_sizes": ((3, 3),)},
]


@torch_2_14
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_description_is_refused_by_name(wrong: dict[str, Any], tmp_path: Path) -> None:
    state = {"m": {"w": described(**wrong)}}
    with pytest.raises(InvalidRequestError, match=r"'m.w' can't be saved: .*CheckpointableTensor"):
        plan(state)
    dcp.save({"m": {"w": torch.ones(8, 3)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(InvalidRequestError, match=r"'m.w' can't be loaded: .*CheckpointableTensor"):
        pannier_client.load(state, checkpoint_id=tmp_path, no_dist=True)
