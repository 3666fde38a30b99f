"""Whole saves against a coordinator on a unix socket, with ranks and sidecars played by hand."""

import asyncio
import dataclasses
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format
from torch.distributed.checkpoint import FileSystemReader

from pannier.common import timeouts
from pannier.coordinator.saves import registry
from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import (
    coordinator_pb2,
    plan_pb2,
    records_pb2,
    save_pb2,
    sidecar_pb2,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import (
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    kind_name,
)
from pannier.wire.plan_columns import decode_column
from pannier.wire.version import WIRE_VERSION
from support.actors.ranks_by_hand import (
    CoordinatorClient,
    Sidecar,
    claim_report,
    connect_client,
    context,
    coordinator,
    local_plan,
    receipt_of,
    report,
    shard,
    tensor,
    thing,
)
from support.plan_messages import columns, keys_of
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S

COMMITTED, ABORTED = save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED
PLANNED, INGESTED, DURABLE = (
    save_pb2.RANK_PHASE_PLANNED,
    save_pb2.RANK_PHASE_INGESTED,
    save_pb2.RANK_PHASE_DURABLE,
)


def halves(rank: int, *, extra: str | None = None) -> plan_pb2.LocalPlan:
    """Half of ``w``, and a copy of ``b`` and ``epoch``."""
    items = [shard("w", [4 * rank, 0], [4, 8], [8, 8]), tensor("b", 8), thing("epoch")]
    if extra is not None:
        items.append(tensor(extra, 3))
    return local_plan(
        items, mappings={"w": ("model", "w"), "b": ("model", "b"), "epoch": ("epoch",)}
    )


async def plan_both(
    client: CoordinatorClient, checkpoint_id: str, number: int = 1
) -> list[plan_pb2.FinalPlan]:
    return await asyncio.gather(
        *(client.plan(context(rank, checkpoint_id, number=number), halves(rank)) for rank in (0, 1))
    )


async def make_durable(
    sidecar: Sidecar, checkpoint_id: str, finals: list[plan_pb2.FinalPlan], number: int = 1
) -> None:
    for each in durable(checkpoint_id, finals, number):
        await sidecar.send(each)


def durable(
    checkpoint_id: str, finals: list[plan_pb2.FinalPlan], number: int = 1
) -> list[coordinator_pb2.RankReport]:
    return [
        report(
            context(rank, checkpoint_id, number=number),
            *(final.attempt, DURABLE),
            receipt=receipt_of(final, rank),
        )
        for rank, final in enumerate(finals)
    ]


def failures_of(error: PannierError) -> dict[int, tuple[str, str]]:
    return {rank: (failure.kind, failure.message) for rank, failure in error.failures.items()}


def decision_of(checkpoint: Path, attempt: str) -> records_pb2.Decision:
    text = (checkpoint / object_names.decision(attempt)).read_bytes()
    return json_format.Parse(text, records_pb2.Decision())


def test_plans_and_receipts_of_all_ranks_become_a_checkpoint(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            finals = await plan_both(client, str(place))
            assert {final.plan_id for final in finals} == {finals[0].plan_id}
            assert [final.attempt for final in finals] == [
                f"i1-aa-{object_names.group_name((0, 1))}-s1"
            ] * 2
            # w is split; b and epoch are held twice and written once.
            written = [
                name
                for final, local in zip(finals, (halves(0), halves(1)), strict=True)
                for name in keys_of(local, final)
            ]
            assert sorted(written) == ["b", "epoch", "w", "w"]
            assert not (place / ".metadata").exists()
            await make_durable(sidecar, str(place), finals)
            save = context(0, str(place)).save
            status = await sidecar.await_state(save, COMMITTED)
            assert [rank.phase for rank in status.ranks] == [DURABLE, DURABLE]
            assert status.committed_s >= status.durable_s > status.planned_s > 0

    asyncio.run(scenario())
    metadata = FileSystemReader(place).read_metadata()
    assert set(metadata.state_dict_metadata) == {"w", "b", "epoch"}
    assert metadata.state_dict_metadata["w"].size == torch.Size([8, 8])
    assert metadata.planner_data == {"w": ("model", "w"), "b": ("model", "b"), "epoch": ("epoch",)}
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == str(place)
    attempt = metadata.storage_meta.save_id
    assert attempt is not None
    assert all(info.length > 0 for info in metadata.storage_data.values())
    decision = decision_of(place, attempt)
    assert decision.outcome == records_pb2.OUTCOME_COMMIT
    assert decision.metadata_size == (place / ".metadata").stat().st_size


@asynccontextmanager
async def unseen_receipt(
    sockets: Path, place: Path
) -> AsyncIterator[tuple[Sidecar, coordinator_pb2.RankReport, save_pb2.SaveId]]:
    """A save whose second host has written its receipt, which isn't in this host's directory."""
    async with coordinator(sockets) as client:
        here, other = [await client.attach(f"node-{rank}") for rank in (0, 1)]
        first, second = durable(str(place), await plan_both(client, str(place)))
        await here.send(first)
        await other.send_unstored(second)
        yield other, second, context(0, str(place)).save


def test_a_receipt_that_shows_late_in_a_shared_directory_is_waited_for(
    sockets: Path, tmp_path: Path
) -> None:
    """As a client of NFS sees it, which remembers for a while that a file was missing."""
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with unseen_receipt(sockets, place) as (other, second, save):
            await other.await_status(
                save, lambda status: "isn't one directory" in status.waiting_on.text
            )
            await other.send(second)
            await other.await_state(save, COMMITTED)

    asyncio.run(scenario())
    assert (place / ".metadata").exists()


def test_a_directory_that_is_another_one_on_another_host_holds_no_checkpoint(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DIRECTORY_CACHED_S", 0.1)
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with unseen_receipt(sockets, place) as (other, _, save):
            status = await other.await_state(save, ABORTED)
            (failure,) = status.failures
            assert failure.kind == save_pb2.FAILURE_KIND_STORAGE
            assert "isn't one directory for all hosts: what node-1 wrote" in failure.message

    asyncio.run(scenario())
    assert not (place / ".metadata").exists()


def test_second_save_to_one_id_replaces_the_first(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "latest"

    async def scenario() -> list[bytes]:
        seen = []
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            for number in (1, 2):
                finals = await plan_both(client, str(place), number)
                await make_durable(sidecar, str(place), finals, number)
                await sidecar.await_state(context(0, str(place), number=number).save, COMMITTED)
                seen.append((place / ".metadata").read_bytes())
        return seen

    first, second = asyncio.run(scenario())
    assert first != second
    metadata = FileSystemReader(place).read_metadata()
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.save_id).endswith("-s2")


def test_older_save_never_replaces_a_newer(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "latest"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            older = await plan_both(client, str(place), 1)
            newer = await plan_both(client, str(place), 2)
            await make_durable(sidecar, str(place), newer, 2)
            await sidecar.await_state(context(0, str(place), number=2).save, COMMITTED)
            await make_durable(sidecar, str(place), older, 1)
            status = await sidecar.await_state(context(0, str(place), number=1).save, ABORTED)
            assert "newer save" in status.failures[0].message
            assert newer[0].attempt in status.failures[0].message

    asyncio.run(scenario())
    metadata = FileSystemReader(place).read_metadata()
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.save_id).endswith("-s2")


def test_missing_rank_is_named_at_the_deadline(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            who = context(0, place, ranks=(0, 1, 2))
            # Known from an earlier save: where rank 2 lives.
            await client.fail(context(2, place + "0", ranks=(0, 1, 2)))
            who.save.number = 2
            with pytest.raises(SaveAbortedError) as caught:
                await client.plan(who, halves(0), timeout_s=2.0)
            failures = failures_of(caught.value)
            assert failures.keys() == {1, 2}
            assert {kind for kind, _ in failures.values()} == {"DEADLINE"}
            assert caught.value.failures[2].host == "node-2"
            assert "rank 1 (not seen yet)" in str(caught.value)
            assert "rank 2 (host node-2, last seen" in str(caught.value)

    asyncio.run(scenario())
    assert not Path(place).exists()


def test_unfinished_rank_is_named_at_the_deadline(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> plan_pb2.FinalPlan:
        async with coordinator(sockets) as client:
            sidecar = await client.attach("node-1")
            finals = await asyncio.gather(
                *(
                    client.plan(context(rank, str(place)), halves(rank), save_timeout_s=7)
                    for rank in (0, 1)
                )
            )
            who = context(1, str(place))
            await sidecar.send(
                report(who, finals[1].attempt, DURABLE, receipt=receipt_of(finals[1], 1))
            )
            status = await sidecar.await_state(who.save, ABORTED)
            assert [failure.rank for failure in status.failures] == [0]
            assert status.failures[0].kind == save_pb2.FAILURE_KIND_DEADLINE
            assert "rank 0 (host node-0, last seen" in status.failures[0].message
            # The decision stays; the attempt's other records go, and the checkpoint never was.
            end = time.monotonic() + BOUND_S
            while (place / object_names.manifest(finals[0].attempt)).exists():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            return finals[0]

    final = asyncio.run(scenario())
    assert decision_of(place, final.attempt).outcome == records_pb2.OUTCOME_ABORT
    assert not (place / ".metadata").exists()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (save_pb2.FAILURE_KIND_SKIPPED, SaveSkippedError),
        (save_pb2.FAILURE_KIND_CLIENT, SaveAbortedError),
    ],
)
def test_failing_rank_ends_the_save_for_all_and_the_next_one_works(
    sockets: Path, tmp_path: Path, kind: "save_pb2.FailureKind", error: type[SaveAbortedError]
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            waiting = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            await client.fail(context(1, place), kind, "no thanks")
            with pytest.raises(error) as caught:
                await waiting
            assert type(caught.value) is error
            assert failures_of(caught.value) == {1: (kind_name(kind), "no thanks")}
            # A later call gets the same error.
            with pytest.raises(error):
                await client.plan(context(0, place), halves(0))
            finals = await plan_both(client, place, 2)
            assert finals[0].attempt.endswith("-s2")

    asyncio.run(scenario())


def test_failure_after_planning_is_sent_to_sidecars_once_it_is_durable(
    sockets: Path, tmp_path: Path
) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            one, two = await client.attach("node-0"), await client.attach("node-1")
            finals = await plan_both(client, str(place))
            first, second = context(0, str(place)), context(1, str(place))
            await one.send(report(first, finals[0].attempt, INGESTED))
            failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_LOST, message="killed")
            await two.send(report(second, finals[1].attempt, PLANNED, failure=failure))
            for sidecar in (one, two):
                status = await sidecar.await_state(first.save, ABORTED)
                assert [(f.rank, f.host, f.message) for f in status.failures] == [
                    (1, "node-1", "killed")
                ]
                assert (place / object_names.decision(finals[0].attempt)).exists()

    asyncio.run(scenario())


def test_loss_of_an_ingested_trainer_changes_nothing(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            finals = await plan_both(client, place)
            who = context(0, place)
            await sidecar.send(report(who, finals[0].attempt, INGESTED))
            failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_LOST, message="killed")
            await sidecar.send(report(who, finals[0].attempt, INGESTED, failure=failure))
            await make_durable(sidecar, place, finals)
            await sidecar.await_state(who.save, COMMITTED)

    asyncio.run(scenario())


def test_rank_that_dies_while_planning_is_lost_at_once(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "root" / "step-1")
    # Its sidecar is attached for longer.
    monkeypatch.setattr(timeouts, "TRAINER_CONNECT_S", 0.0)

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            ranks = (0, 1, 2)
            await client.attach(context(1, place, ranks=ranks).host)
            dying = asyncio.create_task(client.plan(context(1, place, ranks=ranks), halves(1)))
            waiting = asyncio.create_task(client.plan(context(0, place, ranks=ranks), halves(0)))
            await client.await_plans(place, 0, 1)
            dying.cancel()
            with pytest.raises(SaveAbortedError) as caught:
                await waiting
            # Not by the deadline for plans, which has a failure of another kind.
            assert {r: k for r, (k, _) in failures_of(caught.value).items()} == {1: "LOST"}
            cut = f"Plan call was cut off and not repeated within {timeouts.CALL_RETURN_S:g} s"
            assert cut in str(caught.value)

    asyncio.run(scenario())


def test_rank_whose_sidecar_is_restarted_while_planning_calls_again(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "root" / "step-1")
    monkeypatch.setattr(timeouts, "CALL_RETURN_S", 0.1)
    monkeypatch.setattr(timeouts, "SIDECAR_RETURN_S", 0.1)

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            host = context(0, place).host
            killed = await client.attach(host)
            broken = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            await killed.close()
            broken.cancel()
            await asyncio.sleep(0.5)
            # It is serving again, and its trainer has not called yet.
            await client.attach(host)
            await asyncio.sleep(0.5)
            again = asyncio.create_task(client.plan(context(0, place), halves(0)))
            final = await client.plan(context(1, place), halves(1))
            assert (await again).plan_id == final.plan_id

    asyncio.run(scenario())


def test_plan_call_that_is_made_again_joins(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            broken = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            broken.cancel()
            again = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await asyncio.sleep(timeouts.CALL_RETURN_S + 0.2)
            final = await client.plan(context(1, place), halves(1))
            assert (await again).plan_id == final.plan_id
            # An answer that got lost is given again.
            assert await client.plan(context(1, place), halves(1)) == final
            with pytest.raises(SaveAbortedError, match="another plan"):
                await client.plan(context(1, place), halves(1, extra="more"))

    asyncio.run(scenario())


def _other_world(who: sidecar_pb2.SaveContext) -> None:
    who.world_size = 4


def _other_group(who: sidecar_pb2.SaveContext) -> None:
    who.CopyFrom(context(1, who.checkpoint_id, ranks=(0, 1, 2)))
    who.world_size = 2 + 1


def _other_place(who: sidecar_pb2.SaveContext) -> None:
    who.checkpoint_id += "-other"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            _other_place,
            r"rank 0 \(host node-0\) saves to .*step-1, rank 1 \(host node-1\) saves to",
        ),
        (_other_world, r"rank 0 .* has a world size of 2, rank 1 .* of 4"),
        (_other_group, r"rank 0 .* has a world size of 2, rank 1 .* of 3"),
    ],
)
def test_ranks_that_disagree_are_named_with_their_values(
    sockets: Path, tmp_path: Path, change: object, text: str
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            waiting = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            other = context(1, place)
            assert callable(change)
            change(other)
            for call in (client.plan(other, halves(1)), waiting):
                with pytest.raises(SaveAbortedError, match=text) as caught:
                    await call
                assert caught.value.failures.keys() == {0, 1}
                assert {f.kind for f in caught.value.failures.values()} == {"DISAGREEMENT"}

    asyncio.run(scenario())
    assert not Path(place).exists()


def test_ranks_with_different_process_groups_are_named(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            narrow = context(0, place, ranks=(0, 1), world_size=4)
            wide = context(1, place, ranks=(0, 1, 2, 3), world_size=4)
            waiting = asyncio.create_task(client.plan(narrow, halves(0)))
            await client.await_plans(place, 0)
            with pytest.raises(SaveAbortedError, match="same process_group"):
                await client.plan(wide, halves(1))
            with pytest.raises(SaveAbortedError, match="same process_group"):
                await waiting

    asyncio.run(scenario())


def test_ranks_with_different_planner_options_are_named(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            waiting = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            other = halves(1)
            other.options.dedup_save_to_lowest_rank = True
            for call in (client.plan(context(1, place), other), waiting):
                with pytest.raises(
                    SaveAbortedError, match="dedup_save_to_lowest_rank is False on rank 0"
                ):
                    await call

    asyncio.run(scenario())


def test_plans_that_are_no_checkpoint_name_key_and_ranks(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            calls = [
                client.plan(context(0, place), local_plan([tensor("x", 2)])),
                client.plan(context(1, place), local_plan([thing("x")])),
            ]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, SaveAbortedError)
                assert "'x' is a tensor on rank 0 and an object on rank 1" in str(answer)
                assert {f.kind for f in answer.failures.values()} == {"INVALID_PLAN"}

    asyncio.run(scenario())
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("place", "refusal", "text"),
    [
        # Where a path leads is found out by the save's task, in a thread.
        ("{tmp}/elsewhere/step-1", SaveAbortedError, "not below an allowed root"),
        ("{tmp}/root/../step-1", InvalidRequestError, r"'\.\.'|not an absolute path"),
        ("ftp://host/root/step-1", InvalidRequestError, "unknown scheme"),
        ("gs://bucket/root/step-1", InvalidRequestError, "not below an allowed root"),
        ("relative/step-1", InvalidRequestError, "not an absolute path"),
    ],
)
def test_checkpoint_id_that_is_not_allowed_is_refused_at_once(
    sockets: Path, tmp_path: Path, place: str, refusal: type[Exception], text: str
) -> None:
    where = place.format(tmp=tmp_path)

    async def scenario() -> None:
        async with coordinator(sockets, allow=(str(tmp_path / "root"),)) as client:
            # Rank 1 hasn't called yet: no wait for it.
            with pytest.raises(refusal, match=text):
                await client.plan(context(0, where), halves(0))

    asyncio.run(scenario())


def test_storage_that_refuses_is_reported_before_all_ranks_are_there(
    sockets: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            # Not by the deadline for plans, which has a failure of another kind.
            with pytest.raises(SaveAbortedError, match=str(blocked)) as caught:
                await client.plan(context(0, str(blocked / "root" / "step-1")), halves(0))
            assert {f.kind for f in caught.value.failures.values()} == {"STORAGE"}
            # The refusal is not remembered.
            blocked.unlink()
            finals = await plan_both(client, str(blocked / "root" / "step-1"), 2)
            assert finals[0].plan_id

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda r: setattr(r, "plan_id", "0" * 64), "it follows plan"),
        (lambda r: setattr(r.files[0], "size", r.files[0].size - 1), "the plan says"),
        (lambda r: r.files.pop(), "it names files"),
        (lambda r: r.ClearField("varying"), "without a planned place"),
        (lambda r: setattr(r.varying[0], "length", 10**6), "takes bytes 0 to 1000000"),
    ],
)
def test_receipt_that_does_not_fit_the_plan_aborts_by_rank(
    sockets: Path, tmp_path: Path, spoil: object, text: str
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            finals = await plan_both(client, place)
            rank = next(r for r in (0, 1) if 0 in decode_column(finals[r].placement.length))
            receipt = receipt_of(finals[rank], rank)
            assert callable(spoil)
            spoil(receipt)
            who = context(rank, place)
            await sidecar.send(report(who, finals[rank].attempt, DURABLE, receipt=receipt))
            status = await sidecar.await_state(who.save, ABORTED)
            assert [(f.rank, f.kind) for f in status.failures] == [
                (rank, save_pb2.FAILURE_KIND_INTEGRITY)
            ]
            assert text in status.failures[0].message

    asyncio.run(scenario())


def test_rank_without_items_sends_an_empty_receipt(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            finals = await asyncio.gather(
                client.plan(context(0, str(place)), local_plan([tensor("w", 4)])),
                client.plan(context(1, str(place)), local_plan([])),
            )
            assert not finals[1].files
            assert not finals[1].positions
            await make_durable(sidecar, str(place), finals)
            await sidecar.await_state(context(0, str(place)).save, COMMITTED)

    asyncio.run(scenario())
    assert list(FileSystemReader(place).read_metadata().state_dict_metadata) == ["w"]


def test_groups_and_saves_overlap(sockets: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()

            async def one(ranks: tuple[int, ...], number: int) -> None:
                place = str(tmp_path / "root" / f"{ranks[0]}-{number}")
                who = [context(r, place, ranks=ranks, number=number, world_size=4) for r in ranks]
                item = [shard("w", [i * 2], [2], [4]) for i in (0, 1)]
                finals = await asyncio.gather(
                    *(client.plan(w, local_plan([i])) for w, i in zip(who, item, strict=True))
                )
                for w, final in zip(who, finals, strict=True):
                    receipt = receipt_of(final, w.rank)
                    await sidecar.send(report(w, final.attempt, DURABLE, receipt=receipt))
                await sidecar.await_state(who[0].save, COMMITTED)
                assert FileSystemReader(place).read_metadata().state_dict_metadata

            await asyncio.gather(*(one(ranks, n) for ranks in ((0, 1), (2, 3)) for n in (1, 2, 3)))

    asyncio.run(scenario())


def test_save_that_torch_plans_is_begun_and_finished(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            who = [context(rank, str(place)) for rank in (0, 1)]
            begun = await client.call(
                "Begin", sidecar_pb2.BeginRequest(context=who[0], wire_version=WIRE_VERSION)
            )
            names = [object_names.data_file(begun.attempt, rank, 0) for rank in (0, 1)]
            metadata = plan_pb2.GlobalMetadata(
                items=plan_codec.encode_items(
                    [shard("w", [2 * r], [2], [4], hint=r) for r in (0, 1)]
                ),
                files=names,
                placement=plan_pb2.Placement(
                    **columns(file=[0, 1], offset=[0, 0], length=[50, 60])
                ),
            )
            request = sidecar_pb2.FinishRequest(
                context=who[0], attempt=begun.attempt, metadata=metadata, timeout_s=BOUND_S
            )
            finishing = asyncio.create_task(client.call("Finish", request))
            place.mkdir(parents=True, exist_ok=True)
            for rank, name in enumerate(names):
                receipt = records_pb2.Receipt(attempt=begun.attempt, rank=rank)
                receipt.files.add(name=name, size=60)
                (place / name).write_bytes(bytes(60))
                await sidecar.send(report(who[rank], begun.attempt, DURABLE, receipt=receipt))
            answer = await finishing
            assert answer.status.state == COMMITTED
            # The answer that got lost.
            assert (await client.call("Finish", request)).status.state == COMMITTED

    asyncio.run(scenario())
    metadata = FileSystemReader(place).read_metadata()
    assert [info.length for info in metadata.storage_data.values()] == [50, 60]


def test_metadata_of_torch_that_no_file_covers_is_refused(sockets: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            who = context(0, str(place), ranks=(0,))
            begun = await client.call(
                "Begin", sidecar_pb2.BeginRequest(context=who, wire_version=WIRE_VERSION)
            )
            name = object_names.data_file(begun.attempt, 0, 0)
            metadata = plan_pb2.GlobalMetadata(
                items=plan_codec.encode_items([tensor("w", 4)]),
                files=[name],
                placement=plan_pb2.Placement(**columns(file=[0], offset=[20], length=[50])),
            )
            receipt = records_pb2.Receipt(attempt=begun.attempt, rank=0)
            receipt.files.add(name=name, size=60)
            await sidecar.send(report(who, begun.attempt, DURABLE, receipt=receipt))
            with pytest.raises(SaveAbortedError, match="places bytes 20 to 70"):
                await client.call(
                    "Finish",
                    sidecar_pb2.FinishRequest(
                        context=who, attempt=begun.attempt, metadata=metadata, timeout_s=BOUND_S
                    ),
                )
            assert (place / object_names.decision(begun.attempt)).exists()

    asyncio.run(scenario())
    assert not (place / ".metadata").exists()


def test_custom_planner_must_be_named(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            plan = halves(0)
            plan.options.planner = "my.code:MyPlanner"
            plan.options.custom_global_plan = True
            with pytest.raises(InvalidRequestError, match=r"--planner my\.code:MyPlanner"):
                await client.plan(context(0, place), plan)

    asyncio.run(scenario())


def test_status_names_whom_a_save_waits_for(sockets: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            status = status_pb2_grpc.StatusStub(client.channel)
            planning = asyncio.create_task(client.plan(context(0, place), halves(0)))
            await client.await_plans(place, 0)
            (save,) = (await status.ListSaves(status_pb2.ListSavesRequest())).saves
            assert save.state == save_pb2.SAVE_STATE_PLANNING
            assert list(save.waiting_on.ranks) == [1]
            assert 0 < save.waiting_on.deadline_s <= BOUND_S
            assert save.attempt == ""
            finals = [await client.plan(context(1, place), halves(1)), await planning][::-1]
            sidecar = await client.attach()
            who = context(0, place)
            await sidecar.send(
                report(who, finals[0].attempt, INGESTED, bytes_ingested=123, bytes_uploaded=45)
            )
            await client.await_status(place, lambda save: save.ranks[0].bytes_ingested == 123)
            request = status_pb2.GetSaveRequest(id=place)
            save = (await status.GetSave(request)).save
            assert save.state == save_pb2.SAVE_STATE_STAGING
            assert save.attempt == finals[0].attempt
            assert re.match(r"rank 1 \(host node-1, last seen \d s ago", save.waiting_on.text)
            assert save.ranks[0].bytes_ingested == 123
            await make_durable(sidecar, place, finals)
            await sidecar.await_state(who.save, COMMITTED)
            save = (await status.GetSave(status_pb2.GetSaveRequest(id=save.id))).save
            assert save.state == COMMITTED
            assert save.waiting_on.text == ""

    asyncio.run(scenario())


def test_killed_coordinator_goes_on_from_storage_and_reports(tmp_path: Path) -> None:
    """Rank 1's answer got lost with the coordinator; rank 0 is durable, and only its receipt shows that."""
    place = tmp_path / "root" / "step-1"
    with Daemons(tmp_path / "logs", sidecars=0) as daemons:

        async def before() -> list[plan_pb2.FinalPlan]:
            async with connect_client(daemons.coordinator_address) as calls:
                return await plan_both(calls, str(place))

        async def after(finals: list[plan_pb2.FinalPlan]) -> None:
            async with connect_client(daemons.coordinator_address) as calls:
                first, second = context(0, str(place)), context(1, str(place))
                receipt = receipt_of(finals[0], 0)
                key = place / object_names.receipt(finals[0].attempt, 0)
                key.parent.mkdir(parents=True)
                key.write_bytes(receipt.SerializeToString())
                sidecar = await calls.attach("node-1")
                await sidecar.send(report(second, finals[1].attempt, PLANNED))
                # Asked again, the plan is the one that stands.
                assert (await calls.plan(second, halves(1))) == finals[1]
                receipt = receipt_of(finals[1], 1)
                await sidecar.send(report(second, finals[1].attempt, DURABLE, receipt=receipt))
                await sidecar.await_state(first.save, COMMITTED)

        async def late(finals: list[plan_pb2.FinalPlan]) -> None:
            async with connect_client(daemons.coordinator_address) as calls:
                who = context(0, str(place))
                sidecar = await calls.attach(reports=[report(who, finals[0].attempt, INGESTED)])
                await sidecar.await_state(who.save, COMMITTED)

        finals = asyncio.run(before())
        daemons.coordinator.kill()
        daemons.coordinator.start()
        asyncio.run(after(finals))
        metadata = FileSystemReader(place).read_metadata()
        assert set(metadata.state_dict_metadata) == {"w", "b", "epoch"}
        # A coordinator that does not know the save reads the decision.
        daemons.coordinator.kill()
        daemons.coordinator.start()
        asyncio.run(late(finals))
        assert daemons.coordinator.stop() == 0


def test_a_restarted_job_saves_again_where_the_records_were_lost(
    sockets: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    place = root / "step-1"

    async def scenario() -> list[str]:
        attempts = []
        for incarnation in ("aa", "bb"):
            async with coordinator(sockets) as client:
                sidecar = await client.attach()
                who = context(0, str(place), ranks=(0,), incarnation=incarnation)
                final = await client.plan(who, local_plan([tensor("w", 1)]))
                receipt = receipt_of(final, 0)
                await sidecar.send(report(who, final.attempt, DURABLE, receipt=receipt))
                assert (await sidecar.await_state(who.save, COMMITTED)).attempt == final.attempt
                attempts.append(final.attempt)
            shutil.rmtree(root / ".pannier" / "incarnations")
        return attempts

    first, second = map(object_names.Attempt.parse, asyncio.run(scenario()))
    assert second > first
    metadata = FileSystemReader(place).read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.save_id == second.name


def test_an_incarnation_that_was_followed_begins_no_save(sockets: Path, tmp_path: Path) -> None:
    """Whichever coordinator the newer one calls."""
    root = tmp_path / "root"
    elsewhere = sockets / "elsewhere"
    elsewhere.mkdir(mode=0o700)

    async def scenario() -> None:
        async with coordinator(sockets) as client, coordinator(elsewhere) as other:
            sidecar = await client.attach()

            def step(number: int, **who: Any) -> sidecar_pb2.SaveContext:
                return context(0, str(root / f"step-{number}"), ranks=(0,), number=number, **who)

            plan = local_plan([tensor("w", 1)])
            first = await client.plan(step(1), plan)
            who = step(1, incarnation="bb")
            who.seen_incarnation = 1
            newer = await other.plan(who, plan)
            # Planned before the newer one began: it may finish.
            receipt = receipt_of(first, 0)
            await sidecar.send(report(step(1), first.attempt, DURABLE, receipt=receipt))
            await sidecar.await_state(step(1).save, COMMITTED)
            named = r"incarnation aa of job job is not its newest: incarnation bb \(number 2\)"
            with pytest.raises(SaveAbortedError, match=named + ".*node-0"):
                await client.plan(step(2), plan)
            # Nor by a plan that it was given before.
            attempt = object_names.Attempt.parse(first.attempt)
            later = dataclasses.replace(attempt, number=3).name
            claim = claim_report(step(3), first.part, plan_codec.plan_digest(plan), later)
            await sidecar.send(claim)
            status = await sidecar.await_state(step(3).save, ABORTED)
            assert re.search(named, status.failures[0].message)
            assert not (root / "step-3").exists()
            # The newer one continues, and so does one that saves apart.
            assert object_names.Attempt.parse(newer.attempt).incarnation_number == 2
            await other.plan(step(2, incarnation="bb"), plan)
            aside = step(1, incarnation="cc")
            aside.apart = True
            await client.plan(aside, plan)
            await other.plan(step(3, incarnation="bb"), plan)
            # One that had begun before the newer one did, and saves only now.
            late = step(1, incarnation="dd")
            late.seen_incarnation = 1
            with pytest.raises(
                SaveAbortedError, match="incarnation dd of job job is not its newest"
            ):
                await client.plan(late, plan)

    asyncio.run(scenario())


def test_what_torch_plans_is_refused_to_an_incarnation_that_was_followed(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            who = context(0, place, ranks=(0,), world_size=2)
            begin = sidecar_pb2.BeginRequest(context=who, wire_version=WIRE_VERSION)
            await client.call("Begin", begin)
            plan = local_plan([tensor("w", 1)])
            await client.plan(context(0, place, ranks=(0,), incarnation="bb"), plan)
            begin.context.save.number = 2
            with pytest.raises(
                SaveAbortedError, match="incarnation aa of job job is not its newest"
            ):
                await client.call("Begin", begin)

    asyncio.run(scenario())


def test_ranks_that_take_part_in_two_incarnations_are_named_at_once(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            calls = [
                client.plan(
                    context(rank, place, incarnation=incarnation), halves(rank), timeout_s=300
                )
                for rank, incarnation in ((0, "aa"), (1, "bb"))
            ]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, SaveAbortedError)
                for word in (
                    "rank 0 (host node-0) as incarnation aa",
                    "rank 1 (host node-1) as incarnation bb",
                ):
                    assert word in str(error)
                kinds = {rank: failure.kind for rank, failure in error.failures.items()}
                assert kinds == dict.fromkeys((0, 1), "DISAGREEMENT")

    asyncio.run(scenario())


@pytest.mark.parametrize("complete", [True, False])
def test_ranks_that_were_started_again_are_not_taken_for_divided(
    monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    monkeypatch.setattr(timeouts, "SPLIT_S", 0.0)

    async def scenario() -> None:
        known = registry.Registry(StatusRegistry(), begin=lambda save: None, suspect_after_s=5)
        former = known.enter(context(0, "/x/step-1"))
        # Those of the new start come one after the other.
        save = known.enter(context(1, "/x/step-1", incarnation="bb"))
        if complete:
            known.enter(context(0, "/x/step-1", incarnation="bb"))
        await asyncio.sleep(0.01)
        assert [each.failing for each in (former, save)] == [not complete] * 2

    asyncio.run(scenario())


def test_incarnations_are_numbered_once_across_coordinators(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Daemons(tmp_path / "logs", sidecars=0) as daemons:

        async def plan(incarnation: str, number: int) -> str:
            async with connect_client(daemons.coordinator_address) as calls:
                who = context(
                    0, str(root / "x"), ranks=(0,), number=number, incarnation=incarnation
                )
                # In one job only the newest could save.
                who.save.job = f"job-{incarnation}"
                return (await calls.plan(who, local_plan([tensor("w", 1)]))).attempt

        attempts = [asyncio.run(plan("aa", 1)), asyncio.run(plan("bb", 1))]
        daemons.coordinator.kill()
        daemons.coordinator.start()
        attempts += [asyncio.run(plan("aa", 2)), asyncio.run(plan("cc", 1))]
    assert [object_names.Attempt.parse(a).incarnation_number for a in attempts] == [1, 2, 1, 3]


def test_a_duplicate_process_that_saves_elsewhere_after_the_commit_gets_the_disagreement(
    sockets: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "root" / "step-1")
    # Either rank's context may have been the first.
    text = r"rank . .* saves to .*step-1, rank 1 \(host node-1\) saves to .*step-1-other"

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            sidecar = await client.attach()
            finals = await plan_both(client, place)
            await make_durable(sidecar, place, finals)
            await sidecar.await_state(context(0, place).save, COMMITTED)
            other = context(1, place)
            _other_place(other)
            with pytest.raises(InvalidRequestError, match=text):
                await client.plan(other, halves(1))

    asyncio.run(scenario())
