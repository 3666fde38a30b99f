"""What identifies a save, and what all its ranks must agree on.

In: contexts as ranks send them. Out: an immutable :class:`SaveSpec`, or an error that names the ranks
that contradict each other. Pure; any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError
from pannier.wire.failures import rank_list, rank_text

OVERWRITES: Final = {
    save_pb2.OVERWRITE_UNSPECIFIED: "its own job's checkpoint (overwrite=None)",
    save_pb2.OVERWRITE_NEVER: "no checkpoint (overwrite=False)",
    save_pb2.OVERWRITE_ANY: "any checkpoint (overwrite=True)",
}


class DisagreementError(PannierError):
    """Ranks contradict each other; ``failures`` has one entry for each of them.

    Args:
        ranks: rank and host of each.
    """

    kind = save_pb2.FAILURE_KIND_DISAGREEMENT

    def __init__(self, message: str, *ranks: tuple[int, str]) -> None:
        super().__init__(
            message,
            [
                save_pb2.Failure(rank=rank, host=host, kind=self.kind, message=message)
                for rank, host in ranks
            ],
        )


@dataclass(frozen=True)
class SaveSpec:
    """A save as its first rank described it."""

    context: sidecar_pb2.SaveContext
    """Never changed."""

    @cached_property
    def key(self) -> str:
        """The save's identity as text."""
        return object_names.save_text(self.context.save)

    @property
    def label(self) -> str:
        """Id and checkpoint id, for errors and logs."""
        return f"save {self.key} to {self.context.checkpoint_id}"

    @property
    def incarnation(self) -> tuple[str, str]:
        """Job and incarnation."""
        return self.context.save.job, self.context.save.incarnation

    def with_seen_incarnation(self, number: int) -> "SaveSpec":
        """This spec with the highest incarnation number that the job had seen when it started."""
        context = sidecar_pb2.SaveContext()
        context.CopyFrom(self.context)
        context.seen_incarnation = number
        return SaveSpec(context)


_FACTS: Final[Sequence[tuple[str, Callable[[sidecar_pb2.SaveContext], Any]]]] = (
    ("saves to", lambda context: context.checkpoint_id),
    ("has a world size of", lambda context: context.world_size),
    ("saves together with ranks", lambda context: list(context.ranks)),
    ("overwrites", lambda context: OVERWRITES[context.overwrite]),
)


def check_agreement(first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext) -> None:
    """Raises DisagreementError when two ranks describe one save differently."""
    for verb, fact in _FACTS:
        one, two = fact(first), fact(other)
        if one != two:
            one, two = (rank_list(each) if isinstance(each, list) else each for each in (one, two))
            raise DisagreementError(
                f"{sender(first)} {verb} {one}, {sender(other)} {verb} {two}: every rank must call "
                f"save number {first.save.number} of its group with the same arguments",
                (first.rank, first.host),
                (other.rank, other.host),
            )


def describes_same_save(
    first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext, *, brief: bool = False
) -> bool:
    """Whether two ranks describe a save alike: a fast check, made for each message.

    Args:
        brief: ``other`` leaves out the group's ranks, which an earlier message listed.
    """
    return (
        first.checkpoint_id == other.checkpoint_id
        and first.world_size == other.world_size
        and first.overwrite == other.overwrite
        # Compared last: for a large group this takes longer than all the rest.
        and (brief or _equal_but_sender(first, other))
    )


def _equal_but_sender(first: sidecar_pb2.SaveContext, other: sidecar_pb2.SaveContext) -> bool:
    # Messages are compared in C; a repeated field would become a Python object per number.
    own = (other.rank, other.host, _seen_incarnation(other))
    _set_sender(other, first.rank, first.host, _seen_incarnation(first))
    same: bool = other == first
    _set_sender(other, *own)
    return same


def _seen_incarnation(context: sidecar_pb2.SaveContext) -> int | None:
    return context.seen_incarnation if context.HasField("seen_incarnation") else None


def _set_sender(context: sidecar_pb2.SaveContext, rank: int, host: str, seen: int | None) -> None:
    context.rank, context.host = rank, host
    if seen is None:
        context.ClearField("seen_incarnation")
    else:
        context.seen_incarnation = seen


def sender(context: sidecar_pb2.SaveContext) -> str:
    """``rank 3 (host node-2)``: who sent the context."""
    return rank_text(context.rank, context.host)
