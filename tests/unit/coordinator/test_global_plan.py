"""The global plan against DCP's own, over random splits, replicas and objects."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.columns import InvalidPlanError, RankPlan
from pannier.coordinator.planning.global_plan import GlobalPlan, make_global_plan
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.file_layout import lay_out
from pannier.wire.plan_codec import build_metadata, decode_items
from pannier.wire.plan_columns import decode_column, decode_mappings
from support.actors.ranks_by_hand import local_plan, make_manifest, rank_plans, shard, tensor, thing
from support.plan_messages import changed_column

ATTEMPT = "i1-a1-g00000000-s1"
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64]


def cuts(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    """Edges of ``parts`` parts of ``size``, some of them empty, like DTensor's uneven shards."""
    inner = draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), size]


@st.composite
def meshes(draw: st.DrawFn) -> list[list[WriteItem]]:
    """Per rank its items: a random mesh (shards x shards x replicas), with tensors split over it."""
    rows, columns, replicas = (draw(st.integers(1, n)) for n in (3, 3, 2))
    world = rows * columns * replicas
    out: list[list[WriteItem]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(0, 5))):
        fqn, dtype = f"k{number}", draw(st.sampled_from(DTYPES))
        how = draw(st.sampled_from(["object", "plain", "split", "split", "grid"]))
        ranks = range(draw(st.integers(1, world))) if how in ("object", "plain") else range(world)
        if how == "object":
            for rank in ranks:
                out[rank].append(thing(fqn))
            continue
        if how == "plain":
            size = draw(st.lists(st.integers(0, 5), max_size=3))
            for rank in ranks:
                out[rank].append(tensor(fqn, *size, dtype=dtype))
            continue
        height, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
        ys = cuts(draw, height, rows)
        xs = cuts(draw, width, columns) if how == "grid" else [0, width]
        for rank in ranks:
            row, column = rank // replicas // columns, rank // replicas % columns
            x = column if how == "grid" else 0
            offset, extent = [ys[row], xs[x]], [ys[row + 1] - ys[row], xs[x + 1] - xs[x]]
            if 0 in extent:
                # DTensor puts the empty shards at the end; else one would hide a full one.
                offset = [height if e == 0 else o for o, e in zip(offset, extent, strict=True)]
                offset[1] = width if extent[1] == 0 else offset[1]
                extent = [0 if e == 0 else e for e in extent]
            item = shard(fqn, offset, extent, [height, width], dtype=dtype, hint=row)
            out[rank].append(item)
    order = random.Random(draw(st.integers(0, 100)))
    for items in out:
        order.shuffle(items)
    return out


def ours(
    ranks: Sequence[Sequence[WriteItem]], *, lowest: bool, flatten: bool = True
) -> tuple[GlobalPlan, list[RankPlan], Metadata]:
    plans = rank_plans(
        *(
            local_plan(
                items,
                mappings=mappings(rank, items) if flatten else None,
                dedup_save_to_lowest_rank=lowest,
            )
            for rank, items in enumerate(ranks)
        )
    )
    plan = make_global_plan(plans, ATTEMPT)
    return plan, plans, build_metadata(plan.metadata, storage_meta=None)


def mappings(rank: int, items: Sequence[WriteItem]) -> dict[str, tuple[str | int, ...]]:
    """Ranks may map one key to different paths: DCP takes the first rank's."""
    return {item.index.fqn: ("path", item.index.fqn, min(rank, 1)) for item in items}


def torchs(
    ranks: Sequence[Sequence[WriteItem]], *, lowest: bool, flatten: bool = True
) -> tuple[list[SavePlan], Metadata]:
    planner = DefaultSavePlanner(flatten_state_dict=flatten, dedup_save_to_lowest_rank=lowest)
    return planner.create_global_plan(
        [
            SavePlan(list(items), planner_data=mappings(rank, items) if flatten else None)
            for rank, items in enumerate(ranks)
        ]
    )


def assigned(plan: GlobalPlan) -> list[tuple[int, int]]:
    """By chunk: index of the plan of the rank that writes it, and its position there."""
    assignment = plan.assignment
    return list(zip(assignment.owner.tolist(), assignment.position.tolist(), strict=True))


def written(plan: GlobalPlan, ranks: Sequence[Sequence[WriteItem]]) -> list[list[MetadataIndex]]:
    """Per rank the indices that it writes, in order."""
    out: list[list[MetadataIndex]] = [[] for _ in ranks]
    for owner, position in sorted(assigned(plan)):
        out[owner].append(ranks[owner][position].index)
    return out


@settings(max_examples=150)
@given(meshes(), st.booleans())
def test_with_lowest_rank_everything_is_as_in_dcp(
    ranks: list[list[WriteItem]], flatten: bool
) -> None:
    plan, _, metadata = ours(ranks, lowest=True, flatten=flatten)
    finals, expected = torchs(ranks, lowest=True, flatten=flatten)
    assert written(plan, ranks) == [[item.index for item in each.items] for each in finals]
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert list(metadata.state_dict_metadata) == list(expected.state_dict_metadata)
    assert metadata.planner_data == expected.planner_data
    if flatten:
        assert list(metadata.planner_data) == list(expected.planner_data)
    # Hints are rewritten as DCP does, in the metadata only.
    hints = {item.index: item.index.index for each in finals for item in each.items}
    assert {index: index.index for index in metadata.storage_data} == hints


@settings(max_examples=150)
@given(meshes())
def test_balanced_it_differs_from_dcp_only_in_who_writes(ranks: list[list[WriteItem]]) -> None:
    """On purpose: DCP balances copies by the size of the whole tensor, we by the shard's."""
    plan, _, metadata = ours(ranks, lowest=False)
    _, expected = torchs(ranks, lowest=False)
    # So that chunks come in another order.
    assert metadata.planner_data == expected.planner_data
    assert metadata.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for fqn, entry in expected.state_dict_metadata.items():
        mine = metadata.state_dict_metadata[fqn]
        assert type(mine) is type(entry)
        if hasattr(entry, "chunks"):
            assert dataclasses.replace(mine, chunks=[]) == dataclasses.replace(entry, chunks=[])
            assert sorted(mine.chunks, key=str) == sorted(entry.chunks, key=str)
    flat = [index for each in written(plan, ranks) for index in each]
    assert len(flat) == len(set(flat))
    assert set(flat) == {item.index for items in ranks for item in items}


@settings(max_examples=50)
@given(meshes())
def test_final_plans_place_items_as_the_layout_does(ranks: list[list[WriteItem]]) -> None:
    plan, plans, metadata = ours(ranks, lowest=False)
    attempt = object_names.Attempt.parse(ATTEMPT)
    context = sidecar_pb2.SaveContext(save=save_pb2.SaveId(job="j"), ranks=range(len(ranks)))
    manifest = make_manifest(context, attempt, plans, plan)
    assert Manifest.parse(manifest.data).plan_id == manifest.plan_id
    assert make_manifest(context, attempt, plans, plan).data == manifest.data
    for rank, items in enumerate(ranks):
        final = Manifest.parse(manifest.data).final_plan(rank)
        places = final.placement
        columns = (final.positions, places.file, places.offset, places.length)
        positions, *placement = map(decode_column, columns)
        assert positions == sorted(set(positions))
        local = plans[rank].plan
        head, body, tail = map(decode_column, (local.head, local.body, local.tail))
        slotted = [p for p in positions if head[p]]
        layout = lay_out(*([column[p] for p in slotted] for column in (head, body, tail)))
        sizes = [file.size for file in final.files if not file.name.endswith("_objects.distcp")]
        assert sizes == layout.sizes
        at = iter(zip(layout.file, layout.offset, layout.length, strict=True))
        for position, *place in zip(positions, *placement, strict=True):
            name = final.files[place[0]].name
            if head[position]:
                number, *expected = next(at)
                assert name == object_names.data_file(ATTEMPT, rank, number)
                assert place[1:] == expected
                info = metadata.storage_data[items[position].index]
                assert [info.relative_path, info.offset, info.length] == [name, *expected]
            else:
                assert name == object_names.objects_file(ATTEMPT, rank)
                assert place[1:] == [0, 0]


def test_copies_are_balanced_by_bytes() -> None:
    sizes = [100, 90, 60, 50, 40, 30, 20, 10]
    items = [tensor(f"k{n}", size * 1000) for n, size in enumerate(sizes)]
    plan, plans, _ = ours([items] * 3, lowest=False)
    loads = [0, 0, 0]
    for owner, position in assigned(plan):
        loads[owner] += decode_column(plans[owner].plan.body)[position]
    assert max(loads) - min(loads) <= 0.1 * max(loads)


def test_what_a_rank_holds_alone_counts_in_the_balance() -> None:
    alone = shard("big", [0, 0], [50, 10], [100, 10])
    other = shard("big", [50, 0], [50, 10], [100, 10])
    copies = [tensor(f"k{n}", 50) for n in range(8)]
    plan, _, _ = ours([[alone, *copies], [other, *copies], [*copies]], lowest=False)
    counts = [plan.assignment.owner.tolist().count(rank) for rank in range(3)]
    assert counts == [1, 1, 8]


def test_copies_within_one_plan_are_written_once() -> None:
    """As torch_xla's planner makes them; DCP's own dedup drops both."""
    item = shard("w", [0], [2], [4], hint=0)
    copy = shard("w", [0], [2], [4], hint=1)
    plan, _, _ = ours([[item, copy], [shard("w", [2], [2], [4])]], lowest=False)
    assert assigned(plan) == [(0, 0), (1, 0)]


def test_empty_shard_gives_way_to_a_full_one_at_its_offset() -> None:
    plan, _, _ = ours([[shard("w", [0], [0], [4])], [shard("w", [0], [4], [4])]], lowest=True)
    assert assigned(plan) == [(1, 0)]


@pytest.mark.parametrize(
    ("size", "dimension"),
    [([1] * 60, 59), ([0, 1 << 31, 1 << 31], 1), ([1] * 50 + [1 << 40], 50), ([4, *[1] * 59], 0)],
    ids=["many dimensions of size 1", "empty", "one large dimension", "sharded"],
)
def test_tensors_of_many_dimensions_or_without_elements_are_planned(
    size: list[int], dimension: int
) -> None:
    halves = []
    for rank in (0, 1):
        part, at = list(size), [0] * len(size)
        half = size[dimension] // 2
        at[dimension] = rank * half
        part[dimension] = size[dimension] - half if rank else half
        halves.append([shard("w", at, part, size)])
    plan, _, metadata = ours(halves, lowest=True)
    chunks = 2 if size[dimension] > 1 and 0 not in size else 1
    assert len(assigned(plan)) == chunks
    assert list(metadata.state_dict_metadata["w"].size) == size
    whole = [[shard("w", [0] * len(size), size, size)]] * 2
    plan, _, _ = ours(whole, lowest=True)
    assert assigned(plan) == [(0, 0)]


def test_one_rank_may_leave_gaps_as_in_dcp() -> None:
    """A save without process group of one part of a distributed tensor."""
    items = [shard("w", [2], [2], [8])]
    _, _, metadata = ours([items], lowest=False)
    _, expected = torchs([items], lowest=False)
    assert metadata.state_dict_metadata == expected.state_dict_metadata


def test_rank_without_items_takes_part() -> None:
    plan, _, metadata = ours([[], [tensor("w", 4)], []], lowest=False)
    assert plan.assignment.owner.tolist() == [1]
    assert list(metadata.state_dict_metadata) == ["w"]
    plan, _, metadata = ours([[], []], lowest=False)
    assert metadata.state_dict_metadata == {}
    assert metadata.planner_data == {}


@pytest.mark.parametrize(
    ("ranks", "failed", "text"),
    [
        (
            [[tensor("x", 2)], [tensor("x", 2)], [thing("x")]],
            {0, 2},
            "'x' is a tensor on ranks [0, 1] and an object on rank 2",
        ),
        (
            [[tensor("x", 2)], [tensor("x", 2, dtype=torch.float16)]],
            {0, 1},
            "'x' is float32 on rank 0 (host node-0) and float16 on rank 1 (host node-1)",
        ),
        (
            [[tensor("x", 2)], [tensor("x", 3)]],
            {0, 1},
            "'x' differs in size: [2] at [0] of [2] on rank 0 (host node-0), [3] at [0] of [3]",
        ),
        (
            [[tensor("x", 4)], [tensor("x", 2, 2)]],
            {0, 1},
            "'x' differs in size",
        ),
        (
            [[shard("x", [0], [2], [4])], [shard("x", [0], [4], [4])]],
            {0, 1},
            "'x': the same offset has shards of two sizes",
        ),
        (
            [[shard("x", [0], [2], [4])], [shard("x", [2], [1], [4])]],
            {-1},
            "'x' of size [4] is not whole: its shards cover 3 of 4 elements, held by ranks [0, 1]",
        ),
        (
            [[shard("x", [0], [3], [4])], [shard("x", [2], [2], [4])]],
            {0, 1},
            "'x' has overlapping shards: [3] at [0] of [4] on rank 0 (host node-0) and [2] at [2]",
        ),
        (
            [[shard("x", [0, 0], [2, 2], [4, 4])], [shard("x", [1, 1], [2, 2], [4, 4])]],
            {0, 1},
            "'x' has overlapping shards",
        ),
        (
            [[shard("x", [0, 2 * rank], [4, 2 + rank % 2], [4, 9])] for rank in range(4)],
            {1, 2},
            "'x' has overlapping shards: [4, 3] at [0, 2] of [4, 9] on rank 1 (host node-1) and",
        ),
        (
            [[shard("x", [rank], [2], [4])] for rank in range(3)],
            {0, 1},
            "'x' has overlapping shards: [2] at [0] of [4] on rank 0 (host node-0) and [2] at [1]",
        ),
        (
            [[shard("x", [rank], [2], [4])] for rank in (0, 2, 2, 3)],
            {3},
            "'x' on rank 3 (host node-3): its shard is out of bounds: [2] at [3] of [4]",
        ),
        (
            [[shard("x", [0], [3], [4])], [shard("x", [3], [2], [4])]],
            {1},
            "'x' on rank 1 (host node-1): its shard is out of bounds: [2] at [3] of [4]",
        ),
    ],
)
def test_plans_that_are_no_checkpoint_are_refused(
    ranks: list[list[WriteItem]], failed: set[int], text: str
) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        ours(ranks, lowest=False)
    assert text in str(caught.value)
    assert caught.value.failures.keys() == failed
    assert {f.kind for f in caught.value.failures.values()} == {"INVALID_PLAN"}


boxes = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=300)
@given(st.lists(boxes, min_size=1, max_size=6, unique_by=lambda box: box[:2]))
def test_boxes_are_refused_when_dcp_refuses_them(
    where: list[tuple[int, int, int, int]],
) -> None:
    size = [max(y + h for y, _, h, _ in where), max(x + w for _, x, _, w in where)]
    ranks = [[shard("x", [y, x], [h, w], size)] for y, x, h, w in where]
    try:
        torchs(ranks, lowest=True)
    except ValueError:
        with pytest.raises(InvalidPlanError):
            ours(ranks, lowest=True)
    else:
        ours(ranks, lowest=True)


def test_grid_of_many_chunks_is_checked_quickly() -> None:
    grid = [[shard("x", [y, x], [1, 1], [64, 64])] for y in range(64) for x in range(64)]
    ours(grid, lowest=True)
    # One cell reaches into its neighbour, and another is missing: volumes alone don't show that.
    grid[100] = [shard("x", [1, 36], [1, 2], [64, 64])]
    grid[2000] = []
    with pytest.raises(InvalidPlanError, match="overlapping"):
        ours(grid, lowest=True)


def _hint_missing(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan.items, "hint") as hints:
        hints.pop()


def _fqn_outside(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan.items, "fqn") as fqns:
        fqns[0] = 77


def _huge(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan.items, "size") as sizes:
        sizes[0] = 2**63


def _head_of_object(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan, "head") as heads:
        heads[1] = 5


def _shape_missing(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan.items, "chunk_size") as sizes:
        sizes.pop()


def _overflow(plan: plan_pb2.LocalPlan) -> None:
    with changed_column(plan.items, "size") as sizes:
        sizes[:] = [2**40, 2**40]


def _tables_cut_off(plan: plan_pb2.LocalPlan) -> None:
    plan.items.tables = plan.items.tables[:-1]


def _mappings_cut_off(plan: plan_pb2.LocalPlan) -> None:
    plan.mappings = b"\x0a\x05a"


@pytest.mark.parametrize(
    "spoil",
    [
        *(_hint_missing, _fqn_outside, _huge, _head_of_object, _shape_missing, _overflow),
        *(_tables_cut_off, _mappings_cut_off),
    ],
)
def test_malformed_plan_names_its_rank(spoil: object) -> None:
    good = [tensor("x", 2, 2), thing("o")]
    plans = rank_plans(*(local_plan(good, mappings={"x": ("x",)}) for _ in range(2)))
    assert callable(spoil)
    spoil(plans[1].plan)
    with pytest.raises(InvalidPlanError) as caught:
        make_global_plan(plans, ATTEMPT)
    assert 1 in caught.value.failures


@pytest.mark.parametrize("field", ["fqn", "size", "chunk_offset", "hint"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_column_that_ends_within_a_number_names_its_rank(field: str, culprit: int) -> None:
    good = [tensor("x", 2, 300), thing("o")]
    plans = rank_plans(*(local_plan(good) for _ in range(3)))
    items = plans[culprit].plan.items
    with changed_column(items, field) as values:
        values[0] = 300
    setattr(items, field, getattr(items, field)[:-1])
    with pytest.raises(InvalidPlanError, match=f"rank {culprit} .* is cut off") as caught:
        make_global_plan(plans, ATTEMPT)
    assert caught.value.failures.keys() == {culprit}


def _balanced_one_by_one(sizes: Sequence[tuple[int, Sequence[int]]], ranks: int) -> list[int]:
    """Who writes each chunk, given its bytes and holders: the rule, with nothing clever about it."""
    load = [0] * ranks
    sets: dict[tuple[int, ...], list[int]] = {}
    writers = [0] * len(sizes)
    for number, (bytes_, holders) in enumerate(sizes):
        if len(holders) == 1:
            writers[number] = holders[0]
            load[holders[0]] += bytes_
        else:
            sets.setdefault(tuple(holders), []).append(number)
    for holders, numbers in sets.items():
        for number in sorted(numbers, key=lambda number: -sizes[number][0]):
            writers[number] = min(holders, key=lambda rank: load[rank])
            load[writers[number]] += sizes[number][0]
    return writers


@given(st.data())
@settings(max_examples=40)
def test_sets_of_holders_are_balanced_as_if_one_by_one(data: st.DataObject) -> None:
    ranks, copies = data.draw(st.sampled_from([(32, 2), (36, 3), (24, 2), (48, 4)]))
    shards = ranks // copies
    sizes: list[tuple[int, Sequence[int]]] = []
    local: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(1, 3))
        everywhere = data.draw(st.booleans())
        for index in range(1 if everywhere else shards):
            holders = range(ranks) if everywhere else range(index, ranks, shards)
            sizes.append((4 * rows, holders))
            for rank in holders:
                size = [rows] if everywhere else [rows * shards]
                local[rank].append(
                    shard(f"k{number}", [0 if everywhere else rows * index], [rows], size)
                )
    plan, _, _ = ours(local, lowest=False)
    found = sorted(
        (item.index.fqn, item.index.offset, owner)
        for owner, items in enumerate(written(plan, local))
        for item in [next(each for each in local[owner] if each.index == index) for index in items]
    )
    chunks = sorted({(i.index.fqn, i.index.offset) for items in local for i in items})
    expected = _balanced_one_by_one(sizes, ranks)
    # Keys and offsets are made in this order.
    assert [(fqn, offset) for fqn, offset, _ in found] == chunks
    assert [owner for _, _, owner in found] == expected


def test_items_keep_their_kind_and_properties() -> None:
    items = [thing("o"), tensor("a", 2, dtype=torch.bfloat16), shard("b", [0], [2], [2])]
    plan, _, _ = ours([items], lowest=True)
    back = decode_items(plan.metadata.items)
    assert [item.type for item in back] == [
        WriteItemType.BYTE_IO,
        WriteItemType.TENSOR,
        WriteItemType.SHARD,
    ]
    assert [item.index.index for item in back] == [None, 0, 0]
    assert decode_mappings(plan.metadata.mappings)["a"] == ("path", "a", 0)
