"""``.metadata`` from a template against what ``pickle`` makes of torch's own objects."""

import dataclasses
import io
import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from pannier.attempts.metadata_refs import referenced_files
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata import build_candidate, pickle_metadata
from pannier.coordinator.commit.receipt_check import complete_metadata
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    shard,
    tensor,
    thing,
)

FIRST, SECOND = (
    object_names.Attempt(1, number, object_names.group_name((0, 1)), "aa") for number in (1, 2)
)


def made(local: Sequence[plan_pb2.LocalPlan]) -> Manifest:
    plans = rank_plans(*local)
    who = context(0, "/run/step-1", ranks=range(len(plans)))
    return make_manifest(who, FIRST, plans, make_global_plan(plans, FIRST.name))


def receipts_of(manifest: Manifest) -> dict[int, records_pb2.Receipt]:
    """Of data files that are too large to be made here."""
    receipts = {}
    for rank in manifest.ranks:
        receipt = receipts[rank] = records_pb2.Receipt(rank=rank)
        for number, position in enumerate(manifest.share(rank).varying):
            receipt.varying.add(position=position, offset=number << 33, length=100)
    return receipts


def both(manifest: Manifest) -> tuple[Metadata, Metadata]:
    """From the template, and from torch's own objects."""
    receipts = receipts_of(manifest)
    attempt = manifest.header.attempt
    candidate = build_candidate(manifest, receipts, checkpoint_id="/run/step-1")
    message = complete_metadata(manifest, receipts)
    expected = pickle_metadata(message, checkpoint_id="/run/step-1", attempt=attempt)
    assert referenced_files(candidate, "c") == referenced_files(expected, "e")
    # The interpreter's own reader is stricter than the one in C.
    pickletools.dis(candidate, out=io.StringIO())
    slow = pickle._Unpickler(io.BytesIO(candidate)).load()  # type: ignore[attr-defined]
    fast = pickle.loads(candidate)
    assert fields(slow) == fields(fast)
    return fast, pickle.loads(expected)


def fields(metadata: Metadata) -> dict[str, Any]:
    return {each.name: getattr(metadata, each.name) for each in dataclasses.fields(metadata)}


def check(local: Sequence[plan_pb2.LocalPlan]) -> None:
    manifest = made(local)
    ours, expected = both(manifest)
    assert fields(ours) == fields(expected)
    assert list(ours.state_dict_metadata) == list(expected.state_dict_metadata)
    for index in ours.storage_data:
        assert type(index.offset) is type(
            next(i for i in expected.storage_data if i == index).offset
        )
    later = Manifest.of(manifest.plan, context(0, "/run/step-2", number=2), SECOND, {})
    ours, expected = both(later)
    assert fields(ours) == fields(expected)
    assert {info.relative_path.split("_")[2] for info in ours.storage_data.values()} <= {
        SECOND.name
    }


@pytest.mark.parametrize("mappings", [None, {"w": ("model", "w"), "l.0": ("l", 0)}])
def test_shards_objects_and_mappings(mappings: dict[str, tuple[str | int, ...]] | None) -> None:
    check(
        [
            local_plan(
                [
                    shard("w", [4 * rank, 0], [4, 8], [8, 8]),
                    thing("epoch"),
                    tensor("ä", 8, dtype=torch.bfloat16),
                    thing(f"rng.{rank}"),
                    tensor("scalar"),
                ],
                mappings=mappings,
            )
            for rank in (0, 1)
        ]
    )


def test_tensors_whose_place_the_receipt_has() -> None:
    items = [tensor("a", 4), tensor("b", 2, 2), thing("c")]
    check([local_plan(items, slots=lambda item: item.index.fqn == "b")])


def test_nothing_and_objects_alone() -> None:
    check([local_plan([])])
    check([local_plan([thing("a"), thing("b")]), local_plan([])])


def test_large_numbers_and_many_dimensions() -> None:
    shape = [2, 1, 3, 1, 2, 2]
    check(
        [
            local_plan(
                [
                    tensor("six", *shape),
                    tensor("large", 1 << 33, dtype=torch.uint8),
                    tensor("next", 70000),
                    shard("far", [1 << 40], [0], [1 << 40]),
                    shard("far", [0], [1 << 40], [1 << 40]),
                ]
            )
        ]
    )


def test_planner_data_of_several_frames_is_read_by_every_unpickler() -> None:
    names = [f"layers.{number}.weight" for number in range(2000)]
    mappings = {name: ("model", "layers", 7, name) for name in names}
    mappings["long"] = ("x" * 70000,)
    check([local_plan([tensor(name, 1) for name in [*names, "long"]], mappings=mappings)])


def test_more_files_and_keys_than_short_references_reach() -> None:
    check(
        [
            local_plan(
                [tensor(f"w{rank}.{number}", number + 1) for number in range(200)]
                + [thing(f"o{rank}")]
            )
            for rank in range(3)
        ]
    )


@st.composite
def states(draw: st.DrawFn) -> list[list[WriteItem]]:
    """Items of up to three ranks, by rows."""
    ranks = draw(st.integers(1, 3))
    out: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            rows = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
            rest = draw(st.lists(st.integers(1, 300), max_size=3))
            begin = 0
            for rank, own in enumerate(rows):
                if own:
                    offset, extent = [begin, *(0 for _ in rest)], [own, *rest]
                    out[rank].append(shard(f"k{number}", offset, extent, [sum(rows), *rest]))
                begin += own
        else:
            out[draw(st.integers(0, ranks - 1))].append(thing(f"k{number}"))
    return out


@settings(max_examples=40)
@given(states())
def test_any_state(items: list[list[WriteItem]]) -> None:
    check([local_plan(each) for each in items])


def test_a_manifest_from_storage_makes_the_same() -> None:
    manifest = made([local_plan([tensor("w", 4), thing("o")])])
    receipts = receipts_of(manifest)
    read = Manifest.parse(manifest.data)
    assert build_candidate(read, receipts, checkpoint_id="x") == build_candidate(
        manifest, receipts, checkpoint_id="x"
    )
