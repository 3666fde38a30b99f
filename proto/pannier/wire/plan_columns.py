"""Codec of the ``bytes`` fields of ``plan.proto``, without torch and numpy.

Columns: numbers <-> raw little-endian arrays of the narrowest width that holds them. In: sequences of
integers from 0 to 2^64 - 1. Out: ``bytes``; and the integers again. The coordinator, which plans on
millions of numbers, reads and writes the same form with numpy: :mod:`pannier.coordinator.planning.arrays`.
Tables and mappings: the messages that are in them. Pure functions, for any process; any thread.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from pannier.v1 import plan_pb2
from pannier.wire.errors import InvalidRequestError

_Message = TypeVar("_Message", plan_pb2.ItemTables, plan_pb2.FlattenMappings)

_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""By width in bytes: the type code of :mod:`array`."""


def encode_column(values: Sequence[int]) -> bytes:
    """The column of ``values``. Raises OverflowError for a number out of range, TypeError for what is no integer."""
    if not len(values):
        return b""
    width = width_of(max(values))
    numbers = array(_CODES[width], values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return bytes((width,)) + numbers.tobytes()


def decode_column(column: bytes) -> list[int]:
    """Inverse of :func:`encode_column`. Raises InvalidRequestError for what it can't have made."""
    if not column_length(column):
        return []
    numbers = array(_CODES[column[0]])
    numbers.frombytes(column[1:])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def column_length(column: bytes) -> int:
    """How many numbers a column has. Raises InvalidRequestError when it is malformed."""
    if not column:
        return 0
    width = column[0]
    if width not in _CODES:
        raise InvalidRequestError(f"a column has numbers of {width} bytes, not of 1, 2, 4 or 8")
    length, rest = divmod(len(column) - 1, width)
    if rest:
        raise InvalidRequestError(
            f"a column of {len(column) - 1} bytes has numbers of {width} bytes: the last one is cut off"
        )
    return length


def width_of(largest: int) -> int:
    """Bytes that each number of a column takes. Raises OverflowError."""
    for width in _CODES:
        if largest >> 8 * width == 0:
            return width
    raise OverflowError(f"{largest} is not from 0 to 2^64 - 1")


def parse_tables(data: bytes) -> plan_pb2.ItemTables:
    """What ``Items.tables`` holds. Raises InvalidRequestError."""
    return _parse(plan_pb2.ItemTables, data, "the keys and properties of a plan")


def parse_mappings(data: bytes) -> plan_pb2.FlattenMappings:
    """What ``LocalPlan.mappings`` holds. Raises InvalidRequestError."""
    return _parse(plan_pb2.FlattenMappings, data, "the flatten mappings of a plan")


def _parse(kind: type[_Message], data: bytes, what: str) -> _Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"{what} are malformed: {error}") from error


def decode_mappings(message: plan_pb2.FlattenMappings) -> dict[str, tuple[str | int, ...]]:
    """Inverse of ``plan_codec.encode_mappings``."""
    return {
        mapping.fqn: tuple(
            part.index if part.WhichOneof("element") == "index" else part.key
            for part in mapping.path
        )
        for mapping in message.mappings
    }
