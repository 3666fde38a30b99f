"""What the coordinator knows of torch, which it doesn't import, is what torch says of itself."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from pannier.coordinator.commit import torch_pickles
from pannier.coordinator.commit.metadata import build_candidate
from pannier.coordinator.commit.metadata_pickler import dump_metadata
from pannier.coordinator.planning.dtypes import ITEM_BYTES, Dtype, dtype_named
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_codec import decode_properties
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    shard,
    tensor,
    thing,
)

DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
ATTEMPT = object_names.Attempt(1, 1, object_names.group_name((0, 1)), "aa")
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pannier.coordinator import server
from pannier.coordinator.commit.manifest import Manifest, agree
from pannier.coordinator.commit.metadata import build_candidate
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.custom_planners import Planners
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import ConfigurationError

attempt = object_names.Attempt.parse(sys.argv[1])
who = sidecar_pb2.SaveContext.FromString(bytes.fromhex(sys.argv[2]))
plans = [
    RankPlan(rank, f"node-{rank}", f"digest-{rank}", plan_pb2.LocalPlan.FromString(bytes.fromhex(text)))
    for rank, text in enumerate(sys.argv[3:])
]
agreed = agree(plans, Planners().make(plans, attempt.name))
manifest = Manifest.of(agreed, who, attempt, {plan.rank: plan.host for plan in plans})
receipts = {rank: records_pb2.Receipt(rank=rank) for rank in range(len(plans))}
for rank, receipt in receipts.items():
    for position in manifest.share(rank).varying:
        receipt.varying.add(position=position, offset=0, length=100)
sys.stdout.buffer.write(build_candidate(manifest, receipts, checkpoint_id="/run/step-1"))
try:
    Planners(["json:JSONDecoder"])
except ConfigurationError as error:
    sys.stderr.write(str(error))
"""


def properties(dtype: str, **others: str | bool) -> plan_pb2.TensorProperties:
    usual: dict[str, str | bool] = {"layout": "strided", "memory_format": "contiguous_format"}
    return plan_pb2.TensorProperties(dtype=dtype, **{**usual, **others})  # type: ignore[arg-type]


def test_the_sizes_of_dtypes_are_torchs() -> None:
    for name, dtype in DTYPES.items():
        assert dtype_named(name) == Dtype(name, dtype.itemsize)
    assert {"float32", "bfloat16", "float8_e4m3fn", "int64", "bool"} <= ITEM_BYTES.keys()
    assert dtype_named("float") == Dtype("float32", 4)
    with pytest.raises(InvalidRequestError, match=r"'float3' is not a torch\.dtype"):
        dtype_named("float3")


@pytest.mark.parametrize(
    "message",
    [
        *(properties(name) for name in DTYPES),
        *(properties("float32", layout=name) for name in ("sparse_coo", "sparse_csr", "_mkldnn")),
        properties("float32", memory_format="channels_last", requires_grad=True),
        properties("int64", memory_format="preserve_format", pin_memory=True),
    ],
    ids=str,
)
def test_properties_are_pickled_as_torchs_own(message: plan_pb2.TensorProperties) -> None:
    fragment = torch_pickles.properties(message)
    wanted = decode_properties(message)
    assert fragment == torch_pickles.without_frame(dump_metadata(wanted, fast=True))
    loaded = pickle.loads(b"\x80\x04" + fragment + b".")
    assert isinstance(loaded, TensorProperties)
    assert loaded == wanted


def test_properties_that_torch_does_not_know_are_refused() -> None:
    for wrong in ({"layout": "load"}, {"memory_format": "float32"}):
        with pytest.raises(InvalidRequestError, match="is not a torch"):
            torch_pickles.properties(properties("float32", **wrong))


def test_storage_meta_and_version_are_torchs() -> None:
    fragment = torch_pickles.storage_meta("gs://bucket/step-1", "1.2.aa")
    wanted = StorageMeta(checkpoint_id="gs://bucket/step-1", save_id="1.2.aa")
    assert pickle.loads(b"\x80\x04" + fragment + b".") == wanted
    version = getattr(filesystem, "CURRENT_DCP_VERSION", torch_pickles.DCP_VERSION)
    assert version == torch_pickles.DCP_VERSION


def test_a_coordinator_plans_and_commits_where_torch_can_not_be_imported() -> None:
    local = [
        local_plan(
            [
                shard("w", [4 * rank, 0], [4, 8], [8, 8]),
                tensor("b", 8, dtype=torch.bfloat16),
                thing(f"rng.{rank}"),
            ]
        )
        for rank in (0, 1)
    ]
    who = context(0, "/run/step-1", ranks=[0, 1])
    child = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_TORCH, ATTEMPT.name),
            *(each.SerializeToString().hex() for each in (who, *local)),
        ],
        capture_output=True,
        timeout=100,
    )
    assert not child.returncode, child.stderr.decode()
    plans = rank_plans(*local)
    manifest = make_manifest(who, ATTEMPT, plans, make_global_plan(plans, ATTEMPT.name))
    receipts = {rank: records_pb2.Receipt(rank=rank) for rank in (0, 1)}
    for rank, receipt in receipts.items():
        for position in manifest.share(rank).varying:
            receipt.varying.add(position=position, offset=0, length=100)
    assert child.stdout == build_candidate(manifest, receipts, checkpoint_id="/run/step-1")
    text = child.stderr.decode()
    assert "needs torch for --planner json:JSONDecoder: pip install torch where" in text
