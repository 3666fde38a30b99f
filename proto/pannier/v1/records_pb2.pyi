from pannier.v1 import plan_pb2 as _plan_pb2
from pannier.v1 import save_pb2 as _save_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMIT: _ClassVar[Outcome]
    OUTCOME_ABORT: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMIT: Outcome
OUTCOME_ABORT: Outcome

class IncarnationRecord(_message.Message):
    __slots__ = ("number", "job", "incarnation", "created_at", "host", "apart", "launch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    job: str
    incarnation: str
    created_at: float
    host: str
    apart: bool
    launch: str
    def __init__(self, number: _Optional[int] = ..., job: _Optional[str] = ..., incarnation: _Optional[str] = ..., created_at: _Optional[float] = ..., host: _Optional[str] = ..., apart: bool = ..., launch: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "host", "digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    digest: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class PlanManifest(_message.Message):
    __slots__ = ("save", "attempt", "checkpoint_id", "incarnation_number", "members", "metadata", "owner", "position", "external", "body_size", "crc32c", "overwrite", "timeout_s", "unused")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    BODY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    save: _save_pb2.SaveId
    attempt: str
    checkpoint_id: str
    incarnation_number: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    metadata: _plan_pb2.GlobalMetadata
    owner: bytes
    position: bytes
    external: bool
    body_size: int
    crc32c: int
    overwrite: _save_pb2.Overwrite
    timeout_s: float
    unused: UnusedItems
    def __init__(self, save: _Optional[_Union[_save_pb2.SaveId, _Mapping]] = ..., attempt: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., incarnation_number: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., metadata: _Optional[_Union[_plan_pb2.GlobalMetadata, _Mapping]] = ..., owner: _Optional[bytes] = ..., position: _Optional[bytes] = ..., external: bool = ..., body_size: _Optional[int] = ..., crc32c: _Optional[int] = ..., overwrite: _Optional[_Union[_save_pb2.Overwrite, str]] = ..., timeout_s: _Optional[float] = ..., unused: _Optional[_Union[UnusedItems, _Mapping]] = ...) -> None: ...

class UnusedItems(_message.Message):
    __slots__ = ("owner", "position", "placement")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    position: bytes
    placement: _plan_pb2.Placement
    def __init__(self, owner: _Optional[bytes] = ..., position: _Optional[bytes] = ..., placement: _Optional[_Union[_plan_pb2.Placement, _Mapping]] = ...) -> None: ...

class DataFile(_message.Message):
    __slots__ = ("name", "size", "crc32c", "block_crc32c", "block_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CRC32C_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    crc32c: int
    block_crc32c: bytes
    block_bytes: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., crc32c: _Optional[int] = ..., block_crc32c: _Optional[bytes] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class VaryingItem(_message.Message):
    __slots__ = ("position", "file", "offset", "length")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    position: int
    file: str
    offset: int
    length: int
    def __init__(self, position: _Optional[int] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ExtraFile(_message.Message):
    __slots__ = ("name", "file", "offset", "size", "crc32c")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    name: str
    file: str
    offset: int
    size: int
    crc32c: int
    def __init__(self, name: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("attempt", "plan_id", "rank", "host", "files", "varying", "metrics", "extra_files", "part")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    VARYING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FILES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    plan_id: str
    rank: int
    host: str
    files: _containers.RepeatedCompositeFieldContainer[DataFile]
    varying: _containers.RepeatedCompositeFieldContainer[VaryingItem]
    metrics: _containers.ScalarMap[str, float]
    extra_files: _containers.RepeatedCompositeFieldContainer[ExtraFile]
    part: str
    def __init__(self, attempt: _Optional[str] = ..., plan_id: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., files: _Optional[_Iterable[_Union[DataFile, _Mapping]]] = ..., varying: _Optional[_Iterable[_Union[VaryingItem, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., extra_files: _Optional[_Iterable[_Union[ExtraFile, _Mapping]]] = ..., part: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("outcome", "save", "attempt", "incarnation_number", "plan_id", "metadata_size", "metadata_crc32c", "failures", "decided_by", "decided_at", "metrics", "overwrite", "extra_files")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_SIZE_FIELD_NUMBER: _ClassVar[int]
    METADATA_CRC32C_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DECIDED_BY_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FILES_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    save: _save_pb2.SaveId
    attempt: str
    incarnation_number: int
    plan_id: str
    metadata_size: int
    metadata_crc32c: int
    failures: _containers.RepeatedCompositeFieldContainer[_save_pb2.Failure]
    decided_by: str
    decided_at: float
    metrics: _containers.ScalarMap[str, float]
    overwrite: _save_pb2.Overwrite
    extra_files: _containers.RepeatedCompositeFieldContainer[ExtraFile]
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., save: _Optional[_Union[_save_pb2.SaveId, _Mapping]] = ..., attempt: _Optional[str] = ..., incarnation_number: _Optional[int] = ..., plan_id: _Optional[str] = ..., metadata_size: _Optional[int] = ..., metadata_crc32c: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[_save_pb2.Failure, _Mapping]]] = ..., decided_by: _Optional[str] = ..., decided_at: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., overwrite: _Optional[_Union[_save_pb2.Overwrite, str]] = ..., extra_files: _Optional[_Iterable[_Union[ExtraFile, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("attempt", "host", "pid", "holder", "renew_s", "renewals")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RENEW_S_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    host: str
    pid: int
    holder: str
    renew_s: float
    renewals: int
    def __init__(self, attempt: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., holder: _Optional[str] = ..., renew_s: _Optional[float] = ..., renewals: _Optional[int] = ...) -> None: ...
