"""The local plans of a save's ranks as numpy columns: one row per write item of any rank.

In: messages, in the order of ranks. Out: :class:`Columns`, checked for what a row alone
can tell: columns that fit together, chunks within their tensor. Pure; any thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import DecodeError

from pannier.coordinator import varints
from pannier.coordinator.unread import LocalPlan, UnreadPlan, unread
from pannier.v1 import plan_pb2, save_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plans import dtype_named

Ints = varints.Ints
Bools = npt.NDArray[np.bool_]

_LARGEST: Final = 1 << 62
"""Elements, bytes and coordinates stay below it, so that sums fit an int64."""
_SHOWN: Final = 8
"""Ranks spelled out in an error."""


class InvalidPlanError(InvalidRequestError):
    """The ranks' plans are not one checkpoint together; ``failures`` names ranks where it can."""

    def __init__(self, message: str, ranks: Sequence["RankPlan"] = ()) -> None:
        blamed = [(plan.rank, plan.host) for plan in ranks] or [(-1, "")]
        super().__init__(
            message,
            [
                save_pb2.Failure(
                    rank=rank, host=host, kind=save_pb2.FAILURE_KIND_INVALID_PLAN, message=message
                )
                for rank, host in blamed
            ],
        )


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, and who said so."""

    rank: int
    host: str
    digest: str
    plan: LocalPlan


@dataclass(frozen=True)
class Columns:
    """One row per item, by rank and then by position. Shapes are concatenated, from ``start`` on."""

    plans: Sequence[RankPlan]
    fqns: list[str]
    properties: list[plan_pb2.TensorProperties]
    dtypes: list[torch.dtype]
    """By property."""
    plan: Ints
    """Index into ``plans``."""
    position: Ints
    """In that rank's local plan."""
    fqn: Ints
    kind: Ints
    prop: Ints
    """Index into ``properties``; meaningless for objects."""
    ndim: Ints
    start: Ints
    size: Ints
    offset: Ints
    extent: Ints
    head: Ints
    body: Ints
    tail: Ints
    place: Ints
    """The chunk's offset as one number, unique within a key; 0 for objects."""
    volume: Ints
    """Elements of the chunk; 0 for objects."""
    mappings: list[int]
    """By plan: a number that plans with the same flatten mappings share."""

    @property
    def is_object(self) -> Bools:
        """Rows that are no tensors."""
        objects: Bools = self.kind == plan_pb2.ITEM_KIND_BYTE_IO
        return objects

    @property
    def nbytes(self) -> Ints:
        """Raw bytes of the chunk; 0 for objects, whose size nobody knows yet."""
        width = np.array([dtype.itemsize for dtype in self.dtypes] or [0], np.int64)
        return np.where(self.is_object, 0, self.volume * width[self.prop])

    def by_ndim(self, rows: Ints, *, block: int = 1 << 17) -> Iterator[tuple[Ints, ...]]:
        """``rows`` in portions of equal ``ndim`` > 0, with size, offset and extent as matrices.

        Args:
            block: most rows of a portion, which are memory.
        """
        ndim = self.ndim[rows]
        for d in np.unique(ndim):
            if d == 0:
                continue
            alike = rows[ndim == d]
            for begin in range(0, len(alike), block):
                some = alike[begin : begin + block]
                at = self.start[some][:, None] + np.arange(d)
                yield some, self.size[at], self.offset[at], self.extent[at]

    def shape(self, row: int) -> str:
        """Chunk of a row, for people: ``[2, 4] at [0, 8] of [16, 8]``."""
        at = slice(int(self.start[row]), int(self.start[row] + self.ndim[row]))
        return (
            f"{self.extent[at].tolist()} at {self.offset[at].tolist()} of {self.size[at].tolist()}"
        )

    def dtype(self, row: int) -> str:
        """Name of a row's dtype, for people."""
        return self.properties[int(self.prop[row])].dtype

    def key(self, row: int) -> str:
        """Name of a row's tensor or object, quoted."""
        return repr(self.fqns[int(self.fqn[row])])

    def who(self, row: int) -> str:
        """Rank of a row, for people."""
        plan = self.plans[int(self.plan[row])]
        return f"rank {plan.rank}" + (f" (host {plan.host})" if plan.host else "")

    def ranks(self, rows: Ints) -> str:
        """Ranks of rows, for people."""
        found = [self.plans[int(index)].rank for index in np.unique(self.plan[rows])]
        if len(found) == 1:
            return f"rank {found[0]}"
        more = f", … {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"ranks [{', '.join(map(str, found[:_SHOWN]))}{more}]"

    def error(self, message: str, *rows: int) -> InvalidPlanError:
        """An error that blames the ranks of ``rows``."""
        return InvalidPlanError(message, [self.plans[int(self.plan[row])] for row in rows])


def read_columns(plans: Sequence[RankPlan]) -> Columns:
    """Columns of ``plans``, which come in the order of their ranks.

    Raises InvalidPlanError naming the rank whose columns don't fit together or whose
    chunk lies outside its tensor.
    """
    reader = _Reader()
    for plan in plans:
        try:
            reader.add(unread(plan.plan))
        except (DecodeError, IndexError, ValueError) as error:
            raise _malformed(plan, error) from error
    found = {name: varints.decode(parts) for name, parts in reader.parts.items()}
    # Hints are DCP's to make anew: only how many there are is of interest.
    found["hint"] = (np.zeros(0, np.int64), found["hint"][1])
    reader.parts.clear()
    counts = found["kind"][1]
    columns = {name: values for name, (values, _) in found.items()}
    of = np.repeat(np.arange(len(plans)), counts)
    is_object = columns["kind"] == plan_pb2.ITEM_KIND_BYTE_IO
    for problem, wrong in _problems(found, of, is_object, reader):
        if wrong.any():
            culprit = plans[int(np.argmax(wrong))]
            raise _malformed(culprit, ValueError(problem))
    ends = np.cumsum(counts)
    found.clear()
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
        volume=(~is_object).astype(np.int64),
        mappings=reader.mappings,
    )
    _measure(out)
    return out


def _malformed(plan: RankPlan, error: Exception) -> InvalidPlanError:
    return InvalidPlanError(
        f"the plan of rank {plan.rank} (host {plan.host}) is malformed: {error}", [plan]
    )


_PER_ITEM: Final = ("fqn", "kind", "hint", "ndim", "property", "head", "body", "tail")
_SHAPES: Final = ("size", "chunk_offset", "chunk_size")


class _Reader:
    """Columns as bytes, plan after plan; keys and properties become numbers.

    Most ranks have the same keys and properties, in the same order: such lists are looked at once.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[bytes]] = {name: [] for name in (*_PER_ITEM, *_SHAPES)}
        self.names: dict[str, int] = {}
        """Keys, in order of first use, and their numbers."""
        self.messages: dict[bytes, plan_pb2.TensorProperties] = {}
        self.mappings: list[int] = []
        """By plan: a number that plans with the same mappings share."""
        self.counts: list[tuple[int, int]] = []
        """By plan: how many keys and properties it has."""
        self._shifts: list[tuple[int, int]] = []
        self._fqns: list[int] = []
        self._properties: list[int] = []
        self._numbers: dict[bytes, int] = {}
        self._known: dict[bytes, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._alike: dict[int, int] = {}

    def add(self, plan: UnreadPlan) -> None:
        """Raises DecodeError when its keys can't be read."""
        self.mappings.append(self._alike.setdefault(id(plan.around), len(self._alike)))
        for name, parts in self.parts.items():
            parts.append(plan.columns.get(name, b""))
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
    """Fills ``place`` and ``volume``, and checks the bounds they rest on."""
    for rows, size, offset, extent in columns.by_ndim(np.arange(len(columns.fqn))):
        outside = (offset + extent > size).any(axis=1)
        if outside.any():
            row = int(rows[int(np.argmax(outside))])
            raise columns.error(
                f"{columns.key(row)} on {columns.who(row)}: its shard is out of bounds: "
                f"{columns.shape(row)}",
                row,
            )
        # Offsets reach up to the size itself (DTensor puts empty shards there).
        if len(rows) and float(np.prod(size.astype(float) + 1, axis=1).max()) * 16 >= _LARGEST:
            row = int(rows[int(np.argmax(np.prod(size.astype(float) + 1, axis=1)))])
            raise columns.error(f"{columns.key(row)} is too large: {columns.shape(row)}", row)
        place = np.zeros(len(rows), np.int64)
        for dimension in range(size.shape[1]):
            place = place * (size[:, dimension] + 1) + offset[:, dimension]
        columns.place[rows] = place
        columns.volume[rows] = np.prod(extent, axis=1)
