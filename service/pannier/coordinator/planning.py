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
from typing import NamedTuple

import numpy as np

from pannier.coordinator import varints
from pannier.coordinator.agreed import Assignment, Share
from pannier.coordinator.columns import Columns, Ints, RankPlan, read_columns
from pannier.coordinator.coverage import check_coverage
from pannier.coordinator.dedup import Kept, choose_rows
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import identity
from pannier.wire.layout import Layout, lay_out


@dataclass(frozen=True)
class GlobalPlan:
    """One entry per chunk of the checkpoint, in DCP's order: by rank, then by position."""

    attempt: str
    """In which it is made; any other may go by it, too."""
    names: list[str]
    """Of the data files, without the attempt's."""
    assignment: Assignment
    body: bytes
    """Of the plan's manifests."""

    @property
    def metadata(self) -> plan_pb2.GlobalMetadata:
        """The template of this attempt's ``.metadata``: a new message each time."""
        message = records_pb2.PlanManifest.FromString(self.body).metadata
        prefix = identity.data_prefix(self.attempt)
        message.files.extend(prefix + name for name in self.names)
        return message

    @property
    def owner(self) -> list[int]:
        """Index into the plans of the rank that writes it."""
        return list(self.assignment.owner.tolist())

    @property
    def position(self) -> list[int]:
        """In that rank's local plan."""
        return list(self.assignment.position.tolist())


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
    slots = Slots(columns.head[chosen], columns.body[chosen], columns.tail[chosen])
    names, assignment = place_items(
        [plan.rank for plan in plans], columns.plan[chosen], columns.position[chosen], slots
    )
    mappings = merge_mappings(plans, columns.mappings) if options.flatten_state_dict else None
    body = make_body(_items(columns, chosen), assignment, mappings)
    return GlobalPlan(attempt, names, assignment, body)


def make_body(
    items: bytes, told: Assignment, mappings: Sequence[plan_pb2.FlattenMapping] | None
) -> bytes:
    """What the manifests of a plan have in common: fields 6 to 8 of PlanManifest.

    Args:
        items: a serialised message.
        mappings: None: the planner doesn't flatten.
    """
    field, packed = varints.field, _packed
    places = field(1, packed(told.file)) + field(2, packed(told.offset))
    places += field(3, packed(told.length))
    rest = plan_pb2.GlobalMetadata(mappings=mappings, has_mappings=mappings is not None)
    metadata = b"".join(
        (field(1, items), field(3, places), rest.SerializeToString(deterministic=True))
    )
    return b"".join(
        (field(6, metadata), field(7, packed(told.owner)), field(8, packed(told.position)))
    )


def _packed(values: Ints) -> bytes:
    return varints.encode(values)[0]


def _rows_of(columns: Columns, kept: Mapping[int, Share]) -> Kept:
    """The rows that ranks write in any case, and the indices of these ranks' plans."""
    ends = np.cumsum(np.bincount(columns.plan, minlength=len(columns.plans)))
    staged, rows = [], [np.zeros(0, np.int64)]
    for index, plan in enumerate(columns.plans):
        if (share := kept.get(plan.rank)) is not None:
            staged.append(index)
            rows.append(share.positions + (ends[index - 1] if index else 0))
    return Kept(np.array(staged, np.int64), np.concatenate(rows))


class Slots(NamedTuple):
    """Lengths of archives, by item; a head of 0: it has no planned slot."""

    head: Ints
    body: Ints
    tail: Ints


def place_items(
    ranks: Sequence[int], owner: Ints, position: Ints, slots: Slots
) -> tuple[list[str], Assignment]:
    """Names of the data files, and where the items lie, which owners write in order of position.

    Args:
        ranks: by index, as ``owner`` has them.

    Items without a planned slot get their rank's objects file and length 0.
    """
    file, offset, length = np.zeros((3, len(owner)), np.int64)
    names: list[str] = []
    known: dict[bytes, tuple[Layout, Ints]] = {}
    for index, rows in _runs(owner, position):
        rank = ranks[index]
        own = np.stack([column[rows] for column in slots])
        slotted = own[0] > 0
        # Most ranks hold shards of the same sizes.
        key = own.tobytes()
        if key not in known:
            layout = lay_out(*own[:, slotted].tolist())
            known[key] = layout, np.array((layout.file, layout.offset, layout.length), np.int64)
        layout, places = known[key]
        placed, loose = rows[slotted], rows[~slotted]
        file[placed] = places[0] + len(names)
        offset[placed], length[placed] = places[1], places[2]
        names += [identity.data_suffix(rank, number) for number in range(len(layout.sizes))]
        if len(loose):
            file[loose] = len(names)
            names.append(identity.objects_suffix(rank))
    return names, Assignment(owner, position, file, offset, length)


def _runs(owners: Ints, positions: Ints) -> Iterator[tuple[int, Ints]]:
    """Each owner with its rows, in order of position."""
    order = np.lexsort((positions, owners))
    edges = np.flatnonzero(np.diff(owners[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(owners[rows[0]]), rows


def _items(columns: Columns, chosen: Ints) -> bytes:
    """The chosen rows as a serialised message; index hints are the chunks' numbers within their key."""
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
    lists = plan_pb2.Items(
        fqns=[columns.fqns[row] for row in fqn[np.sort(first)].tolist()],
        properties=[columns.properties[int(index)] for index in used[shift:]],
    )
    parts: list[Ints] = [
        rank_of_first[number],
        columns.kind[chosen],
        varints.zigzag(hint),
        ndim,
        np.maximum(property_ - shift, 0),
        columns.size[at],
        columns.offset[at],
        columns.extent[at],
    ]
    columns_ = (varints.field(number, _packed(values)) for number, values in enumerate(parts, 3))
    return b"".join((lists.SerializeToString(deterministic=True), *columns_))


def _count_within(values: Ints) -> Ints:
    """For each element, how many equal ones come before it."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0]) if len(values) else order
    lengths = np.diff(np.r_[starts, len(values)])
    out = np.empty(len(values), np.int64)
    out[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return out


def merge_mappings(
    plans: Sequence[RankPlan], alike: Sequence[int]
) -> list[plan_pb2.FlattenMapping]:
    """DCP's ``dict(ChainMap(*mappings))``: the first rank's path wins; its order, too.

    Args:
        alike: by plan, a number that plans with the same mappings share.
    """
    numbers = list(alike)
    lowest = {number: index for index, number in reversed(list(enumerate(numbers)))}
    highest = {number: index for index, number in enumerate(numbers)}
    merged: dict[str, plan_pb2.FlattenMapping] = {}
    # ChainMap iterates from the last map to the first: so the keys come in this order …
    for index in sorted(highest.values(), reverse=True):
        for mapping in plans[index].plan.mappings:
            merged.setdefault(mapping.fqn, mapping)
    # … and the first map's paths stay.
    for index in sorted(lowest.values(), reverse=True):
        merged.update((mapping.fqn, mapping) for mapping in plans[index].plan.mappings)
    return list(merged.values())
