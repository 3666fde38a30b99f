from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SaveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_STATE_UNSPECIFIED: _ClassVar[SaveState]
    SAVE_STATE_PLANNING: _ClassVar[SaveState]
    SAVE_STATE_STAGING: _ClassVar[SaveState]
    SAVE_STATE_INGESTED: _ClassVar[SaveState]
    SAVE_STATE_UPLOADING: _ClassVar[SaveState]
    SAVE_STATE_COMMITTED: _ClassVar[SaveState]
    SAVE_STATE_ABORTED: _ClassVar[SaveState]
    SAVE_STATE_IN_DOUBT: _ClassVar[SaveState]
    SAVE_STATE_PREPARED: _ClassVar[SaveState]
    SAVE_STATE_SKIPPED: _ClassVar[SaveState]

class RankPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_PHASE_UNSPECIFIED: _ClassVar[RankPhase]
    RANK_PHASE_MISSING: _ClassVar[RankPhase]
    RANK_PHASE_PLANNED: _ClassVar[RankPhase]
    RANK_PHASE_STREAMING: _ClassVar[RankPhase]
    RANK_PHASE_HANDED_OVER: _ClassVar[RankPhase]
    RANK_PHASE_INGESTED: _ClassVar[RankPhase]
    RANK_PHASE_DURABLE: _ClassVar[RankPhase]
    RANK_PHASE_FAILED: _ClassVar[RankPhase]

class Overwrite(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERWRITE_UNSPECIFIED: _ClassVar[Overwrite]
    OVERWRITE_NEVER: _ClassVar[Overwrite]
    OVERWRITE_ANY: _ClassVar[Overwrite]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_SKIPPED: _ClassVar[FailureKind]
    FAILURE_KIND_CLIENT: _ClassVar[FailureKind]
    FAILURE_KIND_DISAGREEMENT: _ClassVar[FailureKind]
    FAILURE_KIND_INVALID_PLAN: _ClassVar[FailureKind]
    FAILURE_KIND_STORAGE: _ClassVar[FailureKind]
    FAILURE_KIND_INTEGRITY: _ClassVar[FailureKind]
    FAILURE_KIND_DEADLINE: _ClassVar[FailureKind]
    FAILURE_KIND_LOST: _ClassVar[FailureKind]
    FAILURE_KIND_SPOOL: _ClassVar[FailureKind]
    FAILURE_KIND_INTERNAL: _ClassVar[FailureKind]
    FAILURE_KIND_EXISTS: _ClassVar[FailureKind]
    FAILURE_KIND_PLAN_CHANGED: _ClassVar[FailureKind]

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_ROOM: _ClassVar[WaitReason]
    WAIT_REASON_PLAN: _ClassVar[WaitReason]
    WAIT_REASON_SIDECAR: _ClassVar[WaitReason]
    WAIT_REASON_COMMIT: _ClassVar[WaitReason]
SAVE_STATE_UNSPECIFIED: SaveState
SAVE_STATE_PLANNING: SaveState
SAVE_STATE_STAGING: SaveState
SAVE_STATE_INGESTED: SaveState
SAVE_STATE_UPLOADING: SaveState
SAVE_STATE_COMMITTED: SaveState
SAVE_STATE_ABORTED: SaveState
SAVE_STATE_IN_DOUBT: SaveState
SAVE_STATE_PREPARED: SaveState
SAVE_STATE_SKIPPED: SaveState
RANK_PHASE_UNSPECIFIED: RankPhase
RANK_PHASE_MISSING: RankPhase
RANK_PHASE_PLANNED: RankPhase
RANK_PHASE_STREAMING: RankPhase
RANK_PHASE_HANDED_OVER: RankPhase
RANK_PHASE_INGESTED: RankPhase
RANK_PHASE_DURABLE: RankPhase
RANK_PHASE_FAILED: RankPhase
OVERWRITE_UNSPECIFIED: Overwrite
OVERWRITE_NEVER: Overwrite
OVERWRITE_ANY: Overwrite
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_SKIPPED: FailureKind
FAILURE_KIND_CLIENT: FailureKind
FAILURE_KIND_DISAGREEMENT: FailureKind
FAILURE_KIND_INVALID_PLAN: FailureKind
FAILURE_KIND_STORAGE: FailureKind
FAILURE_KIND_INTEGRITY: FailureKind
FAILURE_KIND_DEADLINE: FailureKind
FAILURE_KIND_LOST: FailureKind
FAILURE_KIND_SPOOL: FailureKind
FAILURE_KIND_INTERNAL: FailureKind
FAILURE_KIND_EXISTS: FailureKind
FAILURE_KIND_PLAN_CHANGED: FailureKind
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_ROOM: WaitReason
WAIT_REASON_PLAN: WaitReason
WAIT_REASON_SIDECAR: WaitReason
WAIT_REASON_COMMIT: WaitReason

class SaveId(_message.Message):
    __slots__ = ("job", "incarnation", "group", "number")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    group: str
    number: int
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., group: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("rank", "host", "kind", "message")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    kind: FailureKind
    message: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "host", "phase", "bytes_staged", "bytes_ingested", "bytes_uploaded", "bytes_durable", "retries", "last_error", "seconds_since_seen", "transport", "stalled_s", "planned_s", "staged_s", "ingested_s", "durable_s", "replica_host", "bytes_replicated")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_STAGED_FIELD_NUMBER: _ClassVar[int]
    BYTES_INGESTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_UPLOADED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_SEEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    PLANNED_S_FIELD_NUMBER: _ClassVar[int]
    STAGED_S_FIELD_NUMBER: _ClassVar[int]
    INGESTED_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_S_FIELD_NUMBER: _ClassVar[int]
    REPLICA_HOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_REPLICATED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    phase: RankPhase
    bytes_staged: int
    bytes_ingested: int
    bytes_uploaded: int
    bytes_durable: int
    retries: int
    last_error: str
    seconds_since_seen: float
    transport: str
    stalled_s: float
    planned_s: float
    staged_s: float
    ingested_s: float
    durable_s: float
    replica_host: str
    bytes_replicated: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., phase: _Optional[_Union[RankPhase, str]] = ..., bytes_staged: _Optional[int] = ..., bytes_ingested: _Optional[int] = ..., bytes_uploaded: _Optional[int] = ..., bytes_durable: _Optional[int] = ..., retries: _Optional[int] = ..., last_error: _Optional[str] = ..., seconds_since_seen: _Optional[float] = ..., transport: _Optional[str] = ..., stalled_s: _Optional[float] = ..., planned_s: _Optional[float] = ..., staged_s: _Optional[float] = ..., ingested_s: _Optional[float] = ..., durable_s: _Optional[float] = ..., replica_host: _Optional[str] = ..., bytes_replicated: _Optional[int] = ...) -> None: ...

class WaitingOn(_message.Message):
    __slots__ = ("ranks", "text", "deadline_s")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    text: str
    deadline_s: float
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class SaveStatus(_message.Message):
    __slots__ = ("save", "id", "checkpoint_id", "attempt", "state", "ranks", "failures", "waiting_on", "created_at", "planned_s", "ingested_s", "durable_s", "committed_s", "bytes_total", "note", "replicated_ranks", "plan", "summary", "group_size", "durable_ranks")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WAITING_ON_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_S_FIELD_NUMBER: _ClassVar[int]
    INGESTED_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_S_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_RANKS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_RANKS_FIELD_NUMBER: _ClassVar[int]
    save: SaveId
    id: str
    checkpoint_id: str
    attempt: str
    state: SaveState
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    waiting_on: WaitingOn
    created_at: _timestamp_pb2.Timestamp
    planned_s: float
    ingested_s: float
    durable_s: float
    committed_s: float
    bytes_total: int
    note: str
    replicated_ranks: int
    plan: PlanState
    summary: str
    group_size: int
    durable_ranks: int
    def __init__(self, save: _Optional[_Union[SaveId, _Mapping]] = ..., id: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., attempt: _Optional[str] = ..., state: _Optional[_Union[SaveState, str]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., waiting_on: _Optional[_Union[WaitingOn, _Mapping]] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., planned_s: _Optional[float] = ..., ingested_s: _Optional[float] = ..., durable_s: _Optional[float] = ..., committed_s: _Optional[float] = ..., bytes_total: _Optional[int] = ..., note: _Optional[str] = ..., replicated_ranks: _Optional[int] = ..., plan: _Optional[_Union[PlanState, _Mapping]] = ..., summary: _Optional[str] = ..., group_size: _Optional[int] = ..., durable_ranks: _Optional[int] = ...) -> None: ...

class PlanState(_message.Message):
    __slots__ = ("id", "full_plan_requested")
    ID_FIELD_NUMBER: _ClassVar[int]
    FULL_PLAN_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    full_plan_requested: bool
    def __init__(self, id: _Optional[str] = ..., full_plan_requested: bool = ...) -> None: ...

class TrainingWait(_message.Message):
    __slots__ = ("call", "checkpoint_id", "reason", "duration", "ranks", "summary")
    CALL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    call: str
    checkpoint_id: str
    reason: WaitReason
    duration: _duration_pb2.Duration
    ranks: int
    summary: str
    def __init__(self, call: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., reason: _Optional[_Union[WaitReason, str]] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., ranks: _Optional[int] = ..., summary: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("type", "message", "failures", "resume_at")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    resume_at: int
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., resume_at: _Optional[int] = ...) -> None: ...
