"""Reads the local plans of a save's ranks into columns.

In: messages, in the order of ranks. Out: :class:`Columns`, after the checks that need no other
row: columns that fit together, chunks within their tensor. Most ranks hold the same keys in
chunks of the same sizes: such plans are of one *kind*, which is read and checked once. Pure; any
thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from pannier.coordinator.planning import arrays
from pannier.coordinator.planning.arrays import LARGEST, Bools, Ints
from pannier.coordinator.planning.columns import Columns, RankPlan, malformed
from pannier.coordinator.planning.dtypes import dtype_named
from pannier.v1 import plan_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import column_length, parse_tables

_ARCHIVES: Final = ("head", "body", "tail")
_PER_ITEM: Final = ("fqn", "kind", "ndim", "property", *_ARCHIVES)
_SHAPES: Final = ("size", "chunk_offset", "chunk_size")
_OF_KIND: Final = (*_PER_ITEM, "size", "chunk_size", "tables")
"""What plans of a kind have in common."""
_LENGTHS_DIFFER: Final = "its columns differ in length"
_SHAPES_DIFFER: Final = "its shapes don't have as many entries as its items say"


def read_columns(plans: Sequence[RankPlan]) -> Columns:
    """Columns of ``plans``, which come in the order of their ranks.

    Raises InvalidPlanError naming the rank whose columns don't fit together or whose
    chunk lies outside its tensor.
    """
    kind = _number_kinds(tuple(_field(plan, name) for name in _OF_KIND) for plan in plans)
    firsts = np.unique(kind, return_index=True)[1].tolist()
    mappings = _number_kinds(plan.plan.mappings for plan in plans).tolist()
    if len(firsts) == len(plans):
        return _read(plans, mappings)
    alike = _read([plans[index] for index in firsts], [mappings[index] for index in firsts])
    return _spread(alike, kind, plans, mappings)


def _number_kinds(contents: Iterator[object]) -> Ints:
    """By plan: a number that plans with the same content share."""
    known: dict[object, int] = {}
    numbers: list[int] = []
    last: object = None
    for content in contents:
        # Neighbours are mostly equal, and comparing is faster than hashing.
        if not numbers or content != last:
            number, last = known.setdefault(content, len(known)), content
        numbers.append(number)
    return np.array(numbers, np.int64)


def _field(plan: RankPlan, name: str) -> bytes:
    found: bytes = getattr(plan.plan if name in _ARCHIVES else plan.plan.items, name)
    return found


def _read(plans: Sequence[RankPlan], mappings: list[int]) -> Columns:
    """Columns of plans that have little in common."""
    tables = _Tables(plans)
    found = {name: _read_column(name, plans) for name in (*_PER_ITEM, *_SHAPES)}
    counts = found["kind"][1]
    columns = {name: values for name, (values, _) in found.items()}
    of = np.repeat(np.arange(len(plans)), counts)
    is_object = columns["kind"] == plan_pb2.ITEM_KIND_BYTE_IO
    _refuse(_count_hints(plans) != counts, plans, _LENGTHS_DIFFER)
    for problem, wrong in _problems(found, of, is_object, tables):
        _refuse(wrong, plans, problem)
    ends = np.cumsum(counts)
    out = Columns(
        plans=plans,
        fqns=list(tables.names),
        properties=tables.messages,
        dtypes=[dtype_named(each.dtype) for each in tables.messages],
        plan=of,
        position=np.arange(len(of)) - np.repeat(ends - counts, counts),
        fqn=_resolve(columns["fqn"], of, [each.fqns for each in tables.plans]),
        kind=columns["kind"],
        prop=_resolve(columns["property"], of, [each.properties for each in tables.plans]),
        ndim=columns["ndim"],
        start=np.cumsum(columns["ndim"]) - columns["ndim"],
        size=columns["size"],
        offset=columns["chunk_offset"],
        extent=columns["chunk_size"],
        head=columns["head"],
        body=columns["body"],
        tail=columns["tail"],
        place=np.zeros(len(of), np.int64),
        reach=np.zeros(len(of), np.int64),
        volume=(~is_object).astype(np.int64),
        mappings=mappings,
    )
    _measure(out)
    return out


def _spread(alike: Columns, kind: Ints, plans: Sequence[RankPlan], mappings: list[int]) -> Columns:
    """Columns of all plans, from those of the first of each kind.

    Args:
        kind: by plan, index into the plans of ``alike``.
    """
    count = len(alike.plans)
    rows = np.bincount(alike.plan, minlength=count)
    entries = np.bincount(np.repeat(alike.plan, alike.ndim), minlength=count)
    _refuse(_count_hints(plans) != rows[kind], plans, _LENGTHS_DIFFER)
    offset, own_entries = _read_column("chunk_offset", plans)
    _refuse(own_entries != entries[kind], plans, _SHAPES_DIFFER)
    by_row, by_entry = _Spreading(rows, kind), _Spreading(entries, kind)
    counts = rows[kind]
    ndim = by_row(alike.ndim)
    ends = np.cumsum(counts)
    out = Columns(
        plans=plans,
        fqns=alike.fqns,
        properties=alike.properties,
        dtypes=alike.dtypes,
        plan=np.repeat(np.arange(len(plans)), counts),
        position=np.arange(len(ndim)) - np.repeat(ends - counts, counts),
        fqn=by_row(alike.fqn),
        kind=by_row(alike.kind),
        prop=by_row(alike.prop),
        ndim=ndim,
        start=np.cumsum(ndim) - ndim,
        size=by_entry(alike.size),
        offset=offset,
        extent=by_entry(alike.extent),
        head=by_row(alike.head),
        body=by_row(alike.body),
        tail=by_row(alike.tail),
        place=np.zeros(len(ndim), np.int64),
        reach=by_row(alike.reach),
        volume=by_row(alike.volume),
        mappings=mappings,
        alike=alike,
        like=by_row(np.arange(len(alike.fqn))),
    )
    outside = out.offset + out.extent > out.size
    if outside.any():
        # Rows without a shape begin where the next one does.
        entry = int(np.argmax(outside))
        _raise_outside(out, int(np.searchsorted(out.start, entry, side="right")) - 1)
    shaped = np.flatnonzero(ndim)
    if len(shaped):
        terms = offset * by_entry(_strides(alike))
        out.place[shaped] = np.add.reduceat(terms, out.start[shaped])
    return out


class _Spreading:
    """Expands a column of kinds to a column of plans."""

    def __init__(self, lengths: Ints, kind: Ints) -> None:
        ends = np.cumsum(lengths)
        self._cuts = [
            slice(*cut) for cut in zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        ]
        self._kind = kind.tolist()

    def __call__(self, column: Ints) -> Ints:
        if len(self._cuts) == 1:
            return np.tile(column, len(self._kind))
        parts = [column[cut] for cut in self._cuts]
        return np.concatenate([parts[kind] for kind in self._kind])


def _read_column(name: str, plans: Sequence[RankPlan]) -> tuple[Ints, Ints]:
    """A column of these plans, and how many entries each of them has."""
    columns = [_field(plan, name) for plan in plans]
    try:
        return arrays.read_columns(columns)
    except InvalidRequestError:
        for plan, column in zip(plans, columns, strict=True):
            try:
                arrays.read_column(column)
            except InvalidRequestError as error:
                raise malformed(plan, error) from error
        raise


def _count_hints(plans: Sequence[RankPlan]) -> Ints:
    """How many hints each plan has. The global plan makes new ones, as DCP does: the values are unused."""
    counts = []
    for plan in plans:
        try:
            counts.append(column_length(plan.plan.items.hint))
        except InvalidRequestError as error:
            raise malformed(plan, error) from error
    return np.array(counts, np.int64)


def _refuse(wrong: Bools, plans: Sequence[RankPlan], problem: str) -> None:
    if wrong.any():
        raise malformed(plans[int(np.argmax(wrong))], ValueError(problem))


def _raise_outside(columns: Columns, row: int) -> None:
    raise columns.error(
        f"{columns.key(row)} on {columns.who(row)}: its shard is out of bounds: "
        f"{columns.shape(row)}",
        row,
    )


class _OwnTables(NamedTuple):
    """Numbers of one plan's keys and properties among those of all plans."""

    fqns: Ints
    properties: Ints


class _Tables:
    """Keys and properties of all plans, numbered in order of first use.

    Raises InvalidPlanError naming the rank whose tables can't be parsed.
    """

    def __init__(self, plans: Sequence[RankPlan]) -> None:
        self.names: dict[str, int] = {}
        """Keys and their numbers."""
        self.messages: list[plan_pb2.TensorProperties] = []
        """Properties, by number."""
        self._numbers: dict[bytes, int] = {}
        known: dict[bytes, _OwnTables] = {}
        self.plans: list[_OwnTables] = []
        for plan in plans:
            data = plan.plan.items.tables
            if data not in known:
                try:
                    known[data] = self._add(parse_tables(data))
                except InvalidRequestError as error:
                    raise malformed(plan, error) from error
            self.plans.append(known[data])

    def _add(self, tables: plan_pb2.ItemTables) -> _OwnTables:
        names = self.names
        fqns = [names.setdefault(fqn, len(names)) for fqn in tables.fqns]
        properties = [self._number(message) for message in tables.properties]
        return _OwnTables(np.array(fqns, np.int64), np.array(properties, np.int64))

    def _number(self, message: plan_pb2.TensorProperties) -> int:
        text = message.SerializeToString(deterministic=True)
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self.messages.append(message)
        return self._numbers[text]


def _resolve(index: Ints, plan: Ints, tables: Sequence[Ints]) -> Ints:
    """Numbers among those of all plans, from indices into each plan's own table."""
    counts = np.array([len(table) for table in tables], np.int64)
    # Objects have index 0 also where a plan has no properties; their number isn't used.
    flat = np.concatenate([*tables, np.zeros(1, np.int64)])
    found: Ints = flat[(np.cumsum(counts) - counts)[plan] + index]
    return found


def _problems(
    found: Mapping[str, tuple[Ints, Ints]], plan: Ints, is_object: Bools, tables: _Tables
) -> Iterator[tuple[str, Bools]]:
    """Yields what makes a plan malformed, and for which plans it holds; each check relies on those before."""
    counts = found["kind"][1]
    count = len(counts)

    def any_of(wrong: Bools) -> Bools:
        hit: Bools = np.bincount(plan[wrong], minlength=count) > 0
        return hit

    for name in _PER_ITEM:
        yield _LENGTHS_DIFFER, found[name][1] != counts
    slots = sum(found[name][0].astype(float) for name in _ARCHIVES)
    total = np.bincount(plan, weights=slots, minlength=count)
    yield "its slots have more bytes than a file can", total >= LARGEST
    ndim = found["ndim"][0]
    shapes = np.bincount(plan, weights=ndim, minlength=count)
    for name in _SHAPES:
        yield _SHAPES_DIFFER, found[name][1] != shapes
    kind = found["kind"][0]
    known = is_object | (kind == plan_pb2.ITEM_KIND_TENSOR) | (kind == plan_pb2.ITEM_KIND_SHARD)
    yield "an item is of unknown kind", any_of(~known)
    slotted = (ndim != 0) | (found["head"][0] != 0)
    yield "an object has a shape or a planned slot", any_of(is_object & slotted)
    fqns = np.array([len(each.fqns) for each in tables.plans])
    properties = np.array([len(each.properties) for each in tables.plans])
    yield "its tensors have no properties", (properties == 0) & any_of(~is_object)
    yield "an item's key isn't there", any_of(found["fqn"][0] >= fqns[plan])
    # An object's number is 0 in a plan without properties.
    most = np.maximum(properties, 1)
    yield "an item's properties aren't there", any_of(found["property"][0] >= most[plan])


def _measure(columns: Columns) -> None:
    """Fills ``place``, ``reach`` and ``volume``, and checks the bounds that they rely on."""
    for rows, size, offset, extent in columns.by_ndim(np.arange(len(columns.fqn))):
        outside = (offset + extent > size).any(axis=1)
        if outside.any():
            _raise_outside(columns, int(rows[int(np.argmax(outside))]))
        steps, too_large = _steps(size)
        if too_large.any():
            row = int(rows[int(np.argmax(too_large))])
            raise columns.error(f"{columns.key(row)} is too large: {columns.shape(row)}", row)
        volume = np.prod(extent, axis=1)
        columns.place[rows], columns.volume[rows] = (offset * steps).sum(axis=1), volume
        reach = ((extent - 1) * steps).sum(axis=1)
        columns.reach[rows] = np.where(volume > 0, reach, -1)


def _steps(size: Ints) -> tuple[Ints, Bools]:
    """By dimension: how much ``place`` grows with the offset; and which rows have no room for that.

    Chunks at different offsets have different places, empty ones perhaps not.
    """
    # Offsets reach up to the size itself (DTensor puts empty shards there).
    radix = size + 1
    wide = _exceeds(radix)
    if not wide.any():
        return _products(radix), wide
    # Of a dimension of size 1, only an empty shard has another offset than 0: one digit for all of them.
    single = (size == 1) & wide[:, None]
    last = single.sum(axis=1) + 1
    radix = np.where(single, 1, radix)
    steps = np.where(single, 1, _products(radix) * last[:, None])
    empty = (size == 0).any(axis=1) & wide
    steps[empty] = 0
    return steps, _exceeds(np.c_[radix, last]) & ~empty


def _products(radix: Ints) -> Ints:
    """By dimension: the product of the radices of those behind it."""
    out = np.ones_like(radix)
    for dimension in reversed(range(radix.shape[1] - 1)):
        out[:, dimension] = out[:, dimension + 1] * radix[:, dimension + 1]
    return out


def _exceeds(radix: Ints) -> Bools:
    found: Bools = np.prod(radix.astype(float), axis=1) * 16 >= LARGEST
    return found


def _strides(columns: Columns) -> Ints:
    """By entry of a shape: how much ``place`` grows with the offset in that dimension."""
    out = np.ones(len(columns.size), np.int64)
    for rows, size, _, _ in columns.by_ndim(np.arange(len(columns.fqn))):
        out[columns.start[rows][:, None] + np.arange(size.shape[1])] = _steps(size)[0]
    return out
