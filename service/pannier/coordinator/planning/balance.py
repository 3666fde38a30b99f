"""Chooses, of the ranks that hold a chunk, the one that writes it, so that all write about as many bytes.

In: :class:`Columns` and groups of rows that are one chunk. Out: a row of each group. Ranks that hold
the same chunks are a *set* of holders: such a set's chunks go, the largest first, to the member with
the fewest bytes so far. Sets without a common member don't depend on each other, so they are processed
side by side. Pure; any thread.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from pannier.coordinator.planning.arrays import Ints, number_rows
from pannier.coordinator.planning.columns import Columns

_FEW: Final = 8
"""Fewer sets than this are processed one by one."""


class _Set(NamedTuple):
    """Holders of the same chunks."""

    holders: Ints
    """Indices of their plans."""
    groups: Ints
    """Numbers of the chunks, ascending."""


def weights(columns: Columns) -> Ints:
    """Bytes of each row."""
    # An object's size isn't known; as in DCP, it counts as one byte.
    weight = np.maximum(columns.kinds.nbytes, 1)
    return weight if columns.like is None else weight[columns.like]


def balance(columns: Columns, order: Ints, first: Ints, load: Ints) -> Ints:
    """Chooses one row per group: first for groups that one rank holds, then for the others by weight.

    Args:
        order: rows, by group; those of a group are of different plans, ascending.
        first: where each group begins in ``order``.
        load: bytes that each rank writes besides; updated in place.
    """
    count = np.diff(np.r_[first, len(order)])
    chosen = order[first]
    weight = weights(columns)[chosen]
    alone = count == 1
    np.add.at(load, columns.plan[chosen[alone]], weight[alone])
    plan = columns.plan[order]
    for batch in _batches(_sets(plan, first, count), len(load)):
        for sets in _of_one_size(batch):
            share = _one_by_one if len(sets) < _FEW else _side_by_side
            for groups, place in share(sets, weight, load):
                chosen[groups] = order[first[groups] + place]
    return chosen


def _sets(plan: Ints, first: Ints, count: Ints) -> list[_Set]:
    """All sets with more than one member, in the order of their first chunks."""
    found = []
    for size in np.unique(count[count > 1]).tolist():
        groups = np.flatnonzero(count == size)
        holders = plan[first[groups][:, None] + np.arange(size)]
        heads, number = number_rows(holders)
        by_set = np.argsort(number, kind="stable")
        parts = np.split(groups[by_set], np.cumsum(np.bincount(number))[:-1])
        found += [_Set(holders[head], own) for head, own in zip(heads, parts, strict=True)]
    return sorted(found, key=lambda each: int(each.groups[0]))


def _batches(sets: Sequence[_Set], plans: int) -> Iterator[list[_Set]]:
    """Runs of sets without a common member."""
    seen = np.full(plans, -1)
    batch: list[_Set] = []
    number = 0
    for each in sets:
        if (seen[each.holders] == number).any():
            yield batch
            batch, number = [], number + 1
        seen[each.holders] = number
        batch.append(each)
    if batch:
        yield batch


def _of_one_size(sets: Sequence[_Set]) -> Iterator[list[_Set]]:
    """Groups the sets by their number of members."""
    sizes: dict[int, list[_Set]] = {}
    for each in sets:
        sizes.setdefault(len(each.holders), []).append(each)
    yield from sizes.values()


def _one_by_one(
    sets: Sequence[_Set], weight: Ints, load: Ints
) -> Iterator[tuple[Ints, "Ints | int"]]:
    """Yields groups, and the place in its set of the member that writes each; adds to ``load``."""
    for holders, groups in sets:
        heap = list(zip(load[holders].tolist(), range(len(holders)), strict=True))
        heapq.heapify(heap)
        weights = weight[groups]
        by_weight = np.argsort(-weights, kind="stable")
        places = []
        for bytes_ in weights[by_weight].tolist():
            own, place = heap[0]
            places.append(place)
            heapq.heapreplace(heap, (own + bytes_, place))
        for own, place in heap:
            load[holders[place]] = own
        yield groups[by_weight], np.array(places, np.int64)


def _side_by_side(sets: Sequence[_Set], weight: Ints, load: Ints) -> Iterator[tuple[Ints, Ints]]:
    """As :func:`_one_by_one`, at once for sets of one size that have no common member."""
    sets = sorted(sets, key=lambda each: -len(each.groups))
    lengths = np.array([len(each.groups) for each in sets])
    groups = np.concatenate([each.groups for each in sets])
    of = np.repeat(np.arange(len(sets)), lengths)
    groups = groups[np.lexsort((-weight[groups], of))]
    # The n-th chunks of all sets, set by set.
    turn = np.arange(len(groups)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    groups = groups[np.argsort(turn, kind="stable")]
    holders = np.stack([each.holders for each in sets])
    loads = load[holders]
    begin = 0
    for left in (
        len(sets) - np.searchsorted(lengths[::-1], np.arange(lengths[0]), "right")
    ).tolist():
        own, index = groups[begin : begin + left], np.arange(left)
        place = loads[:left].argmin(axis=1)
        loads[index, place] += weight[own]
        yield own, place
        begin += left
    load[holders] = loads
