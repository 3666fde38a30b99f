"""DTensors whose parts aren't what DCP takes them for: saved and loaded right, or refused by name.

FSDP over tensor parallelism has them, with a private placement; some layouts of it DCP describes wrongly.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pannier import client
from pannier.client.torch_compat import StridedShard, shard_problem
from pannier.wire.errors import InvalidRequestError
from support.actors.staged_saves import StagedSaves
from support.processes.absent_ranks import alone_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
old_torch = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch 2.10 has offsets for any strided shard"
)


def part_of(whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Placement]) -> DTensor:
    """This rank's part."""
    return distribute_tensor(
        whole.clone(), init_device_mesh("cpu", mesh), placements, src_data_rank=None
    )


def as_fsdp_has_it(whole: torch.Tensor, data: int, tensor: int, rank: int) -> DTensor:
    """As ``fully_shard`` shards over a mesh what ``parallelize_module`` has sharded."""
    local = chunk(chunk(whole, tensor, rank % tensor), data, rank // tensor)
    return DTensor.from_local(
        local,
        init_device_mesh("cpu", (data, tensor)),
        [StridedShard(0, split_factor=tensor), Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.parametrize("rows", [3, 5, 8, 12])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2)])
def test_fsdp_over_tensor_parallelism_is_saved_where_it_belongs(
    mesh: tuple[int, int], rows: int
) -> None:
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    covered = 0
    for rank in range(math.prod(mesh)):
        with alone_of(math.prod(mesh), rank):
            state = {"w": as_fsdp_has_it(whole, *mesh, rank)}
            saves = StagedSaves()
            ((_, (row, column)), found), *others = saves.stage(state).contents().items()
            saves.close()
        assert not others
        assert column == 0
        assert torch.equal(found, state["w"].to_local())
        assert torch.equal(found, whole[row : row + len(found)])
        covered += len(found)
    assert covered == rows


@pytest.mark.parametrize("mesh", [(3, 2), (4, 3), (2, 3)])
@pytest.mark.parametrize("rows", range(1, 14))
def test_sizes_that_the_mesh_does_not_divide_are_right_or_refused(
    mesh: tuple[int, int], rows: int
) -> None:
    """Each rank by itself: one that is refused ends the save on all."""
    whole = torch.arange(float(rows))
    placed, refused = [], []
    for rank in range(math.prod(mesh)):
        with alone_of(math.prod(mesh), rank):
            part = as_fsdp_has_it(whole, *mesh, rank)
            (described,) = part.__create_chunk_list__()
            (row,), (count,) = described.offsets, described.sizes
            if problem := shard_problem(part):
                refused.append(problem)
            placed.append(torch.equal(part.to_local(), whole[row : row + count]))
    assert all(placed) or refused
    if math.prod(mesh) == 6 and rows == 7 and torch.__version__ >= "2.10":
        assert bool(refused) == (mesh == (3, 2))


def chunk(whole: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """As ``torch.chunk``, which makes no empty ones."""
    chunks = [*whole.chunk(count), *[whole[:0]] * count]
    return chunks[index].clone()


FUSED: list[tuple[tuple[int, ...], list[Placement]]] = [
    # Of a projection that holds several: each rank has a part of each.
    ((2,), [StridedShard(0, split_factor=2)]),
    ((4,), [StridedShard(0, split_factor=3)]),
    # Of FSDP over tensor parallelism, gathered over the latter.
    ((2, 2), [StridedShard(0, split_factor=2), Replicate()]),
    ((2, 2), [Shard(0), StridedShard(0, split_factor=2)]),
]


@pytest.mark.parametrize(("mesh", "placements"), FUSED)
def test_rows_from_several_places_are_refused_by_name(
    mesh: tuple[int, ...], placements: list[Placement]
) -> None:
    with alone_of(math.prod(mesh), 1):
        state = {"model": {"qkv": part_of(torch.arange(24.0), mesh, placements)}}
        with pytest.raises(
            InvalidRequestError, match=r"'model.qkv' can't be saved: .*_StridedShard"
        ):
            StagedSaves().stage(state)


@pytest.mark.parametrize(("mesh", "placements"), FUSED)
def test_they_are_not_loaded_into_either(
    mesh: tuple[int, ...], placements: list[Placement], tmp_path: Path
) -> None:
    """DCP would read the rows that follow the first one."""
    dcp.save({"a": {"w": torch.arange(24.0)}}, checkpoint_id=tmp_path, no_dist=True)
    with alone_of(math.prod(mesh), 1):
        target = part_of(torch.zeros(24), mesh, placements)
        state: dict[str, Any] = {"a": {"w": target}}
        with pytest.raises(InvalidRequestError, match=r"'a.w' can't be loaded: .*_StridedShard"):
            client.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert not target.to_local().any()


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("rows", [1, 4, 7, 12])
@pytest.mark.parametrize("factor", [1, 2, 3])
@old_torch
def test_the_rows_are_those_that_torch_gives_a_rank(rank: int, rows: int, factor: int) -> None:
    with alone_of(6, rank):
        for placements in (
            [StridedShard(0, split_factor=factor), Shard(0)],
            [Shard(0), StridedShard(0, split_factor=factor)],
            [StridedShard(0, split_factor=factor), Replicate()],
        ):
            part = part_of(torch.arange(rows), (2, 3), placements)
            local = part.to_local().tolist()
            is_block = local == list(range(local[0], local[0] + len(local))) if local else True
            assert (shard_problem(part) == "") == is_block, (placements, local)


@old_torch
def test_a_part_that_dcp_describes_otherwise_is_refused_by_name() -> None:
    with alone_of(6, 4):
        state = {"w": as_fsdp_has_it(torch.arange(7.0), 3, 2, 4)}
        with pytest.raises(InvalidRequestError, match=r"'w' can't be saved: .* \(0,\) of \(7,\)"):
            StagedSaves().stage(state)
