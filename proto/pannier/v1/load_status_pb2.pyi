from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pannier.v1 import save_pb2 as _save_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STATE_UNSPECIFIED: _ClassVar[LoadState]
    LOAD_STATE_LOADING: _ClassVar[LoadState]
    LOAD_STATE_LOADED: _ClassVar[LoadState]
    LOAD_STATE_FAILED: _ClassVar[LoadState]

class LoadPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_PHASE_UNSPECIFIED: _ClassVar[LoadPhase]
    LOAD_PHASE_ENTERING: _ClassVar[LoadPhase]
    LOAD_PHASE_RESOLVING: _ClassVar[LoadPhase]
    LOAD_PHASE_PLANNING: _ClassVar[LoadPhase]
    LOAD_PHASE_READING: _ClassVar[LoadPhase]
    LOAD_PHASE_FINISHING: _ClassVar[LoadPhase]
    LOAD_PHASE_LOADED: _ClassVar[LoadPhase]
    LOAD_PHASE_FAILED: _ClassVar[LoadPhase]
LOAD_STATE_UNSPECIFIED: LoadState
LOAD_STATE_LOADING: LoadState
LOAD_STATE_LOADED: LoadState
LOAD_STATE_FAILED: LoadState
LOAD_PHASE_UNSPECIFIED: LoadPhase
LOAD_PHASE_ENTERING: LoadPhase
LOAD_PHASE_RESOLVING: LoadPhase
LOAD_PHASE_PLANNING: LoadPhase
LOAD_PHASE_READING: LoadPhase
LOAD_PHASE_FINISHING: LoadPhase
LOAD_PHASE_LOADED: LoadPhase
LOAD_PHASE_FAILED: LoadPhase

class LoadSource(_message.Message):
    __slots__ = ("source", "files", "bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    files: int
    bytes: int
    def __init__(self, source: _Optional[str] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RankLoadStatus(_message.Message):
    __slots__ = ("rank", "host", "phase", "bytes_total", "sources", "retries", "hedges", "rejected_blocks", "waiting_for", "last_error", "seconds", "seconds_since_seen", "failure")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_SEEN_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    phase: LoadPhase
    bytes_total: int
    sources: _containers.RepeatedCompositeFieldContainer[LoadSource]
    retries: int
    hedges: int
    rejected_blocks: int
    waiting_for: str
    last_error: str
    seconds: float
    seconds_since_seen: float
    failure: _save_pb2.FailureKind
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., phase: _Optional[_Union[LoadPhase, str]] = ..., bytes_total: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[LoadSource, _Mapping]]] = ..., retries: _Optional[int] = ..., hedges: _Optional[int] = ..., rejected_blocks: _Optional[int] = ..., waiting_for: _Optional[str] = ..., last_error: _Optional[str] = ..., seconds: _Optional[float] = ..., seconds_since_seen: _Optional[float] = ..., failure: _Optional[_Union[_save_pb2.FailureKind, str]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("call", "load", "group", "job", "checkpoint_id", "attempt", "ranks", "status", "pid")
    CALL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    call: str
    load: str
    group: str
    job: str
    checkpoint_id: str
    attempt: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    status: RankLoadStatus
    pid: int
    def __init__(self, call: _Optional[str] = ..., load: _Optional[str] = ..., group: _Optional[str] = ..., job: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., attempt: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., status: _Optional[_Union[RankLoadStatus, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("wire_version", "report")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    report: LoadReport
    def __init__(self, wire_version: _Optional[int] = ..., report: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadStatus(_message.Message):
    __slots__ = ("id", "job", "checkpoint_id", "attempt", "state", "ranks", "failures", "waiting_on", "created_at", "seconds", "group_size", "bytes_total", "bytes_read", "sources", "retries", "hedges", "rejected_blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WAITING_ON_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    job: str
    checkpoint_id: str
    attempt: str
    state: LoadState
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoadStatus]
    failures: _containers.RepeatedCompositeFieldContainer[_save_pb2.Failure]
    waiting_on: _save_pb2.WaitingOn
    created_at: _timestamp_pb2.Timestamp
    seconds: float
    group_size: int
    bytes_total: int
    bytes_read: int
    sources: _containers.RepeatedCompositeFieldContainer[LoadSource]
    retries: int
    hedges: int
    rejected_blocks: int
    def __init__(self, id: _Optional[str] = ..., job: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., attempt: _Optional[str] = ..., state: _Optional[_Union[LoadState, str]] = ..., ranks: _Optional[_Iterable[_Union[RankLoadStatus, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_save_pb2.Failure, _Mapping]]] = ..., waiting_on: _Optional[_Union[_save_pb2.WaitingOn, _Mapping]] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., seconds: _Optional[float] = ..., group_size: _Optional[int] = ..., bytes_total: _Optional[int] = ..., bytes_read: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[LoadSource, _Mapping]]] = ..., retries: _Optional[int] = ..., hedges: _Optional[int] = ..., rejected_blocks: _Optional[int] = ...) -> None: ...
