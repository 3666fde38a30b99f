"""Orders and numbers of rows that mostly are in order already. Pure; any thread."""

import numpy as np

from pannier.coordinator.planning.varints import Ints


def order_by(major: Ints, minor: Ints) -> Ints:
    """Indices that sort by ``major``, then by ``minor``; what is equal stays in order."""
    ascending = (major[1:] > major[:-1]) | ((major[1:] == major[:-1]) & (minor[1:] >= minor[:-1]))
    return np.arange(len(major)) if ascending.all() else np.lexsort((minor, major))


def first_of_each(numbers: Ints, count: int) -> Ints:
    """Where each number below ``count`` comes first; ``len(numbers)`` for one that doesn't."""
    first = np.full(count, len(numbers))
    # Of several values for one index the last one stays.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return first


def number_rows(rows: Ints) -> tuple[Ints, Ints]:
    """The first of each distinct row, and for every row the number of its like."""
    # One number per row, by which few are confused; those that are, are found.
    factors = np.array(
        [pow(0x9E3779B97F4A7C15, d + 1, 1 << 64) for d in range(rows.shape[1])], np.uint64
    )
    mixed = (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    _, first, number = np.unique(mixed, return_index=True, return_inverse=True)
    if (rows[first[number]] != rows).any():
        _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, number.reshape(-1)
