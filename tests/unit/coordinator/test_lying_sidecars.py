"""Peers that send a coordinator false reports: those about other hosts' ranks have no effect."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pannier.coordinator import server
from pannier.v1 import coordinator_pb2, plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import (
    InvalidRequestError,
    OverloadedError,
    PannierError,
    SaveAbortedError,
)
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
from support.processes.channels import OWN_CONNECTION

COMMITTED, ABORTED = save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED
INGESTED, DURABLE, FAILED = (
    save_pb2.RANK_PHASE_INGESTED,
    save_pb2.RANK_PHASE_DURABLE,
    save_pb2.RANK_PHASE_FAILED,
)


async def planned(
    client: CoordinatorClient, place: str, ranks: tuple[int, ...] = (0, 1), number: int = 1
) -> dict[int, plan_pb2.FinalPlan]:
    finals = await asyncio.gather(
        *(
            client.plan(
                context(rank, place, ranks=ranks, number=number, world_size=8),
                local_plan([tensor(f"w{rank}", 8)]),
            )
            for rank in ranks
        )
    )
    return dict(zip(ranks, finals, strict=True))


async def settled(sidecar: Sidecar, client: CoordinatorClient, place: str) -> None:
    """Returns when all that ``sidecar`` has sent was processed: a save of its own has ended."""
    who = context(7, f"{place}-aside", ranks=(7,), world_size=8)
    await client.plan(who, local_plan([tensor("x", 1)]))
    gone = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="enough")
    await sidecar.send_unstored(report(who, "", FAILED, failure=gone))
    await sidecar.await_state(who.save, ABORTED)


def test_a_sidecar_that_reports_for_ranks_of_another_host_harms_no_save(
    sockets: Path, tmp_path: Path
) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            honest = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            liar = await client.attach("node-9")
            finals = await planned(client, str(place))
            who = [context(rank, str(place), world_size=8) for rank in (0, 1)]
            attempt = finals[0].attempt
            for rank in (0, 1):
                await honest[rank].send(report(who[rank], attempt, INGESTED))
            await honest[1].await_state(who[0].save, save_pb2.SAVE_STATE_INGESTED)
            forged = receipt_of(finals[1], 1)
            forged.files[0].crc32c ^= 1
            misplaced = receipt_of(finals[0], 0)
            boom = save_pb2.Failure(rank=1, kind=save_pb2.FAILURE_KIND_CLIENT, message="boom")
            other = object_names.Attempt(9, 1, who[0].save.group, "aa").name
            await liar.send_unstored(
                report(who[1], attempt, FAILED, failure=boom),
                report(who[1], attempt, DURABLE, receipt=forged),
                report(who[1], attempt, DURABLE, receipt=misplaced),
                report(who[0], other, INGESTED),
                report(who[0], "../../elsewhere", INGESTED),
                trainers=[
                    coordinator_pb2.TrainerStatus(
                        job="job", incarnation="aa", rank=rank, death="x" * 10**6
                    )
                    for rank in (0, 1)
                ],
            )
            await settled(liar, client, str(place))
            for rank in (0, 1):
                receipt = receipt_of(finals[rank], rank)
                await honest[rank].send(report(who[rank], attempt, DURABLE, receipt=receipt))
            status = await honest[0].await_state(who[0].save, COMMITTED, ABORTED)
            assert status.state == COMMITTED, status
            assert not status.failures
            stored = place / object_names.receipt(attempt, 1)
            assert records_pb2.Receipt.FromString(stored.read_bytes()) == receipt_of(finals[1], 1)

    asyncio.run(scenario())


def test_a_sidecar_takes_over_from_one_of_its_host(sockets: Path, tmp_path: Path) -> None:
    """The stream of the sidecar's former process may still seem to be open."""
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            old, new = await client.attach("node-0"), await client.attach("node-0")
            finals = await planned(client, place)
            for rank, final in finals.items():
                who = context(rank, place, world_size=8)
                await old.send(report(who, final.attempt, INGESTED))
                receipt = receipt_of(final, rank)
                await new.send(report(who, final.attempt, DURABLE, receipt=receipt))
            await new.await_state(context(0, place).save, COMMITTED)

    asyncio.run(scenario())


Spoil = Callable[[coordinator_pb2.RankReport], None]
SPOILS: dict[str, Spoil] = {
    "another plan": lambda r: setattr(r.receipt, "plan_id", "0" * 64),
    "another attempt": lambda r: setattr(r, "attempt", "i9-aa-g00000000-s1"),
    "a file twice": lambda r: r.receipt.files.append(r.receipt.files[0]),
    "another's file": lambda r: setattr(
        r.receipt.files[0], "name", "__i1-aa-g00000000-s1_0_0.distcp"
    ),
    "a file outside": lambda r: setattr(r.receipt.files[0], "name", "../../x.distcp"),
    "a failure that never ends": lambda r: r.failure.CopyFrom(
        save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="x" * 10**6)
    ),
}


@pytest.mark.parametrize("lie", SPOILS)
def test_a_lie_about_its_own_rank_ends_that_save_alone(
    sockets: Path, tmp_path: Path, lie: str
) -> None:
    own, others = str(tmp_path / "root" / "own"), str(tmp_path / "root" / "others")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            liar, honest = await client.attach("node-2"), await client.attach("node-0")
            finals = await planned(client, own, (2, 3))
            theirs = await planned(client, others)
            who = context(2, own, ranks=(2, 3), world_size=8)
            made = report(who, finals[2].attempt, DURABLE, receipt=receipt_of(finals[2], 2))
            SPOILS[lie](made)
            await liar.send_unstored(made)
            status = await liar.await_state(who.save, ABORTED)
            assert [failure.rank for failure in status.failures] == [2]
            assert len(status.failures[0].message) <= limits.MAX_TEXT + 2
            for rank, final in theirs.items():
                receipt = receipt_of(final, rank)
                whose = context(rank, others, world_size=8)
                await honest.send(report(whose, final.attempt, DURABLE, receipt=receipt))
            await honest.await_state(context(0, others).save, COMMITTED)

    asyncio.run(scenario())
    assert not (tmp_path / "root" / "own" / ".metadata").exists()
    assert not list(tmp_path.rglob("x.distcp"))


def test_nonsense_in_a_report_is_left_out_and_the_rest_counts(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach("node-0")
            finals = await planned(client, place)
            outside = context(0, place, world_size=8)
            outside.rank = 5
            crowd = context(0, place, world_size=8)
            crowd.ranks.extend(range(2, limits.MAX_RANKS + 1))
            nowhere = sidecar_pb2.SaveContext()
            escape = context(0, place, world_size=8)
            escape.save.job = "../job"
            await sidecar.send_unstored(
                *(report(bad, "", INGESTED) for bad in (outside, crowd, nowhere, escape)),
                watched=[
                    sidecar_pb2.PendingSave(context=bad, handed_over=True)
                    for bad in (outside, nowhere)
                ],
            )
            for rank, final in finals.items():
                made = report(
                    context(rank, place, world_size=8),
                    final.attempt,
                    DURABLE,
                    receipt=receipt_of(final, rank),
                    seconds_since_seen=math.nan if rank else -1e300,
                )
                await sidecar.send(made)
            status = await sidecar.await_state(context(0, place).save, COMMITTED)
            assert all(rank.seconds_since_seen >= 0 for rank in status.ranks)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world_size": limits.MAX_WORLD + 1}, f"{limits.MAX_WORLD + 1} processes of a job"),
        ({"rank": 4}, "ranks that includes 4"),
        ({"world_size": 1}, "rank 1 is not in a world of 1"),
        ({"host": "h" * 300}, "at most 255"),
        ({"checkpoint_id": "/" + "x" * 2000}, "2001 bytes of a checkpoint id: at most 1024"),
    ],
)
def test_a_call_that_can_be_part_of_no_save_is_refused(
    sockets: Path, tmp_path: Path, change: dict[str, object], text: str
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            who = context(0, place)
            for name, value in change.items():
                setattr(who, name, value)
            with pytest.raises(InvalidRequestError, match=text):
                await client.plan(who, local_plan([tensor("w", 4)]))
            await planned(client, place)

    asyncio.run(scenario())


def test_a_rank_that_two_callers_claim_to_be_ends_its_save_alone(
    sockets: Path, tmp_path: Path
) -> None:
    place, aside = str(tmp_path / "root" / "step-1"), str(tmp_path / "root" / "aside")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            await planned(client, place)
            who = context(1, place, world_size=8)
            who.host = "node-9"
            with pytest.raises(SaveAbortedError, match="do two processes run as this rank"):
                await client.plan(who, local_plan([tensor("w1", 9)]))
            await planned(client, aside, (2, 3))

    asyncio.run(scenario())


def test_saves_under_way_have_a_limit_also_for_reports(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SAVES", 4)
    root = tmp_path / "root"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            waiting = [
                asyncio.create_task(
                    client.plan(
                        context(0, f"{root}/{number}", number=number, world_size=8),
                        local_plan([tensor("w", 4)]),
                    )
                )
                for number in range(1, 5)
            ]
            await settled(sidecar, client, str(root / "x"))
            late = context(0, f"{root}/5", number=5, world_size=8)
            with pytest.raises(OverloadedError, match=r"4 saves of group .* the limit: try again"):
                await client.plan(late, local_plan([tensor("w", 4)]))
            await sidecar.send_unstored(report(late, "", INGESTED))
            # Other hosts' saves continue, and so does the stream.
            await planned(client, str(root / "others"), (2, 3))
            for number in range(1, 5):
                await client.fail(context(0, f"{root}/{number}", number=number, world_size=8))
            for each in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(each, SaveAbortedError)

    asyncio.run(scenario())


def test_calls_of_one_sidecar_have_a_limit_and_others_are_answered(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CONNECTION_CALLS", 4)
    ranks = tuple(range(8))
    greedy_place, place = str(tmp_path / "root" / "greedy"), str(tmp_path / "root" / "step-1")

    def calls(own: CoordinatorClient) -> list["asyncio.Task[plan_pb2.FinalPlan]"]:
        return [
            asyncio.create_task(
                own.plan(
                    context(rank, greedy_place, ranks=ranks),
                    local_plan([tensor(f"w{rank}", 1)]),
                    timeout_s=1.5,
                )
            )
            for rank in ranks
        ]

    async def scenario() -> None:
        async with coordinator(sockets) as honest:
            address = f"unix://{sockets}/c.sock"
            async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
                waiting = calls(CoordinatorClient(channel))
                await planned(honest, place)
                ended = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(each, PannierError) for each in ended)
                # Some of the eight were let in: the plan couldn't be made with those.
                assert "(not seen yet)" in str(ended)

    asyncio.run(scenario())
