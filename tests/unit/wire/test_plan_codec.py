"""DCP's plans and metadata survive the wire exactly."""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pannier.coordinator.commit.metadata_pickler import dump_metadata
from pannier.v1 import plan_pb2
from pannier.wire import plan_codec, plan_columns
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import encode_column
from support.plan_messages import changed_tables
from support.states.contents import without_strides

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
LAYOUTS = [torch.strided, torch.sparse_coo, torch.jagged]

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=12)
hints = st.none() | st.integers(0, 2**40)


@st.composite
def tensor_items(draw: st.DrawFn) -> WriteItem:
    extent = draw(st.lists(st.integers(0, 2**45), max_size=5))
    offset = [draw(st.integers(0, 2**45)) for _ in extent]
    size = [o + e for o, e in zip(offset, extent, strict=True)]
    properties = TensorProperties(
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        requires_grad=draw(st.booleans()),
        memory_format=draw(st.sampled_from(FORMATS)),
        pin_memory=draw(st.booleans()),
    )
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
    return WriteItem(
        MetadataIndex(draw(names), offset, draw(hints)),
        draw(st.sampled_from([WriteItemType.TENSOR, WriteItemType.SHARD])),
        tensor_data=TensorWriteData(chunk, properties, torch.Size(size)),
    )


objects = st.builds(
    lambda fqn, hint: WriteItem(MetadataIndex(fqn, index=hint), WriteItemType.BYTE_IO), names, hints
)


@given(st.lists(tensor_items() | objects, max_size=20))
def test_items_come_back_as_they_were(items: list[WriteItem]) -> None:
    message = plan_pb2.Items.FromString(plan_codec.encode_items(items).SerializeToString())
    back = plan_codec.decode_items(message)
    assert back == items
    # Equality of an index ignores the hint.
    assert [item.index.index for item in back] == [item.index.index for item in items]
    assert [type(item.index.offset) for item in back] == [type(i.index.offset) for i in items]


@given(st.dictionaries(names, st.lists(names | st.integers(-(2**63), 2**63 - 1)).map(tuple)))
def test_mappings_come_back_as_they_were(mappings: dict[str, Any]) -> None:
    back = plan_columns.decode_mappings(plan_codec.encode_mappings(mappings))
    assert back == mappings
    assert list(back) == list(mappings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    assert plan_codec.dtype_named(str(dtype).removeprefix("torch.")) is dtype


def item(
    *,
    index_offset: tuple[int, ...] | None = (0, 0),
    chunk_offset: tuple[int, ...] = (0, 0),
    size: tuple[int, ...] = (2, 2),
    hint: int | None = None,
    fqn: str = "layer.weight",
    memory_format: torch.memory_format = torch.contiguous_format,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(chunk_offset), torch.Size((1, 1)))
    properties = TensorProperties(torch.float32, memory_format=memory_format)
    data = TensorWriteData(chunk, properties, torch.Size(size))
    return WriteItem(MetadataIndex(fqn, index_offset, hint), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (item(index_offset=None), "at no offset"),
        (item(index_offset=(1, 0)), "at offset (1, 0), its chunk at (0, 0)"),
        (item(size=(2,)), "differ in dimensions"),
        (item(hint=-3), "negative"),
        (item(memory_format=torch.channels_last_3d), "channels_last_3d"),
        (item(index_offset=(-1, 0), chunk_offset=(-1, 0)), "can't be encoded"),
        (item(fqn="layer.weight\ud800"), "can't be encoded"),
        (WriteItem(MetadataIndex("layer.weight"), WriteItemType.SHARD), "without bounds"),
        (WriteItem(MetadataIndex("layer.weight", (0,)), WriteItemType.BYTE_IO), "has no offset"),
    ],
)
def test_items_that_dcp_cannot_load_are_refused_by_name(bad: WriteItem, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_codec.encode_items([item(), bad])
    assert "'layer.weight" in str(caught.value)
    assert message in str(caught.value)


def _spoil_fqn(message: plan_pb2.Items) -> None:
    message.fqn = encode_column([9])


def _spoil_kind(message: plan_pb2.Items) -> None:
    message.kind = encode_column([plan_pb2.ITEM_KIND_UNSPECIFIED])


def _spoil_property(message: plan_pb2.Items) -> None:
    message.property = encode_column([9])


def _spoil_shape(message: plan_pb2.Items) -> None:
    message.chunk_size = encode_column([1])


def _spoil_dtype(message: plan_pb2.Items) -> None:
    with changed_tables(message) as tables:
        tables.properties[0].dtype = "float99"


def _spoil_length(message: plan_pb2.Items) -> None:
    message.hint = encode_column([0, 1])


def _spoil_width(message: plan_pb2.Items) -> None:
    message.size = b"\x03" + message.size[1:]


def _spoil_tables(message: plan_pb2.Items) -> None:
    message.tables = message.tables[:-1]


@pytest.mark.parametrize(
    "spoil",
    [
        *(_spoil_fqn, _spoil_kind, _spoil_property, _spoil_shape, _spoil_dtype, _spoil_length),
        *(_spoil_width, _spoil_tables),
    ],
)
def test_columns_that_do_not_fit_are_refused(spoil: Any) -> None:
    message = plan_codec.encode_items([item()])
    spoil(message)
    with pytest.raises(InvalidRequestError):
        plan_codec.decode_items(message)


@pytest.mark.parametrize("path", [("a", 1.5), ("a", None), ("a", True), ("a", 2**70)])
def test_paths_of_other_parts_are_refused(path: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"'a\.b'"):
        plan_codec.encode_mappings({"a.b": path})


def test_digest_differs_between_plans() -> None:
    one = plan_pb2.LocalPlan(items=plan_codec.encode_items([item()]))
    two = plan_pb2.LocalPlan(items=plan_codec.encode_items([item(fqn="other")]))
    again = plan_pb2.LocalPlan.FromString(one.SerializeToString())
    assert (
        plan_codec.plan_digest(one) == plan_codec.plan_digest(again) != plan_codec.plan_digest(two)
    )


STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(3, dtype=torch.int64)},
    "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
    "list": [torch.ones(2), {"deep": "text"}],
    "epoch": 7,
}


def saved(directory: Path) -> Metadata:
    dcp.save(STATE, checkpoint_id=directory, no_dist=True)
    with (directory / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    assert isinstance(metadata, Metadata)
    return metadata


def test_metadata_of_dcp_comes_back_as_it_was(tmp_path: Path) -> None:
    metadata = saved(tmp_path)
    message = plan_pb2.GlobalMetadata.FromString(
        plan_codec.encode_metadata(metadata).SerializeToString()
    )
    back = plan_codec.build_metadata(message, storage_meta=metadata.storage_meta)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            without_strides(entry.properties)
    assert back == metadata
    assert list(back.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert back.version == metadata.version


def test_metadata_is_read_by_torch(tmp_path: Path) -> None:
    metadata = saved(tmp_path)
    message = plan_codec.encode_metadata(metadata)
    storage_meta = StorageMeta(checkpoint_id="gs://bucket/step-1", save_id="i1-a1-g0-s1")
    data = dump_metadata(plan_codec.build_metadata(message, storage_meta=storage_meta))
    (tmp_path / ".metadata").write_bytes(data)
    assert FileSystemReader(tmp_path).read_metadata().storage_meta is not None
    target = {
        "model": {"w": torch.zeros(3, 4), "b": torch.tensor(0)},
        "empty": torch.ones(0, 3, dtype=torch.bfloat16),
        "list": [torch.zeros(2), {"deep": ""}],
        "epoch": 0,
    }
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
    assert target["epoch"] == 7
    out = tmp_path / "whole.pt"
    dcp_to_torch_save(tmp_path, out)
    assert torch.load(out)["list"][1] == {"deep": "text"}


def test_metadata_pickle_uses_torchs_own_names_only(tmp_path: Path) -> None:
    """Any torch since 2.9 knows these, and nothing else is needed to read it."""
    metadata = plan_codec.build_metadata(
        plan_codec.encode_metadata(saved(tmp_path)), storage_meta=None
    )
    seen: set[str] = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.add(f"{module}.{name}")
            return super().find_class(module, name)

    Recorder(io.BytesIO(dump_metadata(metadata))).load()
    prefix = "torch.distributed.checkpoint."
    assert {name.removeprefix(prefix) for name in seen if name.startswith(prefix)} == {
        "filesystem._StorageInfo",
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata.Metadata",
        "metadata.MetadataIndex",
        "metadata.TensorProperties",
        "metadata.TensorStorageMetadata",
        "metadata._MEM_FORMAT_ENCODING",
    }
    assert all(name.startswith(("torch.", "torch")) for name in seen)


def tensor_metadata(*chunks: ChunkStorageMetadata) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4,)), list(chunks))


def test_metadata_that_is_not_whole_is_refused() -> None:
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))
    info = plan_codec.StorageInfo("f", 0, 10)
    with pytest.raises(InvalidRequestError, match=r"'w' at .*no rank wrote it"):
        plan_codec.encode_metadata(Metadata({"w": tensor_metadata(chunk)}, storage_data={}))
    with pytest.raises(InvalidRequestError, match="'w' is in the metadata"):
        plan_codec.encode_metadata(Metadata({"w": tensor_metadata()}, storage_data={}))
    index = MetadataIndex("o")
    with pytest.raises(InvalidRequestError, match="planner_data is a list"):
        plan_codec.encode_metadata(
            Metadata({"o": BytesStorageMetadata()}, planner_data=[1], storage_data={index: info})
        )
    packed = plan_codec.StorageInfo("f", 0, 10, transform_descriptors=["zstd"])
    with pytest.raises(InvalidRequestError, match="'o': its bytes are transformed"):
        plan_codec.encode_metadata(
            Metadata({"o": BytesStorageMetadata()}, storage_data={index: packed})
        )


def test_placements_that_do_not_fit_are_refused() -> None:
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))
    metadata = Metadata(
        {"w": tensor_metadata(chunk)},
        storage_data={MetadataIndex("w", (0,)): plan_codec.StorageInfo("f", 0, math.prod((4, 4)))},
    )
    message = plan_codec.encode_metadata(metadata)
    message.placement.file = encode_column([1])
    with pytest.raises(InvalidRequestError, match="file 1 of 1"):
        plan_codec.build_metadata(message, storage_meta=None)
    message.placement.file = b""
    with pytest.raises(InvalidRequestError, match="0 places"):
        plan_codec.build_metadata(message, storage_meta=None)
