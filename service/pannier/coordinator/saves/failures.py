"""Why a save fails: failures by rank, from explicit reports, receipts, deadlines and errors.

In: what happened to a save. Out: its :class:`Outcome`, which only :class:`Save` changes, and errors that
carry failures. Event loop only; no I/O.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from pannier.common.wait_text import Awaited
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.receipt_check import check_external_receipt, check_receipt
from pannier.v1 import records_pb2, save_pb2
from pannier.wire.errors import (
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    failure_messages,
)
from pannier.wire.failures import failure_kind, failures_text

_log = logging.getLogger(__name__)


class Outcome:
    """Failures of a save, and data that may be lost."""

    def __init__(self) -> None:
        self.failures: dict[int, save_pb2.Failure] = {}
        """By rank; -1: not of a rank."""
        self.failing = asyncio.Event()
        """Set while the save is to be aborted."""
        self.possible_losses: dict[int, save_pb2.Failure] = {}
        """By rank: why its data is lost, unless its receipt is in storage."""
        self._timed_out: set[int] = set()

    def add(self, failures: Iterable[save_pb2.Failure], *, timed_out: bool) -> None:
        """Adds failures; the first one of a rank counts.

        Args:
            timed_out: the ranks failed by time-out rather than by an explicit report.
        """
        for failure in failures:
            if timed_out and failure.rank not in self.failures:
                self._timed_out.add(failure.rank)
            self.failures.setdefault(failure.rank, failure)
        self.failing.set()

    @property
    def only_timed_out(self) -> bool:
        """Whether no rank reported its failure explicitly."""
        return self.failures.keys() <= self._timed_out

    def clear(self) -> None:
        """Drops all failures: the save isn't to be aborted."""
        self.failures.clear()
        self._timed_out.clear()
        self.failing.clear()

    def text(self) -> str:
        """Why the save failed."""
        return failures_text(self.failures.values())


def failures_of(error: BaseException, label: str) -> list[save_pb2.Failure]:
    """Failures of a save whose task raised ``error``; an unexpected one is logged."""
    if isinstance(error, PannierError):
        kind = failure_kind(error, refused=save_pb2.FAILURE_KIND_INVALID_PLAN)
        return failure_messages(error) or [save_pb2.Failure(rank=-1, kind=kind, message=str(error))]
    _log.error("%s failed", label, exc_info=error)
    text = f"internal error in the coordinator: {type(error).__name__}: {error}"
    return [save_pb2.Failure(rank=-1, kind=save_pb2.FAILURE_KIND_INTERNAL, message=text)]


def check_rank_receipt(
    receipt: records_pb2.Receipt, attempt: str, manifest: Manifest | None
) -> None:
    """Raises IntegrityError with a failure of the rank unless its receipt fits the plan.

    Args:
        manifest: None: torch made the plan.
    """
    try:
        if manifest is not None:
            check_receipt(manifest, receipt)
        else:
            check_external_receipt(attempt, receipt)
    except (IntegrityError, InvalidRequestError) as error:
        failure = save_pb2.Failure(
            rank=receipt.rank,
            host=receipt.host,
            kind=save_pb2.FAILURE_KIND_INTEGRITY,
            message=str(error),
        )
        raise IntegrityError(str(error), [failure]) from error


def deadline_error(
    what: str, waited_for: str, seconds: float, late: Sequence[Awaited]
) -> DeadlineError:
    """The error of a save whose deadline passed, with a failure of each late rank.

    Args:
        what: what the ranks did not do.
        waited_for: ranks and hosts as text.
        seconds: the deadline, counted from the start of the save.
    """
    message = f"waiting for {waited_for} when its deadline of {seconds:.0f} s passed"
    return DeadlineError(
        message,
        [
            save_pb2.Failure(
                rank=rank.rank,
                host=rank.host,
                kind=save_pb2.FAILURE_KIND_DEADLINE,
                message=f"{what}: {message}",
            )
            for rank in late
        ],
    )


def loss_error(losses: Iterable[save_pb2.Failure]) -> SaveAbortedError:
    """The error of a save of which some ranks' data is lost."""
    failures = list(losses)
    return SaveAbortedError(failures[0].message, failures)
