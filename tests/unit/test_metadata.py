import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pannier.client.metadata import unpickle_metadata
from pannier.wire.errors import InvalidRequestError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


def written(path: Path, state: dict[str, Any]) -> bytes:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return (path / ".metadata").read_bytes()


def test_is_what_torch_would_have_read(tmp_path: Path) -> None:
    content = written(
        tmp_path,
        {
            "w": torch.randn(4, 2),
            "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "nested": {"list": [torch.zeros(()), "x"], "number": 3},
        },
    )
    want: Metadata = pickle.loads(content)
    got = unpickle_metadata(content, "here")
    assert got.storage_meta is not None
    # Ours can't be opened.
    assert got.storage_meta.checkpoint_id == pathlib.PurePosixPath(tmp_path)
    assert want.storage_meta is not None
    got.storage_meta.checkpoint_id = want.storage_meta.checkpoint_id
    assert got == want


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_knows_every_protocol(tmp_path: Path, protocol: int) -> None:
    want: Metadata = pickle.loads(written(tmp_path, {"w": torch.ones(3)}))
    want.storage_meta = StorageMeta("gs://bucket/x", "id", None, ["module"])
    assert unpickle_metadata(pickle.dumps(want, protocol=protocol), "here") == want


def test_knows_every_dtype() -> None:
    metadata = Metadata({}, planner_data=DTYPES)
    assert unpickle_metadata(pickle.dumps(metadata), "here").planner_data == DTYPES


class Evil:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("where", ["whole", "planner_data", "key"])
def test_nothing_foreign_is_called(tmp_path: Path, where: str) -> None:
    evil = Evil(tmp_path / "flag")
    poisoned: Any = {
        "whole": evil,
        "planner_data": Metadata({}, planner_data={"a": (evil,)}),
        "key": Metadata({"w": evil}),  # type: ignore[dict-item]
    }[where]
    content = pickle.dumps(poisoned)
    with pytest.raises(InvalidRequestError, match=r"gs://b/\.metadata refers to \w+\.mkdir"):
        unpickle_metadata(content, "gs://b/.metadata")
    assert not (tmp_path / "flag").exists()
    # The pickle is as bad as it looks.
    pickle.loads(content)
    assert (tmp_path / "flag").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "nn"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("pathlib", "Path.unlink"),
    ],
)
def test_only_names_of_dcp_are_known(module: str, name: str) -> None:
    content = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    with pytest.raises(InvalidRequestError, match="which is not part of a DCP checkpoint"):
        unpickle_metadata(content + b"\x93.", "here")


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04K\x01", b"\x80\x04)."])
def test_what_is_damaged_or_something_else_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="here"):
        unpickle_metadata(content, "here")


def test_a_cut_one_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path, {"w": torch.ones(3)})
    for length in range(0, len(content), 7):
        with pytest.raises(InvalidRequestError):
            unpickle_metadata(content[:length], "here")
