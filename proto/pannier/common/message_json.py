"""Times in messages, and messages as JSON objects: the form of ``--json``, of ``/status.json`` and of ``/save.json``.

proto3's JSON form with the protos' field names and no field left out, and with one difference: 64-bit integers
are numbers, not strings, as all other numbers of the command line are. proto3's parsers read both. Pure.
"""

from typing import Any, Final

from google.protobuf import json_format, message
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_WIDE: Final = (
    *(FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT64),
    *(FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
)


_LAST: Final = 253402300799.0
"""The end of the year 9999: https://protobuf.dev/reference/protobuf/google.protobuf/#timestamp"""
_LONGEST_S: Final = 315576000000.0
"""10,000 years: https://protobuf.dev/reference/protobuf/google.protobuf/#duration"""


def timestamp(unix_time: float) -> Timestamp:
    """Unix time in seconds as a message; what its JSON can't have is cut: peers may send any number."""
    unix_time = min(max(unix_time, 0.0), _LAST)
    return Timestamp(seconds=int(unix_time), nanos=int(unix_time % 1 * 1e9))


def duration(seconds: float) -> Duration:
    """A number of seconds as a message, cut as above."""
    seconds = min(max(seconds, 0.0), _LONGEST_S)
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def seconds_of(value: Timestamp | Duration) -> float:
    """Unix time, or the length of a duration, in seconds."""
    return value.seconds + value.nanos / 1e9


def as_dict(value: message.Message) -> dict[str, Any]:
    """The message as a dict. It must have no map field; no message of ``pannier.v1`` that is shown has one."""
    fields = json_format.MessageToDict(
        value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _make_numbers(fields, value.DESCRIPTOR)
    return fields


def _make_numbers(fields: dict[str, Any], of: Any) -> None:
    """Replaces the texts of 64-bit integers in place; ``of`` is the message's descriptor."""
    for name, value in fields.items():
        field = of.fields_by_name[name]
        if field.type in _WIDE:
            fields[name] = [int(each) for each in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            for each in value if isinstance(value, list) else [value]:
                # Times and durations are texts.
                if isinstance(each, dict):
                    _make_numbers(each, field.message_type)
