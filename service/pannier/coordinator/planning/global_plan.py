"""The global plan of a save: DCP's result, without an object per item.

In: the local plans of all ranks. Out: :class:`GlobalPlan`, what goes into the plan
manifest: the template of ``.metadata``, who writes each of its chunks, and where. Pure
and CPU-bound; runs in a thread. It differs from ``DefaultSavePlanner`` on purpose:
copies are balanced by the bytes of the shard, largest first, and duplicates within one
rank's plan are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pannier.coordinator.planning.arrays import (
    Ints,
    edges_of,
    first_of_each,
    number_rows,
    order_by,
    write_column,
)
from pannier.coordinator.planning.column_reader import read_columns
from pannier.coordinator.planning.columns import Columns, RankPlan, malformed
from pannier.coordinator.planning.coverage import check_coverage
from pannier.coordinator.planning.dedup import Kept, choose_rows
from pannier.coordinator.planning.plan_cache import Assignment
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError
from pannier.wire.file_layout import lay_out
from pannier.wire.plan_columns import parse_mappings


@dataclass(frozen=True)
class GlobalPlan:
    """One entry per chunk of the checkpoint, in DCP's order: by rank, then by position; then one per item
    that a rank writes as well, though the checkpoint has it from another rank."""

    attempt: str
    """The attempt that it was made for; other attempts may use it, too."""
    names: list[str]
    """Names of the data files, without the attempt's name."""
    assignment: Assignment
    body: bytes
    """The part that all manifests of the plan share."""
    unused: int = 0
    """How many items the checkpoint has from another rank: the last ones."""

    @property
    def metadata(self) -> plan_pb2.GlobalMetadata:
        """The template of this attempt's ``.metadata``: a new message each time."""
        message = records_pb2.PlanManifest.FromString(self.body).metadata
        prefix = object_names.data_prefix(self.attempt)
        message.files.extend(prefix + name for name in self.names)
        return message


Written = Mapping[int, tuple[RankPlan, Ints]]
"""By rank: a local plan, and the positions of the items in it that the rank writes or wrote."""


def make_global_plan(
    plans: Sequence[RankPlan],
    attempt: str,
    *,
    staged: Mapping[int, Ints] = MappingProxyType({}),
    before: Written = MappingProxyType({}),
) -> GlobalPlan:
    """Plans a save of these ranks, which agree on their planner's options.

    Args:
        plans: in the order of ranks; at least one.
        attempt: names the data files.
        staged: the positions of what ranks have staged already, by rank.
        before: what the other ranks wrote by the last plan.

    Raises InvalidPlanError when the plans don't form one checkpoint.
    """
    options = plans[0].plan.options
    columns = read_columns(plans)
    to_lowest_rank = options.dedup_save_to_lowest_rank
    kept = _kept_of(columns, staged, {} if to_lowest_rank else before)
    chosen = choose_rows(columns, to_lowest_rank=to_lowest_rank, kept=kept)
    check_coverage(columns, chosen)
    unused = np.setdiff1d(kept.rows, chosen)
    written = np.concatenate([chosen, unused])
    slots = Slots(columns.head[written], columns.body[written], columns.tail[written])
    names, assignment = place_items(
        [plan.rank for plan in plans], columns.plan[written], columns.position[written], slots
    )
    manifest = records_pb2.PlanManifest()
    _write_items(columns, chosen, manifest.metadata.items)
    if options.flatten_state_dict:
        manifest.metadata.mappings.CopyFrom(merge_mappings(plans, columns.mappings))
    body = make_body(manifest, assignment, len(unused))
    return GlobalPlan(attempt, names, assignment, body, len(unused))


def make_body(manifest: records_pb2.PlanManifest, assignment: Assignment, unused: int = 0) -> bytes:
    """What the manifests of a plan have in common: fields 6 to 8 and 14 of PlanManifest, serialised.

    Args:
        manifest: items and mappings alone; it is completed in place, since columns are large.
        unused: how many of the last items are not in ``.metadata``.
    """
    items = len(assignment.owner) - unused
    manifest.owner, manifest.position = _write_places(
        assignment, slice(items), manifest.metadata.placement
    )
    if unused:
        manifest.unused.owner, manifest.unused.position = _write_places(
            assignment, slice(items, None), manifest.unused.placement
        )
    return manifest.SerializeToString(deterministic=True)


def _write_places(
    assignment: Assignment, part: slice, placement: plan_pb2.Placement
) -> tuple[bytes, bytes]:
    """Writes the places of a part of the items; returns the columns of owners and positions."""
    placement.file = write_column(assignment.file[part])
    placement.offset = write_column(assignment.offset[part])
    placement.length = write_column(assignment.length[part])
    return write_column(assignment.owner[part]), write_column(assignment.position[part])


def _kept_of(columns: Columns, staged: Mapping[int, Ints], before: Written) -> Kept:
    """The rows of what ranks have staged, and of what the others wrote before.

    Raises InvalidPlanError for a position that isn't in the rank's plan.
    """
    counts = np.bincount(columns.plan, minlength=len(columns.plans))
    starts = np.cumsum(counts) - counts
    plans, rows = [], [np.zeros(0, np.int64)]
    for index, plan in enumerate(columns.plans):
        if (positions := staged.get(plan.rank)) is not None:
            if len(positions) and int(positions.max()) >= counts[index]:
                raise malformed(plan, IndexError("it has staged an item that isn't there"))
            plans.append(index)
            rows.append(positions + starts[index])
    wrote = {rank: each for rank, each in before.items() if rank not in staged}
    return Kept(
        np.array(plans, np.int64), np.unique(np.concatenate(rows)), _rows_before(columns, wrote)
    )


def _rows_before(columns: Columns, before: Written) -> Ints:
    """The rows of the chunks that ranks wrote before, by earlier local plans, and still hold."""
    index_of = {plan.rank: index for index, plan in enumerate(columns.plans)}
    ranks = [rank for rank in before if rank in index_of]
    if not ranks:
        return np.zeros(0, np.int64)
    old = read_columns([before[rank][0] for rank in ranks])
    counts = np.bincount(old.plan, minlength=len(ranks))
    starts = np.cumsum(counts) - counts
    rows = np.concatenate([before[rank][1] + starts[n] for n, rank in enumerate(ranks)])
    number = {fqn: index for index, fqn in enumerate(columns.fqns)}
    fqn = np.array([number.get(fqn, -1) for fqn in old.fqns] or [-1], np.int64)[old.fqn[rows]]
    plan = np.array([index_of[rank] for rank in ranks], np.int64)[old.plan[rows]]
    asked = np.flatnonzero(np.isin(columns.plan, plan))
    wrote = np.stack([plan, fqn, old.place[rows], old.volume[rows]], axis=1)
    holds = np.stack([columns.plan, columns.fqn, columns.place, columns.volume], axis=1)[asked]
    heads, chunk = number_rows(np.concatenate([wrote, holds]))
    is_old = np.zeros(len(heads), bool)
    is_old[chunk[: len(wrote)]] = True
    return asked[is_old[chunk[len(wrote) :]]]


class Slots(NamedTuple):
    """Lengths of archives, by item; an item with a head of 0 has no planned slot."""

    head: Ints
    body: Ints
    tail: Ints


def place_items(
    ranks: Sequence[int], owner: Ints, position: Ints, slots: Slots
) -> tuple[list[str], Assignment]:
    """Names of the data files, and the places of the items, which owners write in order of position.

    Args:
        ranks: by index, as ``owner`` has them.

    Items without a planned slot get their rank's objects file and length 0.
    """
    order = order_by(owner, position)
    own = np.stack([column[order] for column in slots])
    file, offset, length = np.zeros((3, len(owner)), np.int64)
    names: list[str] = []
    known: dict[bytes, _Places] = {}
    owners = owner[order]
    edges = edges_of(owners).tolist()
    for begin, end in pairwise(edges):
        rank = ranks[owners[begin]]
        lengths = own[:, begin:end]
        # Most ranks hold shards of the same sizes.
        key = lengths.tobytes()
        if (places := known.get(key)) is None:
            places = known[key] = _Places.of(lengths)
        np.add(places.file, len(names), out=file[begin:end])
        offset[begin:end], length[begin:end] = places.offset, places.length
        names += [object_names.data_suffix(rank, number) for number in range(places.planned)]
        if places.loose:
            names.append(object_names.objects_suffix(rank))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return names, Assignment(owner, position, file[back], offset[back], length[back])


class _Places(NamedTuple):
    """The places of a rank's items, by item; files are counted from the rank's first one on."""

    file: Ints
    offset: Ints
    length: Ints
    planned: int
    """Files of planned slots."""
    loose: bool
    """Whether there is an objects file, after these."""

    @classmethod
    def of(cls, lengths: Ints) -> "_Places":
        slotted = lengths[0] > 0
        layout = lay_out(*lengths[:, slotted].tolist())
        file, offset, length = np.zeros((3, len(slotted)), np.int64)
        file[:] = len(layout.sizes)
        file[slotted], offset[slotted], length[slotted] = layout.file, layout.offset, layout.length
        return cls(file, offset, length, len(layout.sizes), not slotted.all())


def _write_items(columns: Columns, chosen: Ints, out: plan_pb2.Items) -> None:
    """Writes the chosen rows; index hints are the chunks' numbers within their key."""
    fqn = columns.fqn[chosen]
    # Keys in order of first use, as DCP's dict of metadata has them.
    first = first_of_each(fqn, len(columns.fqns))
    keys = np.argsort(first, kind="stable")[: int((first < len(fqn)).sum())]
    number = np.zeros(len(columns.fqns), np.int64)
    number[keys] = np.arange(len(keys))
    is_object = columns.is_object[chosen]
    hint = np.where(is_object, 0, _count_within(columns, chosen) + 1)
    uses = np.bincount(columns.prop[chosen][~is_object], minlength=len(columns.properties))
    used = np.flatnonzero(uses)
    property_ = np.zeros(len(uses) + 1, np.int64)
    property_[used] = np.arange(len(used))
    ndim = columns.ndim[chosen]
    ends = np.cumsum(ndim)
    shapes = [columns.size, columns.offset, columns.extent]
    if int(ndim.sum()) < len(columns.size):
        at = np.repeat(columns.start[chosen] - ends + ndim, ndim) + np.arange(int(ndim.sum()))
        shapes = [column[at] for column in shapes]
    tables = plan_pb2.ItemTables(
        fqns=[columns.fqns[key] for key in keys.tolist()],
        properties=[columns.properties[index] for index in used.tolist()],
    )
    out.tables = tables.SerializeToString(deterministic=True)
    out.fqn = write_column(number[fqn])
    out.kind = write_column(columns.kind[chosen])
    out.hint = write_column(hint)
    out.ndim = write_column(ndim)
    out.property = write_column(np.where(is_object, 0, property_[columns.prop[chosen]]))
    out.size = write_column(shapes[0])
    out.chunk_offset = write_column(shapes[1])
    out.chunk_size = write_column(shapes[2])


def _count_within(columns: Columns, chosen: Ints) -> Ints:
    """For each chosen row, how many chosen rows of its key come before it."""
    order = columns.by_key
    wanted = np.zeros(len(order), np.bool_)
    wanted[chosen] = True
    upto = np.cumsum(wanted[order])
    edges = edges_of(columns.fqn[order])
    before = np.concatenate([np.zeros(1, np.int64), upto])[edges[:-1]]
    count = np.empty(len(order), np.int64)
    count[order] = upto - np.repeat(before + 1, np.diff(edges))
    return count[chosen]


def merge_mappings(plans: Sequence[RankPlan], alike: Sequence[int]) -> plan_pb2.FlattenMappings:
    """As DCP's ``dict(ChainMap(*mappings))``: the first rank's path wins; the keys have the same order.

    Args:
        alike: by plan, a number that plans with the same mappings share.

    Raises InvalidPlanError naming a rank whose mappings can't be parsed.
    """
    numbers = list(alike)
    lowest = {number: index for index, number in reversed(list(enumerate(numbers)))}
    highest = {number: index for index, number in enumerate(numbers)}
    parsed = {number: _parse_mappings(plans[index]) for number, index in lowest.items()}
    merged: dict[str, plan_pb2.FlattenMapping] = {}
    # ChainMap iterates from the last map to the first: so the keys come in this order …
    for index in sorted(highest.values(), reverse=True):
        for mapping in parsed[numbers[index]].mappings:
            merged.setdefault(mapping.fqn, mapping)
    # … and the first map's paths stay.
    for index in sorted(lowest.values(), reverse=True):
        merged.update((mapping.fqn, mapping) for mapping in parsed[numbers[index]].mappings)
    return plan_pb2.FlattenMappings(mappings=merged.values())


def _parse_mappings(plan: RankPlan) -> plan_pb2.FlattenMappings:
    try:
        return parse_mappings(plan.plan.mappings)
    except InvalidRequestError as error:
        raise malformed(plan, error) from error
