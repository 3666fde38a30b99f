"""Saves whose ranks go by their parts of the last plan: all of them, some of them, or in vain."""

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

    async def send_local_plans(self, number: int) -> list[plan_pb2.FinalPlan]:
        """As ranks do that have claimed what they were given for save 1."""
        calls = (self.plan(rank, number, staged=self.given[rank]) for rank in (0, 1))
        return list(await asyncio.gather(*calls))

    async def claim(self, rank: int, number: int, **more: Any) -> None:
        fields: dict[str, Any] = {
            "part": self.given[rank].part,
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
            agreed = self.sidecars[rank].await_status(save, lambda status: bool(status.plan.id))
            status = await agreed
        return status

    async def wanted(self, number: int, *ranks: int) -> None:
        save = self.context(0, number).save
        for rank in ranks or (0, 1):
            await self.sidecars[rank].await_status(
                save, lambda status: status.plan.full_plan_requested
            )

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
        assert (status.plan.id, list(status.waiting_on.ranks)) == ("", [1])
        await job.claim(1, 2)
        status = await job.agreed(2)
        assert status.plan.id == job.given[0].plan_id
        # Before any rank had the answer.
        manifest = job.manifest(2)
        assert manifest.plan_id == status.plan.id
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


def test_a_claimed_part_that_no_plan_has_ends_the_save_by_name(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        await job.claim(1, 2, part="f" * 64)
        await job.wanted(2)
        for answer in await asyncio.gather(
            *(job.plan(rank, 2, staged=job.given[rank]) for rank in (0, 1)), return_exceptions=True
        ):
            assert isinstance(answer, SaveAbortedError)
        status = await job.await_state(2, ABORTED)
        assert [(f.rank, f.kind) for f in status.failures] == [
            (1, save_pb2.FAILURE_KIND_PLAN_CHANGED)
        ]
        assert "other items for rank 1 than these have staged" in causes(status)[1]
        assert not job.is_there(2, object_names.manifest(attempt_name(2)))
        await job.plan_all(3)

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
            # The claims named no save whose manifest has the parts.
            await job.wanted(2)
            assert await job.send_local_plans(2) == job.given_for(2)
            assert (await job.agreed(2)).plan.id == job.given[0].plan_id

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
                assert status.plan.id == job.given[0].plan_id
                assert not status.plan.full_plan_requested
                await job.commit(2, job.given_for(2))

    asyncio.run(scenario())


def test_a_resumed_save_takes_claims_of_the_parts_in_its_manifest(
    sockets: Path, tmp_path: Path
) -> None:
    """Rank 1's plan changed, so that the save's plan is another than the one that rank 0 got its part from."""

    async def scenario() -> None:
        async with coordinator(sockets) as client:
            job = Job(
                client, [await client.attach(f"node-{rank}") for rank in (0, 1)], tmp_path, []
            )
            job.given = await job.plan_all(1)
            await job.claim(0, 2)
            new = await job.plan(1, 2, plan_of(1, tensor("new", 5)))
            assert (await job.agreed(2, 0)).plan.id == new.plan_id != job.given[0].plan_id
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            await job.sidecars[1].send(report(job.context(1, 2), new.attempt, INGESTED))
            # Its sidecar doesn't know that the claim was confirmed.
            await job.claim(0, 2)
            status = await job.agreed(2, 0)
            assert status.plan.id == new.plan_id
            assert not status.plan.full_plan_requested
            kept = job.given_for(2)[0]
            kept.plan_id = new.plan_id
            await job.commit(2, [kept, new])
            # A part that isn't in the manifest.
            await job.claim(0, 3)
            asked = asyncio.create_task(job.plan(1, 3, plan_of(1)))
            # This coordinator has only read the manifest.
            await job.wanted(3, 0)
            await job.plan(0, 3, staged=job.given[0])
            other = await asked
        async with coordinator(sockets) as client:
            job.client = client
            job.sidecars = [await client.attach(f"node-{rank}") for rank in (0, 1)]
            await job.sidecars[1].send(report(job.context(1, 3), other.attempt, INGESTED))
            await job.claim(0, 3, part="f" * 64)
            assert list(causes(await job.await_state(3, ABORTED))) == [0]

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
            agreed = [(await job.agreed(2)).plan.id for job in jobs]
            assert agreed == [jobs[0].given[0].plan_id] * 2

    asyncio.run(scenario())


def test_a_rank_that_hands_its_unchanged_plan_in_changes_nothing(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        final = await job.plan(1, 2)
        assert final == job.given_for(2)[1]
        assert (await job.agreed(2, 0)).plan.id == final.plan_id

    play(scenario, sockets, tmp_path)


def test_what_a_changed_rank_adds_is_planned_around_the_others(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim(0, 2)
        new = await job.plan(1, 2, plan_of(1, tensor("new", 5), tensor("b2", 9)))
        # The coordinator has the local plan of rank 0, whose trainer may be dead by now.
        status = await job.agreed(2, 0)
        assert not status.plan.full_plan_requested
        assert new.plan_id == status.plan.id != job.given[0].plan_id
        # What rank 0 has staged is what it is to write.
        staged = job.given_for(2)[0]
        staged.plan_id = new.plan_id
        assert job.manifest(2).final_plan(0) == staged
        # What rank 1 wrote before it still writes.
        before, after = (
            keys_of(plan, given)
            for plan, given in (
                (plan_of(1), job.given[1]),
                (plan_of(1, tensor("new", 5), tensor("b2", 9)), new),
            )
        )
        assert {*before, "new", "b2"} == set(after)
        await job.commit(2, [staged, new])

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
        with pytest.raises(SaveAbortedError, match="no rank writes 'b' any more") as caught:
            await job.plan(changed, 2, plan_of(changed, without="b"))
        assert [(f.rank, f.kind) for f in caught.value.failures.values()] == [
            (changed, "PLAN_CHANGED")
        ]
        # The next save makes a new plan.
        plans_ = [plan_of(rank, without="b" if rank == changed else "") for rank in (0, 1)]
        await asyncio.gather(*(job.plan(rank, 3, plans_[rank]) for rank in (0, 1)))

    play(scenario, sockets, tmp_path)


def test_ranks_alternate_between_structures_without_trouble(sockets: Path, tmp_path: Path) -> None:
    """Each rank claims its part of the last save's plan only, and asks with any other structure."""

    async def scenario(job: Job) -> None:
        larger = [plan_of(rank, tensor(f"own{rank}", 500)) for rank in (0, 1)]
        given = job.given
        for number in range(2, 10):
            # Rank 0 changes in even saves, rank 1 in saves 2, 5 and 8.
            changes = [number % 2 == 0, number % 3 == 2]
            structure = [number // 2 % 2, (number + 1) // 3 % 2]
            plans = [larger[rank] if structure[rank] else plan_of(rank) for rank in (0, 1)]
            asked = [
                asyncio.create_task(job.plan(rank, number, plans[rank]))
                for rank in (0, 1)
                if changes[rank]
            ]
            for rank in (0, 1):
                if not changes[rank]:
                    digest = plan_codec.plan_digest(plans[rank])
                    await job.claim(rank, number, part=given[rank].part, digest=digest)
            answers = iter(await asyncio.gather(*asked))
            for rank in (0, 1):
                if not changes[rank]:
                    assert not (await job.agreed(number, rank)).plan.full_plan_requested
            manifest = job.manifest(number)
            given = [next(answers) if changes[r] else manifest.final_plan(r) for r in (0, 1)]
            assert given == [manifest.final_plan(rank) for rank in (0, 1)]
            await job.commit(number, given)

    play(scenario, sockets, tmp_path)


def test_two_ranks_that_staged_one_item_commit_and_one_of_the_two_is_taken(
    sockets: Path, tmp_path: Path
) -> None:
    """They claim parts of two plans, which write ``b`` on another rank each."""

    async def scenario(job: Job) -> None:
        writer = next(
            r for r in (0, 1) if any(key == "b" for key in keys_of(plan_of(r), job.given[r]))
        )
        other = 1 - writer
        # Now the other rank writes it.
        without = plan_of(writer, without="b")
        finals = await asyncio.gather(
            *(job.plan(r, 2, without if r == writer else plan_of(r)) for r in (0, 1))
        )
        await job.commit(2, list(finals))
        await job.claim(writer, 3)
        await job.claim(other, 3, part=finals[other].part)
        status = await job.agreed(3)
        assert not status.plan.full_plan_requested
        staged = [job.given_for(3)[r] if r == writer else finals[r] for r in (0, 1)]
        manifest = job.manifest(3)
        assert [manifest.final_plan(r).part for r in (0, 1)] == [plan.part for plan in staged]
        read = Manifest.parse(manifest.data)
        assert [read.final_plan(r) for r in (0, 1)] == [manifest.final_plan(r) for r in (0, 1)]
        await job.commit(3, [read.final_plan(r) for r in (0, 1)])
        # A later save goes by the same plan.
        for rank in (0, 1):
            await job.claim(rank, 4, part=staged[rank].part)
        assert (await job.agreed(4)).plan.id == status.plan.id

    play(scenario, sockets, tmp_path)
    first, third = (FileSystemReader(tmp_path / f"step-{n}").read_metadata() for n in (1, 3))
    assert third.state_dict_metadata == first.state_dict_metadata
    assert set(third.storage_data) == set(first.storage_data)


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
            job.given[1].part,
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
        await job.claim_all(3, part="f" * 64, timeout_s=5.0)
        status = await job.await_state(3, ABORTED)
        assert sorted(causes(status)) == [0, 1]
        assert causes(status)[0].startswith("its full plan was requested")

    play(scenario, sockets, tmp_path)


def test_a_save_known_from_reports_has_the_deadline_that_ranks_report(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario(job: Job) -> None:
        await job.claim_all(2, save_timeout_s=6.0)
        status = await job.agreed(2)
        assert status.waiting_on.deadline_s <= 6
        assert "not durable in time" in str(causes(await job.await_state(2, ABORTED)))

    play(scenario, sockets, tmp_path)


def test_a_place_that_is_not_allowed_ends_the_save(sockets: Path, tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        claim = claim_report(
            context(0, "/elsewhere/step-2", number=2),
            job.given[0].part,
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
            assert (await job.agreed(2)).plan.id == job.given[0].plan_id
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
