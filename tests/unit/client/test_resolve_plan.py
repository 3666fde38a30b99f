"""When a save goes by the plan of an earlier one, against a scripted sidecar: what is asked, and when."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from pannier.client.client import Client
from pannier.client.config import Settings
from pannier.client.planning.local_plan import PlannerRun
from pannier.client.transport.connection import SidecarConnection
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire.errors import InvalidRequestError, PannierError, SaveAbortedError
from pannier.wire.plan_columns import decode_column
from support.actors.scripted_sidecar import ScriptedSidecar, wait_until
from support.processes.stretch import BOUND_S

State = dict[str, Any]


@pytest.fixture
def sidecar(sidecar: ScriptedSidecar) -> ScriptedSidecar:
    # Each save is an attempt of its own.
    sidecar.on["Plan"] = lambda request: name_attempt(sidecar, request)
    return sidecar


@pytest.fixture
def client(sidecar: ScriptedSidecar) -> Iterator[Client]:
    made = Client(Settings(sidecar=sidecar.address))
    yield made
    with suppress(PannierError):
        made.close()


def state(value: float = 1.0) -> State:
    """A new state of the same structure at each call."""
    weight = torch.nn.Parameter(torch.full((40, 3), float(value)))
    moments = {i: {"step": torch.tensor(float(value)), "exp_avg": torch.zeros(3)} for i in range(2)}
    groups = [{"lr": 0.1 * value, "betas": (0.9, 0.99), "params": [0, 1]}]
    return {"model": {"w": weight}, "optim": {"state": moments, "param_groups": groups}, "n": value}


def changed(key: str, value: Any) -> State:
    made = state()
    made["model"][key] = value
    return made


def name_attempt(
    sidecar: ScriptedSidecar, request: sidecar_pb2.PlanRequest, incarnation: int = 1
) -> None:
    sidecar.attempt = f"i{incarnation}-a1-g00000000-s{request.context.save.number}"


def full_plans(sidecar: ScriptedSidecar) -> list[sidecar_pb2.PlanRequest]:
    return sidecar.asked(sidecar_pb2.PlanRequest)


def hand_overs(sidecar: ScriptedSidecar) -> list[sidecar_pb2.HandOverRequest]:
    return sidecar.asked(sidecar_pb2.HandOverRequest)


def claims(sidecar: ScriptedSidecar) -> list[sidecar_pb2.HandOverRequest]:
    return [r for r in hand_overs(sidecar) if r.HasField("claim")]


class Model:
    """A ``Stateful`` that makes new tensors each time."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> State:
        self.asked += 1
        return {"w": torch.full((100,), float(self.asked)), "steps": self.asked}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


class Subclass(DefaultSavePlanner):
    """A planner that changes nothing, which the client can't know."""

    runs = 0

    def create_local_plan(self) -> SavePlan:
        type(self).runs += 1
        return super().create_local_plan()


def test_the_second_save_is_neither_planned_nor_asked_for_in_the_call(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    main = threading.get_ident()
    calls = []
    unary = SidecarConnection.call_repeatedly

    def counted(self: SidecarConnection, method: str, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == main:
            calls.append(method)
        return unary(self, method, *args, **kwargs)

    monkeypatch.setattr(SidecarConnection, "call_repeatedly", counted)
    monkeypatch.setattr("pannier.client.planning.plan_cache.PlannerRun", None)
    handle = client.async_save(state(2.0), checkpoint_id="/x/2")
    assert not calls
    assert handle.result(BOUND_S).attempt
    assert len(full_plans(sidecar)) == 1
    (hand_over,) = claims(sidecar)
    assert 0 < hand_over.claim.timeout_s <= Settings().plan_timeout
    hand_over.claim.ClearField("timeout_s")
    assert hand_over.claim == sidecar_pb2.CachedPlanClaim(
        part="part",
        digest=full_plans(sidecar)[0].digest,
        attempt="i1-a1-g00000000-s1",
        checkpoint_id="/x/1",
    )
    assert (hand_over.attempt, hand_over.plan_id) == ("i1-a1-g00000000-s2", "")
    assert all(file.name.startswith("__i1-a1-g00000000-s2_") for file in hand_over.files)
    # The claim comes with the first bytes: there is no call before them, and none after.
    kinds = [type(request) for request in sidecar.requests[len(sidecar.requests) // 2 :]]
    assert set(kinds) == {sidecar_pb2.FileHeader, sidecar_pb2.HandOverRequest}
    (first, *_) = (r for r in sidecar.asked(sidecar_pb2.FileHeader) if r.context.save.number == 2)
    assert first.claim.part == "part"
    # The next one names the newest save that has the plan.
    client.save(state(3.0), checkpoint_id="/x/3")
    assert claims(sidecar)[-1].claim.attempt == "i1-a1-g00000000-s2"
    assert claims(sidecar)[-1].claim.checkpoint_id == "/x/2"


CHANGES: dict[str, Any] = {
    "another key": lambda: changed("v", torch.ones(1)),
    "a key less": lambda: {k: v for k, v in state().items() if k != "n"},
    "the order of keys": lambda: dict(reversed(state().items())),
    "a key's type": lambda: {**state(), "optim": {**state()["optim"], "state": {"0": {}}}},
    "shape": lambda: changed("w", torch.nn.Parameter(torch.ones(3, 40))),
    "dimensions": lambda: changed("w", torch.nn.Parameter(torch.ones(120))),
    "dtype": lambda: changed("w", torch.nn.Parameter(torch.ones(40, 3).bfloat16())),
    "dtype of the same size": lambda: {
        **state(),
        "model": {"w": torch.ones(40, 3, dtype=torch.int32)},
    },
    "requires_grad": lambda: changed("w", torch.nn.Parameter(torch.ones(40, 3), False)),
    "a tensor for an object": lambda: {**state(), "n": torch.ones(1)},
    "an object for a tensor": lambda: changed("w", 1),
    "a mapping for an object": lambda: {**state(), "n": {"a": 1}},
    "a list of tensors for an object": lambda: {**state(), "n": [torch.ones(1)]},
    "the length of a list": lambda: {
        **state(),
        "optim": {**state()["optim"], "param_groups": state()["optim"]["param_groups"] * 2},
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_planned_again(
    client: Client, sidecar: ScriptedSidecar, change: Any
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    client.save(change(), checkpoint_id="/x/2")
    first, second = full_plans(sidecar)
    assert first.digest != second.digest
    # Only the part of the last save is reused: with other ranks' last parts it makes a plan.
    client.save(change(), checkpoint_id="/x/3")
    assert [r.claim.digest for r in claims(sidecar)] == [second.digest]
    client.save(state(), checkpoint_id="/x/4")
    assert full_plans(sidecar)[-1].digest == first.digest
    assert len(full_plans(sidecar)) == 3


@pytest.mark.parametrize(
    "other", [{"a.0": torch.ones(3)}, {"a": [torch.ones(3)]}], ids=["key", "list"]
)
def test_the_same_key_by_another_path_is_planned_again(
    client: Client, sidecar: ScriptedSidecar, other: State
) -> None:
    client.save({"a": {"0": torch.ones(3)}}, checkpoint_id="/x/1")
    client.save(other, checkpoint_id="/x/2")
    first, second = full_plans(sidecar)
    assert first.plan.items == second.plan.items
    assert first.plan.mappings != second.plan.mappings
    assert first.digest != second.digest


def test_an_object_may_become_any_other(client: Client, sidecar: ScriptedSidecar) -> None:
    client.save(state(), checkpoint_id="/x/1")
    for n, value in enumerate(["a", None, (1, torch.ones(2)), [1, "b"], {1, 2}, object]):
        client.save({**state(), "n": value}, checkpoint_id=f"/x/{n}")
    assert len(full_plans(sidecar)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        torch.ones(40, 3, device="meta"),
        torch.ones(40, 3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3)] * 40),
    ],
    ids=["meta", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_refused_stays_refused(
    client: Client, sidecar: ScriptedSidecar, bad: torch.Tensor
) -> None:
    good = {"w": torch.ones(40, 3)}
    client.save(good, checkpoint_id="/x/1")
    with pytest.raises(InvalidRequestError, match="'w' can't be saved"):
        client.save({"w": bad}, checkpoint_id="/x/2")
    client.save(good, checkpoint_id="/x/3")
    assert len(full_plans(sidecar)) == 1


def test_planner_and_options_belong_to_the_plan(client: Client, sidecar: ScriptedSidecar) -> None:
    planners = (
        DefaultSavePlanner(),
        DefaultSavePlanner(flatten_sharded_tensors=False),
        DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        Subclass(),
        None,
    )
    for n, planner in enumerate(planners):
        client.save(state(), planner=planner, checkpoint_id=f"/x/{n}")
    digests = [request.digest for request in full_plans(sidecar)]
    assert len(set(digests)) == 4
    assert digests[-1] == digests[0]


def test_other_planners_are_run_and_go_by_the_digest(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    Subclass.runs = 0
    for n in range(3):
        client.save(state(n), planner=Subclass(), checkpoint_id=f"/x/{n}")
    assert Subclass.runs == 3
    assert (len(full_plans(sidecar)), len(claims(sidecar))) == (1, 2)


def test_a_planner_changed_after_its_making_is_run(client: Client) -> None:
    planner = DefaultSavePlanner()
    client.save(state(), planner=planner, checkpoint_id="/x/1")
    looked_up = []
    look_up = planner.lookup_object

    def spy(index: Any) -> Any:
        looked_up.append(index.fqn)
        return look_up(index)

    planner.lookup_object = spy  # type: ignore[method-assign]
    client.save(state(), planner=planner, checkpoint_id="/x/2")
    assert "model.w" in looked_up


def test_an_unflattened_state_goes_by_the_digest(client: Client, sidecar: ScriptedSidecar) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    for n in range(2):
        client.save(state(n), planner=planner, checkpoint_id=f"/x/{n}")
    assert (len(full_plans(sidecar)), len(claims(sidecar))) == (1, 1)


def test_a_stateful_is_asked_once_and_stays_quick(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    client.save({"model": model}, checkpoint_id="/x/1")
    with monkeypatch.context() as patched:
        patched.setattr("pannier.client.planning.plan_cache.PlannerRun", None)
        client.save({"model": model}, checkpoint_id="/x/2")
    assert model.asked == 2
    # Also where the structure is another.
    client.save({"model": model, "n": 1}, checkpoint_id="/x/3")
    assert model.asked == 3
    assert len(full_plans(sidecar)) == 2


def test_roots_have_their_own_plans(client: Client, sidecar: ScriptedSidecar) -> None:
    for place in ("/x/1", "/y/1", "/x/2", "/y/2"):
        client.save(state(), checkpoint_id=place)
    assert [r.context.checkpoint_id for r in full_plans(sidecar)] == ["/x/1", "/y/1"]


def test_a_coordinator_that_has_forgotten_gets_the_local_plan(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.forgetful = True
    handle = client.async_save(state(), checkpoint_id="/x/2")
    assert handle.ingest_completion.result(BOUND_S) is None
    save = claims(sidecar)[0].context.save
    sidecar.send_status(save, save_pb2.SAVE_STATE_COMMITTED, checkpoint_id="/x/2")
    handle.result(BOUND_S)
    sidecar.forgetful = False
    client.save(state(), checkpoint_id="/x/3")
    first, second = full_plans(sidecar)
    assert first.plan == second.plan
    assert second.context.save.number == 2
    # With what was staged, around which the coordinator makes its plan.
    assert (first.staged_positions, decode_column(second.staged_positions)) == (
        b"",
        list(range(len(decode_column(second.plan.head)))),
    )
    handed_over = hand_overs(sidecar)
    assert [(r.context.save.number, r.plan_id) for r in handed_over] == [
        (1, "p1"),
        (2, ""),
        (3, ""),
    ]
    assert len(claims(sidecar)) == 2


def test_another_answer_than_what_was_staged_ends_the_save(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.forgetful = True
    # It has a new incarnation's number for us.
    sidecar.on["Plan"] = lambda request: name_attempt(sidecar, request, 2)
    handle = client.async_save(state(), checkpoint_id="/x/2")
    with pytest.raises(PannierError, match="i2-a1-g00000000-s2"):
        handle.result(BOUND_S)
    (failure,) = [r.failure for r in sidecar.asked(sidecar_pb2.FailRequest)]
    assert "i1-a1-g00000000-s2" in failure.message
    assert "i2-a1-g00000000-s2" in failure.message
    sidecar.forgetful = False
    client.save(state(), checkpoint_id="/x/3")
    # Planned again in the call.
    assert full_plans(sidecar)[-1].context.save.number == 3
    assert claims(sidecar)[-1].context.save.number == 2


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (save_pb2.FAILURE_KIND_STORAGE, False),
        (save_pb2.FAILURE_KIND_DEADLINE, False),
        (save_pb2.FAILURE_KIND_SKIPPED, False),
        (save_pb2.FAILURE_KIND_LOST, False),
        (save_pb2.FAILURE_KIND_DISAGREEMENT, True),
        (save_pb2.FAILURE_KIND_INVALID_PLAN, True),
        (save_pb2.FAILURE_KIND_PLAN_CHANGED, True),
        (save_pb2.FAILURE_KIND_INTEGRITY, True),
    ],
)
def test_after_an_abort_the_next_save_is_planned_again_only_if_the_plan_was_the_cause(
    client: Client, sidecar: ScriptedSidecar, kind: "save_pb2.FailureKind", again: bool
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.commit = False
    handle = client.async_save(state(), checkpoint_id="/x/2")
    sidecar.wait_for(lambda: len(hand_overs(sidecar)) == 2)
    failure = save_pb2.Failure(rank=1, kind=kind, message="it went wrong")
    sidecar.abort(claims(sidecar)[0].context, failure)
    with pytest.raises(SaveAbortedError, match="it went wrong"):
        handle.result(BOUND_S)
    sidecar.commit = True
    client.save(state(), checkpoint_id="/x/3")
    assert [r.context.save.number for r in full_plans(sidecar)] == ([1, 3] if again else [1])


def test_a_call_without_an_answer_leaves_no_part_to_claim(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    """The coordinator may have planned it, and takes the new part for this rank's last one."""
    client.save(state(), checkpoint_id="/x/1")

    def lose(request: sidecar_pb2.PlanRequest) -> None:
        raise SaveAbortedError("another rank failed")

    sidecar.on["Plan"] = lose
    with pytest.raises(SaveAbortedError, match="another rank failed"):
        client.save(changed("v", torch.ones(1)), checkpoint_id="/x/2")
    del sidecar.on["Plan"]
    client.save(state(), checkpoint_id="/x/3")
    assert [r.context.save.number for r in full_plans(sidecar)] == [1, 2, 3]
    assert not claims(sidecar)


def test_a_blocking_save_whose_plan_the_others_changed_is_planned_again_at_once(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")

    def abort(request: sidecar_pb2.HandOverRequest) -> None:
        if request.HasField("claim"):
            kind = save_pb2.FAILURE_KIND_PLAN_CHANGED
            raise SaveAbortedError(
                "no rank writes 'b' any more", [save_pb2.Failure(rank=1, kind=kind, message="b")]
            )

    sidecar.on["HandOver"] = abort
    assert client.save(state(), checkpoint_id="/x/2", timeout=BOUND_S).checkpoint_id == "/x/2"
    assert [r.context.save.number for r in claims(sidecar)] == [2]
    assert full_plans(sidecar)[-1].context.save.number == 3
    # Others raise.
    handle = client.async_save(state(), checkpoint_id="/x/4")
    with pytest.raises(SaveAbortedError):
        handle.result(BOUND_S)


def test_an_answer_whose_names_are_not_its_attempts_is_refused(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SidecarClient.plan

    async def odd(*args: Any) -> sidecar_pb2.PlanResponse:
        answer = await plan(*args)
        answer.plan.attempt = "i1-a1-g00000000-s9"
        return answer

    monkeypatch.setattr(SidecarClient, "plan", odd)
    with pytest.raises(InvalidRequestError, match="must begin with __i1-a1-g00000000-s9_"):
        client.async_save(state(), checkpoint_id="/x/1")


def test_a_message_that_is_kept_is_the_planners(client: Client, sidecar: ScriptedSidecar) -> None:
    client.save(state(), checkpoint_id="/x/1")
    planning = PlannerRun(state(), None, is_coordinator=True, checkpoint_id="/x/1")
    assert full_plans(sidecar)[0].plan == planning.message
    assert isinstance(planning.message, plan_pb2.LocalPlan)


def test_a_prepared_save_costs_what_every_save_costs(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.prepare(state(), "/x")
    (prepared,) = sidecar.asked(sidecar_pb2.PlanRequest)
    assert prepared.prepare
    assert not sidecar.files
    assert not client.saves
    with monkeypatch.context() as patched:
        patched.setattr("pannier.client.planning.plan_cache.PlannerRun", None)
        patched.setattr("pannier.client.staging.layout._File._write_headers", None)
        client.save(state(), checkpoint_id="/x/1")
    (hand_over,) = claims(sidecar)
    assert hand_over.context.save.number == 2
    # No manifest in storage has this plan.
    assert (hand_over.claim.attempt, hand_over.claim.checkpoint_id) == ("", "")


def test_a_state_may_be_freed_while_its_save_is_under_way(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = False
    handles, freed = [], []
    for number, planner in enumerate((None, None, Subclass())):
        saved = {"large": torch.ones(1 << 18), "small": torch.ones(3)}
        freed += map(weakref.ref, saved.values())
        target = f"/x/{number}"
        handles.append(client.async_save(saved, checkpoint_id=target, planner=planner))
        del saved, planner
    gc.collect()
    assert [reference() for reference in freed] == [None] * 6
    assert not any(handle.done() for handle in handles)
    for hand_over in hand_overs(sidecar):
        sidecar.send_status(hand_over.context.save, save_pb2.SAVE_STATE_COMMITTED)


def test_preparing_refuses_what_saving_refuses(client: Client, sidecar: ScriptedSidecar) -> None:
    with pytest.raises(InvalidRequestError, match="'w' can't be saved"):
        client.prepare({"w": torch.ones(2, device="meta")}, "/x")
    with pytest.raises(InvalidRequestError, match="neither a path nor a URL"):
        client.prepare(state(), "")
    client.prepare(state(), "/x")
    assert [r.context.save.number for r in full_plans(sidecar)] == [3]


def behind(request: sidecar_pb2.PlanRequest) -> None:
    error = SaveAbortedError("save number 2 ended without rank 0")
    error.resume_at = 7
    raise error


def refuse(request: Any) -> None:
    """What a sidecar answers whose other ranks took part in a save that was aborted."""
    if request.context.save.number == 2:
        raise SaveAbortedError("save number 2 was aborted")


@pytest.mark.parametrize("known", ["by the first bytes", "by the hand-over", "by its status"])
def test_a_rank_that_missed_calls_fails_the_save_that_the_others_are_at_and_is_in_step_again(
    client: Client, sidecar: ScriptedSidecar, known: str
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.on["Plan"] = behind
    if known == "by its status":
        sidecar.commit = sidecar.confirm = False
    else:
        sidecar.on["Write" if "bytes" in known else "HandOver"] = refuse
    handle = client.async_save(state(), checkpoint_id="/x/7")
    if known == "by its status":
        sidecar.wait_for(lambda: len(claims(sidecar)) == 1)
        failure = save_pb2.Failure(rank=0, message="async_save was not called there")
        save = claims(sidecar)[0].context.save
        state_ = save_pb2.SAVE_STATE_ABORTED
        sidecar.send_status(save, state_, failure, checkpoint_id="/x/2")
    with pytest.raises(SaveAbortedError, match="missed save calls of the other ranks"):
        handle.result(BOUND_S)
    sidecar.commit = sidecar.confirm = True
    (failed,) = sidecar.asked(sidecar_pb2.FailRequest)
    assert failed.context.save.number == 7
    assert "missed save calls" in failed.failure.message
    sidecar.on.clear()
    client.save(state(), checkpoint_id="/x/8")
    assert claims(sidecar)[-1].context.save.number == 8


def test_a_save_that_ended_without_this_rank_and_has_no_successor_fails(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.commit = sidecar.confirm = False

    def ended(request: sidecar_pb2.PlanRequest) -> None:
        raise SaveAbortedError("save number 2 was aborted")

    sidecar.on["Plan"] = ended
    handle = client.async_save(state(), checkpoint_id="/x/7")
    sidecar.wait_for(lambda: len(claims(sidecar)) == 1)
    failure = save_pb2.Failure(rank=1, message="disk full")
    save = claims(sidecar)[0].context.save
    sidecar.send_status(save, save_pb2.SAVE_STATE_ABORTED, failure, checkpoint_id="/x/2")
    with pytest.raises(SaveAbortedError, match="disk full"):
        handle.result(BOUND_S)


def test_a_rank_whose_plan_is_not_confirmed_is_not_ingested(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    sidecar.commit = sidecar.confirm = False
    handle = client.async_save(state(), checkpoint_id="/x/2")
    sidecar.wait_for(lambda: len(claims(sidecar)) == 1)
    wait_until(lambda: handle.status().bytes_ingested == handle.status().bytes)
    assert not handle.ingest_completion.done()
    claimed = claims(sidecar)[0]
    sidecar.send_status(
        claimed.context.save, save_pb2.SAVE_STATE_STAGING, plan=save_pb2.PlanState(id="p1")
    )
    assert handle.ingest_completion.result(BOUND_S) is None
    assert not handle.done()
    sidecar.send_status(claimed.context.save, save_pb2.SAVE_STATE_COMMITTED)


def test_a_plan_that_is_confirmed_late_ingests_the_rank_all_the_same(
    sidecar: ScriptedSidecar,
) -> None:
    with Client(Settings(sidecar=sidecar.address, plan_timeout=0.1)) as client:
        client.save(state(), checkpoint_id="/x/1")
        sidecar.commit = sidecar.confirm = False
        handle = client.async_save(state(), checkpoint_id="/x/2")
        sidecar.wait_for(lambda: len(claims(sidecar)) == 1)
        # Its wait for the plan has timed out.
        assert client.saves.wait_until_sent(BOUND_S)
        assert not handle.ingest_completion.done()
        claimed = claims(sidecar)[0]
        ingested = save_pb2.RankStatus(rank=0, phase=save_pb2.RANK_PHASE_INGESTED)
        sidecar.send_status(
            claimed.context.save,
            save_pb2.SAVE_STATE_INGESTED,
            plan=save_pb2.PlanState(id="p1"),
            ranks=[ingested],
        )
        assert handle.ingest_completion.result(BOUND_S) is None
        sidecar.send_status(claimed.context.save, save_pb2.SAVE_STATE_COMMITTED)


def test_the_local_plan_is_sent_while_bytes_are_under_way(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    client.save(state(), checkpoint_id="/x/1")
    planned = threading.Event()

    def request_plan(header: sidecar_pb2.FileHeader) -> None:
        sidecar.send_status(
            header.context.save,
            save_pb2.SAVE_STATE_PLANNING,
            checkpoint_id=header.context.checkpoint_id,
            plan=save_pb2.PlanState(full_plan_requested=True),
        )
        assert planned.wait(BOUND_S)

    def answer(request: sidecar_pb2.PlanRequest) -> None:
        name_attempt(sidecar, request)
        planned.set()

    sidecar.on.update({"Write": request_plan, "Plan": answer})
    # The plan alone answers the claim, also where its response comes after the hand-over's.
    sidecar.commit = sidecar.confirm = False
    handle = client.async_save(state(), checkpoint_id="/x/2")
    assert handle.ingest_completion.result(BOUND_S) is None
    assert [r.context.save.number for r in full_plans(sidecar)] == [1, 2]
    context = hand_overs(sidecar)[-1].context
    sidecar.send_status(context.save, save_pb2.SAVE_STATE_COMMITTED, checkpoint_id="/x/2")
    handle.result(BOUND_S)
