"""Ranks that are handed over by a cached-plan claim: in this process, with scripted peers."""

import os
from collections.abc import Iterator
from pathlib import Path

import crc32c
import pytest

from pannier.common import timeouts
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors, object_names
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import PLAN_ID, Trainer, attempt_of, status_of

HANDED_OVER = save_pb2.RANK_PHASE_HANDED_OVER
INGESTED = save_pb2.RANK_PHASE_INGESTED
DURABLE = save_pb2.RANK_PHASE_DURABLE
COMMITTED = save_pb2.SAVE_STATE_COMMITTED
DATA = os.urandom(3 << 20)
CLAIM = sidecar_pb2.CachedPlanClaim(
    part="ab" * 8, digest="d", attempt="i1-inc1-g00000000-s1", checkpoint_id="/x/step-1"
)


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        made.start()
        yield made


@pytest.fixture
def trainer(host: Host) -> Trainer:
    return host.trainer()


@pytest.fixture
def context(host: Host, trainer: Trainer) -> sidecar_pb2.SaveContext:
    """Of a rank that was handed over, which the coordinator has a report of."""
    made = trainer.context(host.id())
    hand_over(trainer, made)
    report = host.coordinator.await_phase(made, HANDED_OVER)
    assert report.claim == CLAIM
    assert report.attempt == attempt_of(made.save)
    return made


def hand_over(trainer: Trainer, context: sidecar_pb2.SaveContext) -> records_pb2.DataFile:
    header = trainer.header(context, "0", len(DATA))
    header.claim.CopyFrom(CLAIM)
    with trainer.stream(header) as stream:
        held = stream.committed()
        for offset in range(held, len(DATA), 1 << 20):
            stream.send(DATA[offset : offset + (1 << 20)], offset)
        while held < len(DATA):
            held = stream.committed()
    file = records_pb2.DataFile(name=header.name, size=len(DATA), crc32c=crc32c.crc32c(DATA))
    claim = sidecar_pb2.CachedPlanClaim()
    claim.CopyFrom(CLAIM)
    claim.timeout_s = 50
    trainer.hand_over(context, file, claim=claim)
    return file


def answer(
    host: Host,
    context: sidecar_pb2.SaveContext,
    *,
    plan_id: str = "",
    requested: bool = False,
) -> None:
    """What the coordinator makes of the claims."""
    status = status_of(context, save_pb2.SAVE_STATE_PLANNING)
    status.plan.id, status.plan.full_plan_requested = plan_id, requested
    host.coordinator.send(status)


def stored_receipt(host: Host, context: sidecar_pb2.SaveContext) -> records_pb2.Receipt:
    key = object_names.receipt(attempt_of(context.save), 0)
    return records_pb2.Receipt.FromString(Path(host.id(), key).read_bytes())


def test_no_receipt_is_written_before_the_plan_is_confirmed(
    host: Host, trainer: Trainer, context: sidecar_pb2.SaveContext
) -> None:
    """The bytes are uploaded meanwhile, and the trainer may die."""
    trainer.die()
    report = host.coordinator.await_report(lambda report: report.status.bytes_durable == len(DATA))
    assert report.status.phase == HANDED_OVER
    answer(host, context)
    answer(host, context, plan_id=PLAN_ID)
    report = host.coordinator.await_phase(context, DURABLE)
    assert not report.HasField("claim")
    assert report.receipt.plan_id == stored_receipt(host, context).plan_id == PLAN_ID
    # By which the coordinator checks that it is the part that the plan has.
    assert report.receipt.part == CLAIM.part


def test_a_claim_that_is_confirmed_while_bytes_arrive(host: Host, trainer: Trainer) -> None:
    context = trainer.context(host.id())
    header = trainer.header(context, "0", len(DATA))
    header.claim.CopyFrom(CLAIM)
    with trainer.stream(header) as stream:
        assert stream.committed() == 0
        host.coordinator.await_report(lambda report: report.claim == CLAIM)
        answer(host, context, plan_id=PLAN_ID)
        trainer.await_state(context, save_pb2.SAVE_STATE_PLANNING)
    hand_over(trainer, context)
    report = host.coordinator.await_phase(context, DURABLE)
    assert report.receipt.plan_id == PLAN_ID
    phases = [each.status.phase for each in host.coordinator.reports]
    assert HANDED_OVER not in phases


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_restarted_sidecar_has_the_claim_in_its_journal(
    host: Host, trainer: Trainer, context: sidecar_pb2.SaveContext, confirmed: bool
) -> None:
    trainer.die()
    before = len(host.coordinator.reports)
    if confirmed:
        answer(host, context, plan_id=PLAN_ID)
        host.coordinator.await_phase(context, DURABLE)
    host.end()
    after = len(host.coordinator.reports)
    host.start()
    if confirmed:
        report = host.coordinator.await_phase(context, DURABLE, after=after)
    else:
        assert host.coordinator.await_phase(context, HANDED_OVER, after=after).claim == CLAIM
        answer(host, context, plan_id=PLAN_ID)
        report = host.coordinator.await_phase(context, DURABLE, after=before)
    assert report.receipt.plan_id == stored_receipt(host, context).plan_id == PLAN_ID
    host.coordinator.decide(context, COMMITTED)
    await_true(lambda: not host.sidecar.saves.undecided(), "committed")
    host.end()
    assert sorted(os.listdir(host.spool)) == ["00000001.data", "journal"]
    host.start()
    (copy,) = host.sidecar.local_copies.statuses()
    assert copy.checkpoint_id == context.checkpoint_id


def test_a_rank_whose_full_plan_is_requested_is_confirmed_by_the_answer(
    host: Host, trainer: Trainer, context: sidecar_pb2.SaveContext
) -> None:
    answer(host, context, requested=True)
    while not trainer.await_state(context, save_pb2.SAVE_STATE_PLANNING).plan.full_plan_requested:
        pass
    # Of a plan that has something else for this rank.
    host.coordinator.part = "other"
    assert trainer.plan(context).plan_id == PLAN_ID
    (save,) = host.sidecar.saves.undecided()
    assert save.ranks[0].unconfirmed == CLAIM
    host.coordinator.part = CLAIM.part
    assert trainer.plan(context).plan_id == PLAN_ID
    # From here on the trainer may die.
    assert save.ranks[0].unconfirmed is None
    trainer.die()
    report = host.coordinator.await_phase(context, DURABLE)
    assert report.receipt.plan_id == PLAN_ID


def test_a_dead_trainer_whose_full_plan_is_requested_is_named(
    host: Host,
    trainer: Trainer,
    context: sidecar_pb2.SaveContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", 0.1)
    trainer.die()
    await_true(lambda: not host.sidecar._connections.jobs(), "disconnected")
    answer(host, context, requested=True)
    report = host.coordinator.await_report(lambda report: report.HasField("failure"))
    assert report.failure.kind == save_pb2.FAILURE_KIND_LOST
    assert "rank 0" in report.failure.message


@pytest.mark.parametrize("field", ["part", "digest"])
def test_a_rank_claims_one_plan(
    host: Host, trainer: Trainer, context: sidecar_pb2.SaveContext, field: str
) -> None:
    other = sidecar_pb2.CachedPlanClaim()
    other.CopyFrom(CLAIM)
    setattr(other, field, "other")
    with pytest.raises(errors.InvalidRequestError, match="after it claimed or got another one"):
        trainer.hand_over(context, claim=other)
    setattr(other, field, "")
    with pytest.raises(errors.InvalidRequestError, match="has no part or no digest"):
        trainer.hand_over(context, claim=other)


def test_a_rank_with_a_plan_claims_none(host: Host, trainer: Trainer) -> None:
    context = trainer.context(host.id())
    trainer.plan(context)
    with pytest.raises(errors.InvalidRequestError, match="after it claimed or got another one"):
        trainer.hand_over(context, claim=CLAIM)
