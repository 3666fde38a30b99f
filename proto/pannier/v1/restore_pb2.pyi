from pannier.v1 import load_status_pb2 as _load_status_pb2
from pannier.v1 import records_pb2 as _records_pb2
from pannier.v1 import sidecar_pb2 as _sidecar_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocateRequest(_message.Message):
    __slots__ = ("attempt", "files", "load", "checkpoint_id")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    files: _containers.RepeatedScalarFieldContainer[str]
    load: str
    checkpoint_id: str
    def __init__(self, attempt: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ..., load: _Optional[str] = ..., checkpoint_id: _Optional[str] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("files", "token", "descriptors", "token_first", "wire_version", "host", "peer_address", "peer_tls", "peer_name", "restore_budget")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIRST_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_TLS_FIELD_NUMBER: _ClassVar[int]
    PEER_NAME_FIELD_NUMBER: _ClassVar[int]
    RESTORE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[LocatedFile]
    token: bytes
    descriptors: str
    token_first: bool
    wire_version: int
    host: str
    peer_address: str
    peer_tls: bool
    peer_name: str
    restore_budget: int
    def __init__(self, files: _Optional[_Iterable[_Union[LocatedFile, _Mapping]]] = ..., token: _Optional[bytes] = ..., descriptors: _Optional[str] = ..., token_first: bool = ..., wire_version: _Optional[int] = ..., host: _Optional[str] = ..., peer_address: _Optional[str] = ..., peer_tls: bool = ..., peer_name: _Optional[str] = ..., restore_budget: _Optional[int] = ...) -> None: ...

class LocatedFile(_message.Message):
    __slots__ = ("name", "size", "stamp", "stamp_offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    STAMP_OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    stamp: bytes
    stamp_offset: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., stamp: _Optional[bytes] = ..., stamp_offset: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("start", "files", "block", "done")
    START_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    start: FetchStart
    files: FetchFiles
    block: BlockRequest
    done: int
    def __init__(self, start: _Optional[_Union[FetchStart, _Mapping]] = ..., files: _Optional[_Union[FetchFiles, _Mapping]] = ..., block: _Optional[_Union[BlockRequest, _Mapping]] = ..., done: _Optional[int] = ...) -> None: ...

class FetchStart(_message.Message):
    __slots__ = ("load", "checkpoint_id", "attempt", "rank", "hosts", "own", "files", "wire_version")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    load: str
    checkpoint_id: str
    attempt: str
    rank: int
    hosts: _containers.RepeatedCompositeFieldContainer[FetchHost]
    own: int
    files: FetchFiles
    wire_version: int
    def __init__(self, load: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., attempt: _Optional[str] = ..., rank: _Optional[int] = ..., hosts: _Optional[_Iterable[_Union[FetchHost, _Mapping]]] = ..., own: _Optional[int] = ..., files: _Optional[_Union[FetchFiles, _Mapping]] = ..., wire_version: _Optional[int] = ...) -> None: ...

class FetchHost(_message.Message):
    __slots__ = ("host", "peer_address")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host: str
    peer_address: str
    def __init__(self, host: _Optional[str] = ..., peer_address: _Optional[str] = ...) -> None: ...

class FetchFiles(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[_records_pb2.DataFile]
    def __init__(self, files: _Optional[_Iterable[_Union[_records_pb2.DataFile, _Mapping]]] = ...) -> None: ...

class BlockRequest(_message.Message):
    __slots__ = ("id", "file", "block", "holders", "owner", "readers", "owner_readers")
    ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    OWNER_READERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    file: int
    block: int
    holders: _containers.RepeatedScalarFieldContainer[int]
    owner: int
    readers: int
    owner_readers: int
    def __init__(self, id: _Optional[int] = ..., file: _Optional[int] = ..., block: _Optional[int] = ..., holders: _Optional[_Iterable[int]] = ..., owner: _Optional[int] = ..., readers: _Optional[int] = ..., owner_readers: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("memory", "block")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    memory: FetchMemory
    block: FetchedBlock
    def __init__(self, memory: _Optional[_Union[FetchMemory, _Mapping]] = ..., block: _Optional[_Union[FetchedBlock, _Mapping]] = ...) -> None: ...

class FetchMemory(_message.Message):
    __slots__ = ("size", "token", "descriptors", "token_first")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIRST_FIELD_NUMBER: _ClassVar[int]
    size: int
    token: bytes
    descriptors: str
    token_first: bool
    def __init__(self, size: _Optional[int] = ..., token: _Optional[bytes] = ..., descriptors: _Optional[str] = ..., token_first: bool = ...) -> None: ...

class FetchedBlock(_message.Message):
    __slots__ = ("id", "offset", "size", "crc32c", "source", "kept", "rejected", "failed", "hedged", "error", "retries")
    ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEDGED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    id: int
    offset: int
    size: int
    crc32c: int
    source: str
    kept: bool
    rejected: int
    failed: int
    hedged: int
    error: str
    retries: int
    def __init__(self, id: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., crc32c: _Optional[int] = ..., source: _Optional[str] = ..., kept: bool = ..., rejected: _Optional[int] = ..., failed: _Optional[int] = ..., hedged: _Optional[int] = ..., error: _Optional[str] = ..., retries: _Optional[int] = ...) -> None: ...

class ReadBlockRequest(_message.Message):
    __slots__ = ("load", "checkpoint_id", "attempt", "file", "file_size", "block", "crc32c", "readers", "spool_only", "host", "wire_version")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    SPOOL_ONLY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    load: str
    checkpoint_id: str
    attempt: str
    file: str
    file_size: int
    block: int
    crc32c: int
    readers: int
    spool_only: bool
    host: str
    wire_version: int
    def __init__(self, load: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., attempt: _Optional[str] = ..., file: _Optional[str] = ..., file_size: _Optional[int] = ..., block: _Optional[int] = ..., crc32c: _Optional[int] = ..., readers: _Optional[int] = ..., spool_only: bool = ..., host: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class ReadBlockResponse(_message.Message):
    __slots__ = ("data", "crc32c", "from_storage")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    FROM_STORAGE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc32c: int
    from_storage: bool
    def __init__(self, data: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., from_storage: bool = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: ReplicaStart
    chunk: ReplicaChunk
    def __init__(self, start: _Optional[_Union[ReplicaStart, _Mapping]] = ..., chunk: _Optional[_Union[ReplicaChunk, _Mapping]] = ...) -> None: ...

class ReplicaStart(_message.Message):
    __slots__ = ("context", "receipt", "created_at", "save_timeout_s", "host", "wire_version")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    context: _sidecar_pb2.SaveContext
    receipt: _records_pb2.Receipt
    created_at: float
    save_timeout_s: float
    host: str
    wire_version: int
    def __init__(self, context: _Optional[_Union[_sidecar_pb2.SaveContext, _Mapping]] = ..., receipt: _Optional[_Union[_records_pb2.Receipt, _Mapping]] = ..., created_at: _Optional[float] = ..., save_timeout_s: _Optional[float] = ..., host: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class ReplicaChunk(_message.Message):
    __slots__ = ("file", "offset", "data", "crc32c")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    file: int
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, file: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("held", "complete")
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    complete: bool
    def __init__(self, held: _Optional[_Iterable[int]] = ..., complete: bool = ...) -> None: ...
