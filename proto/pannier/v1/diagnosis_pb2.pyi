from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECK_RESULT_UNSPECIFIED: _ClassVar[CheckResult]
    CHECK_RESULT_OK: _ClassVar[CheckResult]
    CHECK_RESULT_WARNING: _ClassVar[CheckResult]
    CHECK_RESULT_FAILED: _ClassVar[CheckResult]
CHECK_RESULT_UNSPECIFIED: CheckResult
CHECK_RESULT_OK: CheckResult
CHECK_RESULT_WARNING: CheckResult
CHECK_RESULT_FAILED: CheckResult

class Check(_message.Message):
    __slots__ = ("name", "result", "found", "hint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    result: CheckResult
    found: str
    hint: str
    def __init__(self, name: _Optional[str] = ..., result: _Optional[_Union[CheckResult, str]] = ..., found: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("root", "timeout_s")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    root: str
    timeout_s: float
    def __init__(self, root: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("daemon", "host", "version", "wire_version", "checks", "descriptors", "coordinator")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    daemon: str
    host: str
    version: str
    wire_version: int
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    descriptors: str
    coordinator: DiagnoseResponse
    def __init__(self, daemon: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., wire_version: _Optional[int] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ..., descriptors: _Optional[str] = ..., coordinator: _Optional[_Union[DiagnoseResponse, _Mapping]] = ...) -> None: ...
