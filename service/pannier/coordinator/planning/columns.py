"""The local plans of a save's ranks as numpy columns: one row per write item of any rank.

In: what :mod:`pannier.coordinator.planning.column_reader` reads from messages. Out: arrays that
planning works on, and errors that name keys and ranks. Immutable; any thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pannier.coordinator.planning.arrays import Bools, Ints
from pannier.coordinator.planning.dtypes import Dtype
from pannier.v1 import plan_pb2, save_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.failures import rank_text, ranks_text


class InvalidPlanError(InvalidRequestError):
    """The ranks' plans don't form one checkpoint; ``failures`` names the ranks where they are known."""

    failure_kind: save_pb2.FailureKind = save_pb2.FAILURE_KIND_INVALID_PLAN

    def __init__(self, message: str, ranks: Sequence["RankPlan"] = ()) -> None:
        blamed = [(plan.rank, plan.host) for plan in ranks] or [(-1, "")]
        super().__init__(
            message,
            [
                save_pb2.Failure(rank=rank, host=host, kind=self.failure_kind, message=message)
                for rank, host in blamed
            ],
        )


class PlanChangedError(InvalidPlanError):
    """What ranks have staged makes no checkpoint with the plans of the others, but new plans of all ranks do."""

    failure_kind = save_pb2.FAILURE_KIND_PLAN_CHANGED


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds."""

    rank: int
    host: str
    digest: str
    plan: plan_pb2.LocalPlan
    staged_positions: bytes = b""
    """Of a rank that claimed its part of the last plan: a column of the items that it has staged."""


def malformed(plan: RankPlan, error: Exception) -> InvalidPlanError:
    """An error that names the rank whose plan can't be read."""
    return InvalidPlanError(
        f"the plan of rank {plan.rank} (host {plan.host}) is malformed: {error}", [plan]
    )


@dataclass(frozen=True)
class Columns:
    """One row per item, by rank and then by position. Shapes are concatenated, from ``start`` on."""

    plans: Sequence[RankPlan]
    fqns: list[str]
    properties: list[plan_pb2.TensorProperties]
    dtypes: list[Dtype]
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
    reach: Ints
    """Distance from ``place`` to the chunk's last element, counted in the same way; -1 for an empty chunk."""
    volume: Ints
    """Elements of the chunk; 0 for objects."""
    mappings: list[int]
    """By plan: a number that plans with the same flatten mappings share."""
    alike: "Columns | None" = None
    """Columns of the first plan of each kind; plans of a kind differ only in offsets. None: no two plans
    are of one kind."""
    like: Ints | None = None
    """By row: the corresponding row of ``alike``."""

    @property
    def kinds(self) -> "Columns":
        """The columns for checks of what all plans of a kind have in common: each kind is in them once."""
        return self.alike or self

    @cached_property
    def by_key(self) -> Ints:
        """All rows by key; those of a key are in the order of plans and positions."""
        kinds = self.alike
        if kinds is not None and len(kinds.plans) == 1:
            # Each key comes once in each plan, so this is a transposition, most of the time.
            order = np.argsort(kinds.fqn, kind="stable")
            if (np.diff(kinds.fqn[order]) > 0).all():
                begin = np.arange(len(self.plans)) * len(order)
                return (order[:, None] + begin).ravel()
        return np.argsort(self.fqn, kind="stable")

    @cached_property
    def by_place(self) -> Ints:
        """All rows by key and place; those that share both are in the order of plans and positions."""
        order = self.by_key
        fqn, place = self.fqn[order], self.place[order]
        # Shards mostly come in the order of ranks.
        if ((fqn[1:] == fqn[:-1]) & (place[1:] < place[:-1])).any():
            return np.lexsort((self.place, self.fqn))
        return order

    @property
    def is_object(self) -> Bools:
        """Rows that are no tensors."""
        objects: Bools = self.kind == plan_pb2.ITEM_KIND_BYTE_IO
        return objects

    @property
    def nbytes(self) -> Ints:
        """Raw bytes of the chunk; 0 for objects, whose size is not known yet."""
        width = np.array([dtype.itemsize for dtype in self.dtypes] or [0], np.int64)
        return np.where(self.is_object, 0, self.volume * width[self.prop])

    def by_ndim(self, rows: Ints, *, block: int = 1 << 17) -> Iterator[tuple[Ints, ...]]:
        """``rows`` in portions of equal ``ndim`` > 0, with size, offset and extent as matrices.

        Args:
            block: most rows of a portion, which bounds its memory.
        """
        ndim = self.ndim[rows]
        for d in np.flatnonzero(np.bincount(ndim, minlength=1)).tolist():
            if d == 0:
                continue
            alike = rows[ndim == d]
            for begin in range(0, len(alike), block):
                some = alike[begin : begin + block]
                at = self.start[some][:, None] + np.arange(d)
                yield some, self.size[at], self.offset[at], self.extent[at]

    def shape(self, row: int) -> str:
        """Chunk of a row, human-readable: ``[2, 4] at [0, 8] of [16, 8]``."""
        at = slice(int(self.start[row]), int(self.start[row] + self.ndim[row]))
        return (
            f"{self.extent[at].tolist()} at {self.offset[at].tolist()} of {self.size[at].tolist()}"
        )

    def dtype(self, row: int) -> str:
        """Name of a row's dtype."""
        return self.properties[int(self.prop[row])].dtype

    def key(self, row: int) -> str:
        """Name of a row's tensor or object, quoted."""
        return repr(self.fqns[int(self.fqn[row])])

    def who(self, row: int) -> str:
        """Rank of a row, human-readable."""
        plan = self.plans[int(self.plan[row])]
        return rank_text(plan.rank, plan.host)

    def ranks(self, rows: Ints) -> str:
        """Ranks of rows, human-readable."""
        return ranks_text(self.plans[int(index)].rank for index in np.unique(self.plan[rows]))

    def error(self, message: str, *rows: int) -> InvalidPlanError:
        """An error with a failure of each rank of ``rows``."""
        return InvalidPlanError(message, [self.plans[int(self.plan[row])] for row in rows])
