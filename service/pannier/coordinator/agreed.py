"""What every save by one global plan has in common, whatever its attempt.

In: who writes which chunk, and where. Out: each rank's final plan, and what it must report.
A plan that was agreed is kept, and later saves go by it. Immutable; any thread.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from pannier.coordinator.columns import Ints
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import identity


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
    """0: told by the receipt."""


@dataclass(frozen=True)
class Share:
    """What one rank writes, in order of position."""

    rows: Ints
    """Chunks of the checkpoint."""
    positions: Ints
    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name without the attempt's; 0 for the objects file, whose size the receipt tells."""
    varying: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By position: row and file of the items whose place the receipt tells."""


class AgreedPlan:
    """A global plan and its id.

    Args:
        members: ranks and digests of their local plans, in order.
        names: of the data files, without the attempt's.
        body: what all its manifests have in common.

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
        _check(assignment, len(members), len(names))
        self._shares: dict[int, Share] = {}
        self._order = np.lexsort((assignment.position, assignment.owner))
        edges = np.searchsorted(assignment.owner[self._order], np.arange(len(members) + 1))
        self._spans = {
            rank: (int(edges[index]), int(edges[index + 1]))
            for index, (rank, _) in enumerate(members)
        }

    def share(self, rank: int) -> Share:
        """What ``rank`` writes; nothing, for a rank without items."""
        share = self._shares.get(rank)
        if share is None:
            start, end = self._spans.get(rank, (0, 0))
            share = self._shares[rank] = self._cut(self._order[start:end])
        return share

    def _cut(self, rows: Ints) -> Share:
        told = self.assignment
        file, length = told.file[rows], told.length[rows]
        share = Share(rows, told.position[rows])
        # A rank's files are numbered in the order of the layout; the objects file is the last.
        ends = told.offset[rows] + length
        for number in np.unique(file).tolist():
            here = file == number
            share.files[self.names[number]] = int(ends[here].max()) if length[here].any() else 0
        for index in np.flatnonzero(length == 0).tolist():
            share.varying[int(share.positions[index])] = (
                int(rows[index]),
                self.names[int(file[index])],
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
        share, told = self.share(rank), self.assignment
        prefix = identity.data_prefix(attempt)
        # Files are numbered in the order of the share's.
        _, file = np.unique(told.file[share.rows], return_inverse=True)
        return plan_pb2.FinalPlan(
            plan_id=self.plan_id,
            attempt=attempt,
            positions=share.positions.tolist(),
            files=[
                plan_pb2.PlannedFile(name=prefix + name, size=size)
                for name, size in share.files.items()
            ],
            placement=plan_pb2.Placement(
                file=file.tolist(),
                offset=told.offset[share.rows].tolist(),
                length=told.length[share.rows].tolist(),
            ),
        )


def read_assignment(message: records_pb2.PlanManifest) -> Assignment:
    """What a manifest says of it. Raises OverflowError for numbers that no plan has."""
    place = message.metadata.placement
    columns = (message.owner, message.position, place.file, place.offset, place.length)
    return Assignment(*(np.array(column, np.int64) for column in columns))


def _check(told: Assignment, members: int, names: int) -> None:
    lengths = {len(each) for each in (told.owner, told.position, told.file, told.offset)}
    if lengths != {len(told.length)}:
        raise ValueError("its columns differ in length")
    if len(told.owner) and (told.owner.max() >= members or told.file.max() >= names):
        raise IndexError("it names a member or a file that isn't there")


class _Line(NamedTuple):
    """Saves that go by the same plans."""

    job: str
    incarnation: str
    group: str
    root: str


_KEPT_EACH: Final = 4
"""Plans of one group under one root."""
_KEPT_BYTES: Final = 256 << 20
"""Of all bodies together; the newest stays in any case."""


class AgreedPlans:
    """The plans that later saves may go by, the newest last. Event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[_Line, str], AgreedPlan] = OrderedDict()

    def keep(self, context: sidecar_pb2.SaveContext, plan: AgreedPlan) -> None:
        """The save was agreed by this plan."""
        line = _line(context)
        self._kept[line, plan.plan_id] = plan
        self._kept.move_to_end((line, plan.plan_id))
        own = [key for key in self._kept if key[0] == line]
        for key in own[:-_KEPT_EACH]:
            del self._kept[key]
        while len(self._kept) > 1 and sum(len(p.body) for p in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def find(self, context: sidecar_pb2.SaveContext, plan_id: str) -> AgreedPlan | None:
        """A plan that the group's ranks were given before, for a save to the same root."""
        return self._kept.get((_line(context), plan_id))

    def alike(
        self, context: sidecar_pb2.SaveContext, digests: dict[int, str]
    ) -> Iterator[AgreedPlan]:
        """The plans that were made of the same local plans, the newest first."""
        line = _line(context)
        for (other, _), plan in reversed(self._kept.items()):
            if other == line and plan.digests == digests:
                yield plan


def _line(context: sidecar_pb2.SaveContext) -> _Line:
    root, _ = identity.split_checkpoint_id(context.checkpoint_id)
    return _Line(context.save.job, context.save.incarnation, context.save.group, root)
