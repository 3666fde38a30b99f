"""What a rank does about its claim of a cached plan when the coordinator requests its local plan."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.client.transport import plan_claim
from pannier.client.transport.file_stream import Cancellation
from pannier.client.transport.plan_claim import PlanClaim
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from support.processes.stretch import BOUND_S

SAVE = save_pb2.SaveId(job="job", incarnation="abc", group="g1", number=2)
CONTEXT = sidecar_pb2.SaveContext(save=SAVE, checkpoint_id="/x/y", ranks=[0, 1], world_size=2)


class Plan:
    """A cached plan, which the coordinator's plan equals."""

    def __init__(self) -> None:
        self.message = plan_pb2.LocalPlan()
        self.digest = "d"
        self.confirmed: list[str] = []

    def claim(self) -> sidecar_pb2.CachedPlanClaim:
        return sidecar_pb2.CachedPlanClaim(part="p1")

    def confirm(self, checkpoint_id: str, attempt: str) -> None:
        self.confirmed.append(attempt)

    @property
    def staged_positions(self) -> bytes:
        return b"\1\3"

    def attempt(self, number: int) -> str:
        return f"a{number}"

    def equals(self, final: plan_pb2.FinalPlan, number: int) -> bool:
        return True


class Sidecar:
    """Answers local plans with the coordinator's plan."""

    def __init__(self) -> None:
        self.requests: list[sidecar_pb2.PlanRequest] = []

    def plan(self, request: sidecar_pb2.PlanRequest, timeout: float) -> sidecar_pb2.PlanResponse:
        self.requests.append(request)
        return sidecar_pb2.PlanResponse(plan=plan_pb2.FinalPlan(plan_id="p2", attempt="a2"))


class RefusedThread(threading.Thread):
    """As while the interpreter ends."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("can_start", [True, False])
def test_a_requested_local_plan_is_sent_once_also_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, can_start: bool
) -> None:
    if not can_start:
        refusing = SimpleNamespace(Condition=threading.Condition, Thread=RefusedThread)
        monkeypatch.setattr(plan_claim, "threading", refusing)
    plan = Plan()
    sidecar: Any = Sidecar()
    claim = PlanClaim(
        plan,
        sidecar,
        CONTEXT,
        deadline=Deadline(BOUND_S),
        wait_s=BOUND_S,
        stop=Cancellation(),
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(claim.wait)
        for _ in range(2):
            claim.on_status(save_pb2.SaveStatus(plan=save_pb2.PlanState(full_plan_requested=True)))
        assert waiting.result(BOUND_S) == "p2"
    assert [each.digest for each in sidecar.requests] == ["d"]
    assert [each.staged_positions for each in sidecar.requests] == [b"\1\3"]
    assert plan.confirmed == ["a2"]
