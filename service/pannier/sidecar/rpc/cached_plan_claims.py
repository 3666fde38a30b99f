"""A trainer goes on by a plan that it has: its call of ``Plan``, which costs no call to the coordinator.

In: the call. Out: the answer, once the sidecar's reports have brought the rank's word to the
coordinator, and the save's status the coordinator's. Blocking, in a thread of the gRPC server.
"""

import time
from collections.abc import Callable
from typing import Any

from pannier.sidecar.coordinator_client import SLACK_S, Link
from pannier.sidecar.ingest import check_attempt
from pannier.sidecar.save_state import Phase, Proposal, RankSave, Saves
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import DeadlineError, UnavailableError
from pannier.wire.failures import aborted_error


def is_proposal(request: sidecar_pb2.PlanRequest) -> bool:
    """Whether the trainer goes by an earlier plan."""
    return bool(request.cached_plan_id) and not request.HasField("plan")


def propose(
    saves: Saves,
    link: Link,
    rank: RankSave,
    request: sidecar_pb2.PlanRequest,
    on_end: Callable[[Callable[[], Any]], None],
) -> sidecar_pb2.PlanResponse:
    """Waits until all ranks of the save are agreed, or the rank's local plan is wanted.

    Args:
        on_end: takes a function to call when the trainer gives its call up.

    Raises:
        SaveAbortedError: the save, or this rank's part, has failed.
        InvalidRequestError: the rank said otherwise before.
        DeadlineError: nothing was heard in time; the rank has failed.
        UnavailableError: the call was given up.
    """
    check_attempt(request.attempt, rank)
    given_up = False

    def give_up() -> None:
        nonlocal given_up
        given_up = True
        saves.wake()

    def over() -> bool:
        status = rank.save.coordinator
        wanted = status is not None and status.plan_wanted
        ended = rank.save.verdict is not None or rank.phase is not Phase.PLANNING
        return given_up or wanted or ended or bool(_failures(rank))

    proposal = Proposal(request.cached_plan_id, request.digest, request.attempt)
    saves.proposed(rank, proposal)
    on_end(give_up)
    answered = saves.until(over, time.monotonic() + request.timeout_s + SLACK_S)
    saves.check(rank)
    if rank.phase is not Phase.PLANNING:
        agreed = plan_pb2.FinalPlan(plan_id=rank.plan_id, attempt=rank.attempt)
        return sidecar_pb2.PlanResponse(plan=agreed)
    if answered and not given_up and saves.withdrawn(rank):
        return sidecar_pb2.PlanResponse(wanted=True)
    if failures := _failures(rank):
        error = aborted_error(rank.save.key, rank.save.checkpoint_id, failures)
        saves.refused(rank, error)
        raise error
    if given_up:
        raise UnavailableError(f"{rank.label}: the call of Plan was given up")
    problem = (
        f"the {link.description} did not say within {request.timeout_s:.0f} s whether all ranks go "
        "by their plan"
    )
    status = rank.save.coordinator
    if status is not None and status.waiting_on.text:
        problem += f"; it last waited for {status.waiting_on.text}"
    saves.fail(rank, save_pb2.FAILURE_KIND_DEADLINE, f"Plan: {problem}")
    raise DeadlineError(problem)


def _failures(rank: RankSave) -> list[save_pb2.Failure]:
    """Why the coordinator gives the save up when that is for storage.

    Then its ABORT may take as long as storage is away. A rank that calls with its local plan isn't
    kept waiting for it either.
    """
    status = rank.save.coordinator
    failures = list(status.failures) if status is not None else []
    storage = any(each.kind == save_pb2.FAILURE_KIND_STORAGE for each in failures)
    return failures if storage else []
