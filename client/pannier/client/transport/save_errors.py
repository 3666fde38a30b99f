"""Errors of one save: as messages to the other ranks, and as what the handle raises.

In: exceptions of this rank, and statuses from the sidecar. Out: ``FailRequest`` messages and
PannierErrors. Pure functions.
"""

from typing import Final

from pannier.client.user_errors import description
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import errors, object_names
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    InDoubtError,
    SaveAbortedError,
    SaveSkippedError,
)

_KINDS: Final[tuple[tuple[type[BaseException], save_pb2.FailureKind], ...]] = (
    (SaveSkippedError, save_pb2.FAILURE_KIND_SKIPPED),
    (errors.IntegrityError, save_pb2.FAILURE_KIND_INTEGRITY),
    (errors.StorageError, save_pb2.FAILURE_KIND_STORAGE),
    (DeadlineError, save_pb2.FAILURE_KIND_DEADLINE),
    (InDoubtError, save_pb2.FAILURE_KIND_DEADLINE),
    (BusyError, save_pb2.FAILURE_KIND_SPOOL),
)


def fail_request(context: sidecar_pb2.SaveContext, error: BaseException) -> sidecar_pb2.FailRequest:
    """The message that aborts a save on all ranks because of ``error`` on this one."""
    kind = next(
        (kind for types, kind in _KINDS if isinstance(error, types)), save_pb2.FAILURE_KIND_CLIENT
    )
    text = description(error)
    failure = save_pb2.Failure(rank=context.rank, host=context.host, kind=kind, message=text)
    return sidecar_pb2.FailRequest(context=context, failure=failure)


def in_doubt(context: sidecar_pb2.SaveContext, why: str) -> InDoubtError:
    """The error of a save whose decision isn't known here, and may not be made yet."""
    text = object_names.save_text(context.save)
    root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
    return InDoubtError(
        f"save {text} to {context.checkpoint_id} is in doubt: {why}. It may still be committed: "
        "don't use or delete this checkpoint id before its outcome is known, by "
        f"`pannier status {text}`, `pannier ls {root}` or client.latest({root!r})"
    )


def not_handed_over(
    context: sidecar_pb2.SaveContext, error: errors.PannierError
) -> SaveAbortedError:
    """The error of a save that can't be committed, because this rank's part never reached the sidecar."""
    failures = error.failures or {-1: fail_request(context, error).failure}
    return SaveAbortedError(
        f"save {object_names.save_text(context.save)} to {context.checkpoint_id} can't be "
        f"committed, because the part of rank {context.rank} was not handed over: {error}",
        failures.values(),
    )


def aborted(status: save_pb2.SaveStatus, waiting: str = "") -> SaveAbortedError:
    """The error of an aborted save: who failed, and why.

    Args:
        waiting: what this rank waited for when the status came.
    """
    causes = [
        (f"rank {cause.rank} ({cause.host}): " if cause.rank >= 0 else "") + cause.message
        for cause in status.failures
    ]
    cls = errors.aborted_as(status.failures)
    what = "was skipped" if cls is SaveSkippedError else "was aborted"
    text = "; ".join(causes[:4]) or "no cause was reported"
    more = f"; and {len(causes) - 4} more" if len(causes) > 4 else ""
    more += f"; this rank was waiting for {waiting}" if waiting else ""
    return cls(
        f"save {object_names.save_text(status.save)} to {status.checkpoint_id} {what}: {text}{more}",
        list(status.failures),
    )
