"""The global plan of a save: DCP's result, without an object per item.

In: the local plans of all ranks. Out: :class:`GlobalPlan`, what goes into the plan
manifest: the template of ``.metadata``, who writes each of its chunks, and where. Pure
and CPU-bound; runs in a thread. Where it differs from ``DefaultSavePlanner`` on purpose:
copies are balanced by the bytes of the shard, largest first, and duplicates within one
rank's plan are dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from pannier.coordinator.agreed import Share
from pannier.coordinator.columns import Columns, Ints, RankPlan, read_columns
from pannier.coordinator.coverage import check_coverage
from pannier.coordinator.dedup import Kept, choose_rows
from pannier.v1 import plan_pb2
from pannier.wire import identity
from pannier.wire.layout import lay_out


@dataclass(frozen=True)
class GlobalPlan:
    """One entry per chunk of the checkpoint, in DCP's order: by rank, then by position."""

    metadata: plan_pb2.GlobalMetadata
    owner: list[int]
    """Index into the plans of the rank that writes it."""
    position: list[int]
    """In that rank's local plan."""


def make_global_plan(
    plans: Sequence[RankPlan], attempt: str, kept: Mapping[int, Share] = MappingProxyType({})
) -> GlobalPlan:
    """Plans a save of these ranks, which agree on their planner's options.

    Args:
        plans: in the order of ranks; at least one.
        attempt: names the data files.
        kept: by rank, what ranks write that have staged already.

    Raises InvalidPlanError when the plans are not one checkpoint together.
    """
    options = plans[0].plan.options
    columns = read_columns(plans)
    chosen = choose_rows(
        columns, to_lowest_rank=options.dedup_save_to_lowest_rank, kept=_rows_of(columns, kept)
    )
    check_coverage(columns, chosen)
    owner, position = columns.plan[chosen].tolist(), columns.position[chosen].tolist()
    metadata = plan_pb2.GlobalMetadata(items=_items(columns, chosen))
    place_items(metadata, plans, owner, position, attempt)
    if options.flatten_state_dict:
        metadata.has_mappings = True
        metadata.mappings.extend(_merge_mappings(plans))
    return GlobalPlan(metadata, owner, position)


def _rows_of(columns: Columns, kept: Mapping[int, Share]) -> Kept:
    """The rows that ranks write in any case, and the indices of these ranks' plans."""
    ends = np.cumsum(np.bincount(columns.plan, minlength=len(columns.plans)))
    staged, rows = [], [np.zeros(0, np.int64)]
    for index, plan in enumerate(columns.plans):
        if (share := kept.get(plan.rank)) is not None:
            staged.append(index)
            rows.append(share.positions + (ends[index - 1] if index else 0))
    return Kept(np.array(staged, np.int64), np.concatenate(rows))


def place_items(
    metadata: plan_pb2.GlobalMetadata,
    plans: Sequence[RankPlan],
    owner: Sequence[int],
    position: Sequence[int],
    attempt: str,
) -> None:
    """Fills in the files and placements of items that their owners write in order of position.

    Items without a planned slot get their rank's objects file and length 0.
    """
    count = len(owner)
    file, offset, length = np.zeros((3, count), np.int64)
    owners, positions = np.array(owner, np.int64), np.array(position, np.int64)
    for index, rows in _runs(owners, positions):
        rank, plan = plans[index].rank, plans[index].plan
        head, body, tail = (
            np.array(each, np.int64)[positions[rows]] for each in (plan.head, plan.body, plan.tail)
        )
        slotted = head > 0
        layout = lay_out(head[slotted].tolist(), body[slotted].tolist(), tail[slotted].tolist())
        placed, loose = rows[slotted], rows[~slotted]
        first = len(metadata.files)
        metadata.files.extend(
            identity.data_file(attempt, rank, number) for number in range(len(layout.sizes))
        )
        file[placed] = np.array(layout.file, np.int64) + first
        offset[placed] = layout.offset
        length[placed] = layout.length
        if len(loose):
            file[loose] = len(metadata.files)
            metadata.files.append(identity.objects_file(attempt, rank))
    metadata.placement.file.extend(file.tolist())
    metadata.placement.offset.extend(offset.tolist())
    metadata.placement.length.extend(length.tolist())


def _runs(owners: Ints, positions: Ints) -> Iterator[tuple[int, Ints]]:
    """Each owner with its rows, in order of position."""
    order = np.lexsort((positions, owners))
    edges = np.flatnonzero(np.diff(owners[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(owners[rows[0]]), rows


def _items(columns: Columns, chosen: Ints) -> plan_pb2.Items:
    """The chosen rows as a message; index hints are the chunks' numbers within their key."""
    fqn = columns.fqn[chosen]
    _, first, number = np.unique(fqn, return_index=True, return_inverse=True)
    # Keys in order of first use, as DCP's dict of metadata has them.
    rank_of_first = np.argsort(np.argsort(first))
    is_object = columns.is_object[chosen]
    hint = np.where(is_object, -1, _count_within(fqn))
    used, property_ = np.unique(np.where(is_object, -1, columns.prop[chosen]), return_inverse=True)
    shift = int(len(used) > 0 and used[0] == -1)
    ndim = columns.ndim[chosen]
    before = np.cumsum(ndim) - ndim
    at = np.repeat(columns.start[chosen] - before, ndim) + np.arange(int(ndim.sum()))
    out = plan_pb2.Items(
        fqns=[columns.fqns[int(fqn[row])] for row in np.sort(first)],
        properties=[columns.properties[int(index)] for index in used[shift:]],
    )
    parts: list[tuple[Any, Ints]] = [
        (out.fqn, rank_of_first[number]),
        (out.kind, columns.kind[chosen]),
        (out.hint, hint),
        (out.ndim, ndim),
        (out.property, np.maximum(property_ - shift, 0)),
        (out.size, columns.size[at]),
        (out.chunk_offset, columns.offset[at]),
        (out.chunk_size, columns.extent[at]),
    ]
    for column, values in parts:
        column.extend(values.tolist())
    return out


def _count_within(values: Ints) -> Ints:
    """For each element, how many equal ones come before it."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0]) if len(values) else order
    lengths = np.diff(np.r_[starts, len(values)])
    out = np.empty(len(values), np.int64)
    out[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return out


def _merge_mappings(plans: Sequence[RankPlan]) -> list[plan_pb2.FlattenMapping]:
    """DCP's ``dict(ChainMap(*mappings))``: the first rank's path wins; its order, too."""
    merged: dict[str, plan_pb2.FlattenMapping] = {}
    # ChainMap iterates from the last map to the first.
    for plan in reversed(plans):
        merged.update((mapping.fqn, mapping) for mapping in plan.plan.mappings)
    return list(merged.values())
