"""Saves while storage misbehaves: what is in doubt stays in doubt until storage answers."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c
import pytest
from google.protobuf import json_format

from pannier.attempts.manifests import publish
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.global_plan import GlobalPlan, make_global_plan
from pannier.coordinator.saves.registry import ENDED_KEPT, Registry
from pannier.coordinator.saves.save_task import SaveTask, SaveTasks
from pannier.coordinator.saves.save_view import status
from pannier.coordinator.saves.states import PlanMode, State
from pannier.coordinator.stores import Stores
from pannier.daemon.status_registry import StatusRegistry
from pannier.storage import Store, open_store
from pannier.v1 import plan_pb2, records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    receipt_of,
    tensor,
    thing,
)
from support.actors.scene import Scene, attempt_of
from support.processes.stretch import BOUND_S


def play(scenario: Callable[[Scene], Awaitable[None]], checkpoint_id: str = "") -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            scene = Scene(threads, checkpoint_id)
            try:
                await scenario(scene)
            finally:
                await scene.tasks.stop()
                for info in await scene.plain.list():
                    await scene.plain.delete(info.key)

    asyncio.run(main())


def test_commit_is_in_doubt_until_the_decision_is_written() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.refused.add(object_names.decision(attempt_of(save)))
        await scene.make_durable(save)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        assert save.state is State.IN_DOUBT
        assert "503" in status(save).waiting_on.text
        # Too late to fail: the decision may be durable.
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "late", 0)
        scene.store.refused.clear()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.COMMITTED
        assert not save.outcome.failures
        assert await scene.plain.stat(object_names.METADATA) is not None

    play(scenario)


def test_a_durable_save_waits_for_storage_that_fails_before_its_decision() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.refused.add(object_names.metadata_candidate(attempt_of(save)))
        await scene.make_durable(save)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        assert not save.failing
        assert "503" in status(save).waiting_on.text
        scene.store.refused.clear()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.COMMITTED

    play(scenario)


def test_abort_is_in_doubt_until_the_decision_is_written_and_deletes_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.refused.add(object_names.decision(attempt_of(save)))
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        assert save.state is State.IN_DOUBT
        assert await scene.plain.stat(object_names.manifest(attempt_of(save))) is not None
        scene.store.refused.clear()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        assert [failure.message for failure in status(save).failures] == ["boom"]

    play(scenario)


def test_the_memory_of_one_process_is_no_place_for_a_save() -> None:
    with pytest.raises(InvalidRequestError, match="one process only"):
        Stores().check("memory://run/step")


def test_a_place_that_is_a_file_ends_the_save(tmp_path: Path) -> None:
    place = tmp_path / "step"
    place.write_text("here first")

    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        (failure,) = status(save).failures
        assert failure.kind == save_pb2.FAILURE_KIND_STORAGE
        assert "not a directory" in failure.message.lower()

    play(scenario, str(place))


def test_a_save_that_was_planned_where_this_coordinator_may_not_write_stays_in_doubt(
    tmp_path: Path,
) -> None:
    """It is started again with a narrower --allow, and a sidecar goes on with an earlier save."""
    place = tmp_path / "elsewhere" / "run" / "step-1"

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            stores = Stores(allow=[str(tmp_path / "allowed")])
            tasks = SaveTasks(stores, Planners(), host="here", threads=threads)
            registry = Registry(StatusRegistry(), begin=tasks.begin, suspect_after_s=5)
            save = registry.enter(context(0, str(place)))
            save.resume()
            await asyncio.wait_for(
                save.wait_until(lambda: save.state is State.IN_DOUBT and bool(save.storage_wait)),
                BOUND_S,
            )
            assert "start the daemon with another --allow" in status(save).waiting_on.text
            assert "Error" not in save.storage_wait
            with pytest.raises(InvalidRequestError, match="not below an allowed root"):
                await stores.find_attempt(save.context)
            await tasks.stop()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("external", [False, True])
def test_a_place_that_may_not_be_written_ends_the_save(external: bool) -> None:
    async def scenario(scene: Scene) -> None:
        scene.store.denied = True
        if external:
            save = scene.registry.enter(scene.context())
            save.declare_mode(PlanMode.EXTERNAL)
            await scene.reach(save, lambda: save.state is State.STAGING)
            # What its sidecar reports of the first upload.
            save.fail(save_pb2.FAILURE_KIND_STORAGE, "403", 0)
        else:
            save = await scene.planned()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        (failure,) = status(save).failures
        assert failure.kind == save_pb2.FAILURE_KIND_STORAGE

    play(scenario)


@pytest.mark.parametrize("lost", ["", "receipt", "file"])
def test_what_was_removed_before_torchs_plan_is_published_is_not_committed(lost: str) -> None:
    """Its sidecars and coordinator were stopped until ``pannier gc`` had given the save up."""

    async def scenario(scene: Scene) -> None:
        for rank in (0, 1):
            save = scene.registry.enter(scene.context(rank))
        save.declare_mode(PlanMode.EXTERNAL)
        await scene.reach(save, lambda: save.state is State.STAGING)
        name = attempt_of(save)
        for rank in (0, 1):
            receipt = records_pb2.Receipt(attempt=name, rank=rank)
            file = receipt.files.add(name=object_names.data_file(name, rank, 0), size=4)
            for key, data, what in (
                (file.name, b"data", "file"),
                (object_names.receipt(name, rank), receipt.SerializeToString(), "receipt"),
            ):
                if rank == 0 or what != lost:
                    await scene.plain.create(key, data)
            save.add_receipt(receipt)
        save.set_external_metadata(plan_pb2.GlobalMetadata())
        save.progress()
        await scene.reach(save, lambda: save.ended)
        assert (await scene.plain.stat(object_names.METADATA) is None) == bool(lost)
        if not lost:
            assert save.state is State.COMMITTED
            return
        assert save.state is State.ABORTED
        (failure,) = status(save).failures
        assert "files or receipts of ranks [1] are no longer in" in failure.message

    play(scenario)


def test_an_incarnation_whose_ranks_died_before_all_had_planned_takes_no_number() -> None:
    """Else their last words, however late they come, would make it newer than the next one."""

    async def scenario(scene: Scene) -> None:
        save = scene.registry.enter(scene.context(0))
        save.plans.add(scene.plans[0])
        save.notify()
        save.fail(save_pb2.FAILURE_KIND_LOST, "its process is gone", 0)
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        assert save.attempt is None
        root, _ = object_names.split_checkpoint_id(scene.checkpoint_id)
        store = open_store(root)
        assert not await store.list(object_names.incarnations_prefix())
        await store.close()

    play(scenario)


def test_a_planned_save_whose_place_is_denied_later_stays_in_doubt() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.denied = True
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        assert save.state is State.IN_DOUBT
        scene.store.denied = False
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED

    play(scenario)


def test_a_manifest_that_may_have_been_written_needs_a_decision() -> None:
    async def scenario(scene: Scene) -> None:
        manifest = object_names.manifest(
            object_names.Attempt(1, 1, scene.context().save.group, "aa").name
        )
        scene.store.lose.add(manifest)
        save = await scene.planned()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        assert await scene.plain.stat(object_names.decision(attempt_of(save))) is not None

    play(scenario)


def test_commit_that_was_decided_is_installed_when_storage_is_back() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.refused.add(object_names.METADATA)
        await scene.make_durable(save)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        assert save.state is State.IN_DOUBT
        scene.store.refused.clear()
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.COMMITTED

    play(scenario)


def test_a_decision_found_in_storage_is_applied_with_its_failures() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        name = attempt_of(save)
        failure = save_pb2.Failure(rank=1, host="h", kind=save_pb2.FAILURE_KIND_LOST, message="m")
        other = records_pb2.Decision(
            outcome=records_pb2.OUTCOME_ABORT,
            save=save.context.save,
            attempt=name,
            failures=[failure],
            decided_by="else",
        )
        scene.store.before[object_names.decision(name)] = lambda: _put_decision(scene.plain, other)
        await scene.make_durable(save)
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        assert list(save.outcome.failures.values()) == [failure]
        assert await scene.plain.stat(object_names.METADATA) is None

    play(scenario)


def test_commit_by_another_coordinator_wins_over_our_abort() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        name = attempt_of(save)
        await scene.plain.create(object_names.metadata_candidate(name), b"theirs")
        await scene.plain.create(object_names.receipt(name, 0), b"")
        other = records_pb2.Decision(
            outcome=records_pb2.OUTCOME_COMMIT,
            save=save.context.save,
            attempt=name,
            metadata_size=6,
            metadata_crc32c=crc32c.crc32c(b"theirs"),
        )
        await _put_decision(scene.plain, other)
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.COMMITTED
        assert await scene.plain.read(object_names.METADATA) == b"theirs"

    play(scenario)


async def _put_decision(store: Store, decision: records_pb2.Decision) -> None:
    text = json_format.MessageToJson(decision).encode()
    await store.create(object_names.decision(decision.attempt), text)


@pytest.mark.parametrize("same", [True, False])
def test_manifest_of_another_coordinator_is_used_if_it_is_of_our_plans(same: bool) -> None:
    async def scenario(scene: Scene) -> None:
        theirs = scene.plans
        if not same:
            theirs = rank_plans(local_plan([tensor("w", 4)]), local_plan([thing("other")]))
        attempt = object_names.Attempt(1, 1, object_names.group_name((0, 1)), "aa")
        # Planned elsewhere, with another host's names.
        theirs = [RankPlan(p.rank, "elsewhere", p.digest, p.plan) for p in theirs]
        plan = make_global_plan(theirs, attempt.name)
        manifest = make_manifest(scene.context(), attempt, theirs, plan)
        await publish(scene.plain, manifest)
        save = await scene.planned()
        if same:
            assert save.manifest is not None
            assert save.manifest.plan_id == manifest.plan_id
        else:
            await scene.reach(save, lambda: save.ended)
            assert save.outcome.failures[1].kind == save_pb2.FAILURE_KIND_DISAGREEMENT
            assert "was planned before" in save.outcome.failures[1].message

    play(scenario)


def test_a_planner_that_hangs_ends_its_save_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, make = threading.Event(), Planners.make

    def hang(self: Planners, plans: Sequence[RankPlan], *more: Any, **kept: Any) -> GlobalPlan:
        if plans[0].plan.options.custom_global_plan:
            gate.wait()
        return make(self, plans, *more, **kept)

    monkeypatch.setattr(Planners, "make", hang)

    async def scenario(scene: Scene) -> None:
        custom = [local_plan([tensor(name, 4)]) for name in "wb"]
        for each in custom:
            each.options.planner, each.options.custom_global_plan = "theirs:Planner", True
        hanging = scene.registry.enter(scene.context())
        for plan in rank_plans(*custom):
            scene.registry.enter(scene.context(plan.rank))
            hanging.plans.add(plan)
        hanging.deadlines.plan = time.monotonic() + 0.5
        hanging.notify()
        await scene.reach(hanging, lambda: hanging.ended)
        (failure,) = hanging.outcome.failures.values()
        assert failure.kind == save_pb2.FAILURE_KIND_DEADLINE
        assert "the planner theirs:Planner had made no global plan" in failure.message
        other = scene.registry.enter(scene.context(number=2))
        for plan in scene.plans:
            scene.registry.enter(scene.context(plan.rank, number=2))
            other.plans.add(plan)
        other.notify()
        await scene.reach(other, lambda: other.state is not State.PLANNING)
        await scene.make_durable(other)
        await scene.reach(other, lambda: other.state is State.COMMITTED)

    try:
        play(scenario)
    finally:
        gate.set()


def test_impossible_moves_raise() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        await scene.make_durable(save)
        await scene.reach(save, lambda: save.ended)
        for state in (State.ABORTED, State.PLANNING, State.IN_DOUBT):
            with pytest.raises(RuntimeError, match="COMMITTED: it can't become"):
                save.move(state)

    play(scenario)


def test_ended_saves_are_remembered_for_a_while_without_their_plans() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        await scene.make_durable(save)
        await scene.reach(save, lambda: save.ended)
        assert save.manifest is None
        assert not save.plans.plans
        assert scene.registry.enter(scene.context()) is save
        for number in range(2, ENDED_KEPT + 3):
            other = scene.registry.enter(scene.context(number=number))
            other.fail(save_pb2.FAILURE_KIND_SKIPPED, "busy", 0)
            other.move(State.ABORTED)
        assert scene.registry.find_key(save.key) is None
        assert len(scene.status_registry.list(limit=10**6)) == ENDED_KEPT

    play(scenario)


def _lost(rank: int) -> save_pb2.Failure:
    return save_pb2.Failure(rank=rank, kind=save_pb2.FAILURE_KIND_LOST, message="gone")


def test_a_possible_loss_is_dropped_with_a_receipt_and_fails_without_one() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        assert save.manifest is not None
        receipt = receipt_of(save.manifest.final_plan(0), 0)
        await scene.plain.create(
            object_names.receipt(attempt_of(save), 0), receipt.SerializeToString()
        )
        save.report_possible_loss(_lost(0))
        await scene.reach(save, lambda: save.ranks[0].receipt is not None)
        assert not save.outcome.possible_losses
        assert not save.failing
        save.report_possible_loss(_lost(1))
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.ABORTED
        assert save.outcome.failures == {1: _lost(1)}

    play(scenario)


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("given_up", ["late", "lost"])
def test_receipts_that_no_sidecar_reported_count_at_the_end(given_up: str, readable: bool) -> None:
    """Storage that doesn't answer then shows nothing: the save ends by what it holds later."""

    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        assert save.manifest is not None
        for rank in save.ranks:
            data = receipt_of(save.manifest.final_plan(rank), rank).SerializeToString()
            await scene.plain.create(object_names.receipt(attempt_of(save), rank), data)
        scene.store.unreadable = not readable
        if given_up == "late":
            save.deadlines.shorten(save.deadlines.start)
            save.notify()
        else:
            save.report_possible_loss(_lost(0))
        if not readable:
            await scene.reach(save, lambda: len(scene.store.asked) > 2)
            assert "503" in save.storage_wait
            assert not save.failing
            scene.store.unreadable = False
        await scene.reach(save, lambda: save.ended)
        assert save.state is State.COMMITTED

    play(scenario)


def test_a_save_that_was_committed_is_not_failing_after_a_late_failure() -> None:
    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        scene.store.refused.add(object_names.decision(attempt_of(save)))
        await scene.make_durable(save)
        await scene.reach(save, lambda: scene.store.tries >= 2)
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "late", 0)
        assert save.failing
        scene.store.refused.clear()
        await scene.reach(save, lambda: save.ended)
        assert (save.state, save.failing) == (State.COMMITTED, False)

    play(scenario)


def test_saves_are_cancelled_before_what_their_commits_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    committed, stop = Sweeper.committed, Sweeper.stop

    async def scenario(scene: Scene) -> None:
        save = await scene.planned()
        writing, answered = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            writing.set()
            await answered.wait()

        def begin(self: Sweeper, checkpoint_id: str) -> None:
            calls.append("begun")
            committed(self, checkpoint_id)

        async def end(self: Sweeper) -> None:
            await stop(self)
            calls.append("stopped")
            # A save that still runs is committed now.
            answered.set()
            for _ in range(200):
                await asyncio.sleep(0)

        monkeypatch.setattr(Sweeper, "committed", begin)
        monkeypatch.setattr(Sweeper, "stop", end)
        scene.store.before[object_names.METADATA] = write
        await scene.make_durable(save)
        await asyncio.wait_for(writing.wait(), BOUND_S)
        await scene.tasks.stop()
        assert calls == ["stopped"]

    play(scenario)


def test_an_internal_error_leaves_the_save_in_doubt_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: SaveTask) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(SaveTask, "_run_until_failing", fail)

    async def scenario(scene: Scene) -> None:
        save = scene.registry.enter(scene.context())
        await scene.reach(save, lambda: save.state is State.IN_DOUBT)
        assert "KeyError" in status(save).waiting_on.text

    play(scenario)
    assert "left IN_DOUBT: restart the coordinator, or run `pannier recover`" in caplog.text
