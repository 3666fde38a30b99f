from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pannier.v1 import load_status_pb2 as _load_status_pb2
from pannier.v1 import save_pb2 as _save_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListSavesRequest(_message.Message):
    __slots__ = ("job", "states", "limit")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    job: str
    states: _containers.RepeatedScalarFieldContainer[_save_pb2.SaveState]
    limit: int
    def __init__(self, job: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_save_pb2.SaveState, str]]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListSavesResponse(_message.Message):
    __slots__ = ("saves", "daemon_state", "host", "version", "bytes_queued", "oldest_upload_s", "spool_bytes", "spool_leased_bytes", "spool_held_bytes", "spool_saves_bytes", "spool_capacity_bytes", "spool_free_bytes", "trainers", "local_copies", "loads", "upload_limit", "upload_limited", "evicted_copies", "training_waits", "daemon", "memory_limit", "memory_used")
    SAVES_FIELD_NUMBER: _ClassVar[int]
    DAEMON_STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_QUEUED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UPLOAD_S_FIELD_NUMBER: _ClassVar[int]
    SPOOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_SAVES_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_COPIES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_LIMIT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_LIMITED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COPIES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_WAITS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    saves: _containers.RepeatedCompositeFieldContainer[_save_pb2.SaveStatus]
    daemon_state: str
    host: str
    version: str
    bytes_queued: int
    oldest_upload_s: float
    spool_bytes: int
    spool_leased_bytes: int
    spool_held_bytes: int
    spool_saves_bytes: int
    spool_capacity_bytes: int
    spool_free_bytes: int
    trainers: int
    local_copies: _containers.RepeatedCompositeFieldContainer[LocalCopy]
    loads: _containers.RepeatedCompositeFieldContainer[_load_status_pb2.LoadStatus]
    upload_limit: int
    upload_limited: bool
    evicted_copies: _containers.RepeatedCompositeFieldContainer[EvictedCopy]
    training_waits: _containers.RepeatedCompositeFieldContainer[_save_pb2.TrainingWait]
    daemon: str
    memory_limit: int
    memory_used: int
    def __init__(self, saves: _Optional[_Iterable[_Union[_save_pb2.SaveStatus, _Mapping]]] = ..., daemon_state: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., bytes_queued: _Optional[int] = ..., oldest_upload_s: _Optional[float] = ..., spool_bytes: _Optional[int] = ..., spool_leased_bytes: _Optional[int] = ..., spool_held_bytes: _Optional[int] = ..., spool_saves_bytes: _Optional[int] = ..., spool_capacity_bytes: _Optional[int] = ..., spool_free_bytes: _Optional[int] = ..., trainers: _Optional[int] = ..., local_copies: _Optional[_Iterable[_Union[LocalCopy, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[_load_status_pb2.LoadStatus, _Mapping]]] = ..., upload_limit: _Optional[int] = ..., upload_limited: bool = ..., evicted_copies: _Optional[_Iterable[_Union[EvictedCopy, _Mapping]]] = ..., training_waits: _Optional[_Iterable[_Union[_save_pb2.TrainingWait, _Mapping]]] = ..., daemon: _Optional[str] = ..., memory_limit: _Optional[int] = ..., memory_used: _Optional[int] = ...) -> None: ...

class LocalCopy(_message.Message):
    __slots__ = ("checkpoint_id", "save", "attempt", "files", "bytes")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    save: _save_pb2.SaveId
    attempt: str
    files: int
    bytes: int
    def __init__(self, checkpoint_id: _Optional[str] = ..., save: _Optional[_Union[_save_pb2.SaveId, _Mapping]] = ..., attempt: _Optional[str] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class EvictedCopy(_message.Message):
    __slots__ = ("checkpoint_id", "bytes", "reason", "evicted_at")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVICTED_AT_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    bytes: int
    reason: str
    evicted_at: _timestamp_pb2.Timestamp
    def __init__(self, checkpoint_id: _Optional[str] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ..., evicted_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetSaveRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetSaveResponse(_message.Message):
    __slots__ = ("save",)
    SAVE_FIELD_NUMBER: _ClassVar[int]
    save: _save_pb2.SaveStatus
    def __init__(self, save: _Optional[_Union[_save_pb2.SaveStatus, _Mapping]] = ...) -> None: ...

class WatchSaveRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class WatchSaveResponse(_message.Message):
    __slots__ = ("save",)
    SAVE_FIELD_NUMBER: _ClassVar[int]
    save: _save_pb2.SaveStatus
    def __init__(self, save: _Optional[_Union[_save_pb2.SaveStatus, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _load_status_pb2.LoadStatus
    def __init__(self, load: _Optional[_Union[_load_status_pb2.LoadStatus, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _load_status_pb2.LoadStatus
    def __init__(self, load: _Optional[_Union[_load_status_pb2.LoadStatus, _Mapping]] = ...) -> None: ...
