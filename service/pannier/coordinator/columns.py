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

from pannier.v1 import plan_pb2, save_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plans import dtype_named

Ints = npt.NDArray[np.int64]
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
    plan: plan_pb2.LocalPlan


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

    def by_ndim(self, rows: Ints) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """``rows`` in portions of equal ``ndim`` > 0, with size, offset and extent as matrices."""
        ndim = self.ndim[rows]
        for d in np.unique(ndim):
            if d == 0:
                continue
            some = rows[ndim == d]
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
    names: dict[str, int] = {}
    known: dict[bytes, int] = {}
    parts = []
    for plan in plans:
        try:
            parts.append(_read_plan(plan.plan, names, known))
        except (IndexError, OverflowError, ValueError) as error:
            raise InvalidPlanError(
                f"the plan of rank {plan.rank} (host {plan.host}) is malformed: {error}", [plan]
            ) from error
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    fqn, kind, ndim, prop, size, offset, extent, head, body, tail = joined
    properties = [plan_pb2.TensorProperties.FromString(text) for text in known]
    counts = [len(part[0]) for part in parts]
    start = np.cumsum(ndim) - ndim
    columns = Columns(
        plans=plans,
        fqns=list(names),
        properties=properties,
        dtypes=[dtype_named(each.dtype) for each in properties],
        plan=np.repeat(np.arange(len(plans)), counts),
        position=np.concatenate([np.arange(count) for count in counts]),
        fqn=fqn,
        kind=kind,
        prop=prop,
        ndim=ndim,
        start=start,
        size=size,
        offset=offset,
        extent=extent,
        head=head,
        body=body,
        tail=tail,
        place=np.zeros_like(fqn),
        volume=(kind != plan_pb2.ITEM_KIND_BYTE_IO).astype(np.int64),
    )
    _measure(columns)
    return columns


def _read_plan(
    plan: plan_pb2.LocalPlan, names: dict[str, int], known: dict[bytes, int]
) -> tuple[Ints, ...]:
    """One rank's columns; keys and properties become numbers in ``names`` and ``known``."""
    items = plan.items
    fqns = np.array([names.setdefault(fqn, len(names)) for fqn in items.fqns], np.int64)
    properties = [known.setdefault(_bytes(p), len(known)) for p in items.properties]
    kind, ndim = _ints(items.kind), _ints(items.ndim)
    prop, fqn = _ints(items.property), _ints(items.fqn)
    head, body, tail = _ints(plan.head), _ints(plan.body), _ints(plan.tail)
    if {len(each) for each in (fqn, ndim, prop, items.hint, head, body, tail)} - {len(kind)}:
        raise ValueError("its columns differ in length")
    if sum(map(float, (*plan.head, *plan.body, *plan.tail))) >= _LARGEST:
        raise ValueError("its slots have more bytes than a file can")
    size, offset, extent = (
        _ints(each) for each in (items.size, items.chunk_offset, items.chunk_size)
    )
    total = int(ndim.sum())
    if not total == len(size) == len(offset) == len(extent):
        raise ValueError(f"its shapes have {len(size)} entries, not {total}")
    if not np.isin(kind, _KINDS).all():
        raise ValueError("an item is of unknown kind")
    is_object = kind == plan_pb2.ITEM_KIND_BYTE_IO
    if ndim[is_object].any() or head[is_object].any():
        raise ValueError("an object has a shape or a planned slot")
    if not is_object.all() and not properties:
        raise ValueError("its tensors have no properties")
    # Objects have no property; their number is never looked at.
    numbers = np.array(properties or [0], np.int64)
    return fqns[fqn], kind, ndim, numbers[prop], size, offset, extent, head, body, tail


_KINDS: Final = [
    plan_pb2.ITEM_KIND_BYTE_IO,
    plan_pb2.ITEM_KIND_TENSOR,
    plan_pb2.ITEM_KIND_SHARD,
]


def _bytes(message: plan_pb2.TensorProperties) -> bytes:
    return message.SerializeToString(deterministic=True)


def _ints(column: Sequence[int]) -> Ints:
    values = np.array(column, np.int64)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < _LARGEST:
        raise ValueError(f"a value of {int(values.max())} is out of range")
    return values


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
