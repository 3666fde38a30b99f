import importlib
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pannier.attempts.metadata_refs import referenced_files
from pannier.client import torch_compat
from pannier.client.loading.torch_metadata import build_metadata
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
    got = build_metadata(content, "here")
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
    assert build_metadata(pickle.dumps(want, protocol=protocol), "here") == want


def test_knows_every_dtype() -> None:
    metadata = Metadata({}, planner_data=DTYPES)
    assert build_metadata(pickle.dumps(metadata), "here").planner_data == DTYPES


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
        build_metadata(content, "gs://b/.metadata")
    assert not (tmp_path / "flag").exists()
    # The pickle is as bad as it looks.
    pickle.loads(content)
    assert (tmp_path / "flag").exists()


def text(words: str) -> bytes:
    """A string as part of a pickle; as the following, of protocol 4."""
    return b"\x8c" + bytes([len(words)]) + words.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def attribute(owner: bytes, name: bytes) -> bytes:
    return named("builtins", "getattr") + owner + name + b"\x86R"


DCP = "torch.distributed.checkpoint.metadata"
ENUM = named(DCP, "_MEM_FORMAT_ENCODING")
MEMBER = attribute(ENUM, text("TORCH_CHANNELS_LAST"))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "nn"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("pathlib", "Path.unlink"),
    ],
)
def test_only_names_of_dcp_are_known(module: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="which is not part of a DCP checkpoint"):
        build_metadata(b"\x80\x04" + named(module, name) + b".", "here")


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04K\x01", b"\x80\x04)."])
def test_what_is_damaged_or_something_else_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="here"):
        build_metadata(content, "here")


def test_a_cut_one_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path, {"w": torch.ones(3)})
    for length in range(0, len(content), 7):
        with pytest.raises(InvalidRequestError):
            build_metadata(content[:length], "here")


WRITTEN = {path.stem: path for path in (Path(__file__).parents[1] / "data").glob("*.metadata")}
"""``.metadata`` of plain torch, from several versions of Python and torch."""


@pytest.mark.parametrize("by", ["python-3.11.2-torch-2.13", "python-3.11.7-torch-2.15"])
def test_is_read_whatever_torch_and_python_wrote_it(by: str) -> None:
    content = WRITTEN[by].read_bytes()
    metadata = build_metadata(content, by)
    assert sorted(metadata.state_dict_metadata) == ["channels", "model.b", "model.w", "step"]
    entry = metadata.state_dict_metadata["model.b"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (entry.properties.dtype, entry.properties.memory_format) == (
        torch.bfloat16,
        torch.contiguous_format,
    )
    # What is read is this torch's own, and can be pickled again.
    assert pickle.loads(pickle.dumps(metadata)).state_dict_metadata == metadata.state_dict_metadata
    files = {info.relative_path for info in metadata.storage_data.values()}
    assert referenced_files(content, by) == files == {"__0_0.distcp"}


def with_planner_data(value: bytes) -> bytes:
    state = b"}(" + text("state_dict_metadata") + b"}" + text("planner_data") + value + b"u"
    return b"\x80\x04" + named(DCP, "Metadata") + b")\x81" + state + b"b."


def test_a_member_of_dcps_enum_may_be_named() -> None:
    got = build_metadata(with_planner_data(MEMBER), "here").planner_data
    assert (got.name, got.value) == ("TORCH_CHANNELS_LAST", 1)
    old = named("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
    member = attribute(old, text("TORCH_PRESERVE_FORMAT"))
    assert build_metadata(with_planner_data(member), "here").planner_data.value == 2
    # Of protocol 2.
    content = f"\x80\x02c__builtin__\ngetattr\nc{DCP}\n_MEM_FORMAT_ENCODING\n"
    called = content.encode("latin-1") + b"X\x13\x00\x00\x00TORCH_CHANNELS_LAST\x86R."
    with pytest.raises(InvalidRequestError, match="holds a getattr, not a DCP"):
        build_metadata(called, "here")


NOT_MEMBERS = {
    "method of a class": attribute(named(DCP, "Metadata"), text("__init__")),
    "method of torch": attribute(named("torch", "Size"), text("numel")),
    "member of a list": attribute(b"]", text("append")),
    **{
        f"{name!r} of the enum": attribute(ENUM, text(name))
        for name in ("__class__", "__members__", "_member_map_", "mro", "name", "", "ABSENT")
    },
    "dotted": attribute(ENUM, text("TORCH_CHANNELS_LAST.value")),
    "dotted class": attribute(ENUM, text("__class__.__mro__")),
    "number": attribute(ENUM, b"K\x01"),
    "bytes": attribute(ENUM, b"C\x13TORCH_CHANNELS_LAST"),
    "value of a member": attribute(MEMBER, text("value")),
    "class of a member": attribute(MEMBER, text("__class__")),
    "member of a member": attribute(MEMBER, text("TORCH_CHANNELS_LAST")),
    "nested": attribute(attribute(ENUM, text("__class__")), text("__subclasses__")),
    "getattr itself": attribute(named("builtins", "getattr"), text("__self__")),
}


@pytest.mark.parametrize("what", NOT_MEMBERS)
def test_getattr_of_anything_else_is_refused(what: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"refers to getattr\(.*not part of a DCP"):
        build_metadata(with_planner_data(NOT_MEMBERS[what]), "here")


def test_getattr_cannot_be_changed_or_called_otherwise() -> None:
    name = named("builtins", "getattr")
    for content in (
        name,
        name + ENUM + text("ABSENT") + text("default") + b"\x87R",
        # Sets attributes of what was named.
        name + b"N}" + text("__defaults__") + b")s\x86b",
        name + b")\x81",
    ):
        with pytest.raises(InvalidRequestError):
            build_metadata(b"\x80\x04" + content + b".", "here")


CLASSES = [
    *((DCP, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    (DCP, "_MEM_FORMAT_ENCODING"),
]


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=lambda part: part)
def test_no_class_or_function_of_the_trainer_is_changed(module: str, name: str) -> None:
    """BUILD sets attributes of what it is given: of a class, they would change the whole process."""
    owner = importlib.import_module(module)
    before = dict(vars(getattr(owner, name))) if hasattr(getattr(owner, name), "__dict__") else None
    changed = named(module, name) + b"N}(" + text("__fspath__") + text("evil") + b"u\x86b"
    for content in (changed, named(module, name) + b"}(" + text("evil") + b"K\x01ub"):
        with pytest.raises(InvalidRequestError, match="the state of a Named is set"):
            build_metadata(b"\x80\x04" + content + b".", "here")
        with pytest.raises(InvalidRequestError, match="the state of a Named is set"):
            build_metadata(with_planner_data(content), "here")
    assert before is None or dict(vars(getattr(owner, name))) == before


INDEX = MetadataIndex("w", torch.Size([0]))
INFO = torch_compat.StorageInfo("f", 0, 4)
CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))


def tensor(**fields: Any) -> Any:
    whole = {"properties": TensorProperties(), "size": torch.Size([1]), "chunks": [CHUNK]}
    return TensorStorageMetadata(**{**whole, **fields})


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


WRONG_TYPES: dict[str, Any] = {
    "tensors that are no dict": Metadata([]),  # type: ignore[arg-type]
    "a tensor that is a text": Metadata({"w": "text"}),  # type: ignore[dict-item]
    "a key that is a number": Metadata({1: tensor()}),  # type: ignore[dict-item]
    "chunks that are no list": Metadata({"w": tensor(chunks={})}),
    "a chunk that is a number": Metadata({"w": tensor(chunks=[1])}),
    "a size that is a tuple": Metadata({"w": tensor(size=(1,))}),
    "properties that are missing": Metadata({"w": tensor(properties=None)}),
    "places that are no dict": Metadata({}, storage_data=[INFO]),
    "a place under a text": Metadata({}, storage_data={"w": INFO}),
    "a place that is a text": Metadata({}, storage_data={INDEX: "f"}),
    "a file's name that is a number": Metadata(
        {}, storage_data={INDEX: torch_compat.StorageInfo(1, 0, 4)}
    ),
    "an offset that is a text": Metadata(
        {}, storage_data={INDEX: torch_compat.StorageInfo("f", "0", 4)}
    ),
    "an offset that is a bool": Metadata(
        {}, storage_data={INDEX: torch_compat.StorageInfo("f", True, 4)}
    ),
    "transforms that are numbers": Metadata(
        {}, storage_data={INDEX: torch_compat.StorageInfo("f", 0, 4, [1])}
    ),
    "a key without a name": Metadata({}, storage_data={MetadataIndex(None): INFO}),
    "a save's id that is a number": Metadata({}, storage_meta=StorageMeta(save_id=1)),
    "modules that are a text": Metadata({}, storage_meta=StorageMeta(modules="x")),
    "a version that is a number": Metadata({}, version=1),  # type: ignore[arg-type]
    "lists in each other": Metadata({}, planner_data=nested(100)),
}


@pytest.mark.parametrize("what", WRONG_TYPES)
def test_a_value_of_another_type_than_dcps_is_refused(what: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="here is damaged or not a DCP checkpoint's: it has"
    ):
        build_metadata(pickle.dumps(WRONG_TYPES[what]), "here")


def test_what_planner_data_refers_to_repeatedly_is_bounded() -> None:
    shared: Any = ["leaf"]
    for _ in range(50):
        shared = [shared, shared]
    with pytest.raises(InvalidRequestError, match="refers to itself too often"):
        build_metadata(pickle.dumps(Metadata({}, planner_data=shared)), "here")
    path = ("a", 0)
    data = {"a.0": path, "b": [path, {path: {"x"}, "y": frozenset({1})}], "size": torch.Size([2])}
    assert (
        build_metadata(pickle.dumps(Metadata({}, planner_data=data)), "here").planner_data == data
    )
