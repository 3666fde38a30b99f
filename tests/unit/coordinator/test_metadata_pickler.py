"""What the coordinator pickles doesn't depend on its own torch and Python."""

import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from pannier.client.loading.torch_metadata import build_metadata
from pannier.coordinator.commit.metadata import build_candidate, pickle_metadata
from pannier.coordinator.commit.receipt_check import complete_metadata
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.plan_codec import MemoryFormat
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    tensor,
    thing,
)

ATTEMPT = object_names.Attempt(1, 1, object_names.group_name((0,)), "aa")


def committed() -> dict[str, bytes]:
    """``.metadata`` of a small state, by either way that the coordinator makes it."""
    plans = rank_plans(
        local_plan([tensor("w", 4, 2), tensor("b", 2, dtype=torch.bfloat16), thing("step")])
    )
    who = context(0, "/run/step-1", ranks=[0])
    manifest = make_manifest(who, ATTEMPT, plans, make_global_plan(plans, ATTEMPT.name))
    receipt = records_pb2.Receipt(rank=0)
    for number, position in enumerate(manifest.share(0).varying):
        receipt.varying.add(position=position, offset=number << 10, length=100)
    receipts = {0: receipt}
    return {
        "template": build_candidate(manifest, receipts, checkpoint_id="/run/step-1"),
        "whole": pickle_metadata(
            complete_metadata(manifest, receipts),
            checkpoint_id="/run/step-1",
            attempt=manifest.header.attempt,
        ),
    }


def names(content: bytes) -> set[str]:
    """All strings of a pickle: names of modules, classes and functions among them."""
    return {arg for _, arg, _ in pickletools.genops(content) if isinstance(arg, str)}


def states_of_properties(content: bytes) -> list[tuple[Any, ...]]:
    """What the pickle gives to each ``TensorProperties.__setstate__``."""
    seen: list[tuple[Any, ...]] = []

    class Properties:
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            seen.append(state)

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Properties if name == "TensorProperties" else super().find_class(module, name)

    Recorder(io.BytesIO(content)).load()
    return seen


def test_enums_are_written_by_value_by_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = committed()
    # As Python 3.11.2 has it.
    monkeypatch.setattr(
        MemoryFormat, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    assert "getattr" in names(pickle.dumps(TensorProperties()))
    assert committed() == usual
    for content in usual.values():
        assert "_MEM_FORMAT_ENCODING" in names(content)
        assert "getattr" not in names(content)


def test_properties_have_the_five_fields_that_every_torch_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = committed()
    own = TensorProperties.__getstate__
    # As torch 2.15 has it.
    monkeypatch.setattr(
        TensorProperties, "__getstate__", lambda self: (*own(self)[:5], (2, 1)), raising=True
    )
    assert len(TensorProperties().__getstate__()) == 6
    assert committed() == usual
    for content in usual.values():
        assert {len(state) for state in states_of_properties(content)} == {5}
        assert len(build_metadata(content, "here").state_dict_metadata) == 3
