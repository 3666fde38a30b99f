"""Tensors that describe themselves to DCP by methods of their own, as Megatron-FSDP's uneven shards do.

Their rows may move between saves, under equal local shapes; so may those of a DTensor by its placements alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pannier.client.planning.state_fingerprint import fingerprint
from pannier.client.torch_compat import StridedShard, local_tensors
from support.actors.staged_saves import StagedSave, StagedSaves
from support.processes.absent_ranks import alone_of
from support.states.changing_shards import describe_as

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Any]
METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def sharded(
    mesh: tuple[int, ...] = (2,), placements: tuple[Placement, ...] = (Shard(0),), rows: int = 2
) -> DTensor:
    return DTensor.from_local(
        torch.ones(rows, 3),
        init_device_mesh("cpu", mesh),
        placements,
        run_check=False,
        shape=torch.Size((8, 3)),
        stride=(3, 1),
    )


def rows(save: StagedSave) -> list[int]:
    """Where the items' rows begin in the global tensor."""
    return [offset[0] for _, offset in save.contents()]


@pytest.mark.parametrize("kind", ["DTensor", "plain tensor"])
def test_rows_that_move_under_equal_local_shapes_are_written_where_they_are(kind: str) -> None:
    with alone_of(2, 0):
        saves = StagedSaves()
        for step, row in enumerate((0, 4, 4, 1)):
            tensor: Any = sharded() if kind == "DTensor" else torch.ones(2, 3)
            (local,) = local_tensors(tensor)
            local.fill_(step)
            describe_as(local, row)
            save = saves.stage({"w": tensor})
            assert rows(save) == [row]
            assert torch.equal(*save.contents().values(), torch.full((2, 3), float(step)))
            saves.release(save)
        saves.close()


@pytest.mark.parametrize("kind", ["DTensor", "plain tensor"])
def test_a_tensor_that_begins_or_ceases_to_describe_itself_is_planned_again(kind: str) -> None:
    """Also one that was plain when its plan was prepared, and is the same object since."""
    with alone_of(2, 0):
        saves = StagedSaves()
        tensor: Any = sharded(rows=4) if kind == "DTensor" else torch.ones(2, 3)
        (local,) = local_tensors(tensor)
        for row in (0, 4, 0):
            if row:
                describe_as(local, row)
            else:
                for name in METHODS:
                    vars(local).pop(name, None)
            save = saves.stage({"w": tensor})
            assert rows(save) == [row]
            saves.release(save)
        saves.close()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "on",
    [
        lambda state: state["plain"],
        lambda state: state["sharded"],
        lambda state: state["sharded"]._local_tensor,
        lambda state: state["old"],
        lambda state: state["old"].local_shards()[0].tensor,
    ],
    ids=["plain tensor", "DTensor", "its local tensor", "ShardedTensor", "its shard"],
)
def test_whatever_dcp_asks_for_is_no_part_of_a_known_structure(
    on: Callable[[State], Any], name: str
) -> None:
    def state() -> State:
        shard = LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], 0)
        old = init_from_local_shards([shard], 2, 3)
        return {"plain": torch.ones(2), "sharded": sharded((1,)), "old": old, "n": 1}

    with alone_of(1):
        seen = fingerprint(state())
        assert seen is not None
        assert seen.values(state()) is not None
        other = state()
        setattr(on(other), name, lambda *args: [])
        assert seen.values(other) is None
        assert fingerprint(other) is None


def test_dtensors_whose_method_was_replaced_are_planned_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with alone_of(2, 0):
        seen = fingerprint({"w": sharded()})
        assert seen is not None
        theirs = DTensor.__create_write_items__
        monkeypatch.setattr(
            DTensor, "__create_write_items__", lambda self, fqn, value: theirs(self, fqn, value)
        )
        assert seen.values({"w": sharded()}) is None
        assert fingerprint({"w": sharded()}) is None


class Proxy:
    """Says that it is an instance of what it stands for, as lazily made values do."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)


def test_a_proxy_of_a_tensor_or_mapping_is_no_object() -> None:
    seen = fingerprint({"w": Proxy(3)})
    assert seen is not None
    assert seen.values({"w": Proxy("text")}) is not None
    for value in (torch.ones(2), {"a": 1}):
        assert seen.values({"w": Proxy(value)}) is None
        assert fingerprint({"w": Proxy(value)}) is None


LAYOUTS: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(0)),
    (StridedShard(0, split_factor=2), Shard(0)),
    (StridedShard(0, split_factor=4), Shard(0)),
    (Shard(0), Replicate()),
]


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_layouts_of_equal_local_shape_are_other_structures(
    first: tuple[Placement, ...], second: tuple[Placement, ...]
) -> None:
    """Also in torch 2.9, where ``_StridedShard(0, split_factor=2) == Shard(0)``."""
    with alone_of(4, 1):
        seen = fingerprint({"w": sharded((2, 2), first)})
        assert seen is not None
        assert (seen.values({"w": sharded((2, 2), second)}) is not None) == (first is second)


def test_fsdp_over_tensor_parallelism_and_two_plain_shards_keep_their_rows() -> None:
    with alone_of(4, 1):
        saves = StagedSaves()
        found = []
        for placements in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[0]):
            save = saves.stage({"w": sharded((2, 2), placements)})
            found.append(rows(save))
            saves.release(save)
        saves.close()
    assert found == [[2], [4], [2]]
