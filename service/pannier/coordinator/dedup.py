"""Who writes what: for every chunk that several ranks hold, the one rank that writes it.

In: :class:`Columns`. Out: the rows to be written, one per (key, offset), ascending. Pure;
any thread. DCP's ``dedup_save_plans`` does the same with one Python object per item, and
balances by the size of the whole tensor; here the bytes of the shard count.
"""

import heapq
from typing import Final, NamedTuple

import numpy as np

from pannier.coordinator.columns import Bools, Columns, Ints, InvalidPlanError

_SHOWN: Final = 8
"""Ranks spelled out in an error."""


class Kept(NamedTuple):
    """What can't be changed any more, as ranks have staged by an earlier plan."""

    plans: Ints
    """Indices of these ranks' plans: they write nothing else."""
    rows: Ints
    """What they write."""


def choose_rows(columns: Columns, *, to_lowest_rank: bool, kept: Kept | None = None) -> Ints:
    """Rows to be written, ascending, so by rank and position.

    Copies within one rank's plan count as one, the first. A chunk goes to the rank with
    the fewest bytes so far among those that hold it, the largest chunks first, or to the
    lowest rank. An empty chunk gives way to a full one at the same offset.

    Raises InvalidPlanError when ranks hold something different under one (key, offset), or when
    only ranks that can't write it any more hold it.
    """
    if not len(columns.fqn):
        return np.zeros(0, np.int64)
    _check_types(columns)
    # Stable: within a group the rows stay in the order of ranks and positions.
    order = np.lexsort((columns.place, columns.fqn))
    group = _number(columns.fqn[order], columns.place[order])
    order, group = _without_empty(columns, order, group)
    _check_extents(columns, order, group)
    copies = np.zeros(len(order), bool)
    copies[1:] = (group[1:] == group[:-1]) & (columns.plan[order][1:] == columns.plan[order][:-1])
    order, group = order[~copies], group[~copies]
    if kept is not None and len(kept.plans):
        order, group = _without_staged(columns, order, group, kept)
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    chosen = order[first] if to_lowest_rank else _balance(columns, order, first)
    return np.sort(chosen)


def _number(*keys: Ints) -> Ints:
    """Numbers 0, 1, … for the runs of equal ``keys``, which are sorted."""
    new = np.zeros(len(keys[0]), bool)
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return np.cumsum(new)


def _without_empty(columns: Columns, order: Ints, group: Ints) -> tuple[Ints, Ints]:
    full: Bools = columns.volume[order] > 0
    group_is_full = np.zeros(int(group[-1]) + 1, bool)
    group_is_full[group[full]] = True
    kept = full | ~group_is_full[group]
    return order[kept], group[kept]


def _without_staged(columns: Columns, order: Ints, group: Ints, kept: Kept) -> tuple[Ints, Ints]:
    """What ranks that have staged write, they write alone; of all else they write nothing."""
    staged = np.isin(columns.plan[order], kept.plans)
    fixed = np.isin(order, kept.rows)
    group_is_fixed = np.zeros(int(group[-1]) + 1, bool)
    group_is_fixed[group[fixed]] = True
    left = np.where(group_is_fixed[group], fixed, ~staged)
    changed = np.setdiff1d(np.arange(len(columns.plans)), kept.plans)
    if len(lost := np.setdiff1d(kept.rows, order[fixed])):
        row = int(lost[0])
        raise InvalidPlanError(
            f"the plans of {_ranks(columns, changed)} have changed: {columns.key(row)}, which "
            f"{columns.who(row)} has staged, is no longer its to write; the next save is planned "
            "anew",
            [columns.plans[int(index)] for index in changed],
        )
    covered = np.zeros(len(group_is_fixed), bool)
    covered[group[left]] = True
    if not covered.all():
        row = int(order[np.argmax(~covered[group])])
        raise InvalidPlanError(
            f"the plans of {_ranks(columns, changed)} have changed, and nobody writes "
            f"{columns.key(row)} any more, which {columns.who(row)} holds and has staged without; "
            "the next save is planned anew",
            [columns.plans[int(index)] for index in changed],
        )
    once = np.bincount(group[fixed], minlength=1)
    if once.max() > 1:
        row = int(order[fixed][np.argmax(once[group[fixed]] > 1)])
        raise InvalidPlanError(
            f"ranks go by different plans, in which more than one of them writes {columns.key(row)}; "
            "the next save is planned anew",
            [columns.plans[int(index)] for index in (changed if len(changed) else kept.plans)],
        )
    return order[left], group[left]


def _ranks(columns: Columns, plans: Ints) -> str:
    ranks = [columns.plans[int(index)].rank for index in plans]
    more = f", … {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks [{', '.join(map(str, ranks[:_SHOWN]))}{more}]"


def _balance(columns: Columns, order: Ints, first: Ints) -> Ints:
    """One row per group: those that one rank holds alone, then the others by weight."""
    count = np.diff(np.r_[first, len(order)])
    # An object's size isn't known; like DCP, it counts as something.
    weight = np.maximum(columns.nbytes[order[first]], 1)
    alone = count == 1
    chosen = order[first]
    load = np.zeros(len(columns.plans), np.int64)
    np.add.at(load, columns.plan[chosen[alone]], weight[alone])
    plan = columns.plan[order].astype(np.int32)
    sets: dict[bytes, list[int]] = {}
    for number in np.flatnonzero(~alone).tolist():
        at = first[number]
        sets.setdefault(plan[at : at + count[number]].tobytes(), []).append(number)
    for holders_bytes, numbers in sets.items():
        holders = np.frombuffer(holders_bytes, np.int32).tolist()
        heap = [(int(load[holder]), place) for place, holder in enumerate(holders)]
        heapq.heapify(heap)
        weights = weight[numbers]
        for index in np.argsort(-weights, kind="stable").tolist():
            bytes_, place = heap[0]
            chosen[numbers[index]] = order[first[numbers[index]] + place]
            heapq.heapreplace(heap, (bytes_ + int(weights[index]), place))
        for bytes_, place in heap:
            load[holders[place]] = bytes_
    return chosen


def _check_types(columns: Columns) -> None:
    """Every row of a key agrees with the key's first row on what it is."""
    _, first, inverse = np.unique(columns.fqn, return_index=True, return_inverse=True)
    reference = first[inverse]
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
    names = sorted({str(dtype) for dtype in columns.dtypes})
    dtype = np.array([names.index(str(dtype)) for dtype in columns.dtypes] or [0])
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
    """Rows of a group agree on the chunk's extent (empty ones are all alike)."""
    _, first = np.unique(group, return_index=True)
    reference = _spread(order, first)
    again = (reference != order) & (columns.volume[order] > 0)
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
