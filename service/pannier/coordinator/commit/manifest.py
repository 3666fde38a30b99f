"""The plan manifest: the global plan as an object beside the checkpoint, and what follows from it.

In: a global plan and the members of a save. Out: the object's bytes, each rank's final plan, and
what each rank's receipt must contain. All of this is read from the manifest alone, so a coordinator
that finds another's manifest continues from that one. Later saves by the same plan get separate
manifests, which share everything but the header.
"""

from collections.abc import Mapping, Sequence

from pannier.attempts.manifests import ManifestRecord, join, plan_id_of
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.global_plan import GlobalPlan
from pannier.coordinator.planning.plan_cache import AgreedPlan, Share, read_assignment
from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError


class Manifest(ManifestRecord):
    """A plan manifest with its plan. Immutable."""

    _plan: AgreedPlan | None = None

    @classmethod
    def of(
        cls,
        plan: AgreedPlan,
        context: sidecar_pb2.SaveContext,
        attempt: object_names.Attempt,
        hosts: Mapping[int, str],
        *,
        timeout_s: float = 0,
    ) -> "Manifest":
        """The manifest of a save by an agreed plan that Pannier made. CPU-bound; any thread.

        Args:
            timeout_s: seconds that the save has left; 0: not known.
        """
        header = _header(context, attempt, timeout_s)
        for rank, digest in plan.members:
            header.members.add(rank=rank, host=hosts.get(rank, ""), digest=digest)
        prefix = object_names.data_prefix(attempt.name)
        header.metadata.files.extend([prefix + name for name in plan.names])
        made = cls(header, join(header, plan.body), plan.plan_id, plan.body)
        made._plan = plan
        return made

    @classmethod
    def make_external(
        cls,
        context: sidecar_pb2.SaveContext,
        attempt: object_names.Attempt,
        hosts: Mapping[int, str],
        metadata: plan_pb2.GlobalMetadata,
        *,
        timeout_s: float = 0,
    ) -> "Manifest":
        """The manifest of a plan that torch made, with complete placements."""
        message = _header(context, attempt, timeout_s)
        message.external = True
        for rank in context.ranks:
            message.members.add(rank=rank, host=hosts.get(rank, ""))
        message.metadata.CopyFrom(metadata)
        return cls.parse(message.SerializeToString(deterministic=True))

    @property
    def plan(self) -> AgreedPlan:
        """The plan, which other attempts may have in common. Parsing one from storage is CPU-bound, once.

        Raises IntegrityError when the manifest contradicts itself.
        """
        if self._plan is None:
            message = self.message
            prefix = object_names.data_prefix(message.attempt)
            try:
                # The assignment of a plan of torch's isn't known.
                assignment, unused = read_assignment(
                    records_pb2.PlanManifest() if message.external else message
                )
                self._plan = AgreedPlan(
                    plan_id=self.plan_id,
                    members=[(member.rank, member.digest) for member in message.members],
                    names=[name.removeprefix(prefix) for name in message.metadata.files],
                    body=self.body or b"",
                    assignment=assignment,
                    unused=unused,
                )
            except (IndexError, ValueError) as error:
                raise IntegrityError(
                    f"the plan manifest of attempt {message.attempt} contradicts itself: {error}"
                ) from error
        return self._plan

    def share(self, rank: int) -> Share:
        """What ``rank`` writes; nothing, for a rank without items. Raises as :attr:`plan`."""
        return self.plan.share(rank)

    def final_plan(self, rank: int) -> plan_pb2.FinalPlan:
        """The answer to ``rank``'s local plan."""
        return self.plan.final_plan(rank, self.header.attempt)


def agree(members: Sequence[RankPlan], plan: GlobalPlan) -> AgreedPlan:
    """The agreed plan of these ranks. CPU-bound; any thread."""
    who = [(each.rank, each.digest) for each in members]
    agreed = AgreedPlan(
        plan_id=plan_id_of(who, plan.names, plan.body),
        members=who,
        names=plan.names,
        body=plan.body,
        assignment=plan.assignment,
        unused=plan.unused,
    )
    # The answers to the ranks need these next.
    agreed.make_parts()
    return agreed


def _header(
    context: sidecar_pb2.SaveContext, attempt: object_names.Attempt, timeout_s: float
) -> records_pb2.PlanManifest:
    return records_pb2.PlanManifest(
        save=context.save,
        attempt=attempt.name,
        checkpoint_id=context.checkpoint_id,
        incarnation_number=attempt.incarnation_number,
        overwrite=context.overwrite,
        timeout_s=timeout_s,
    )
