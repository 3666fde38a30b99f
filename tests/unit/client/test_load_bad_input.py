"""What a load refuses, says which tensor, what is stored and what was asked for."""

import dataclasses
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier import client
from pannier.client.loading.torch_metadata import build_metadata
from pannier.wire.errors import InvalidRequestError, PannierError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root") / "step-1"
    state = {"w": torch.arange(6.0), "n": 3, "deep": {"b": torch.ones(2, dtype=torch.bfloat16)}}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"w": torch.empty(6, device="meta")},
            r"'w' can't be loaded: torch.float32 of \(6,\) is stored, .* tensor on meta, .*to_empty",
        ),
        (
            {"deep": {"b": torch.empty(2, device="meta")}},
            r"'deep.b' can't be loaded: torch.bfloat16 of \(2,\) is stored, .* on meta",
        ),
        (
            {"w": torch.zeros(7)},
            r"saved torch.Size\(\[6\]\) and current: torch.Size\(\[7\]\) for w",
        ),
        ({"w": torch.zeros(2, 3)}, r"\[6\].*\[2, 3\].* for w"),
        ({"w": 5}, r"'w' can't be loaded: torch.float32 of \(6,\) is stored, .* has 5 \(int\)"),
        ({"w": None}, r"'w' can't be loaded: .* has None \(NoneType\)"),
        (
            {"w": torch.zeros(6).to_sparse()},
            r"'w' of .* can't be loaded: .* \(6,\) \(torch.strided\) is stored, .* \(torch.sparse_coo\)",
        ),
        ({"other": torch.zeros(6)}, "Missing key in checkpoint state_dict: other"),
        ({"w": {"deeper": torch.zeros(6)}}, r"Missing key in checkpoint state_dict: w\.deeper"),
        ([torch.zeros(6)], "state_dict=list can't be filled: give a dict"),
    ],
)
def test_the_tensor_is_named_with_what_is_stored_and_what_was_asked_for(
    checkpoint: Path, state: Any, text: str
) -> None:
    with pytest.raises(PannierError, match=text):
        client.load(state, checkpoint_id=checkpoint)


def test_another_dtype_and_a_parameter_just_work(checkpoint: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    client.load(OrderedDict(w=weight), checkpoint_id=checkpoint)
    assert torch.equal(weight.detach(), torch.arange(6, dtype=torch.float64))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e9, "60"])
def test_a_timeout_without_sense_is_refused(checkpoint: Path, seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"timeout={seconds!r}"):
        client.load({"w": torch.zeros(6)}, checkpoint_id=checkpoint, timeout=seconds)
    with pytest.raises(InvalidRequestError, match=f"timeout={seconds!r}"):
        client.latest(checkpoint.parent, timeout=seconds)


def test_latest_names_what_it_may_include(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequestError, match="include='durable': give 'committed' or 'ing"):
        client.latest(checkpoint.parent, include="durable")


def test_a_class_of_a_newer_torch_is_named_with_the_torch_that_is_here(checkpoint: Path) -> None:
    @dataclasses.dataclass
    class FutureMetadata:
        fields: int = 1

    FutureMetadata.__module__ = "torch.distributed.checkpoint.metadata"
    FutureMetadata.__qualname__ = "FutureMetadata"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.metadata, "FutureMetadata", FutureMetadata, raising=False)
        content = pickle.dumps(FutureMetadata())
    text = rf"metadata\.FutureMetadata, .* torch {torch.__version__}.* if a newer torch wrote it"
    with pytest.raises(InvalidRequestError, match=text.replace("+", r"\+")):
        build_metadata(content, "here")
