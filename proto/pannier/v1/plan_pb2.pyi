from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ItemKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_KIND_UNSPECIFIED: _ClassVar[ItemKind]
    ITEM_KIND_BYTE_IO: _ClassVar[ItemKind]
    ITEM_KIND_TENSOR: _ClassVar[ItemKind]
    ITEM_KIND_SHARD: _ClassVar[ItemKind]
ITEM_KIND_UNSPECIFIED: ItemKind
ITEM_KIND_BYTE_IO: ItemKind
ITEM_KIND_TENSOR: ItemKind
ITEM_KIND_SHARD: ItemKind

class TensorProperties(_message.Message):
    __slots__ = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PIN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    def __init__(self, dtype: _Optional[str] = ..., layout: _Optional[str] = ..., requires_grad: bool = ..., memory_format: _Optional[str] = ..., pin_memory: bool = ...) -> None: ...

class PathElement(_message.Message):
    __slots__ = ("key", "index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    key: str
    index: int
    def __init__(self, key: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class FlattenMapping(_message.Message):
    __slots__ = ("fqn", "path")
    FQN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    path: _containers.RepeatedCompositeFieldContainer[PathElement]
    def __init__(self, fqn: _Optional[str] = ..., path: _Optional[_Iterable[_Union[PathElement, _Mapping]]] = ...) -> None: ...

class FlattenMappings(_message.Message):
    __slots__ = ("mappings",)
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    mappings: _containers.RepeatedCompositeFieldContainer[FlattenMapping]
    def __init__(self, mappings: _Optional[_Iterable[_Union[FlattenMapping, _Mapping]]] = ...) -> None: ...

class ItemTables(_message.Message):
    __slots__ = ("fqns", "properties")
    FQNS_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    fqns: _containers.RepeatedScalarFieldContainer[str]
    properties: _containers.RepeatedCompositeFieldContainer[TensorProperties]
    def __init__(self, fqns: _Optional[_Iterable[str]] = ..., properties: _Optional[_Iterable[_Union[TensorProperties, _Mapping]]] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("tables", "fqn", "kind", "hint", "ndim", "property", "size", "chunk_offset", "chunk_size")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FQN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    NDIM_FIELD_NUMBER: _ClassVar[int]
    PROPERTY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    tables: bytes
    fqn: bytes
    kind: bytes
    hint: bytes
    ndim: bytes
    property: bytes
    size: bytes
    chunk_offset: bytes
    chunk_size: bytes
    def __init__(self, tables: _Optional[bytes] = ..., fqn: _Optional[bytes] = ..., kind: _Optional[bytes] = ..., hint: _Optional[bytes] = ..., ndim: _Optional[bytes] = ..., property: _Optional[bytes] = ..., size: _Optional[bytes] = ..., chunk_offset: _Optional[bytes] = ..., chunk_size: _Optional[bytes] = ...) -> None: ...

class PlannerOptions(_message.Message):
    __slots__ = ("planner", "flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank", "custom_global_plan")
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    FLATTEN_STATE_DICT_FIELD_NUMBER: _ClassVar[int]
    FLATTEN_SHARDED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    DEDUP_SAVE_TO_LOWEST_RANK_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_GLOBAL_PLAN_FIELD_NUMBER: _ClassVar[int]
    planner: str
    flatten_state_dict: bool
    flatten_sharded_tensors: bool
    dedup_save_to_lowest_rank: bool
    custom_global_plan: bool
    def __init__(self, planner: _Optional[str] = ..., flatten_state_dict: bool = ..., flatten_sharded_tensors: bool = ..., dedup_save_to_lowest_rank: bool = ..., custom_global_plan: bool = ...) -> None: ...

class LocalPlan(_message.Message):
    __slots__ = ("items", "head", "body", "tail", "mappings", "options")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    items: Items
    head: bytes
    body: bytes
    tail: bytes
    mappings: bytes
    options: PlannerOptions
    def __init__(self, items: _Optional[_Union[Items, _Mapping]] = ..., head: _Optional[bytes] = ..., body: _Optional[bytes] = ..., tail: _Optional[bytes] = ..., mappings: _Optional[bytes] = ..., options: _Optional[_Union[PlannerOptions, _Mapping]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("file", "offset", "length")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    file: bytes
    offset: bytes
    length: bytes
    def __init__(self, file: _Optional[bytes] = ..., offset: _Optional[bytes] = ..., length: _Optional[bytes] = ...) -> None: ...

class PlannedFile(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class FinalPlan(_message.Message):
    __slots__ = ("plan_id", "attempt", "positions", "files", "placement", "part")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    attempt: str
    positions: bytes
    files: _containers.RepeatedCompositeFieldContainer[PlannedFile]
    placement: Placement
    part: str
    def __init__(self, plan_id: _Optional[str] = ..., attempt: _Optional[str] = ..., positions: _Optional[bytes] = ..., files: _Optional[_Iterable[_Union[PlannedFile, _Mapping]]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., part: _Optional[str] = ...) -> None: ...

class GlobalMetadata(_message.Message):
    __slots__ = ("items", "files", "placement", "mappings")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    items: Items
    files: _containers.RepeatedScalarFieldContainer[str]
    placement: Placement
    mappings: FlattenMappings
    def __init__(self, items: _Optional[_Union[Items, _Mapping]] = ..., files: _Optional[_Iterable[str]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., mappings: _Optional[_Union[FlattenMappings, _Mapping]] = ...) -> None: ...
