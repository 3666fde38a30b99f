"""Parts of XLA tensors are fetched once, in batches, and freed when they are staged; by a runtime that is played."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.layout import PlannerValues, StateValues, own_layout, state_slots
from pannier.client.staging.stager import stage
from pannier.client.xla import runtime, shard_tensors
from pannier.client.xla.planners import SavePlanner
from pannier.client.xla.runtime import Chunk
from pannier.client.xla.shard_tensors import Fetcher, ShardView

ROWS = 8


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call has fetched; the tensors are the host's, each half a shard."""
    calls: list[int] = []

    def fetch_shards(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        calls.append(len(tensors))
        return [list(tensor.clone().chunk(2)) for tensor in tensors]

    def fetch_whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(tensors))
        return [tensor.clone() for tensor in tensors]

    monkeypatch.setattr(runtime, "fetch_shards", fetch_shards)
    monkeypatch.setattr(runtime, "fetch_whole", fetch_whole)
    return calls


def parts(number: int, tensor: torch.Tensor, *, is_sharded: bool = True) -> Iterator[ShardView]:
    count = 2 if is_sharded else 1
    rows = len(tensor) // count
    sizes = torch.Size([rows, *tensor.shape[1:]])
    for ordinal in range(count):
        offsets = torch.Size([ordinal * rows] + [0] * (tensor.dim() - 1))
        yield ShardView(number, tensor, is_sharded, Chunk(ordinal, offsets, sizes))


def item(part: ShardView) -> WriteItem:
    fqn, chunk = str(part.leaf), part.chunk
    return WriteItem(
        MetadataIndex(fqn, chunk.offsets, chunk.ordinal),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(chunk.offsets, chunk.sizes),
            TensorProperties(part.tensor.dtype),
            part.tensor.size(),
        ),
    )


def test_a_tensor_is_fetched_once_for_all_its_parts_and_small_ones_together(
    fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_tensors, "BATCH_BYTES", 3 * ROWS * 4)
    tensors = [torch.randn(ROWS) for _ in range(5)]
    views = [part for number, tensor in enumerate(tensors) for part in parts(number, tensor)]
    fetcher = Fetcher()
    fetcher.expect(views)
    taken = [fetcher.take(view) for view in views]
    assert fetched == [3, 2]
    assert torch.equal(torch.cat(taken), torch.cat(tensors))
    assert not fetcher._fetched


def test_what_is_left_out_is_not_fetched(fetched: list[int]) -> None:
    wanted, other = torch.randn(ROWS), torch.randn(ROWS)
    fetcher = Fetcher()
    fetcher.expect(parts(0, wanted))
    first, second = (fetcher.take(view) for view in parts(0, wanted))
    assert torch.equal(torch.cat([first, second]), wanted)
    assert fetched == [1]
    (whole,) = parts(1, other, is_sharded=False)
    assert torch.equal(fetcher.take(whole), other)


def test_the_stager_copies_parts_of_xla_tensors_as_any_other_values(fetched: list[int]) -> None:
    sharded, whole, empty = torch.randn(ROWS, 3), torch.arange(ROWS), torch.ones(0, 2)
    values = [
        *parts(0, sharded),
        *parts(1, whole, is_sharded=False),
        *parts(2, empty, is_sharded=False),
    ]
    items = [item(part) for part in values]
    layout = copy.copy(own_layout(items, 0, is_planned=True))
    layout.positions = range(len(items))
    slots = state_slots(layout, [item.index.fqn for item in items], values)
    assert slots is not None
    pool = ArenaPool(1)
    staged = stage(layout, StateValues(slots, values), pool.acquire(layout.sizes))
    held = [
        torch.frombuffer(
            staged.arena.files[slot.file].memory,
            dtype=slot.part.dtype,
            count=slot.archive.body // slot.part.dtype.itemsize,
            offset=slot.raw,
        )
        for slot in layout.slots
        if slot is not None and slot.archive.body
    ]
    assert torch.equal(torch.cat(held[:2]).view(ROWS, 3), sharded)
    assert torch.equal(held[2], whole)
    assert fetched == [1, 1]
    assert "torch_xla" in staged.copy_description
    del held
    pool.release(staged.arena)
    pool.close()


def test_a_planner_takes_the_parts_of_what_it_plans_and_only_these_are_fetched(
    fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.randn(ROWS, 2), "left out": torch.randn(ROWS), "b": torch.randn(ROWS)}
    monkeypatch.setattr(runtime, "is_loaded", lambda: True)
    monkeypatch.setattr(runtime, "holds_xla", lambda value: value is state)
    monkeypatch.setattr(runtime, "is_xla", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(runtime, "settle", lambda: None)
    monkeypatch.setattr(runtime, "kind", lambda tensor: runtime.Kind.SHARDED)
    monkeypatch.setattr(runtime, "chunks", lambda tensor: [p.chunk for p in parts(0, tensor)])
    planner = SavePlanner()
    planner.set_up_planner(state)
    plan = planner.create_local_plan()
    plan.items[:] = [each for each in plan.items if each.index.fqn != "left out"]
    values = PlannerValues(planner.finish_plan(plan).items, planner)
    resolved = [values.resolve(slot) for slot in values.single]
    assert [values.key(slot) for slot in values.single] == ["a", "a", "b", "b"]
    assert torch.equal(torch.cat(resolved[:2]), state["a"])  # type: ignore[arg-type]
    assert torch.equal(torch.cat(resolved[2:]), state["b"])  # type: ignore[arg-type]
    assert fetched == [2]
    values.release()
