"""Agreed global plans, with what all saves by one of them have in common, and a cache of them.

In: who writes which chunk, and where. Out: each rank's final plan, which is its *part* of the plan, and what
its receipt must have. A plan that was agreed is kept with its ranks' local plans: later saves use it, or some
of its parts. Plans are immutable; any thread.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
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
from pannier.coordinator.planning.columns import RankPlan
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import object_names

_Derived = TypeVar("_Derived")


@dataclass(frozen=True)
class Assignment:
    """One entry per item that is written: who writes it, and where."""

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
    """Entries of the assignment."""
    positions: Ints
    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name, without the attempt's; 0 for the objects file, whose size is in the receipt."""
    varying: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By position: row and file of the items whose place is in the receipt; the row is -1 for an item that
    ``.metadata`` has from another rank."""


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
        unused: how many of the last items of the assignment ``.metadata`` has from other ranks.

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
        unused: int = 0,
    ) -> None:
        self.plan_id = plan_id
        self.members = tuple(members)
        self.names = tuple(names)
        self.body = body
        self.digests = dict(members)
        self.assignment = assignment
        self._used = len(assignment.owner) - unused
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
        self._parts: dict[int, str] = {}
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
            row = int(self._order[index])
            share.varying[int(self._positions[index])] = (
                row if row < self._used else -1,
                self.names[files.names[files.of_item[index]]],
            )
        return share

    def part(self, rank: int) -> str:
        """Hash, hex, of what the rank writes; "" for a rank that isn't a member."""
        part = self._parts.get(rank)
        if part is None:
            index = self._index.get(rank)
            if index is None:
                return ""
            what = plan_pb2.FinalPlan(
                files=[
                    plan_pb2.PlannedFile(name=name, size=size)
                    for name, size in self.share(rank).files.items()
                ]
            )
            what.MergeFrom(self.write_columns()[index])
            hashed = hashlib.sha256(what.SerializeToString(deterministic=True))
            part = self._parts[rank] = hashed.hexdigest()
        return part

    def make_parts(self) -> None:
        """Makes what :meth:`part` returns. CPU-bound, once."""
        for rank in self.digests:
            self.part(rank)

    def has_part(self, rank: int, digest: str, part: str) -> bool:
        """Whether the rank writes exactly this part by a local plan with this digest."""
        return self.digests.get(rank) == digest and self.part(rank) == part

    def final_plan(self, rank: int, attempt: str) -> plan_pb2.FinalPlan:
        """The answer to ``rank``'s local plan, in this attempt."""
        prefix = object_names.data_prefix(attempt)
        final = plan_pb2.FinalPlan(
            plan_id=self.plan_id,
            attempt=attempt,
            part=self.part(rank),
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


def read_assignment(message: records_pb2.PlanManifest) -> tuple[Assignment, int]:
    """The assignment in a manifest, and how many of its last items aren't in ``.metadata``.

    Raises InvalidRequestError for malformed columns.
    """
    used = _read_places(message.owner, message.position, message.metadata.placement)
    if not message.HasField("unused"):
        return Assignment(*used), 0
    rest = message.unused
    unused = _read_places(rest.owner, rest.position, rest.placement)
    both = [np.concatenate(columns) for columns in zip(used, unused, strict=True)]
    return Assignment(*both), len(unused[0])


def _read_places(owner: bytes, position: bytes, place: plan_pb2.Placement) -> list[Ints]:
    return [read_column(each) for each in (owner, position, place.file, place.offset, place.length)]


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
"""Plans of one group under one root: saves in flight may go by earlier ones than the last."""
_KEPT_BYTES: Final = 256 << 20
"""Of all bodies and local plans together; the newest plan stays in any case."""


class KeptLocalPlans:
    """Local plans by digest, in little memory: most ranks of a job have the same tables and mappings.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes, bytes]] = {}
        """The tables, the mappings, and the rest."""
        self._shared: dict[bytes, bytes] = {}

    def add(self, plans: Iterable[RankPlan]) -> None:
        """Keeps these plans. CPU-bound."""
        for each in plans:
            if each.digest not in self._kept:
                tables, mappings = each.plan.items.tables, each.plan.mappings
                rest = plan_pb2.LocalPlan()
                rest.CopyFrom(each.plan)
                rest.items.tables = rest.mappings = b""
                self._kept[each.digest] = (
                    self._shared.setdefault(tables, tables),
                    self._shared.setdefault(mappings, mappings),
                    rest.SerializeToString(),
                )

    def update(self, other: "KeptLocalPlans") -> None:
        """Keeps the other's plans, too."""
        for digest, (tables, mappings, rest) in other._kept.items():
            shared = (
                self._shared.setdefault(tables, tables),
                self._shared.setdefault(mappings, mappings),
            )
            self._kept.setdefault(digest, (*shared, rest))

    def retain(self, digests: Collection[str]) -> None:
        """Drops all other plans."""
        self._kept = {digest: kept for digest, kept in self._kept.items() if digest in digests}
        used = {each for tables, mappings, _ in self._kept.values() for each in (tables, mappings)}
        self._shared = {each: each for each in used}

    def select(self, digests: Iterable[str]) -> "KeptLocalPlans":
        """Those of these plans that are kept."""
        selected = KeptLocalPlans()
        selected._kept = {each: self._kept[each] for each in digests if each in self._kept}
        return selected

    def read(self, digest: str) -> plan_pb2.LocalPlan:
        """The local plan with this digest. Raises KeyError."""
        tables, mappings, rest = self._kept[digest]
        plan = plan_pb2.LocalPlan.FromString(rest)
        plan.items.tables, plan.mappings = tables, mappings
        return plan

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    @property
    def size(self) -> int:
        """Bytes."""
        own = sum(len(rest) for _, _, rest in self._kept.values())
        return own + sum(map(len, self._shared))


class _Kept:
    """Of one group and root."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, AgreedPlan]] = []
        """With the number of the newest save by each, ascending."""
        self.local = KeptLocalPlans()

    def add(self, number: int, plan: AgreedPlan) -> None:
        """Adds a plan, or another save by one that is kept: what was derived from that stays."""
        same = [each for each in self.plans if each[1].plan_id == plan.plan_id]
        for each in same:
            self.plans.remove(each)
            number, plan = max(number, each[0]), each[1]
        self.plans = sorted([*self.plans, (number, plan)], key=lambda each: each[0])
        while len(self.plans) > _KEPT_EACH:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drops the oldest plan, and the local plans that only that one was made of."""
        del self.plans[0]
        self.local.retain({digest for _, plan in self.plans for digest in plan.digests.values()})

    @property
    def size(self) -> int:
        """Bytes."""
        return self.local.size + sum(len(plan.body) for _, plan in self.plans)


class PlanCache:
    """Agreed plans that later saves may use, with their ranks' local plans. Event loop only."""

    def __init__(self) -> None:
        self._kept: dict[_Line, _Kept] = {}
        """The last used ones last."""

    def keep(
        self,
        context: sidecar_pb2.SaveContext,
        plan: AgreedPlan,
        local: KeptLocalPlans | None = None,
        *,
        number: int | None = None,
    ) -> None:
        """Adds the plan that a save has agreed on.

        Args:
            local: the local plans that ranks handed in for it.
            number: of the save. Default: the context's.
        """
        line = _line(context)
        kept = self._kept[line] = self._kept.pop(line) if line in self._kept else _Kept()
        if local is not None:
            kept.local.update(local)
        kept.add(context.save.number if number is None else number, plan)
        size = sum(each.size for each in self._kept.values())
        while size > _KEPT_BYTES and (len(self._kept) > 1 or len(kept.plans) > 1):
            oldest, others = next(iter(self._kept.items()))
            size -= others.size
            if len(others.plans) > 1:
                others.drop_oldest()
                size += others.size
            else:
                del self._kept[oldest]

    def find(self, context: sidecar_pb2.SaveContext, plan_id: str) -> AgreedPlan | None:
        """A plan that the group agreed on for an earlier save to the same root."""
        return next((plan for plan in self.plans(context) if plan.plan_id == plan_id), None)

    def plans(self, context: sidecar_pb2.SaveContext) -> list[AgreedPlan]:
        """The group's plans to the same root, the newest first."""
        kept = self._kept.get(_line(context))
        return [] if kept is None else [plan for _, plan in reversed(kept.plans)]

    def find_part(
        self, context: sidecar_pb2.SaveContext, rank: int, digest: str, part: str
    ) -> AgreedPlan | None:
        """The newest plan in which the rank has this part."""
        plans = self.plans(context)
        return next((plan for plan in plans if plan.has_part(rank, digest, part)), None)

    def local_plans(self, context: sidecar_pb2.SaveContext) -> KeptLocalPlans:
        """Those of the group's kept plans, as far as this process has got them."""
        kept = self._kept.get(_line(context))
        return KeptLocalPlans() if kept is None else kept.local


def _line(context: sidecar_pb2.SaveContext) -> _Line:
    root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
    return _Line(context.save.job, context.save.incarnation, context.save.group, root)
