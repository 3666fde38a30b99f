"""DCP's plans and metadata <-> the columns of ``plan.proto``.

In: torch's ``WriteItem``s, flatten mappings and ``Metadata``. Out: messages, and the
same objects back again. Pure functions; any thread. This module needs torch: the sidecar never
imports it, the coordinator only for plans that need torch's own objects.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
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

from pannier.v1 import plan_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import (
    decode_column,
    decode_mappings,
    encode_column,
    parse_tables,
)

# All private names of torch that are used here; checked in torch 2.9, 2.13 and 2.15. FileSystemReader and
# dcp_to_torch_save read nothing else from `storage_data`.
StorageInfo: Final = filesystem._StorageInfo
"""``_StorageInfo(relative_path, offset, length)``: what torch's readers expect for each chunk."""
MemoryFormat: Final = dcp_metadata._MEM_FORMAT_ENCODING
"""Encoding of a ``torch.memory_format`` in a pickled ``TensorProperties``."""
_DCP_VERSION: Final[str | None] = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""``Metadata.version`` as FileSystemWriter sets it; older versions of torch set none."""

_KINDS: Final = {
    WriteItemType.BYTE_IO: plan_pb2.ITEM_KIND_BYTE_IO,
    WriteItemType.TENSOR: plan_pb2.ITEM_KIND_TENSOR,
    WriteItemType.SHARD: plan_pb2.ITEM_KIND_SHARD,
}
_TYPES: Final = {kind: type_ for type_, kind in _KINDS.items()}
ITEM_COLUMNS: Final = tuple(
    field.name for field in plan_pb2.Items.DESCRIPTOR.fields if field.name != "tables"
)
"""Names of the columns of ``Items``."""
_LARGEST: Final = (1 << 63) - 1
_PICKLED_FORMATS: Final = (
    torch.contiguous_format,
    torch.channels_last,
    torch.preserve_format,
)
"""The memory formats with which torch's TensorProperties can be pickled."""


def plan_digest(plan: plan_pb2.LocalPlan) -> str:
    """SHA-256, hex, of a local plan in canonical form."""
    return hashlib.sha256(plan.SerializeToString(deterministic=True)).hexdigest()


# Items.


def encode_items(items: Sequence[WriteItem]) -> plan_pb2.Items:
    """Columns of a plan's items, in order.

    ``WriteItem.bytes_io_data`` (a size that is never read) is left out.

    Raises InvalidRequestError, naming the key, for items that DCP would write but could not load: a
    tensor without bounds, an index that isn't at its chunk's offset, an object with an offset, a
    memory format that ``.metadata`` can't hold.
    """
    encoder = _Encoder()
    for item in items:
        encoder.add(item)
    try:
        return encoder.finish()
    except (OverflowError, TypeError, ValueError) as error:
        # Negative sizes, lone surrogates and the like. Encoded alone, the item that has them raises.
        if len(items) > 1:
            for item in items:
                encode_items([item])
        raise InvalidRequestError(
            f"{items[0].index.fqn!r}: this item can't be encoded: {error}"
        ) from error


class _Encoder:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """Of names, in order of first use."""
        self._property_numbers: dict[tuple[Any, ...], int] = {}
        self._properties: list[plan_pb2.TensorProperties] = []
        self._columns: dict[str, list[int]] = {name: [] for name in ITEM_COLUMNS}

    def add(self, item: WriteItem) -> None:
        fqn, hint, columns = item.index.fqn, item.index.index, self._columns
        if hint is not None and hint < 0:
            raise InvalidRequestError(f"{fqn!r}: its index hint is negative: {hint}")
        number = self._numbers.setdefault(fqn, len(self._numbers))
        data = item.tensor_data
        ndim = property_ = 0
        if item.type is WriteItemType.BYTE_IO:
            if item.index.offset is not None:
                raise InvalidRequestError(
                    f"{fqn!r}: an object has no offset, but its index is at {item.index.offset}"
                )
        else:
            if data is None or data.chunk is None:
                raise InvalidRequestError(
                    f"{fqn!r}: the planner made a tensor item without bounds, which DCP can't load"
                )
            _check_chunk(fqn, item.index.offset, data)
            ndim, property_ = len(data.size), self._property(fqn, data.properties)
            columns["size"].extend(data.size)
            columns["chunk_offset"].extend(data.chunk.offsets)
            columns["chunk_size"].extend(data.chunk.sizes)
        columns["fqn"].append(number)
        columns["kind"].append(_KINDS[item.type])
        columns["hint"].append(0 if hint is None else hint + 1)
        columns["ndim"].append(ndim)
        columns["property"].append(property_)

    def _property(self, fqn: str, p: TensorProperties) -> int:
        key = (p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)
        number = self._property_numbers.get(key)
        if number is None:
            if p.memory_format not in _PICKLED_FORMATS:
                raise InvalidRequestError(
                    f"{fqn!r}: DCP's metadata has no {p.memory_format}; save it contiguous"
                )
            self._properties.append(_encode_properties(p))
            number = self._property_numbers[key] = len(self._property_numbers)
        return number

    def finish(self) -> plan_pb2.Items:
        tables = plan_pb2.ItemTables(fqns=self._numbers, properties=self._properties)
        columns = {name: encode_column(values) for name, values in self._columns.items()}
        return plan_pb2.Items(tables=tables.SerializeToString(deterministic=True), **columns)


def _check_chunk(fqn: str, offset: Sequence[int] | None, data: TensorWriteData) -> None:
    chunk = data.chunk
    if offset is None or tuple(offset) != tuple(chunk.offsets):
        at = "at no offset" if offset is None else f"at offset {tuple(offset)}"
        raise InvalidRequestError(
            f"{fqn!r}: the planner's index is {at}, its chunk at {tuple(chunk.offsets)}: DCP could "
            "not load it; make them equal"
        )
    if not len(data.size) == len(chunk.offsets) == len(chunk.sizes):
        raise InvalidRequestError(
            f"{fqn!r}: size {tuple(data.size)}, chunk offsets {tuple(chunk.offsets)} and chunk "
            f"sizes {tuple(chunk.sizes)} differ in dimensions"
        )


def decode_items(message: plan_pb2.Items) -> list[WriteItem]:
    """Inverse of :func:`encode_items`. Raises InvalidRequestError when columns don't fit together."""
    try:
        return _decode_items(message)
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the columns of a plan don't fit together: {error}") from error


def _decode_items(message: plan_pb2.Items) -> list[WriteItem]:
    tables = parse_tables(message.tables)
    properties = [decode_properties(p) for p in tables.properties]
    fqns = list(tables.fqns)
    size, offset, extent = (
        decode_column(column) for column in (message.size, message.chunk_offset, message.chunk_size)
    )
    if (largest := max((*size, *offset, *extent), default=0)) > _LARGEST:
        raise InvalidRequestError(f"a shape with {largest} in it exceeds torch's range")
    columns = (message.fqn, message.kind, message.hint, message.ndim, message.property)
    items = []
    at = 0
    for fqn, kind, hint, ndim, prop in zip(*map(decode_column, columns), strict=True):
        name, index = fqns[fqn], hint - 1 if hint else None
        type_ = _TYPES[kind]
        if type_ is WriteItemType.BYTE_IO:
            items.append(WriteItem(MetadataIndex(name, index=index), type_))
            continue
        end = at + ndim
        if end > min(len(size), len(offset), len(extent)):
            raise InvalidRequestError(f"{name!r}: the columns of its shape end too early")
        offsets = torch.Size(offset[at:end])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(extent[at:end])),
            properties=properties[prop],
            size=torch.Size(size[at:end]),
        )
        items.append(WriteItem(MetadataIndex(name, offsets, index), type_, tensor_data=data))
        at = end
    return items


def _encode_properties(properties: TensorProperties) -> plan_pb2.TensorProperties:
    return plan_pb2.TensorProperties(
        dtype=str(properties.dtype).removeprefix("torch."),
        layout=str(properties.layout).removeprefix("torch."),
        requires_grad=properties.requires_grad,
        memory_format=str(properties.memory_format).removeprefix("torch."),
        pin_memory=properties.pin_memory,
    )


def decode_properties(message: plan_pb2.TensorProperties) -> TensorProperties:
    """Inverse of the encoding in :func:`encode_items`. Raises InvalidRequestError."""
    return TensorProperties(
        dtype=dtype_named(message.dtype),
        layout=_torch_attribute(message.layout, torch.layout),
        requires_grad=message.requires_grad,
        memory_format=_torch_attribute(message.memory_format, torch.memory_format),
        pin_memory=message.pin_memory,
    )


def dtype_named(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``. Raises InvalidRequestError for a name this torch lacks."""
    dtype: torch.dtype = _torch_attribute(name, torch.dtype)
    return dtype


def _torch_attribute(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise InvalidRequestError(
            f"{name!r} is not a torch.{kind.__name__} in torch {torch.__version__}; does the "
            "coordinator run an older torch than the trainers?"
        )
    return value


# Flatten mappings.


def encode_mappings(mappings: Mapping[str, Sequence[str | int]]) -> plan_pb2.FlattenMappings:
    """``DefaultSavePlanner.mappings`` as a message, in order.

    Raises InvalidRequestError when a path has other parts than strings and integers.
    """
    return plan_pb2.FlattenMappings(
        mappings=[
            plan_pb2.FlattenMapping(fqn=fqn, path=[_encode_part(fqn, part) for part in path])
            for fqn, path in mappings.items()
        ]
    )


def _encode_part(fqn: str, part: object) -> plan_pb2.PathElement:
    try:
        if isinstance(part, str):
            return plan_pb2.PathElement(key=part)
        if isinstance(part, int) and not isinstance(part, bool):
            return plan_pb2.PathElement(index=part)
    except ValueError as error:
        raise InvalidRequestError(f"{fqn!r}: part {part!r} of its path: {error}") from error
    raise InvalidRequestError(
        f"{fqn!r}: part {part!r} of its path is a {type(part).__name__}, not a string or integer"
    )


# Metadata.


def encode_metadata(metadata: Metadata) -> plan_pb2.GlobalMetadata:
    """A complete ``Metadata``, with torch's ``storage_data``, as a message.

    Raises InvalidRequestError when a chunk has no place, its bytes are transformed
    (compressed, encrypted), or ``planner_data`` is something else than flatten mappings.
    """
    out = metadata_columns(metadata)
    files: dict[str, int] = {}
    file, offset, length = [], [], []
    places = metadata.storage_data or {}
    for item in _items_of(metadata):
        info = places.get(item.index)
        if info is None:
            raise InvalidRequestError(
                f"{item.index.fqn!r} at {item.index.offset} was planned, but no rank wrote it"
            )
        if getattr(info, "transform_descriptors", None):
            raise InvalidRequestError(
                f"{item.index.fqn!r}: its bytes are transformed by {info.transform_descriptors}, "
                "which Pannier's metadata doesn't hold; save without extensions"
            )
        file.append(files.setdefault(info.relative_path, len(files)))
        offset.append(info.offset)
        length.append(info.length)
    out.files.extend(files)
    try:
        out.placement.file = encode_column(file)
        out.placement.offset = encode_column(offset)
        out.placement.length = encode_column(length)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"the metadata places a chunk nowhere: {error}") from error
    return out


def metadata_columns(metadata: Metadata) -> plan_pb2.GlobalMetadata:
    """As :func:`encode_metadata`, without placements: one item per chunk, in order."""
    planner_data = metadata.planner_data
    mappings = None
    if planner_data is not None:
        mappings = encode_mappings(check_planner_data(planner_data))
    return plan_pb2.GlobalMetadata(items=encode_items(_items_of(metadata)), mappings=mappings)


def check_planner_data(planner_data: Any) -> Mapping[str, Sequence[str | int]]:
    """``planner_data`` itself. Raises InvalidRequestError unless it is flatten mappings."""
    if isinstance(planner_data, Mapping) and all(
        isinstance(fqn, str) and isinstance(path, (tuple, list))
        for fqn, path in planner_data.items()
    ):
        return planner_data
    raise InvalidRequestError(
        f"planner_data is a {type(planner_data).__name__} that isn't DefaultSavePlanner's flatten "
        "mappings ({key: path}); a planner's own planner_data can't be saved"
    )


def _items_of(metadata: Metadata) -> list[WriteItem]:
    items = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
            continue
        if not entry.chunks:
            raise InvalidRequestError(f"{fqn!r} is in the metadata, but no rank holds a part of it")
        for number, chunk in enumerate(entry.chunks):
            data = TensorWriteData(chunk=chunk, properties=entry.properties, size=entry.size)
            index = MetadataIndex(fqn, chunk.offsets, number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


def build_metadata(
    message: plan_pb2.GlobalMetadata, *, storage_meta: StorageMeta | None
) -> Metadata:
    """torch's ``Metadata``, with its ``storage_data`` as torch's readers take it.

    A key's properties and size are those of its first item, as in DCP.

    Raises InvalidRequestError when columns don't fit together.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    placement, names = message.placement, list(message.files)
    items = decode_items(message.items)
    files, offsets, lengths = (
        decode_column(column) for column in (placement.file, placement.offset, placement.length)
    )
    if not len(items) == len(files) == len(offsets) == len(lengths):
        raise InvalidRequestError(f"{len(items)} items have {len(files)} places")
    if max(files, default=-1) >= len(names):
        raise InvalidRequestError(f"a place is in file {max(files)} of {len(names)}")
    for item, file, offset, length in zip(items, files, offsets, lengths, strict=True):
        data, fqn = item.tensor_data, item.index.fqn
        entry = state.get(fqn)
        if data is None:
            if entry is not None:
                raise InvalidRequestError(f"{fqn!r} is an object and also another item")
            state[fqn] = BytesStorageMetadata()
        else:
            if entry is None:
                entry = state[fqn] = TensorStorageMetadata(data.properties, data.size, [])
            elif isinstance(entry, BytesStorageMetadata):
                raise InvalidRequestError(f"{fqn!r} is both an object and a tensor")
            entry.chunks.append(data.chunk)
        storage[item.index] = StorageInfo(names[file], offset, length)
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=decode_mappings(message.mappings) if message.HasField("mappings") else None,
        storage_data=storage,
        storage_meta=storage_meta,
    )
    if any(field.name == "version" for field in dataclasses.fields(Metadata)):
        metadata.version = _DCP_VERSION
    return metadata
