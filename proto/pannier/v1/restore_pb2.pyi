from pannier.v1 import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocateRequest(_message.Message):
    __slots__ = ("attempt", "files")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempt: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("files", "token", "descriptors", "token_first", "wire_version")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIRST_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[LocatedFile]
    token: bytes
    descriptors: str
    token_first: bool
    wire_version: int
    def __init__(self, files: _Optional[_Iterable[_Union[LocatedFile, _Mapping]]] = ..., token: _Optional[bytes] = ..., descriptors: _Optional[str] = ..., token_first: bool = ..., wire_version: _Optional[int] = ...) -> None: ...

class LocatedFile(_message.Message):
    __slots__ = ("file", "stamp", "stamp_offset")
    FILE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    STAMP_OFFSET_FIELD_NUMBER: _ClassVar[int]
    file: _records_pb2.DataFile
    stamp: bytes
    stamp_offset: int
    def __init__(self, file: _Optional[_Union[_records_pb2.DataFile, _Mapping]] = ..., stamp: _Optional[bytes] = ..., stamp_offset: _Optional[int] = ...) -> None: ...
