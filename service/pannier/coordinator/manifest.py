"""The plan manifest: the global plan as an object beside the checkpoint, and what follows from it.

In: a global plan and the members of a save. Out: bytes whose hash is the plan id, each
rank's final plan, and what each rank's receipt must say. Everybody reads these from the
manifest alone, so a coordinator that finds another's manifest goes on from that one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pannier.coordinator.columns import RankPlan
from pannier.coordinator.planning import GlobalPlan
from pannier.records.manifests import ManifestRecord
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError


@dataclass(frozen=True)
class Share:
    """What one rank writes: rows of the manifest's metadata, in order of position."""

    rows: list[int]
    positions: list[int]
    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name; 0 for the objects file, whose size the receipt tells."""


class Manifest(ManifestRecord):
    """A plan manifest that knows its plan. Immutable."""

    def __init__(self, message: records_pb2.PlanManifest, data: bytes) -> None:
        super().__init__(message, data)
        self._shares: Mapping[int, Share] | None = None

    @classmethod
    def make(
        cls,
        context: sidecar_pb2.SaveContext,
        attempt: identity.Attempt,
        members: Sequence[RankPlan],
        plan: GlobalPlan,
    ) -> "Manifest":
        """The manifest of a plan that Pannier made. CPU-bound; any thread."""
        return cls._of(
            records_pb2.PlanManifest(
                save=context.save,
                attempt=attempt.name,
                checkpoint_id=context.checkpoint_id,
                incarnation_number=attempt.incarnation_number,
                members=[
                    records_pb2.Member(rank=each.rank, host=each.host, digest=each.digest)
                    for each in members
                ],
                metadata=plan.metadata,
                owner=plan.owner,
                position=plan.position,
            )
        )

    @classmethod
    def make_external(
        cls,
        context: sidecar_pb2.SaveContext,
        attempt: identity.Attempt,
        hosts: Mapping[int, str],
        metadata: plan_pb2.GlobalMetadata,
    ) -> "Manifest":
        """The manifest of a plan that torch made, with complete placements."""
        return cls._of(
            records_pb2.PlanManifest(
                save=context.save,
                attempt=attempt.name,
                checkpoint_id=context.checkpoint_id,
                incarnation_number=attempt.incarnation_number,
                members=[
                    records_pb2.Member(rank=rank, host=hosts.get(rank, ""))
                    for rank in context.ranks
                ],
                metadata=metadata,
                external=True,
            )
        )

    @classmethod
    def _of(cls, message: records_pb2.PlanManifest) -> "Manifest":
        return cls(message, message.SerializeToString(deterministic=True))

    def share(self, rank: int) -> Share:
        """What ``rank`` writes; nothing, for a rank without items.

        Raises IntegrityError when the manifest contradicts itself.
        """
        if self._shares is None:
            try:
                self._shares = _shares(self.message)
            except (IndexError, ValueError, OverflowError) as error:
                raise IntegrityError(
                    f"the plan manifest of attempt {self.message.attempt} contradicts itself: "
                    f"{error}"
                ) from error
        return self._shares.get(rank) or Share([], [])

    def final_plan(self, rank: int) -> plan_pb2.FinalPlan:
        """The answer to ``rank``'s local plan."""
        share = self.share(rank)
        place = self.message.metadata.placement
        names = {name: number for number, name in enumerate(share.files)}
        files = self.message.metadata.files
        return plan_pb2.FinalPlan(
            plan_id=self.plan_id,
            attempt=self.message.attempt,
            positions=share.positions,
            files=[
                plan_pb2.PlannedFile(name=name, size=size) for name, size in share.files.items()
            ],
            placement=plan_pb2.Placement(
                file=[names[files[place.file[row]]] for row in share.rows],
                offset=[place.offset[row] for row in share.rows],
                length=[place.length[row] for row in share.rows],
            ),
        )


def _shares(message: records_pb2.PlanManifest) -> dict[int, Share]:
    owner, position = np.array(message.owner, np.int64), np.array(message.position, np.int64)
    place, names = message.metadata.placement, message.metadata.files
    order = np.lexsort((position, owner))
    edges = np.flatnonzero(np.diff(owner[order])) + 1
    file = np.array(place.file, np.int64)
    length = np.array(place.length, np.int64)
    end = np.array(place.offset, np.int64) + length
    shares = {}
    for rows in np.split(order, edges):
        if not len(rows):
            continue
        share = Share(rows.tolist(), position[rows].tolist())
        # A rank's files are numbered in the order of the layout; the objects file is the last.
        for number in np.unique(file[rows]).tolist():
            here = rows[file[rows] == number]
            share.files[names[number]] = int(end[here].max()) if length[here].any() else 0
        shares[message.members[int(owner[rows[0]])].rank] = share
    return shares
