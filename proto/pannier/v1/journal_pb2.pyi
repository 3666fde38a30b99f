from pannier.v1 import plan_pb2 as _plan_pb2
from pannier.v1 import records_pb2 as _records_pb2
from pannier.v1 import save_pb2 as _save_pb2
from pannier.v1 import sidecar_pb2 as _sidecar_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalRecord(_message.Message):
    __slots__ = ("part", "begun", "opened", "held", "ingested", "durable", "stored", "failed", "ended", "forgotten", "confirmed")
    PART_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    INGESTED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    part: int
    begun: PartBegun
    opened: FileOpened
    held: FileHeld
    ingested: _records_pb2.Receipt
    durable: FileDurable
    stored: ReceiptStored
    failed: _save_pb2.Failure
    ended: PartEnded
    forgotten: PartForgotten
    confirmed: PlanConfirmed
    def __init__(self, part: _Optional[int] = ..., begun: _Optional[_Union[PartBegun, _Mapping]] = ..., opened: _Optional[_Union[FileOpened, _Mapping]] = ..., held: _Optional[_Union[FileHeld, _Mapping]] = ..., ingested: _Optional[_Union[_records_pb2.Receipt, _Mapping]] = ..., durable: _Optional[_Union[FileDurable, _Mapping]] = ..., stored: _Optional[_Union[ReceiptStored, _Mapping]] = ..., failed: _Optional[_Union[_save_pb2.Failure, _Mapping]] = ..., ended: _Optional[_Union[PartEnded, _Mapping]] = ..., forgotten: _Optional[_Union[PartForgotten, _Mapping]] = ..., confirmed: _Optional[_Union[PlanConfirmed, _Mapping]] = ...) -> None: ...

class PartBegun(_message.Message):
    __slots__ = ("context", "attempt", "plan_id", "planned", "files", "claim", "replica", "created_at", "save_timeout_s", "boot_id", "boot_time_s", "storage")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    context: _sidecar_pb2.SaveContext
    attempt: str
    plan_id: str
    planned: bool
    files: _containers.RepeatedCompositeFieldContainer[_plan_pb2.PlannedFile]
    claim: _sidecar_pb2.CachedPlanClaim
    replica: bool
    created_at: float
    save_timeout_s: float
    boot_id: str
    boot_time_s: float
    storage: StorageSettings
    def __init__(self, context: _Optional[_Union[_sidecar_pb2.SaveContext, _Mapping]] = ..., attempt: _Optional[str] = ..., plan_id: _Optional[str] = ..., planned: bool = ..., files: _Optional[_Iterable[_Union[_plan_pb2.PlannedFile, _Mapping]]] = ..., claim: _Optional[_Union[_sidecar_pb2.CachedPlanClaim, _Mapping]] = ..., replica: bool = ..., created_at: _Optional[float] = ..., save_timeout_s: _Optional[float] = ..., boot_id: _Optional[str] = ..., boot_time_s: _Optional[float] = ..., storage: _Optional[_Union[StorageSettings, _Mapping]] = ...) -> None: ...

class StorageSettings(_message.Message):
    __slots__ = ("hashes",)
    class HashesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.ScalarMap[str, str]
    def __init__(self, hashes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FileOpened(_message.Message):
    __slots__ = ("name", "size", "spool_file", "stamp", "boot_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SPOOL_FILE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    spool_file: str
    stamp: bytes
    boot_id: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., spool_file: _Optional[str] = ..., stamp: _Optional[bytes] = ..., boot_id: _Optional[str] = ...) -> None: ...

class FileHeld(_message.Message):
    __slots__ = ("name", "held", "crc32c")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    name: str
    held: int
    crc32c: int
    def __init__(self, name: _Optional[str] = ..., held: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class FileDurable(_message.Message):
    __slots__ = ("name", "crc32c", "block_crc32c", "block_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CRC32C_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    crc32c: int
    block_crc32c: bytes
    block_bytes: int
    def __init__(self, name: _Optional[str] = ..., crc32c: _Optional[int] = ..., block_crc32c: _Optional[bytes] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class ReceiptStored(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PartEnded(_message.Message):
    __slots__ = ("state", "failures")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    state: _save_pb2.SaveState
    failures: _containers.RepeatedCompositeFieldContainer[_save_pb2.Failure]
    def __init__(self, state: _Optional[_Union[_save_pb2.SaveState, str]] = ..., failures: _Optional[_Iterable[_Union[_save_pb2.Failure, _Mapping]]] = ...) -> None: ...

class PartForgotten(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlanConfirmed(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    def __init__(self, plan_id: _Optional[str] = ...) -> None: ...
