from pannier.v1 import load_status_pb2 as _load_status_pb2
from pannier.v1 import records_pb2 as _records_pb2
from pannier.v1 import restore_pb2 as _restore_pb2
from pannier.v1 import save_pb2 as _save_pb2
from pannier.v1 import sidecar_pb2 as _sidecar_pb2
from pannier.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankReport(_message.Message):
    __slots__ = ("context", "attempt", "status", "receipt", "failure", "timeout_s", "save_timeout_s", "claim")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    context: _sidecar_pb2.SaveContext
    attempt: str
    status: _save_pb2.RankStatus
    receipt: _records_pb2.Receipt
    failure: _save_pb2.Failure
    timeout_s: float
    save_timeout_s: float
    claim: _sidecar_pb2.CachedPlanClaim
    def __init__(self, context: _Optional[_Union[_sidecar_pb2.SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., status: _Optional[_Union[_save_pb2.RankStatus, _Mapping]] = ..., receipt: _Optional[_Union[_records_pb2.Receipt, _Mapping]] = ..., failure: _Optional[_Union[_save_pb2.Failure, _Mapping]] = ..., timeout_s: _Optional[float] = ..., save_timeout_s: _Optional[float] = ..., claim: _Optional[_Union[_sidecar_pb2.CachedPlanClaim, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("wire_version", "host", "sidecar", "reports", "watched", "trainers", "job", "loads", "copies", "replicas")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SIDECAR_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    host: str
    sidecar: str
    reports: _containers.RepeatedCompositeFieldContainer[RankReport]
    watched: _containers.RepeatedCompositeFieldContainer[_sidecar_pb2.PendingSave]
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    job: str
    loads: _containers.RepeatedCompositeFieldContainer[_load_status_pb2.LoadReport]
    copies: HeldCopies
    replicas: ReplicaOffer
    def __init__(self, wire_version: _Optional[int] = ..., host: _Optional[str] = ..., sidecar: _Optional[str] = ..., reports: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., watched: _Optional[_Iterable[_Union[_sidecar_pb2.PendingSave, _Mapping]]] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., job: _Optional[str] = ..., loads: _Optional[_Iterable[_Union[_load_status_pb2.LoadReport, _Mapping]]] = ..., copies: _Optional[_Union[HeldCopies, _Mapping]] = ..., replicas: _Optional[_Union[ReplicaOffer, _Mapping]] = ...) -> None: ...

class ReplicaOffer(_message.Message):
    __slots__ = ("failure_domain",)
    FAILURE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    failure_domain: str
    def __init__(self, failure_domain: _Optional[str] = ...) -> None: ...

class HeldCopies(_message.Message):
    __slots__ = ("copies", "peer_address", "replicas")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[_status_pb2.LocalCopy]
    peer_address: str
    replicas: _containers.RepeatedCompositeFieldContainer[HeldReplica]
    def __init__(self, copies: _Optional[_Iterable[_Union[_status_pb2.LocalCopy, _Mapping]]] = ..., peer_address: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[HeldReplica, _Mapping]]] = ...) -> None: ...

class HeldReplica(_message.Message):
    __slots__ = ("context", "attempt", "complete")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    context: _sidecar_pb2.SaveContext
    attempt: str
    complete: bool
    def __init__(self, context: _Optional[_Union[_sidecar_pb2.SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., complete: bool = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("job", "incarnation", "rank", "seconds_since_seen", "death", "waiting")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_SEEN_FIELD_NUMBER: _ClassVar[int]
    DEATH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    rank: int
    seconds_since_seen: float
    death: str
    waiting: _save_pb2.TrainingWait
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., rank: _Optional[int] = ..., seconds_since_seen: _Optional[float] = ..., death: _Optional[str] = ..., waiting: _Optional[_Union[_save_pb2.TrainingWait, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("saves", "replica_holder", "take_over")
    SAVES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_HOLDER_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    saves: _containers.RepeatedCompositeFieldContainer[_save_pb2.SaveStatus]
    replica_holder: _restore_pb2.FetchHost
    take_over: _containers.RepeatedCompositeFieldContainer[TakeOver]
    def __init__(self, saves: _Optional[_Iterable[_Union[_save_pb2.SaveStatus, _Mapping]]] = ..., replica_holder: _Optional[_Union[_restore_pb2.FetchHost, _Mapping]] = ..., take_over: _Optional[_Iterable[_Union[TakeOver, _Mapping]]] = ...) -> None: ...

class TakeOver(_message.Message):
    __slots__ = ("save", "rank")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    save: _save_pb2.SaveId
    rank: int
    def __init__(self, save: _Optional[_Union[_save_pb2.SaveId, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...
