"""What a save's handle shows, returns or raises.

In: statuses of the sidecar, this rank's own error, and the decision, as far as they are known. Out: values and
exceptions. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from pannier.client.handle import Resolver, SaveHandle, SaveResult, SaveStatus
from pannier.client.transport.save_errors import aborted, fail_request, in_doubt, not_handed_over
from pannier.client.user_errors import name_save
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import Failure, PannierError, SaveAbortedError, SaveSkippedError

_NEED_NO_TRAINER: Final = (save_pb2.RANK_PHASE_INGESTED, save_pb2.RANK_PHASE_DURABLE)


class DroppedError(Exception):
    """The call ended without a handle."""


class MissedError(SaveAbortedError):
    """This rank missed save calls of the others."""

    @classmethod
    def of(cls, context: sidecar_pb2.SaveContext, number: int) -> "MissedError":
        """``number``: of the save that the group is at."""
        return cls(
            f"rank {context.rank} (host {context.host}) missed save calls of the other ranks: it was at save "
            f"number {context.save.number} and they at {number}. That one fails, too; the next is in step again, "
            f"with number {number + 1}",
            [fail_request(context, PannierError("this rank missed save calls")).failure],
        )


def progress(
    shown: SaveStatus,
    update: save_pb2.SaveStatus,
    rank: int,
) -> dict[str, Any]:
    """The fields of the status ``shown`` by the handle of ``rank`` that change."""
    own = _of_rank(update, rank)
    return {
        "attempt": update.attempt or shown.attempt,
        "state": save_pb2.SaveState.Name(update.state).removeprefix("SAVE_STATE_"),
        "total_bytes": update.bytes_total or shown.total_bytes,
        "bytes_ingested": shown.bytes if needs_no_trainer(update, rank) else shown.bytes_ingested,
        "bytes_uploaded": max(shown.bytes_uploaded, sum(rank.bytes_uploaded for rank in own)),
        "failures": {failure.rank: Failure.of(failure) for failure in update.failures},
    }


def needs_no_trainer(update: save_pb2.SaveStatus, rank: int) -> bool:
    """Whether the sidecar has all that ``rank`` sends; the answer to its hand-over may come later."""
    is_committed = update.state == save_pb2.SAVE_STATE_COMMITTED
    return is_committed or any(each.phase in _NEED_NO_TRAINER for each in _of_rank(update, rank))


def result(
    shown: SaveStatus, decided: save_pb2.SaveStatus, seconds: Mapping[str, float]
) -> SaveResult:
    """Of a committed save; ``seconds``: by phase."""
    return SaveResult(
        checkpoint_id=shown.checkpoint_id,
        attempt=decided.attempt,
        bytes=shown.bytes,
        total_bytes=decided.bytes_total or shown.bytes,
        seconds=dict(seconds),
    )


def failure(
    context: sidecar_pb2.SaveContext,
    error: BaseException | None,
    decided: save_pb2.SaveStatus | None,
    *,
    may_be_handed_over: bool,
    room: str,
) -> Exception:
    """The error of a save that isn't committed, and of which no hand-over can begin any more.

    Args:
        error: why it failed on this rank; None: it didn't.
        decided: ABORT; None: not known here.
        may_be_handed_over: the sidecar received this rank's part, or may have.
        room: the room in the spool that it waited for; empty: none.
    """
    is_own = error is not None and not isinstance(error, PannierError | DroppedError)
    text = object_names.save_text(context.save)
    if isinstance(error, MissedError):
        return error
    if decided is not None and not is_own:
        return aborted(decided, room)
    if isinstance(error, DroppedError) or not isinstance(error, Exception):
        return SaveAbortedError(f"save {text} was given up")
    if isinstance(error, SaveAbortedError):
        return error
    if decided is None and may_be_handed_over:
        # This process can't know the decision.
        return in_doubt(context, str(error))
    if isinstance(error, PannierError):
        # Only ABORT is possible.
        return not_handed_over(context, error)
    # The user's code's, or a device's.
    name_save(error, text, context.checkpoint_id)
    return error


def skipped(save: str, checkpoint_id: str, error: SaveSkippedError) -> SaveHandle:
    """A handle of a save that the user's own ``on_busy="skip"`` ended."""
    handle = SaveHandle(save, checkpoint_id)
    resolver = Resolver(handle)
    resolver.show(state="SKIPPED")
    resolver.fail(error, quietly=True)
    return handle


def _of_rank(update: save_pb2.SaveStatus, rank: int) -> list[save_pb2.RankStatus]:
    return [each for each in update.ranks if each.rank == rank]
