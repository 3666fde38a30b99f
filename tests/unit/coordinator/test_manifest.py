"""Manifests of several attempts by one plan: their own headers, one body, one plan id."""

import random
from dataclasses import replace

import pytest

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    shard,
    tensor,
    thing,
)
from support.plan_messages import columns

FIRST, SECOND = (
    object_names.Attempt(1, number, object_names.group_name((0, 1)), "aa") for number in (1, 2)
)
PLANS = rank_plans(
    *(
        local_plan([shard("w", [4 * rank, 0], [4, 8], [8, 8]), tensor("b", 8), thing("epoch")])
        for rank in (0, 1)
    )
)


def first() -> Manifest:
    return make_manifest(
        context(0, "/run/step-1"), FIRST, PLANS, make_global_plan(PLANS, FIRST.name)
    )


def second(of: Manifest) -> Manifest:
    return Manifest.of(of.plan, context(0, "/run/step-2", number=2), SECOND, {0: "a", 1: "b"})


def test_plan_id_is_the_same_for_every_attempt_by_the_plan() -> None:
    later = second(first())
    assert later.plan_id == first().plan_id
    assert later.data != first().data
    read = Manifest.parse(later.data)
    assert read.plan_id == later.plan_id
    assert read.message.attempt == SECOND.name
    assert [member.host for member in read.message.members] == ["a", "b"]
    assert read.message.checkpoint_id == "/run/step-2"


def test_a_later_manifest_is_what_a_new_plan_would_make() -> None:
    plan = make_global_plan(PLANS, SECOND.name)
    members = [*PLANS]
    made = make_manifest(context(0, "/run/step-2", number=2), SECOND, members, plan)
    later = Manifest.of(
        first().plan,
        context(0, "/run/step-2", number=2),
        SECOND,
        {each.rank: each.host for each in members},
    )
    assert later.data == made.data
    assert later.message.metadata == plan.metadata
    for rank in (0, 1):
        assert later.final_plan(rank) == made.final_plan(rank)
        assert Manifest.parse(later.data).final_plan(rank) == made.final_plan(rank)


def test_plan_id_differs_when_a_rank_or_a_digest_does() -> None:
    ids = {first().plan_id}
    for other in (replace(PLANS[1], digest="another"), replace(PLANS[1], rank=7)):
        plans = [PLANS[0], other]
        plan = make_global_plan(plans, FIRST.name)
        ids.add(make_manifest(context(0, "/run/step-1"), FIRST, plans, plan).plan_id)
    assert len(ids) == 3


def test_a_damaged_byte_anywhere_is_found() -> None:
    manifest = first()
    chance = random.Random(0)
    for at in range(len(manifest.data)):
        damaged = bytearray(manifest.data)
        damaged[at] ^= 1 << chance.randrange(8)
        try:
            read = Manifest.parse(bytes(damaged))
        except IntegrityError:
            continue
        # Where the seal itself no longer is one, the object counts as a single message.
        assert read.plan_id != manifest.plan_id


def test_a_body_that_is_cut_off_is_found() -> None:
    data = first().data
    for size in (len(data) - 1, len(data) // 2):
        with pytest.raises(IntegrityError):
            Manifest.parse(data[:size])


def test_one_message_is_a_manifest_too() -> None:
    message = records_pb2.PlanManifest(attempt=FIRST.name, **columns(owner=[0], position=[0]))
    message.members.add(rank=3, digest="d")
    message.metadata.files.append(object_names.data_file(FIRST.name, 3, 0))
    place = plan_pb2.Placement(**columns(file=[0], offset=[64], length=[100]))
    message.metadata.placement.CopyFrom(place)
    read = Manifest.parse(message.SerializeToString())
    assert read.share(3).files == {"3_0.distcp": 164}
