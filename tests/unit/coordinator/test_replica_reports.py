"""Sidecars that hold replicas, at a real coordinator: what their reports change, and what they are asked for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.v1 import coordinator_pb2, plan_pb2, save_pb2, sidecar_pb2
from support.actors.ranks_by_hand import (
    CoordinatorClient,
    Sidecar,
    context,
    coordinator,
    local_plan,
    receipt_of,
    report,
    tensor,
)
from support.processes.stretch import until

COMMITTED = save_pb2.SAVE_STATE_COMMITTED
DURABLE, INGESTED = save_pb2.RANK_PHASE_DURABLE, save_pb2.RANK_PHASE_INGESTED


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "CHECK_S", 0.02)
    monkeypatch.setattr(timeouts, "STATUS_REFRESH_S", 0.02)
    monkeypatch.setattr(timeouts, "TAKE_OVER_S", 0.1)


async def planned(client: CoordinatorClient, place: str) -> dict[int, plan_pb2.FinalPlan]:
    calls = [
        client.plan(context(rank, place), local_plan([tensor(f"w{rank}", 8)])) for rank in (0, 1)
    ]
    return dict(enumerate(await asyncio.gather(*calls)))


def held(
    who: sidecar_pb2.SaveContext, attempt: str, *, complete: bool = True
) -> coordinator_pb2.HeldCopies:
    made = coordinator_pb2.HeldCopies(peer_address="holder:7")
    made.replicas.add(context=who, attempt=attempt, complete=complete)
    return made


async def repeat(sidecar: Sidecar, copies: coordinator_pb2.HeldCopies) -> None:
    """Sends them again and again, as sidecars do: the save's attempt has to be known first."""
    while True:
        await sidecar.send_unstored(copies=copies)
        await asyncio.sleep(0.05)


def offer() -> dict[str, Any]:
    return {"replicas": coordinator_pb2.ReplicaOffer(failure_domain="rack")}


def test_a_save_that_only_a_replicas_holder_reports_is_resumed_and_committed(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")
    who = [context(rank, place) for rank in (0, 1)]

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            finals = await planned(client, place)
            attempt = finals[0].attempt
            receipts = [receipt_of(finals[rank], rank) for rank in (0, 1)]
            own = await client.attach("node-0")
            await own.send(report(who[0], attempt, DURABLE, receipt=receipts[0]))
            await own.await_status(who[0].save, lambda status: bool(status.waiting_on.text))
        # The coordinator and both hosts are lost.
        async with coordinator(sockets) as client:
            partial = held(who[1], attempt, complete=False)
            holder = await client.attach("node-2", copies=partial, **offer())
            repeating = asyncio.create_task(repeat(holder, held(who[1], attempt)))
            status = await holder.await_status(who[1].save, lambda s: s.replicated_ranks == 1)
            assert not status.failures
            await until(lambda: holder.orders == {1})
            repeating.cancel()
            await holder.send(report(who[1], attempt, INGESTED))
            await holder.send(report(who[1], attempt, DURABLE, receipt=receipts[1]))
            await holder.await_state(who[1].save, COMMITTED)

    asyncio.run(scenario())


def test_a_host_that_comes_back_after_its_rank_was_taken_over_does_no_harm(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")
    who = [context(rank, place) for rank in (0, 1)]

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            first = await client.attach("node-0")
            lost = await client.attach("node-1")
            finals = await planned(client, place)
            attempt = finals[0].attempt
            for rank, sidecar in enumerate((first, lost)):
                await sidecar.send(report(who[rank], attempt, INGESTED))
            holder = await client.attach("node-2", copies=held(who[1], attempt), **offer())
            await first.await_status(who[0].save, lambda status: status.replicated_ranks == 1)
            await lost.close()
            await until(lambda: holder.orders == {1})
            await holder.send_unstored(report(who[1], attempt, INGESTED), copies=held(who[1], ""))
            await first.await_status(who[0].save, lambda status: status.replicated_ranks == 0)
            boom = save_pb2.Failure(rank=1, kind=save_pb2.FAILURE_KIND_SPOOL, message="boom")
            back = await client.attach(
                "node-1", [report(who[1], attempt, save_pb2.RANK_PHASE_FAILED, failure=boom)]
            )
            for rank, sidecar in ((1, holder), (0, first)):
                receipt = receipt_of(finals[rank], rank)
                await sidecar.send(report(who[rank], attempt, DURABLE, receipt=receipt))
            status = await back.await_state(who[1].save, COMMITTED)
            assert not status.failures

    asyncio.run(scenario())


def test_claims_of_replicas_that_are_not_offered_or_of_another_attempt_change_nothing(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            first = await client.attach("node-0")
            finals = await planned(client, place)
            who, attempt = context(1, place), finals[0].attempt
            stranger = await client.attach("node-8", copies=held(who, attempt))
            other = await client.attach("node-9", copies=held(who, f"{attempt}9"), **offer())
            await first.send(report(context(0, place), attempt, INGESTED))
            await other.await_status(who.save, lambda status: bool(status.waiting_on.text))
            right = await client.attach("node-7", copies=held(who, attempt), **offer())
            await until(lambda: right.orders == {1})
            assert not stranger.orders | other.orders

    asyncio.run(scenario())
