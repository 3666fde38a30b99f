"""Why a save fails: from an error, a receipt or a deadline to failures by rank.

In: a :class:`Save` and what happened to it. Out: an error with failures, or a doomed save.
"""

import logging
from typing import NoReturn

from pannier.coordinator.commit.receipt_check import check_external_receipt, check_receipt
from pannier.coordinator.saves.save import Save
from pannier.v1 import records_pb2, save_pb2
from pannier.wire.errors import (
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
)
from pannier.wire.failures import failure_kind

_log = logging.getLogger(__name__)


def check_told(save: Save, receipt: records_pb2.Receipt) -> None:
    """Raises IntegrityError, blaming the rank."""
    assert save.attempt is not None
    try:
        if save.manifest is not None and not save.external:
            check_receipt(save.manifest, receipt)
        else:
            check_external_receipt(save.attempt.name, receipt)
    except (IntegrityError, InvalidRequestError) as error:
        failure = save_pb2.Failure(
            rank=receipt.rank,
            host=receipt.host,
            kind=save_pb2.FAILURE_KIND_INTEGRITY,
            message=str(error),
        )
        raise IntegrityError(str(error), [failure]) from error


def raise_missed(save: Save, what: str, deadline: float) -> NoReturn:
    """Raises DeadlineError that names each rank that is missing."""
    seconds = deadline - save.start
    text = save.waiting_text()
    message = f"waiting for {text} when its deadline of {seconds:.0f} s passed"
    raise DeadlineError(
        message,
        [
            save_pb2.Failure(
                rank=late.rank,
                host=late.host,
                kind=save_pb2.FAILURE_KIND_DEADLINE,
                message=f"{what}: {message}",
            )
            for late in save.awaited()
        ],
    )


def raise_lost(save: Save) -> NoReturn:
    """Raises SaveAbortedError for the save's suspects."""
    failures = list(save.suspects.values())
    raise SaveAbortedError(failures[0].message, failures)


def blame(save: Save, error: BaseException) -> None:
    """Dooms the save because of what its work raised."""
    if not isinstance(error, PannierError):
        _log.error("%s failed", save.label, exc_info=error)
        text = f"internal error in the coordinator: {type(error).__name__}: {error}"
        save.fail(save_pb2.FAILURE_KIND_INTERNAL, text)
    elif error.failures:
        save.doom(error.failures.values(), concluded=isinstance(error, DeadlineError))
    else:
        save.fail(failure_kind(error, refused=save_pb2.FAILURE_KIND_INVALID_PLAN), str(error))
