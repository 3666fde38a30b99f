"""Checks that the chosen chunks of every tensor make up the tensor: no gap, no overlap.

In: :class:`Columns` and the rows to be written. Out: nothing, or an error. Pure; any thread.
Empty chunks overlap nothing. As in DCP, a save of one rank alone may leave gaps: the rank may
hold a part of a distributed tensor on purpose (``no_dist``).
"""

from typing import Final

import numpy as np

from pannier.coordinator.planning.arrays import Ints, order_by
from pannier.coordinator.planning.columns import Columns

_BLOCK: Final = 512
"""Chunks compared with all others at once."""


def check_coverage(columns: Columns, chosen: Ints) -> None:
    """Raises InvalidPlanError naming the first tensor with missing or overlapping shards."""
    wanted = np.zeros(len(columns.fqn), np.bool_)
    wanted[chosen] = True
    wanted &= columns.ndim > 0
    rows = columns.by_place[wanted[columns.by_place]]
    if len(rows) == 0:
        return
    _check_overlaps(columns, rows)
    if len(columns.plans) > 1:
        _check_volumes(columns, rows)


def _starts(fqn: Ints) -> Ints:
    """Where the runs of equal ``fqn`` begin."""
    return np.flatnonzero(np.r_[True, fqn[1:] != fqn[:-1]])


def _check_volumes(columns: Columns, rows: Ints) -> None:
    starts = _starts(columns.fqn[rows])
    held = np.add.reduceat(columns.volume[rows], starts)
    firsts = rows[starts]
    wanted = np.zeros(len(columns.fqn), np.int64)
    for some, size, _, _ in columns.by_ndim(firsts):
        wanted[some] = np.prod(size, axis=1)
    missing = held != wanted[firsts]
    if not missing.any():
        return
    number = int(np.argmax(missing))
    row = int(firsts[number])
    its_rows = rows[columns.fqn[rows] == columns.fqn[row]]
    at = slice(int(columns.start[row]), int(columns.start[row] + columns.ndim[row]))
    others = int(missing.sum()) - 1
    raise columns.error(
        f"{columns.key(row)} of size {columns.size[at].tolist()} is not whole: its shards cover "
        f"{held[number]} of {wanted[row]} elements, held by {columns.ranks(its_rows)}"
        + (f" (and so are {others} more keys)" if others else "")
        + "; do all ranks that hold a part of it save together?"
    )


def _check_overlaps(columns: Columns, rows: Ints) -> None:
    """``rows`` are sorted by key and place."""
    reach = columns.reach[rows]
    if (full := reach >= 0).sum() < len(rows):
        rows, reach = rows[full], reach[full]
    # A chunk lies from ``place`` to ``place + reach``. In most keys these ranges don't intersect, as most
    # tensors are split along their first dimension: such keys have no overlap.
    fqn, place = columns.fqn[rows], columns.place[rows]
    mixed = (fqn[1:] == fqn[:-1]) & (place[1:] <= place[:-1] + reach[:-1])
    if not mixed.any():
        return
    mixed_keys = np.zeros(len(columns.fqns), np.bool_)
    mixed_keys[fqn[1:][mixed]] = True
    rows = rows[mixed_keys[fqn]]
    for some, size, offset, extent in columns.by_ndim(rows, block=len(rows)):
        fqn = columns.fqn[some]
        starts = _starts(fqn)
        count = np.diff(np.r_[starts, len(some)])
        split = np.logical_or.reduceat((offset != 0) | (extent != size), starts, axis=0)
        along = np.argmax(split, axis=1)
        one_way = split.sum(axis=1) <= 1
        _check_line(columns, some, offset, extent, np.repeat(along, count))
        for number in np.flatnonzero(~one_way & (count > 1)).tolist():
            at = slice(starts[number], starts[number] + count[number])
            _check_boxes(columns, some[at], offset[at], extent[at])


def _check_line(columns: Columns, rows: Ints, offset: Ints, extent: Ints, along: Ints) -> None:
    """Checks that neighbours along a dimension don't overlap.

    That is enough for a key that is split along that one dimension; for other keys it
    finds some of the overlaps.
    """
    index = np.arange(len(rows))
    begin = offset[index, along]
    end = begin + extent[index, along]
    fqn = columns.fqn[rows]
    # Shards mostly come in the order of ranks.
    order = order_by(fqn, begin)
    left, right = order[:-1], order[1:]
    overlap = (fqn[left] == fqn[right]) & (begin[right] < end[left])
    # Neighbours in this dimension that are apart in another one don't overlap.
    left, right = left[overlap], right[overlap]
    apart = (offset[left] + extent[left] <= offset[right]) | (
        offset[right] + extent[right] <= offset[left]
    )
    found = np.flatnonzero(~apart.any(axis=1))
    if len(found):
        number = int(found[0])
        _raise_overlap(columns, int(rows[left[number]]), int(rows[right[number]]))


def _check_boxes(columns: Columns, rows: Ints, offset: Ints, extent: Ints) -> None:
    """Checks the chunks of one key that is split along several dimensions."""
    if _is_grid(offset, extent):
        return
    end = offset + extent
    for begin in range(0, len(rows), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        overlap = np.ones((len(rows[block]), len(rows)), bool)
        for d in range(offset.shape[1]):
            overlap &= offset[block, d][:, None] < end[:, d]
            overlap &= offset[:, d] < end[block, d][:, None]
        overlap[np.arange(len(rows[block])), begin + np.arange(len(rows[block]))] = False
        if overlap.any():
            first, second = np.argwhere(overlap)[0]
            _raise_overlap(columns, int(rows[begin + first]), int(rows[second]))


def _is_grid(offset: Ints, extent: Ints) -> bool:
    """Whether each chunk is one cell of the grid of all chunks' edges, and no two are the same cell."""
    cell = np.zeros(len(offset), np.int64)
    for d in range(offset.shape[1]):
        edges = np.unique(np.r_[offset[:, d], offset[:, d] + extent[:, d]])
        low = np.searchsorted(edges, offset[:, d])
        if (np.searchsorted(edges, offset[:, d] + extent[:, d]) != low + 1).any():
            return False
        cell = cell * len(edges) + low
    return len(np.unique(cell)) == len(cell)


def _raise_overlap(columns: Columns, row: int, other: int) -> None:
    row, other = min(row, other), max(row, other)
    raise columns.error(
        f"{columns.key(row)} has overlapping shards: {columns.shape(row)} on {columns.who(row)} "
        f"and {columns.shape(other)} on {columns.who(other)}",
        row,
        other,
    )
