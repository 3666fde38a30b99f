"""Failures of a save: the kind of an error, and how failures and ranks read in messages.

In: errors, and failures by rank. Out: failure kinds, human-readable texts, and the error of an aborted
save. Pure; any thread.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from pannier.v1 import save_pb2
from pannier.wire.errors import (
    CheckpointExistsError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
)

_RANKS: Final = 16
"""Ranks spelled out in a text."""
_CAUSES: Final = 4
"""Causes spelled out in the error of an aborted save."""


def failure_kind(
    error: BaseException,
    *,
    refused: save_pb2.FailureKind = save_pb2.FAILURE_KIND_CLIENT,
    other: save_pb2.FailureKind = save_pb2.FAILURE_KIND_INTERNAL,
) -> save_pb2.FailureKind:
    """The kind of the failure that ``error`` causes.

    Args:
        refused: the kind of an InvalidRequestError, which depends on whose data was checked.
        other: the kind of errors that have none.
    """
    if isinstance(error, PannierError) and error.kind != save_pb2.FAILURE_KIND_UNSPECIFIED:
        return error.kind
    return refused if isinstance(error, InvalidRequestError) else other


def aborted_error(
    save: str, checkpoint_id: str, failures: Iterable[save_pb2.Failure], *, waiting: str = ""
) -> SaveAbortedError:
    """The error of a save that ended without a checkpoint: which ranks failed, and why.

    Args:
        save: its identity, as text.
        waiting: what this rank waited for when the save was aborted.
    """
    causes = list(failures)
    kinds = {failure.kind for failure in causes}
    cls, verb = SaveAbortedError, "aborted"
    if save_pb2.FAILURE_KIND_SKIPPED in kinds:
        cls, verb = SaveSkippedError, "skipped"
    elif save_pb2.FAILURE_KIND_EXISTS in kinds:
        cls = CheckpointExistsError
    text = failures_text(causes) or "no cause was reported"
    if waiting:
        text += f"; this rank was waiting for {waiting}"
    return cls(f"save {save} to {checkpoint_id} was {verb}: {text}", causes)


def failures_text(failures: Iterable[save_pb2.Failure]) -> str:
    """``rank 3 (host node-2): spool full; ...``, by rank, each message once; empty without failures."""
    # Ranks that contradict each other share one message, which names them.
    causes: dict[str, list[save_pb2.Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        causes.setdefault(failure.message, []).append(failure)
    return shorten(
        [
            message
            if len(shared) > 1 or shared[0].rank < 0
            else f"{rank_text(shared[0].rank, shared[0].host)}: {message}"
            for message, shared in causes.items()
        ],
        _CAUSES,
        separator="; ",
    )


def rank_text(rank: int, host: str = "") -> str:
    """``rank 3 (host node-2)``, or ``rank 3`` where the host isn't known."""
    return f"rank {rank}" + (f" (host {host})" if host else "")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks [3, 7]``, or ``ranks [0, 1, ..., 15] and 12 more`` for a long list."""
    listed = list(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {rank_list(listed)}"


def rank_list(ranks: Sequence[int]) -> str:
    """``[3, 7]``, or ``[0, 1, ..., 15] and 12 more``."""
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"{list(ranks[:_RANKS])}{more}"


def shorten(texts: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """The first ``most`` texts, joined, and how many more there are: ``a, b and 3 more``."""
    joined = separator.join(texts[:most])
    if len(texts) <= most:
        return joined
    return f"{joined}{';' if separator == '; ' else ''} and {len(texts) - most} more"


def cut_text(text: str, most: int) -> str:
    """At most ``most`` characters of a text; an ellipsis shows that there were more."""
    return text if len(text) <= most else text[:most] + " …"
