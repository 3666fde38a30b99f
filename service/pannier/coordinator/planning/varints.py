"""Packed columns of a protobuf message as numpy arrays, and back, without an object per number.

In: bytes as protobuf writes them. Out: arrays; and bytes that protobuf reads. Pure; any thread.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_LONGEST: Final = 10
"""Bytes of a number."""
_LAST_BYTES: Final = bytes(range(128))
"""What a number may end with."""
PACKED: Final = 2
"""Wire type of packed columns, messages and strings."""


def cut(data: bytes, start: int = 0, *, before: int = 1 << 29) -> tuple[dict[int, bytes], int]:
    """Content of each field by number, as :func:`spans` finds it."""
    found, at = spans(data, start, len(data), before=before)
    return {number: data[begin:end] for number, (begin, end) in found.items()}, at


def spans(
    data: bytes, start: int, end: int, *, before: int = 1 << 29
) -> tuple[dict[int, tuple[int, int]], int]:
    """Where each field's content is, by number, up to the first one from ``before`` on, and where
    that is.

    Of a message, ``data[start:end]``, that has length-delimited fields alone, each at most once, in
    order.

    Raises IndexError, ValueError.
    """
    found: dict[int, tuple[int, int]] = {}
    at = start
    while at < end:
        tag, content = _number(data, at)
        number = tag >> 3
        if number >= before:
            break
        size, content = _number(data, content)
        at = content + size
        if tag & 7 != PACKED or at > end or number in found:
            raise ValueError(f"field {number} isn't as protobuf writes it")
        found[number] = content, at
    return found, at


def find(data: bytes, number: int) -> tuple[int, int, int]:
    """Where the length-delimited field begins, where its content does, and where both end.

    All three are the same when it isn't there. What comes before it is length-delimited, too.

    Raises IndexError, ValueError.
    """
    at = 0
    while at < len(data):
        tag, content = _number(data, at)
        if tag >> 3 > number:
            break
        if tag & 7 != PACKED:
            raise ValueError(f"field {tag >> 3} isn't as protobuf writes it")
        size, content = _number(data, content)
        end = content + size
        if end > len(data):
            raise ValueError("a field is longer than its message")
        if tag >> 3 == number:
            return at, content, end
        at = end
    return at, at, at


def leading(data: bytes, start: int = 0, end: int | None = None, *, upto: int) -> tuple[bytes, int]:
    """The fields with numbers up to this one, which come first, and where they end.

    Raises IndexError, ValueError.
    """
    at, end = start, len(data) if end is None else end
    while at < end:
        tag, content = _number(data, at)
        if tag >> 3 > upto:
            break
        size, content = _number(data, content)
        at = content + size
    if at > end:
        raise ValueError("a field is longer than its message")
    return data[start:at], at


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7


def decode(parts: Sequence[bytes]) -> tuple[Ints, Ints]:
    """The numbers of all parts, one after another, and how many each part has.

    Numbers of 2^63 and above come out negative. Raises ValueError when a part ends within one.
    """
    data = np.frombuffer(b"".join(parts), np.uint8)
    sizes = np.array([len(part) for part in parts], np.int64)
    ends = np.flatnonzero(data < 128)
    edges = np.cumsum(sizes)
    upto = np.searchsorted(ends, edges)
    if (data[edges[sizes > 0] - 1] >= 128).any():
        raise ValueError("a column ends within a number")
    counts = np.diff(upto, prepend=0)
    if len(ends) == len(data):
        return data.astype(np.int64), counts
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _LONGEST:
        raise ValueError("a number has more than ten bytes")
    values = (data[starts] & 127).astype(np.uint64)
    for index in range(1, longest):
        rows = np.flatnonzero(lengths > index)
        more = (data[starts[rows] + index] & 127).astype(np.uint64)
        values[rows] |= more << np.uint64(7 * index)
    return values.view(np.int64), counts


def count(part: bytes) -> int:
    """How many numbers a packed column has."""
    return len(part) - len(part.translate(None, _LAST_BYTES))


def encode(values: Ints) -> tuple[bytes, Ints]:
    """The numbers, none below 0, as a packed column; and where each one ends."""
    if not len(values):
        return b"", np.zeros(0, np.int64)
    most = int(values.max())
    if most < 128:
        return values.astype(np.uint8).tobytes(), np.arange(1, len(values) + 1)
    longest = -(-most.bit_length() // 7)
    # One row per number, as long as the longest; what a shorter one doesn't need is left out.
    out = np.empty((len(values), longest), np.uint8)
    needed = np.ones((len(values), longest), np.bool_)
    lengths = np.ones(len(values), np.int64)
    left: npt.NDArray[Any] = values.astype(np.uint32 if most < 1 << 32 else np.uint64)
    for index in range(longest):
        out[:, index] = left.astype(np.uint8) & 127
        left = left >> 7
        if index + 1 < longest:
            more = left != 0
            needed[:, index + 1] = more
            lengths += more
            out[:, index] |= more.view(np.uint8) << 7
    ends = np.cumsum(lengths)
    text = out if int(ends[-1]) == out.size else out[needed]
    return text.tobytes(), ends


def encode_parts(values: Ints, edges: Ints) -> list[bytes]:
    """The packed columns of ``values[edges[0]:edges[1]]`` and so on; most of these are alike."""
    bounds = edges.tolist()
    distinct: dict[bytes, int] = {}
    which: list[int] = []
    spans: list[tuple[int, int]] = []
    for begin, end in pairwise(bounds):
        number = distinct.setdefault(values[begin:end].tobytes(), len(spans))
        if number == len(spans):
            spans.append((begin, end))
        which.append(number)
    if len(spans) < len(which):
        values = np.concatenate([values[begin:end] for begin, end in spans] or [values[:0]])
        bounds = np.cumsum([0, *(end - begin for begin, end in spans)]).tolist()
    data, ends = encode(values)
    cuts = np.concatenate([np.zeros(1, np.int64), ends])[bounds].tolist()
    parts = [data[begin:end] for begin, end in pairwise(cuts)]
    return [parts[number] for number in which]


def encode_runs(values: Ints) -> bytes:
    """As :func:`encode`, of numbers that come many times in a row."""
    edges = edges_of(values)
    if len(edges) * 8 > len(values):
        return encode(values)[0]
    data, ends = encode(values[edges[:-1]])
    cuts = [0, *ends.tolist()]
    lengths = np.diff(edges).tolist()
    return b"".join(
        data[begin:end] * length
        for begin, end, length in zip(cuts[:-1], cuts[1:], lengths, strict=True)
    )


def edges_of(values: Ints) -> Ints:
    """Where runs of equal numbers begin, and where the last one ends."""
    inner = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([np.zeros(min(1, len(values)), np.int64), inner, [len(values)]])


def zigzag(values: Ints) -> Ints:
    """Signed numbers as protobuf's ``sint64`` has them, before they are packed."""
    out: Ints = (values << 1) ^ (values >> 63)
    return out


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field; empty content is no field."""
    if not content:
        return b""
    return _varint(number << 3 | PACKED) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
