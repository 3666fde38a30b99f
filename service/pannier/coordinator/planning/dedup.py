"""Deduplication: chooses one rank to write each chunk that several ranks hold.

In: :class:`Columns`, and what ranks have staged or wrote before. Out: the rows to be written, one per (key,
offset), ascending. Pure; any thread. DCP's ``dedup_save_plans`` does the same with one Python object per
item, and balances by the size of the whole tensor; here the bytes of the shard count.
"""

from typing import NamedTuple

import numpy as np

from pannier.coordinator.planning.arrays import Bools, Ints, first_of_each
from pannier.coordinator.planning.balance import balance, weights
from pannier.coordinator.planning.columns import Columns, InvalidPlanError, PlanChangedError
from pannier.wire.failures import ranks_text


class Kept(NamedTuple):
    """What ranks have staged, which can't change any more, and what the other ranks wrote in the last plan."""

    plans: Ints
    """Indices of the plans of ranks that have staged: they write nothing else."""
    rows: Ints
    """What they write."""
    before: Ints
    """What the other ranks wrote, and still hold."""


def choose_rows(columns: Columns, *, to_lowest_rank: bool, kept: Kept | None = None) -> Ints:
    """Rows to be written, ascending, so by rank and position.

    Copies within one rank's plan count as one, the first. A chunk goes to the rank with
    the fewest bytes so far among those that hold it, the largest chunks first, or to the
    lowest rank. An empty chunk gives way to a full one at the same offset. A chunk that a rank has staged
    goes to the lowest of these ranks, one that a rank wrote before stays that rank's.

    Raises InvalidPlanError when ranks hold something different under one (key, offset); PlanChangedError when
    only ranks that have staged without it hold it.
    """
    if not len(columns.fqn):
        return np.zeros(0, np.int64)
    try:
        _check_types(columns.kinds)
    except InvalidPlanError:
        # Checked again on all plans, so that the error names all ranks.
        _check_types(columns)
        raise
    order = columns.by_place
    fqn, place = columns.fqn[order], columns.place[order]
    first = np.flatnonzero(np.r_[True, (fqn[1:] != fqn[:-1]) | (place[1:] != place[:-1])])
    count = np.diff(first, append=len(order))
    chosen = np.zeros(len(order), bool)
    if kept is None or not len(kept.plans):
        # Most chunks are there once; the others are few, or all.
        kept = kept if kept is not None and len(kept.before) else None
        chosen[order[first[count == 1]]] = True
        order = order[np.repeat(count > 1, count)]
        count = count[count > 1]
    if len(order):
        load = _load(columns, chosen)
        group = np.repeat(np.arange(len(count)), count)
        chosen[_choose(columns, order, group, load, kept, to_lowest_rank=to_lowest_rank)] = True
    return np.flatnonzero(chosen)


def _choose(
    columns: Columns,
    order: Ints,
    group: Ints,
    load: Ints,
    kept: Kept | None,
    *,
    to_lowest_rank: bool,
) -> Ints:
    """One row of each group.

    Args:
        order: rows by group, and within a group by rank and position.
        group: numbers 0, 1, …
        load: bytes that each rank writes in any case.
    """
    order, group = _without_empty(columns, order, group)
    _check_extents(columns, order, group)
    copies = np.zeros(len(order), bool)
    plan = columns.plan[order]
    copies[1:] = (group[1:] == group[:-1]) & (plan[1:] == plan[:-1])
    if copies.any():
        order, group = order[~copies], group[~copies]
    if kept is not None:
        order, group = _without_kept(columns, order, group, kept)
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    return order[first] if to_lowest_rank else balance(columns, order, first, load)


def _load(columns: Columns, chosen: Bools) -> Ints:
    """Bytes of these rows, by plan."""
    bytes_ = np.where(chosen, weights(columns), 0)
    ends = np.cumsum(np.bincount(columns.plan, minlength=len(columns.plans)))
    upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(bytes_)])[ends]
    return np.diff(upto, prepend=0)


def _without_empty(columns: Columns, order: Ints, group: Ints) -> tuple[Ints, Ints]:
    full: Bools = columns.volume[order] > 0
    group_is_full = np.zeros(int(group[-1]) + 1, bool)
    group_is_full[group[full]] = True
    kept = full | ~group_is_full[group]
    return order[kept], group[kept]


def _without_kept(columns: Columns, order: Ints, group: Ints, kept: Kept) -> tuple[Ints, Ints]:
    """Rows that may be chosen: ranks that have staged write what they staged, and nothing else."""
    staged = np.isin(columns.plan[order], kept.plans)
    fixed = _firsts(np.isin(order, kept.rows), group)
    before = _firsts(np.isin(order, kept.before) & ~staged, group)
    count = int(group[-1]) + 1
    is_fixed, stays = np.zeros((2, count), bool)
    is_fixed[group[fixed]] = True
    stays[group[before]] = True
    left = np.where(is_fixed[group], fixed, np.where(stays[group], before, ~staged))
    covered = np.zeros(count, bool)
    covered[group[left]] = True
    if not covered.all():
        row = int(order[np.argmax(~covered[group])])
        changed = np.setdiff1d(np.arange(len(columns.plans)), kept.plans)
        who = ranks_text(columns.plans[int(index)].rank for index in changed)
        raise PlanChangedError(
            f"no rank writes {columns.key(row)} any more, which {columns.who(row)} holds and has staged "
            f"without: the rank that wrote it has dropped it (the plans of {who} have changed). The "
            "next save is planned again; a key that comes and goes should have a name of its own on "
            "each rank",
            [columns.plans[int(index)] for index in changed],
        )
    return order[left], group[left]


def _firsts(marked: Bools, group: Ints) -> Bools:
    """Of the marked rows the first of each group."""
    rows = np.flatnonzero(marked)
    firsts = np.zeros(len(marked), bool)
    firsts[rows[np.diff(group[rows], prepend=-1) != 0]] = True
    return firsts


def _check_types(columns: Columns) -> None:
    """Checks that every row of a key has the type, dtype and size of the key's first row."""
    reference = first_of_each(columns.fqn, len(columns.fqns))[columns.fqn]
    is_object = columns.is_object
    differs = is_object != is_object[reference]
    if differs.any():
        row, other = _pair(differs, reference)
        if is_object[row]:
            row, other = other, row
        rows = np.flatnonzero(columns.fqn == columns.fqn[row])
        tensors, objects = rows[~is_object[rows]], rows[is_object[rows]]
        raise columns.error(
            f"{columns.key(row)} is a tensor on {columns.ranks(tensors)} and an object on "
            f"{columns.ranks(objects)}; give it the same type, or another key, on each rank",
            row,
            other,
        )
    names = sorted({dtype.name for dtype in columns.dtypes})
    dtype = np.array([names.index(dtype.name) for dtype in columns.dtypes] or [0])
    own = dtype[columns.prop]
    differs = ~is_object & (own != own[reference])
    if differs.any():
        row, other = _pair(differs, reference)
        raise columns.error(
            f"{columns.key(row)} is {columns.dtype(other)} on {columns.who(other)} and "
            f"{columns.dtype(row)} on {columns.who(row)}; use the same dtype on each rank",
            row,
            other,
        )
    _check_sizes(columns, reference)


def _check_sizes(columns: Columns, reference: Ints) -> None:
    differs = columns.ndim != columns.ndim[reference]
    for rows, size, _, _ in columns.by_ndim(np.flatnonzero(~differs)):
        other = columns.size[columns.start[reference[rows]][:, None] + np.arange(size.shape[1])]
        differs[rows] = (size != other).any(axis=1)
    if differs.any():
        row, first = _pair(differs, reference)
        raise columns.error(
            f"{columns.key(row)} differs in size: {columns.shape(first)} on "
            f"{columns.who(first)}, {columns.shape(row)} on {columns.who(row)}; a tensor that is "
            "each rank's own needs a key of its own",
            row,
            first,
        )


def _check_extents(columns: Columns, order: Ints, group: Ints) -> None:
    """Checks that rows of a group agree on the chunk's extent; empty chunks are all alike."""
    reference = _spread(order, np.flatnonzero(np.diff(group, prepend=-1)))
    again = (reference != order) & (columns.volume[order] > 0)
    if columns.like is not None:
        again &= columns.like[reference] != columns.like[order]
    rows, others = order[again], reference[again]
    differs = np.zeros(len(columns.fqn), bool)
    back = np.zeros(len(columns.fqn), np.int64)
    back[rows] = others
    for some, _, _, extent in columns.by_ndim(rows):
        other = columns.extent[columns.start[back[some]][:, None] + np.arange(extent.shape[1])]
        differs[some] = (extent != other).any(axis=1)
    if differs.any():
        row, other_row = _pair(differs, back)
        raise columns.error(
            f"{columns.key(row)}: the same offset has shards of two sizes: "
            f"{columns.shape(other_row)} on {columns.who(other_row)}, {columns.shape(row)} on "
            f"{columns.who(row)}",
            row,
            other_row,
        )


def _spread(order: Ints, first: Ints) -> Ints:
    """For each row of ``order`` the first row of its group."""
    count = np.diff(np.r_[first, len(order)])
    return np.repeat(order[first], count)


def _pair(differs: Bools, reference: Ints) -> tuple[int, int]:
    row = int(np.argmax(differs))
    return row, int(reference[row])
