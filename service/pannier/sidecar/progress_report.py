"""What the coordinator is told of a rank's part in a save: the part in, a message out."""

import time
from typing import Final

from pannier.sidecar.save_state import Phase, RankSave
from pannier.sidecar.status import rank_status
from pannier.v1 import coordinator_pb2

_LEAST_S: Final = 0.001
"""Remaining time that is over; 0 would be no word."""


def tellable(rank: RankSave) -> bool:
    """Whether there is anything to tell."""
    # A rank that plans is known to the coordinator by its call, unless it goes by an earlier plan; a
    # refused one by the answer.
    planning = rank.phase is Phase.PLANNING and rank.proposal is None
    return not planning and not rank.refused


def report_of(rank: RankSave) -> coordinator_pb2.RankReport:
    """How far it is."""
    report = coordinator_pb2.RankReport(
        context=rank.context, attempt=rank.attempt, status=rank_status(rank)
    )
    now = time.monotonic()
    if rank.proposal is not None:
        report.plan_id, report.digest = rank.proposal.plan_id, rank.proposal.digest
        if report.status.phase == Phase.PLANNING.value:
            report.attempt = rank.proposal.attempt
    if rank.plan_deadline and rank.phase is Phase.PLANNING:
        report.timeout_s = max(_LEAST_S, rank.plan_deadline - now)
    if rank.deadline:
        report.save_timeout_s = max(_LEAST_S, rank.deadline - now)
    # In this order: whoever sees DURABLE must see the receipt.
    if rank.receipt is not None and report.status.phase == Phase.DURABLE.value:
        report.receipt.CopyFrom(rank.receipt)
    if rank.failure is not None:
        report.failure.CopyFrom(rank.failure)
    return report
