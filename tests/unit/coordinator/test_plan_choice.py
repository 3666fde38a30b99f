"""Saves whose ranks go by a plan of an earlier save: all of them, some of them, or in vain."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItem

from pannier.coordinator.commit.manifest import Manifest
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import PannierError, SaveAbortedError
from pannier.wire.version import WIRE_VERSION
from support.actors.ranks_by_hand import (
    CoordinatorClient,
    Sidecar,
    claim_report,
    context,
    coordinator,
    local_plan,
    receipt_of,
    report,
    shard,
    tensor,
    thing,
)
from support.plan_messages import keys_of
from support.processes.stretch import BOUND_S

INGESTED = save_pb2.RANK_PHASE_INGESTED
COMMITTED, ABORTED = save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED
DURABLE = save_pb2.RANK_PHASE_DURABLE
GROUP = object_names.group_name((0, 1))


def attempt_name(number: int) -> str:
    return object_names.Attempt(1, number, GROUP, "aa").name


def items(rank: int) -> list[WriteItem]:
    """Half of ``w``; ``b``, ``c`` and ``epoch``, which each rank has."""
    half = shard("w", [4 * rank, 0], [4, 8], [8, 8])
    return [half, tensor("b", 8), tensor("c", 8), thing("epoch")]


def plan_of(rank: int, *more: WriteItem, without: str = "") -> plan_pb2.LocalPlan:
    held = [item for item in items(rank) if item.index.fqn != without]
    return local_plan([*held, *more])


@dataclass
class Job:
    """Two ranks on two hosts, and what they were given for save 1."""

    client: CoordinatorClient
    sidecars: list[Sidecar]
    root: Path
    given: list[plan_pb2.FinalPlan]

    def place(self, number: int) -> str:
        return str(self.root / f"step-{number}")

    def context(self, rank: int, number: int) -> sidecar_pb2.SaveContext:
        return context(rank, self.place(number), number=number)

    async def plan(
        self, rank: int, number: int, plan: plan_pb2.LocalPlan | None = None, **more: Any
    ) -> plan_pb2.FinalPlan:
        return await self.client.plan(self.context(rank, number), plan or plan_of(rank), **more)

    async def plan_all(self, number: int) -> list[plan_pb2.FinalPlan]:
        return list(await asyncio.gather(*(self.plan(rank, number) for rank in (0, 1))))

    async def claim(self, rank: int, number: int, **more: Any) -> None:
        fields: dict[str, Any] = {
            "plan_id": self.given[rank].plan_id,
            "digest": plan_codec.plan_digest(plan_of(rank)),
            "attempt": attempt_name(number),
        }
        fields.update(more)
        await self.sidecars[rank].send(claim_report(self.context(rank, number), **fields))

    async def claim_all(self, number: int, **more: Any) -> None:
        for rank in (0, 1):
            await self.claim(rank, number, **more)

    async def await_state(self, number: int, *states: "save_pb2.SaveState") -> save_pb2.SaveStatus:
        return await self.sidecars[0].await_state(self.context(0, number).save, *states)

    async def agreed(self, number: int, *ranks: int) -> save_pb2.SaveStatus:
        """Waits until the sidecars of these ranks have the agreed plan's id; default: all."""
        save = self.context(0, number).save
        for rank in ranks or (0, 1):
            agreed = self.sidecars[rank].await_status(save, lambda status: bool(status.plan_id))
            status = await agreed
        return status

    async def wanted(self, number: int, *ranks: int) -> None:
        save = self.context(0, number).save
        for rank in ranks or (0, 1):
            await self.sidecars[rank].await_status(save, lambda status: status.full_plan_requested)

    async def commit(self, number: int, finals: list[plan_pb2.FinalPlan]) -> None:
        for rank, final in enumerate(finals):
            who = self.context(rank, number)
            receipt = receipt_of(final, rank)
            await self.sidecars[rank].send(report(who, final.attempt, DURABLE, receipt=receipt))
        await self.await_state(number, COMMITTED)

    def given_for(self, number: int) -> list[plan_pb2.FinalPlan]:
        """What the ranks were given, as they use it in a later save."""
        finals = []
        for given in self.given:
            final = plan_pb2.FinalPlan()
            final.CopyFrom(given)
            final.attempt = attempt_name(number)
            for file in final.files:
                file.name = file.name.replace(given.attempt, final.attempt)
            finals.append(final)
        return finals

    def is_there(self, number: int, name: str) -> bool:
        return Path(self.place(number), name).exists()

    def manifest(self, number: int) -> Manifest:
        return Manifest.parse(self._manifest_path(number).read_bytes())

    def remove_manifest(self, number: int) -> None:
        self._manifest_path(number).unlink()

    def _manifest_path(self, number: int) -> Path:
        return Path(self.place(number), object_names.manifest(attempt_name(number)))


def play(scenario: Any, sockets: Path, root: Path, **settings: Any) -> None:
    """With a job whose first save is committed."""

    async def main() -> None:
        async with coordinator(sockets, **settings) as client:
            sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            job = Job(client, sidecars, root, [])
            job.given = await job.plan_all(1)
            await job.commit(1, job.given)
            await scenario(job)

    asyncio.run(main())


def causes(status: save_pb2.SaveStatus | PannierError) -> dict[int, str]:
    failures = status.failures.values() if isinstance(status, PannierError) else status.failures
    return {failure.rank: failure.message for failure in failures}


def test_ranks_that_go_by_the_last_plan_need_no_call(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        status = await job.sidecars[0].await_status(job.context(0, 2).save, lambda status: True)
        assert (status.plan_id, list(status.waiting_on.ranks)) == ("", [1])
        await job.claim(1, 2)
        status = await job.agreed(2)
        assert status.plan_id == job.given[0].plan_id
        # Before any rank had the answer.
        manifest = job.manifest(2)
        assert manifest.plan_id == status.plan_id
        assert [member.host for member in manifest.message.members] == ["node-0", "node-1"]
        assert not job.is_there(2, ".metadata")
        assert [manifest.final_plan(rank) for rank in (0, 1)] == job.given_for(2)
        await job.commit(2, job.given_for(2))

    play(scenario, sockets, tmp_path)
    first, second = (FileSystemReader(tmp_path / f"step-{n}").read_metadata() for n in (1, 2))
    assert second.state_dict_metadata == first.state_dict_metadata
    assert second.storage_meta is not None
    assert second.storage_meta.save_id == attempt_name(2)
    for index, info in second.storage_data.items():
        old = first.storage_data[index]
        assert info.relative_path == old.relative_path.replace(attempt_name(1), attempt_name(2))
        assert (info.offset, info.length) == (old.offset, old.length)


def test_a_plan_that_the_coordinator_does_not_know_is_wanted(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.claim_all(2, plan_id="f" * 64)
        await job.wanted(2)
        answers = await job.plan_all(2)
        assert answers == job.given_for(2)
        await job.agreed(2)
        await job.commit(2, answers)

    play(scenario, sockets, tmp_path)


def test_a_restarted_coordinator_wants_the_plans_and_makes_the_same(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(client, [], tmp_path, [])
            job.given = await job.plan_all(1)
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            await job.claim_all(2)
            await job.wanted(2)
            assert await job.plan_all(2) == job.given_for(2)
            # The claims named no save whose manifest has the plan, so that they can't be confirmed
            # by what they say: but the plan is the same one.
            assert (await job.agreed(2)).plan_id == job.given[0].plan_id

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", ["the source", "another root", "another group", ""])
def test_a_restarted_coordinator_reads_the_claimed_plan_from_an_earlier_save(
    sockets: Path, tmp_path: Path, lost: str
) -> None:
    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(client, [], tmp_path / "root", [])
            job.given = await job.plan_all(1)
        source = (job.place(1), attempt_name(1))
        if lost == "the source":
            job.remove_manifest(1)
        elif lost == "another root":
            source = (str(shutil.copytree(job.place(1), tmp_path / "step-1")), attempt_name(1))
        elif lost == "another group":
            source = (job.place(1), attempt_name(1).replace(GROUP, "g00000000"))
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            await job.claim_all(2, source=source)
            if lost:
                await job.wanted(2)
            else:
                status = await job.agreed(2)
                assert status.plan_id == job.given[0].plan_id
                assert not status.full_plan_requested
                await job.commit(2, job.given_for(2))

    asyncio.run(scenario())


@pytest.mark.parametrize("readable", [True, False])
def test_a_resumed_save_takes_claims_of_a_plan_by_which_ranks_write_the_same(
    sockets: Path, tmp_path: Path, readable: bool
) -> None:
    """Rank 1's plan changed, so that the save's is another than the one that rank 0 claims."""

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(
                client, [await client.attach(f"node-{rank}") for rank in (0, 1)], tmp_path, []
            )
            job.given = await job.plan_all(1)
            await job.claim(0, 2)
            changed = asyncio.create_task(job.plan(1, 2, plan_of(1, tensor("new", 5))))
            await job.wanted(2, 0)
            kept = await job.plan(0, 2)
            new = await changed
            status = await job.agreed(2, 0)
            assert list(status.equal_plan_ids) == [job.given[0].plan_id] != [status.plan_id]
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            await job.sidecars[1].send(report(job.context(1, 2), new.attempt, INGESTED))
            # Its sidecar doesn't know that the claim was confirmed.
            source = (job.place(1), attempt_name(1)) if readable else ("", "")
            await job.claim(0, 2, source=source)
            if readable:
                status = await job.sidecars[0].await_status(
                    job.context(0, 2).save, lambda status: bool(status.equal_plan_ids)
                )
                assert list(status.equal_plan_ids) == [job.given[0].plan_id]
                assert not status.full_plan_requested
            else:
                await job.wanted(2, 0)
                assert await job.plan(0, 2) == kept
            await job.commit(2, [kept, new])

    asyncio.run(scenario())


def test_a_restarted_coordinator_finds_the_agreed_manifest(sockets: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(
                client, [await client.attach(f"node-{rank}") for rank in (0, 1)], tmp_path, []
            )
            job.given = await job.plan_all(1)
            await job.claim_all(2)
            await job.agreed(2)
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            # Neither coordinator knows the plan.
            await job.claim_all(2)
            await job.agreed(2)
            await job.commit(2, job.given_for(2))
            # It knows the plan again.
            await job.claim_all(3)
            await job.agreed(3)

    asyncio.run(scenario())


def test_two_coordinators_agree_on_one_manifest(sockets: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            jobs = []
            for name in ("one", "two"):
                (sockets / name).mkdir(mode=0o700)
                calls = await stack.enter_async_context(coordinator(sockets / name))
                hosts = [await calls.attach(f"node-{rank}") for rank in (0, 1)]
                jobs.append(Job(calls, hosts, tmp_path, []))
            for job in jobs:
                job.given = await job.plan_all(1)
            for job in jobs:
                await job.claim_all(2)
            agreed = [(await job.agreed(2)).plan_id for job in jobs]
            assert agreed == [jobs[0].given[0].plan_id] * 2

    asyncio.run(scenario())


def test_a_rank_that_hands_its_unchanged_plan_in_changes_nothing(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        final = await job.plan(1, 2)
        assert final == job.given_for(2)[1]
        assert (await job.agreed(2, 0)).plan_id == final.plan_id

    play(scenario, sockets, tmp_path)


def test_what_a_changed_rank_adds_is_planned_around_the_others(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        changed = asyncio.create_task(job.plan(1, 2, plan_of(1, tensor("new", 5), tensor("b2", 9))))
        await job.wanted(2, 0)
        kept = await job.plan(0, 2)
        new = await changed
        assert new.plan_id == kept.plan_id != job.given[0].plan_id
        # What rank 0 has staged is what it is to write.
        staged = job.given_for(2)[0]
        staged.plan_id = kept.plan_id
        assert kept == staged
        await job.commit(2, [kept, new])

    play(scenario, sockets, tmp_path)
    metadata = FileSystemReader(tmp_path / "step-2").read_metadata()
    assert set(metadata.state_dict_metadata) == {"w", "b", "c", "epoch", "new", "b2"}


def test_what_a_changed_rank_no_longer_writes_ends_the_save_by_name(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        local = [plan_of(rank) for rank in (0, 1)]
        written = {key: rank for rank in (0, 1) for key in keys_of(local[rank], job.given[rank])}
        # Both hold `b`; the one that wrote it has it no more.
        changed = written["b"]
        await job.claim(1 - changed, 2)
        refused = asyncio.create_task(job.plan(changed, 2, plan_of(changed, without="b")))
        await job.wanted(2, 1 - changed)
        with pytest.raises(SaveAbortedError, match="no rank writes 'b' any more") as caught:
            await job.plan(1 - changed, 2)
        assert list(causes(caught.value)) == [changed]
        with pytest.raises(SaveAbortedError):
            await refused
        # The next save makes a new plan.
        plans_ = [plan_of(rank, without="b" if rank == changed else "") for rank in (0, 1)]
        await asyncio.gather(*(job.plan(rank, 3, plans_[rank]) for rank in (0, 1)))

    play(scenario, sockets, tmp_path)


def test_ranks_alternate_between_plans_without_trouble(sockets: Path, tmp_path: Path) -> None:
    """Rank 1 has something more to save every other time."""

    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        other = plan_of(1, tensor("new", 5))
        changed = asyncio.create_task(job.plan(1, 2, other))
        await job.wanted(2, 0)
        kept = await job.plan(0, 2)
        await changed
        # Rank 1 goes by the first plan, rank 0 by the one that it was given last.
        await job.claim(0, 3, plan_id=kept.plan_id)
        await job.claim(1, 3)
        assert (await job.agreed(3)).plan_id in (kept.plan_id, job.given[1].plan_id)
        await job.claim(0, 4, plan_id=kept.plan_id)
        await job.claim(1, 4, plan_id=kept.plan_id, digest=plan_codec.plan_digest(other))
        assert (await job.agreed(4)).plan_id == kept.plan_id

    play(scenario, sockets, tmp_path)


def test_files_of_another_attempt_end_the_save_by_name(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        await job.claim(1, 2, attempt=attempt_name(2).replace("i1-", "i7-"))
        status = await job.await_state(2, ABORTED)
        assert list(causes(status)) == [1]
        assert "attempts like i7-" in causes(status)[1]

    play(scenario, sockets, tmp_path)


def test_ranks_that_say_two_things_end_the_save(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        await job.claim(0, 2, digest="0" * 64)
        assert list(causes(await job.await_state(2, ABORTED))) == [0]
        await job.claim(0, 3)
        there = claim_report(
            context(1, str(tmp_path / "elsewhere"), number=3),
            job.given[1].plan_id,
            plan_codec.plan_digest(plan_of(1)),
            attempt_name(3),
        )
        await job.sidecars[1].send(there)
        assert "elsewhere" in str(causes(await job.await_state(3, ABORTED)))
        await job.claim_all(4)
        await job.agreed(4)
        await job.claim(0, 4, digest="0" * 64)
        assert list(causes(await job.await_state(4, ABORTED))) == [0]

    play(scenario, sockets, tmp_path)


def test_a_rank_that_never_claims_a_plan_is_named(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2, timeout_s=2.0)
        status = await job.await_state(2, ABORTED)
        assert causes(status)[1].startswith("async_save was not called there")
        # So is one whose full plan is requested.
        await job.claim_all(3, plan_id="f" * 64, timeout_s=2.0)
        status = await job.await_state(3, ABORTED)
        assert sorted(causes(status)) == [0, 1]
        assert causes(status)[0].startswith("its full plan was requested")

    play(scenario, sockets, tmp_path)


def test_a_save_known_from_reports_has_the_deadline_that_ranks_report(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim_all(2, save_timeout_s=3.0)
        status = await job.agreed(2)
        assert status.waiting_on.deadline_s <= 3
        assert "not durable in time" in str(causes(await job.await_state(2, ABORTED)))

    play(scenario, sockets, tmp_path)


def test_a_place_that_is_not_allowed_ends_the_save(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        claim = claim_report(
            context(0, "/elsewhere/step-2", number=2),
            job.given[0].plan_id,
            plan_codec.plan_digest(plan_of(0)),
            attempt_name(2),
        )
        await job.sidecars[0].send(claim)
        assert "/elsewhere" in causes(await job.await_state(2, ABORTED))[-1]

    play(scenario, sockets, tmp_path, allow=(str(tmp_path),))


async def _prepare(job: Job, rank: int, number: int) -> sidecar_pb2.PlanResponse:
    request = sidecar_pb2.PlanRequest(
        context=job.context(rank, number),
        plan=plan_of(rank),
        digest=plan_codec.plan_digest(plan_of(rank)),
        timeout_s=BOUND_S,
        wire_version=WIRE_VERSION,
        prepare=True,
    )
    answer: sidecar_pb2.PlanResponse = await job.client.call("Plan", request)
    return answer


def test_a_prepared_plan_leaves_nothing_and_is_known_later(sockets: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(
                client, [await client.attach(f"node-{rank}") for rank in (0, 1)], tmp_path, []
            )
            answers = await asyncio.gather(*(_prepare(job, rank, 1) for rank in (0, 1)))
            job.given = [answer.plan for answer in answers]
            assert not job.is_there(1, ".")
            # An answer that got lost is given again.
            assert (await _prepare(job, 0, 1)).plan == job.given[0]
            await job.claim_all(2)
            assert (await job.agreed(2)).plan_id == job.given[0].plan_id
            await job.commit(2, job.given_for(2))

    asyncio.run(scenario())


def test_one_rank_prepares_what_another_saves(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        saving = asyncio.create_task(job.plan(0, 2))
        await job.client.await_plans(job.place(2), 0)
        text = r"rank 1 calls prepare where the other ranks call async_save \(save number 2\)"
        with pytest.raises(SaveAbortedError, match=text):
            await _prepare(job, 1, 2)
        with pytest.raises(SaveAbortedError):
            await saving

    play(scenario, sockets, tmp_path)


def test_one_rank_saves_what_another_prepares(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        preparing = asyncio.create_task(_prepare(job, 0, 2))
        await job.client.await_plans(job.place(2), 0)
        text = r"rank 1 calls async_save where the other ranks call prepare \(save number 2\)"
        with pytest.raises(SaveAbortedError, match=text):
            await job.plan(1, 2)
        with pytest.raises(SaveAbortedError):
            await preparing

    play(scenario, sockets, tmp_path)
