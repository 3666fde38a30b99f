"""Agreed global plans, with what all saves by one of them have in common, and a cache of them.

In: who writes which chunk, and where. Out: each rank's final plan, and what its receipt must have.
A plan that was agreed is kept, and later saves may use it. Immutable; any thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np

from pannier.coordinator.planning.arrays import (
    Ints,
    edges_of,
    order_by,
    read_column,
    write_column,
)
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import object_names

_Derived = TypeVar("_Derived")


@dataclass(frozen=True)
class Assignment:
    """One entry per chunk of the checkpoint: who writes it, and where."""

    owner: Ints
    """Index into the members."""
    position: Ints
    """In that member's local plan."""
    file: Ints
    """Index into the names of the data files."""
    offset: Ints
    length: Ints
    """0: the receipt contains it."""


@dataclass(frozen=True)
class Share:
    """What one rank writes, in order of position."""

    rows: Ints
    """Chunks of the checkpoint."""
    positions: Ints
    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name, without the attempt's; 0 for the objects file, whose size is in the receipt."""
    varying: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By position: row and file of the items whose place is in the receipt."""


class _Files(NamedTuple):
    """The data files of all members, by member and number; a member's objects file is its last."""

    names: Ints
    """Index into the names of the data files."""
    sizes: Ints
    """Bytes of the planned slots."""
    spans: dict[int, tuple[int, int]]
    """By rank: begin and end of its range of these files."""
    of_item: Ints
    """Which of these files each item is in; items by member and position."""


def _number_files(assignment: Assignment, order: Ints, ranks: Sequence[int], names: int) -> _Files:
    owner, file = assignment.owner[order], assignment.file[order]
    by_file = order_by(owner, file)
    pair = owner[by_file] * max(1, names) + file[by_file]
    heads = edges_of(pair)[:-1]
    of_item = np.empty(len(order), np.int64)
    of_item[by_file] = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(order)))
    first = np.searchsorted(pair[heads], np.arange(len(ranks) + 1) * max(1, names)).tolist()
    length = assignment.length[order]
    end = np.where(length > 0, assignment.offset[order] + length, 0)[by_file]
    return _Files(
        names=file[by_file][heads],
        sizes=np.maximum.reduceat(end, heads) if len(heads) else end,
        spans=dict(zip(ranks, pairwise(first), strict=True)),
        of_item=of_item,
    )


class AgreedPlan:
    """A global plan and its id.

    Args:
        members: ranks and digests of their local plans, in order.
        names: of the data files, without the attempt's.
        body: the part that all its manifests share.

    Raises IndexError, ValueError when these contradict each other.
    """

    def __init__(
        self,
        *,
        plan_id: str,
        members: Sequence[tuple[int, str]],
        names: Sequence[str],
        body: bytes,
        assignment: Assignment,
    ) -> None:
        self.plan_id = plan_id
        self.members = tuple(members)
        self.names = tuple(names)
        self.body = body
        self.digests = dict(members)
        self.assignment = assignment
        self._derived: dict[object, Any] = {}
        _check(assignment, len(members), len(names))
        order = order_by(assignment.owner, assignment.position)
        self._order = order
        self._index = {rank: index for index, (rank, _) in enumerate(members)}
        owner = assignment.owner[order]
        edges = np.searchsorted(owner, np.arange(len(members) + 1))
        self._spans = {
            rank: (int(edges[index]), int(edges[index + 1]))
            for index, (rank, _) in enumerate(members)
        }
        length = assignment.length[order]
        self._files = _number_files(assignment, order, [rank for rank, _ in members], len(names))
        self._positions = assignment.position[order]
        varying = np.flatnonzero(length == 0)
        cuts = np.searchsorted(varying, edges).tolist()
        self._varying = {
            rank: varying[cuts[index] : cuts[index + 1]] for index, (rank, _) in enumerate(members)
        }
        """By rank: indices into ``_order`` of its items without a planned place."""
        self._shares: dict[int, Share] = {}
        self._columns: list[plan_pb2.FinalPlan] | None = None

    def derive(self, make: Callable[["AgreedPlan"], _Derived]) -> _Derived:
        """What ``make`` returns for this plan: made once, and kept with the plan."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(_Derived, self._derived[make])

    def share(self, rank: int) -> Share:
        """What ``rank`` writes; nothing, for a rank without items."""
        share = self._shares.get(rank)
        if share is None:
            share = self._shares[rank] = self._cut(rank)
        return share

    def _cut(self, rank: int) -> Share:
        start, end = self._spans.get(rank, (0, 0))
        share = Share(self._order[start:end], self._positions[start:end])
        files = self._files
        for number in range(*files.spans.get(rank, (0, 0))):
            share.files[self.names[files.names[number]]] = int(files.sizes[number])
        for index in self._varying[rank].tolist() if rank in self._varying else ():
            share.varying[int(self._positions[index])] = (
                int(self._order[index]),
                self.names[files.names[files.of_item[index]]],
            )
        return share

    def writes_same(self, other: "AgreedPlan", rank: int) -> bool:
        """Whether the rank's final plan is the same in both."""
        if self is other:
            return True
        one, two = self.share(rank), other.share(rank)
        return one.files == two.files and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (one.positions, two.positions),
                (self.assignment.offset[one.rows], other.assignment.offset[two.rows]),
                (self.assignment.length[one.rows], other.assignment.length[two.rows]),
            )
        )

    def final_plan(self, rank: int, attempt: str) -> plan_pb2.FinalPlan:
        """The answer to ``rank``'s local plan, in this attempt."""
        prefix = object_names.data_prefix(attempt)
        final = plan_pb2.FinalPlan(
            plan_id=self.plan_id,
            attempt=attempt,
            files=[
                plan_pb2.PlannedFile(name=prefix + name, size=size)
                for name, size in self.share(rank).files.items()
            ],
        )
        index = self._index.get(rank)
        if index is not None:
            final.MergeFrom(self.write_columns()[index])
        return final

    def write_columns(self) -> list[plan_pb2.FinalPlan]:
        """Positions and placement of all final plans, by member. The first call is CPU-bound."""
        if self._columns is None:
            assignment, order = self.assignment, self._order
            starts = np.array([start for start, _ in self._files.spans.values()], np.int64)
            file = self._files.of_item - starts[assignment.owner[order]]
            columns = np.stack(
                (self._positions, file, assignment.offset[order], assignment.length[order])
            )
            # The columns of most members are equal.
            known: dict[bytes, plan_pb2.FinalPlan] = {}
            self._columns = []
            for start, end in self._spans.values():
                own = columns[:, start:end]
                if (key := own.tobytes()) not in known:
                    positions, *placement = map(write_column, own)
                    known[key] = plan_pb2.FinalPlan(
                        positions=positions,
                        placement=plan_pb2.Placement(
                            **dict(zip(("file", "offset", "length"), placement, strict=True))
                        ),
                    )
                self._columns.append(known[key])
        return self._columns


def read_assignment(message: records_pb2.PlanManifest) -> Assignment:
    """The assignment in a manifest. Raises InvalidRequestError for malformed columns."""
    place = message.metadata.placement
    columns = (message.owner, message.position, place.file, place.offset, place.length)
    return Assignment(*map(read_column, columns))


def _check(assignment: Assignment, members: int, names: int) -> None:
    owner, position, file, offset, length = vars(assignment).values()
    if {len(each) for each in (owner, position, file, offset)} != {len(length)}:
        raise ValueError("its columns differ in length")
    if len(owner) and (owner.max() >= members or file.max() >= names):
        raise IndexError("it names a member or a file that isn't there")


class _Line(NamedTuple):
    """Key of the saves that may share plans."""

    job: str
    incarnation: str
    group: str
    root: str


_KEPT_EACH: Final = 4
"""Plans of one group under one root."""
_KEPT_BYTES: Final = 256 << 20
"""Of all bodies together; the newest stays in any case."""


class PlanCache:
    """Agreed plans that later saves may use, the newest last. Event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[_Line, str], AgreedPlan] = OrderedDict()

    def keep(self, context: sidecar_pb2.SaveContext, plan: AgreedPlan) -> None:
        """Adds the plan that a save has agreed on."""
        line = _line(context)
        self._kept[line, plan.plan_id] = plan
        self._kept.move_to_end((line, plan.plan_id))
        own = [key for key in self._kept if key[0] == line]
        for key in own[:-_KEPT_EACH]:
            del self._kept[key]
        while len(self._kept) > 1 and sum(len(p.body) for p in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def find(self, context: sidecar_pb2.SaveContext, plan_id: str) -> AgreedPlan | None:
        """A plan that the group agreed on for an earlier save to the same root."""
        return self._kept.get((_line(context), plan_id))

    def find_alike(
        self, context: sidecar_pb2.SaveContext, digests: Mapping[int, str]
    ) -> Iterator[AgreedPlan]:
        """Plans that were made of the same local plans, the newest first."""
        line = _line(context)
        for (other, _), plan in reversed(self._kept.items()):
            if other == line and plan.digests == digests:
                yield plan


def _line(context: sidecar_pb2.SaveContext) -> _Line:
    root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
    return _Line(context.save.job, context.save.incarnation, context.save.group, root)
