"""Errors of one save: as messages to the other ranks, and as what the handle raises.

In: exceptions of this rank, and statuses from the sidecar. Out: ``FailRequest`` messages and
PannierErrors. Pure functions.
"""

from typing import Final

from pannier.client.user_errors import description
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import errors, object_names
from pannier.wire.errors import InDoubtError, SaveAbortedError, failure_messages
from pannier.wire.failures import aborted_error, failure_kind

_PLAN_KINDS: Final = frozenset(
    (
        save_pb2.FAILURE_KIND_DISAGREEMENT,
        save_pb2.FAILURE_KIND_INVALID_PLAN,
        save_pb2.FAILURE_KIND_INTEGRITY,
        save_pb2.FAILURE_KIND_INTERNAL,
        save_pb2.FAILURE_KIND_PLAN_CHANGED,
    )
)
"""Kinds of failures that another plan may avoid. Storage, a deadline, a skip or a lost rank isn't one of them."""


def needs_new_plan(error: BaseException) -> bool:
    """Whether the save after one with this error is to be planned again."""
    failures = failure_messages(error) if isinstance(error, errors.PannierError) else ()
    return any(failure.kind in _PLAN_KINDS for failure in failures)


def has_plan_changed(error: BaseException) -> bool:
    """Whether the same save succeeds if all ranks plan it again."""
    failures = failure_messages(error) if isinstance(error, errors.PannierError) else ()
    return any(failure.kind == save_pb2.FAILURE_KIND_PLAN_CHANGED for failure in failures)


def fail_request(context: sidecar_pb2.SaveContext, error: BaseException) -> sidecar_pb2.FailRequest:
    """The message that aborts a save on all ranks because of ``error`` on this one."""
    failure = save_pb2.Failure(
        rank=context.rank,
        host=context.host,
        kind=failure_kind(error, other=save_pb2.FAILURE_KIND_CLIENT),
        message=description(error),
    )
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
    failures = failure_messages(error) or [fail_request(context, error).failure]
    return SaveAbortedError(
        f"save {object_names.save_text(context.save)} to {context.checkpoint_id} can't be "
        f"committed, because the part of rank {context.rank} was not handed over: {error}",
        failures,
    )


def aborted(status: save_pb2.SaveStatus, waiting: str = "") -> SaveAbortedError:
    """The error of the aborted save that ``status`` describes; ``waiting`` as in aborted_error."""
    key = object_names.save_text(status.save)
    return aborted_error(key, status.checkpoint_id, status.failures, waiting=waiting)
