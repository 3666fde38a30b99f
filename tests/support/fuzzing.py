"""How what comes from outside is fuzzed: settings, and strategies for it."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pannier.v1 import plan_pb2
from pannier.wire.errors import PannierError
from pannier.wire.plan_columns import encode_column

FUZZ: Final = settings(
    max_examples=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
"""The same few examples each time."""

ODD_NAMES = (
    *("..", ".", "", "%2e%2e", "%2f", "..%2f", "\x00", "\n", "\u202e", "\u2025", "\uff0e\uff0e"),
    *(
        " ",
        "~",
        "a" * 300,
        ".pannier",
        ".metadata",
        "__i1-a1-g00000000-s1_0_0.distcp",
        "CON",
        "a\\b",
    ),
    *("\ud800", "é", "e\u0301", "?", "#", "*", "[a]", "{x}", "$HOME", "link", "deep"),
)
ODD_SCHEMES = ("", "file://", "gs://", "gcs://", "s3://", "memory://", "http://", "://", "FILE://")
Answer = TypeVar("Answer")

names = st.one_of(st.sampled_from(ODD_NAMES), st.text(max_size=20))
places = st.builds(
    lambda scheme, slash, parts, end: scheme + slash + "/".join(parts) + end,
    st.sampled_from(ODD_SCHEMES),
    st.sampled_from(["/", "", "//", "./"]),
    st.lists(names, max_size=5),
    st.sampled_from(["", "/", "/.", "/..", "\0"]),
)
"""Checkpoint ids and roots, most of them bad."""


def accepted(parse: Callable[..., Answer], *arguments: Any, **named: Any) -> list[Answer]:
    """What ``parse`` makes of it; empty when it is refused as it should be."""
    try:
        return [parse(*arguments, **named)]
    except PannierError:
        return []


def messages(kind: type[Message], *, depth: int = 3) -> st.SearchStrategy[Any]:
    """Any message that a peer could send: each field within its type, none of it sensible."""

    def fill(values: dict[str, Any]) -> Message:
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if field.name in values:
                _put(message, field, values[field.name])
        return message

    fields = {
        field.name: _field(field, depth)
        for field in kind.DESCRIPTOR.fields
        if depth or field.message_type is None
    }
    return st.fixed_dictionaries({}, optional=fields).map(fill)


def _put(message: Message, field: Any, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update((entry.key, entry.value) for entry in value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _field(field: Any, depth: int) -> st.SearchStrategy[Any]:
    one = _single(field, depth)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _single(field: Any, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type._concrete_class, depth=depth - 1)
    if field.enum_type is not None:
        return st.sampled_from([0, 1, 2, 3, 4, 5, 99])
    if field.type == FieldDescriptor.TYPE_BYTES and field.file.name in _PLANS:
        kind = _SERIALISED.get(field.name)
        # Most of them are sound, so that their contents count.
        sound = _COLUMNS if kind is None else messages(kind).map(kind.SerializeToString)
        return st.one_of(sound, sound, sound, st.binary(max_size=40))
    return _SCALARS[field.type]


def _numbers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [each for each in (0, 1, 2, 3, 4, 8, 704, 873, high, high // 2, low) if each >= low]
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


_PLANS = {"pannier/v1/plan.proto", "pannier/v1/records.proto"}
"""Their ``bytes`` are columns, but for these."""
_SERIALISED = {"tables": plan_pb2.ItemTables, "mappings": plan_pb2.FlattenMappings}
_COLUMNS = st.one_of(
    st.lists(_numbers(0, 8), max_size=4), st.lists(_numbers(0, (1 << 64) - 1), max_size=4)
).map(encode_column)
_TEXT = st.one_of(
    st.sampled_from([name for name in ODD_NAMES if name.isprintable()]),
    st.sampled_from(
        ["float32", "int8", "strided", "contiguous_format", "w", "i1-a1-g00000000-s1", "load", "0"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
_SCALARS = {
    FieldDescriptor.TYPE_UINT32: _numbers(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: _numbers(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED64: _numbers(0, (1 << 64) - 1),
    FieldDescriptor.TYPE_UINT64: _numbers(0, (1 << 64) - 1),
    FieldDescriptor.TYPE_INT32: _numbers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: _numbers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT32: _numbers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT64: _numbers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
}
