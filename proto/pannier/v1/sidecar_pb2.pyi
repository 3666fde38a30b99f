from pannier.v1 import plan_pb2 as _plan_pb2
from pannier.v1 import records_pb2 as _records_pb2
from pannier.v1 import save_pb2 as _save_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("wire_version", "client_version", "job", "incarnation", "rank", "world_size", "host", "pid", "client", "pending")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    client_version: str
    job: str
    incarnation: str
    rank: int
    world_size: int
    host: str
    pid: int
    client: str
    pending: _containers.RepeatedCompositeFieldContainer[PendingSave]
    def __init__(self, wire_version: _Optional[int] = ..., client_version: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., client: _Optional[str] = ..., pending: _Optional[_Iterable[_Union[PendingSave, _Mapping]]] = ...) -> None: ...

class PendingSave(_message.Message):
    __slots__ = ("context", "handed_over", "save_timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    handed_over: bool
    save_timeout_s: float
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., handed_over: bool = ..., save_timeout_s: _Optional[float] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("wire_version", "sidecar_version", "host", "coordinator", "max_message_bytes", "embedded", "draining", "descriptors", "token_first")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIDECAR_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIRST_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    sidecar_version: str
    host: str
    coordinator: str
    max_message_bytes: int
    embedded: bool
    draining: bool
    descriptors: str
    token_first: bool
    def __init__(self, wire_version: _Optional[int] = ..., sidecar_version: _Optional[str] = ..., host: _Optional[str] = ..., coordinator: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., embedded: bool = ..., draining: bool = ..., descriptors: _Optional[str] = ..., token_first: bool = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "save", "room")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    save: _save_pb2.SaveStatus
    room: RoomWanted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., save: _Optional[_Union[_save_pb2.SaveStatus, _Mapping]] = ..., room: _Optional[_Union[RoomWanted, _Mapping]] = ...) -> None: ...

class RoomWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveContext(_message.Message):
    __slots__ = ("save", "checkpoint_id", "ranks", "world_size", "rank", "host", "overwrite", "seen_incarnation", "apart", "launch")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    SEEN_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    save: _save_pb2.SaveId
    checkpoint_id: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    world_size: int
    rank: int
    host: str
    overwrite: _save_pb2.Overwrite
    seen_incarnation: int
    apart: bool
    launch: str
    def __init__(self, save: _Optional[_Union[_save_pb2.SaveId, _Mapping]] = ..., checkpoint_id: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., overwrite: _Optional[_Union[_save_pb2.Overwrite, str]] = ..., seen_incarnation: _Optional[int] = ..., apart: bool = ..., launch: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("context", "plan", "digest", "timeout_s", "save_timeout_s", "wire_version", "prepare", "staged_positions", "storage_wait_s", "value_hashes")
    class ValueHashesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    STAGED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    VALUE_HASHES_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    plan: _plan_pb2.LocalPlan
    digest: str
    timeout_s: float
    save_timeout_s: float
    wire_version: int
    prepare: bool
    staged_positions: bytes
    storage_wait_s: float
    value_hashes: _containers.ScalarMap[str, int]
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., plan: _Optional[_Union[_plan_pb2.LocalPlan, _Mapping]] = ..., digest: _Optional[str] = ..., timeout_s: _Optional[float] = ..., save_timeout_s: _Optional[float] = ..., wire_version: _Optional[int] = ..., prepare: bool = ..., staged_positions: _Optional[bytes] = ..., storage_wait_s: _Optional[float] = ..., value_hashes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan", "warning")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.FinalPlan
    warning: str
    def __init__(self, plan: _Optional[_Union[_plan_pb2.FinalPlan, _Mapping]] = ..., warning: _Optional[str] = ...) -> None: ...

class CachedPlanClaim(_message.Message):
    __slots__ = ("digest", "attempt", "checkpoint_id", "timeout_s", "part")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    digest: str
    attempt: str
    checkpoint_id: str
    timeout_s: float
    part: str
    def __init__(self, digest: _Optional[str] = ..., attempt: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., part: _Optional[str] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("context", "save_timeout_s", "wire_version")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    save_timeout_s: float
    wire_version: int
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., save_timeout_s: _Optional[float] = ..., wire_version: _Optional[int] = ...) -> None: ...

class BeginResponse(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    def __init__(self, attempt: _Optional[str] = ...) -> None: ...

class FileHeader(_message.Message):
    __slots__ = ("context", "attempt", "name", "size", "reason", "claim", "save_timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    attempt: str
    name: str
    size: int
    reason: str
    claim: CachedPlanClaim
    save_timeout_s: float
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., name: _Optional[str] = ..., size: _Optional[int] = ..., reason: _Optional[str] = ..., claim: _Optional[_Union[CachedPlanClaim, _Mapping]] = ..., save_timeout_s: _Optional[float] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("header", "offset", "crc32c", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: FileHeader
    offset: int
    crc32c: int
    data: bytes
    def __init__(self, header: _Optional[_Union[FileHeader, _Mapping]] = ..., offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    def __init__(self, committed: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("job", "incarnation", "rank", "client", "sizes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    rank: int
    client: str
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., client: _Optional[str] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class LeasedFile(_message.Message):
    __slots__ = ("spool_file", "capacity")
    SPOOL_FILE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    spool_file: str
    capacity: int
    def __init__(self, spool_file: _Optional[str] = ..., capacity: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("files", "token", "second_set")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECOND_SET_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[LeasedFile]
    token: bytes
    second_set: str
    def __init__(self, files: _Optional[_Iterable[_Union[LeasedFile, _Mapping]]] = ..., token: _Optional[bytes] = ..., second_set: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job", "incarnation", "rank", "client", "spool_files")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SPOOL_FILES_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    rank: int
    client: str
    spool_files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., client: _Optional[str] = ..., spool_files: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MappedFile(_message.Message):
    __slots__ = ("name", "spool_file", "stamp")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPOOL_FILE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    name: str
    spool_file: str
    stamp: bytes
    def __init__(self, name: _Optional[str] = ..., spool_file: _Optional[str] = ..., stamp: _Optional[bytes] = ...) -> None: ...

class InlinedFile(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("context", "attempt", "plan_id", "files", "varying", "mapped", "stalled_s", "metrics", "claim", "extra_files", "inlined", "save_timeout_s")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    VARYING_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FILES_FIELD_NUMBER: _ClassVar[int]
    INLINED_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    attempt: str
    plan_id: str
    files: _containers.RepeatedCompositeFieldContainer[_records_pb2.DataFile]
    varying: _containers.RepeatedCompositeFieldContainer[_records_pb2.VaryingItem]
    mapped: _containers.RepeatedCompositeFieldContainer[MappedFile]
    stalled_s: float
    metrics: _containers.ScalarMap[str, float]
    claim: CachedPlanClaim
    extra_files: _containers.RepeatedCompositeFieldContainer[_records_pb2.ExtraFile]
    inlined: _containers.RepeatedCompositeFieldContainer[InlinedFile]
    save_timeout_s: float
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., plan_id: _Optional[str] = ..., files: _Optional[_Iterable[_Union[_records_pb2.DataFile, _Mapping]]] = ..., varying: _Optional[_Iterable[_Union[_records_pb2.VaryingItem, _Mapping]]] = ..., mapped: _Optional[_Iterable[_Union[MappedFile, _Mapping]]] = ..., stalled_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., claim: _Optional[_Union[CachedPlanClaim, _Mapping]] = ..., extra_files: _Optional[_Iterable[_Union[_records_pb2.ExtraFile, _Mapping]]] = ..., inlined: _Optional[_Iterable[_Union[InlinedFile, _Mapping]]] = ..., save_timeout_s: _Optional[float] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("context", "attempt", "metadata", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    attempt: str
    metadata: _plan_pb2.GlobalMetadata
    timeout_s: float
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., metadata: _Optional[_Union[_plan_pb2.GlobalMetadata, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _save_pb2.SaveStatus
    def __init__(self, status: _Optional[_Union[_save_pb2.SaveStatus, _Mapping]] = ...) -> None: ...

class FailRequest(_message.Message):
    __slots__ = ("context", "failure")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    context: SaveContext
    failure: _save_pb2.Failure
    def __init__(self, context: _Optional[_Union[SaveContext, _Mapping]] = ..., failure: _Optional[_Union[_save_pb2.Failure, _Mapping]] = ...) -> None: ...

class FailResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("job", "incarnation", "rank", "client", "closing", "waiting")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    rank: int
    client: str
    closing: bool
    waiting: _save_pb2.TrainingWait
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., client: _Optional[str] = ..., closing: bool = ..., waiting: _Optional[_Union[_save_pb2.TrainingWait, _Mapping]] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
