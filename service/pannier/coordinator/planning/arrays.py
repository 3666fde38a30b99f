"""Columns of plans as numpy arrays: read from messages, written into them, put in order.

In: columns as :mod:`pannier.wire.plan_columns` describes them, and rows that mostly are in order
already. Out: arrays, columns. Pure; any thread.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import column_length, width_of

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LARGEST = 1 << 62
"""Numbers in plans stay below it, so that sums of two fit an int64."""


def read_column(column: bytes) -> Ints:
    """The numbers of a column. Raises InvalidRequestError."""
    return read_columns([column])[0]


def read_columns(columns: Sequence[bytes]) -> tuple[Ints, Ints]:
    """The numbers of all columns, one after another, and how many each has.

    Raises InvalidRequestError for a malformed column, and for a number that no plan has.
    """
    counts = np.array([column_length(column) for column in columns], np.int64)
    out = np.empty(int(counts.sum()), np.int64)
    edges = [0, *np.cumsum(counts).tolist()]
    for column, (begin, end) in zip(columns, pairwise(edges), strict=True):
        if begin < end:
            out[begin:end] = np.frombuffer(column, f"<u{column[0]}", offset=1)
    # Numbers of 2^63 and above are negative here.
    if len(out) and (int(out.min()) < 0 or int(out.max()) >= LARGEST):
        raise InvalidRequestError("a number is out of range")
    return out, counts


def write_column(values: Ints) -> bytes:
    """Numbers, none below 0, as a column."""
    if not len(values):
        return b""
    width = width_of(int(values.max()))
    return bytes((width,)) + values.astype(f"<u{width}").tobytes()


def edges_of(values: Ints) -> Ints:
    """Where runs of equal numbers begin, and where the last one ends."""
    inner = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([np.zeros(min(1, len(values)), np.int64), inner, [len(values)]])


def order_by(major: Ints, minor: Ints) -> Ints:
    """Indices that sort by ``major``, then by ``minor``; equal pairs stay in order."""
    ascending = (major[1:] > major[:-1]) | ((major[1:] == major[:-1]) & (minor[1:] >= minor[:-1]))
    return np.arange(len(major)) if ascending.all() else np.lexsort((minor, major))


def first_of_each(numbers: Ints, count: int) -> Ints:
    """Where each number below ``count`` comes first; ``len(numbers)`` for one that is absent."""
    first = np.full(count, len(numbers))
    # Of several values for one index the last one stays.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return first


def number_rows(rows: Ints) -> tuple[Ints, Ints]:
    """Numbers distinct rows: the first of each, and for every row its number."""
    # A hash per row. Collisions are rare, and found by comparing.
    factors = np.array(
        [pow(0x9E3779B97F4A7C15, d + 1, 1 << 64) for d in range(rows.shape[1])], np.uint64
    )
    mixed = (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    _, first, number = np.unique(mixed, return_index=True, return_inverse=True)
    if (rows[first[number]] != rows).any():
        _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, number.reshape(-1)
