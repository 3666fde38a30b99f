"""From the local plans of a save's ranks to columns.

In: messages, in the order of ranks. Out: :class:`Columns`, checked for what a row alone
can tell: columns that fit together, chunks within their tensor. Most ranks hold the same keys in
chunks of the same sizes: such plans are of one *kind*, which is read and checked once. Pure; any
thread.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from pannier.coordinator.planning import varints
from pannier.coordinator.planning.columns import Bools, Columns, Ints, InvalidPlanError, RankPlan
from pannier.coordinator.planning.encoded_plans import UnreadPlan, unread
from pannier.v1 import plan_pb2
from pannier.wire.plan_codec import dtype_named

_LARGEST: Final = 1 << 62
"""Elements, bytes and coordinates stay below it, so that sums fit an int64."""
_PER_ITEM: Final = ("fqn", "kind", "hint", "ndim", "property", "head", "body", "tail")
_SHAPES: Final = ("size", "chunk_offset", "chunk_size")
_OF_KIND: Final = (*(name for name in _PER_ITEM if name != "hint"), "size", "chunk_size")


def read_columns(plans: Sequence[RankPlan]) -> Columns:
    """Columns of ``plans``, which come in the order of their ranks.

    Raises InvalidPlanError naming the rank whose columns don't fit together or whose
    chunk lies outside its tensor.
    """
    own = [_unread(plan) for plan in plans]
    kinds: dict[tuple[bytes, ...], int] = {}
    kind = np.array([kinds.setdefault(_content(plan), len(kinds)) for plan in own], np.int64)
    firsts = np.unique(kind, return_index=True)[1].tolist()
    alike = _read([plans[index] for index in firsts], [own[index] for index in firsts])
    return alike if len(firsts) == len(plans) else _spread(alike, kind, plans, own)


def _unread(plan: RankPlan) -> UnreadPlan:
    try:
        return unread(plan.plan)
    except (DecodeError, IndexError, ValueError) as error:
        raise _malformed(plan, error) from error


def _content(plan: UnreadPlan) -> tuple[bytes, ...]:
    """What plans of a kind have in common."""
    return (plan.lists, *(plan.columns.get(name, b"") for name in _OF_KIND))


def _read(plans: Sequence[RankPlan], own: Sequence[UnreadPlan]) -> Columns:
    """Columns of plans that have little in common."""
    reader = _Reader()
    for plan, content in zip(plans, own, strict=True):
        try:
            reader.add(content)
        except DecodeError as error:
            raise _malformed(plan, error) from error
    found = {name: _decoded(name, plans, own) for name in (*_PER_ITEM, *_SHAPES)}
    # Hints are DCP's to make anew: only how many there are is of interest.
    found["hint"] = (np.zeros(0, np.int64), found["hint"][1])
    counts = found["kind"][1]
    columns = {name: values for name, (values, _) in found.items()}
    of = np.repeat(np.arange(len(plans)), counts)
    is_object = columns["kind"] == plan_pb2.ITEM_KIND_BYTE_IO
    for problem, wrong in _problems(found, of, is_object, reader):
        if wrong.any():
            raise _malformed(plans[int(np.argmax(wrong))], ValueError(problem))
    ends = np.cumsum(counts)
    out = Columns(
        plans=plans,
        fqns=list(reader.names),
        properties=list(reader.messages.values()),
        dtypes=[dtype_named(each.dtype) for each in reader.messages.values()],
        plan=of,
        position=np.arange(len(of)) - np.repeat(ends - counts, counts),
        fqn=reader.fqns(columns.pop("fqn"), of),
        kind=columns["kind"],
        prop=reader.properties(columns.pop("property"), of),
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
        mappings=_mappings(own),
    )
    _measure(out)
    return out


def _spread(
    alike: Columns, kind: Ints, plans: Sequence[RankPlan], own: Sequence[UnreadPlan]
) -> Columns:
    """Columns of all plans, from those of the first of each kind.

    Args:
        kind: by plan, index into the plans of ``alike``.
    """
    count = len(alike.plans)
    rows = np.bincount(alike.plan, minlength=count)
    entries = np.bincount(np.repeat(alike.plan, alike.ndim), minlength=count)
    hints = _counted("hint", plans, own)
    _refuse(hints != rows[kind], plans, "its columns differ in length")
    offset, told = _decoded("chunk_offset", plans, own)
    wrong = np.repeat(np.arange(len(plans)), told)[(offset < 0) | (offset >= _LARGEST)]
    _refuse(np.bincount(wrong, minlength=len(plans)) > 0, plans, "a value is out of range")
    _refuse(told != entries[kind], plans, "its shapes don't have as many entries as its items say")
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
        mappings=_mappings(own),
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
    """Columns of kinds become columns of plans."""

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


def _decoded(name: str, plans: Sequence[RankPlan], own: Sequence[UnreadPlan]) -> tuple[Ints, Ints]:
    """A column of these plans, and how many entries each of them has."""
    parts = [plan.columns.get(name, b"") for plan in own]
    try:
        return varints.decode(parts)
    except ValueError:
        for plan, part in zip(plans, parts, strict=True):
            try:
                varints.decode([part])
            except ValueError as error:
                raise _malformed(plan, error) from error
        raise


def _counted(name: str, plans: Sequence[RankPlan], own: Sequence[UnreadPlan]) -> Ints:
    """How many entries of a column each of these plans has, whatever they are."""
    parts = [plan.columns.get(name, b"") for plan in own]
    for plan, part in zip(plans, parts, strict=True):
        if part and part[-1] > 127:
            raise _malformed(plan, ValueError("a column ends within a number"))
    return np.array([varints.count(part) for part in parts], np.int64)


def _mappings(own: Sequence[UnreadPlan]) -> list[int]:
    """By plan: a number that plans with the same mappings share."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(plan.around), len(numbers)) for plan in own]


def _refuse(wrong: Bools, plans: Sequence[RankPlan], problem: str) -> None:
    if wrong.any():
        raise _malformed(plans[int(np.argmax(wrong))], ValueError(problem))


def _malformed(plan: RankPlan, error: Exception) -> InvalidPlanError:
    return InvalidPlanError(
        f"the plan of rank {plan.rank} (host {plan.host}) is malformed: {error}", [plan]
    )


def _raise_outside(columns: Columns, row: int) -> None:
    raise columns.error(
        f"{columns.key(row)} on {columns.who(row)}: its shard is out of bounds: "
        f"{columns.shape(row)}",
        row,
    )


class _Reader:
    """Columns as bytes, plan after plan; keys and properties become numbers.

    Most ranks have the same keys and properties, in the same order: such lists are looked at once.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        """Keys, in order of first use, and their numbers."""
        self.messages: dict[bytes, plan_pb2.TensorProperties] = {}
        self.counts: list[tuple[int, int]] = []
        """By plan: how many keys and properties it has."""
        self._shifts: list[tuple[int, int]] = []
        self._fqns: list[int] = []
        self._properties: list[int] = []
        self._numbers: dict[bytes, int] = {}
        self._known: dict[bytes, tuple[tuple[int, int], tuple[int, int]]] = {}

    def add(self, plan: UnreadPlan) -> None:
        """Raises DecodeError when its keys can't be read."""
        known = self._known.get(plan.lists)
        if known is None:
            items = plan_pb2.Items.FromString(plan.lists)
            shifts = (len(self._fqns), len(self._properties))
            names = self.names
            self._fqns += [names.setdefault(fqn, len(names)) for fqn in items.fqns]
            self._properties += [self._property(each) for each in items.properties]
            known = self._known[plan.lists] = (shifts, (len(items.fqns), len(items.properties)))
        self._shifts.append(known[0])
        self.counts.append(known[1])

    def _property(self, message: plan_pb2.TensorProperties) -> int:
        text = message.SerializeToString(deterministic=True)
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self.messages[text] = plan_pb2.TensorProperties.FromString(text)
        return self._numbers[text]

    def fqns(self, column: Ints, plan: Ints) -> Ints:
        """Numbers of keys, from indices into each plan's own list."""
        return self._resolved(self._fqns, 0, column, plan)

    def properties(self, column: Ints, plan: Ints) -> Ints:
        """The same of properties. Objects have none: what their number is doesn't matter."""
        return self._resolved(self._properties, 1, column, plan)

    def _resolved(self, numbers: list[int], which: int, column: Ints, plan: Ints) -> Ints:
        shifts = np.array(self._shifts, np.int64).reshape(-1, 2)[:, which]
        index = column + shifts[plan]
        # A list without any, of a plan that has objects alone, is at the end of all.
        found: Ints = np.array([*numbers, 0], np.int64)[np.minimum(index, len(numbers))]
        return found


def _problems(
    found: dict[str, tuple[Ints, Ints]], plan: Ints, is_object: Bools, reader: _Reader
) -> Iterator[tuple[str, Bools]]:
    """What makes a plan malformed, and whether it is so, by plan; each rests on those before."""
    counts = found["kind"][1]
    count = len(counts)

    def any_of(wrong: Bools) -> Bools:
        hit: Bools = np.bincount(plan[wrong], minlength=count) > 0
        return hit

    for name in _PER_ITEM:
        yield "its columns differ in length", found[name][1] != counts
    for name in (*_PER_ITEM, *_SHAPES):
        if name == "hint":
            continue
        values, own = found[name]
        bad = (values < 0) | (values >= _LARGEST)
        hits = np.repeat(np.arange(count), own)[bad]
        yield "a value is out of range", np.bincount(hits, minlength=count) > 0
    slots = sum(found[name][0].astype(float) for name in ("head", "body", "tail"))
    total = np.bincount(plan, weights=slots, minlength=count)
    yield "its slots have more bytes than a file can", total >= _LARGEST
    ndim = found["ndim"][0]
    shapes = np.bincount(plan, weights=ndim, minlength=count)
    for name in _SHAPES:
        yield "its shapes don't have as many entries as its items say", found[name][1] != shapes
    kind = found["kind"][0]
    known = is_object | (kind == plan_pb2.ITEM_KIND_TENSOR) | (kind == plan_pb2.ITEM_KIND_SHARD)
    yield "an item is of unknown kind", any_of(~known)
    slotted = (ndim != 0) | (found["head"][0] != 0)
    yield "an object has a shape or a planned slot", any_of(is_object & slotted)
    fqns, properties = np.array(reader.counts, np.int64).T
    yield "its tensors have no properties", (properties == 0) & any_of(~is_object)
    yield "an item's key isn't there", any_of(found["fqn"][0] >= fqns[plan])
    # Of an object without properties the number is 0.
    most = np.maximum(properties, 1)
    yield "an item's properties aren't there", any_of(found["property"][0] >= most[plan])


def _measure(columns: Columns) -> None:
    """Fills ``place``, ``reach`` and ``volume``, and checks the bounds they rest on."""
    for rows, size, offset, extent in columns.by_ndim(np.arange(len(columns.fqn))):
        outside = (offset + extent > size).any(axis=1)
        if outside.any():
            _raise_outside(columns, int(rows[int(np.argmax(outside))]))
        # Offsets reach up to the size itself (DTensor puts empty shards there).
        if len(rows) and float(np.prod(size.astype(float) + 1, axis=1).max()) * 16 >= _LARGEST:
            row = int(rows[int(np.argmax(np.prod(size.astype(float) + 1, axis=1)))])
            raise columns.error(f"{columns.key(row)} is too large: {columns.shape(row)}", row)
        place, reach = np.zeros((2, len(rows)), np.int64)
        for dimension in range(size.shape[1]):
            place = place * (size[:, dimension] + 1) + offset[:, dimension]
            reach = reach * (size[:, dimension] + 1) + extent[:, dimension] - 1
        volume = np.prod(extent, axis=1)
        columns.place[rows], columns.volume[rows] = place, volume
        columns.reach[rows] = np.where(volume > 0, reach, -1)


def _strides(columns: Columns) -> Ints:
    """By entry of a shape: how much ``place`` grows with the offset in that dimension."""
    out = np.ones(len(columns.size), np.int64)
    for rows, size, _, _ in columns.by_ndim(np.arange(len(columns.fqn))):
        at = columns.start[rows][:, None] + np.arange(size.shape[1])
        for dimension in reversed(range(size.shape[1] - 1)):
            out[at[:, dimension]] = out[at[:, dimension + 1]] * (size[:, dimension + 1] + 1)
    return out
