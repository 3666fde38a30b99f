"""Two coordinators at one save: storage decides, and the loser notes that."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pannier.common import timeouts
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_view import status
from pannier.coordinator.saves.states import State
from pannier.v1 import save_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import receipt_of
from support.actors.scene import Scene, attempt_of
from support.processes.stretch import BOUND_S


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RESUME_CHECK_S", 0.05)
    monkeypatch.setattr(timeouts, "RESUME_LONGEST_CHECK_S", 0.1)
    monkeypatch.setattr(timeouts, "REMOVE_AGAIN_S", (0.05, 5.0))


def play(scenario: Callable[[Scene, Scene], Awaitable[None]]) -> None:
    """Two coordinators on one store, which ranks reach one or the other of."""

    async def main() -> None:
        with ThreadPoolExecutor(2) as threads:
            one = Scene(threads)
            other = Scene(threads, one.checkpoint_id, "there")
            try:
                await scenario(one, other)
            finally:
                await one.tasks.stop()
                await other.tasks.stop()
                for info in await one.plain.list():
                    await one.plain.delete(info.key)

    asyncio.run(main())


async def store_receipt(scene: Scene, save: Save, rank: int) -> None:
    assert save.manifest is not None
    receipt = receipt_of(save.manifest.final_plan(rank), rank)
    key = object_names.receipt(attempt_of(save), rank)
    await scene.plain.create(key, receipt.SerializeToString())


async def end(scene: Scene, save: Save) -> State:
    await scene.reach(save, lambda: save.ended)
    return save.state


def test_both_commit_though_each_got_half_of_the_reports(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        mine, theirs = await asyncio.gather(one.planned(), other.planned())
        assert mine.manifest is not None
        assert theirs.manifest is not None
        assert mine.manifest.plan_id == theirs.manifest.plan_id
        await store_receipt(one, mine, 0)
        await store_receipt(one, mine, 1)
        assert await end(one, mine) is await end(other, theirs) is State.COMMITTED
        assert await one.plain.stat(object_names.METADATA) is not None

    play(scenario)


def test_one_aborts_what_the_other_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        mine, theirs = await asyncio.gather(one.planned(), other.planned())
        mine.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        assert await end(one, mine) is await end(other, theirs) is State.ABORTED
        assert [failure.message for failure in status(theirs).failures] == ["boom"]
        assert "ABORT was decided by another coordinator" in status(theirs).note
        # Either may have planned first; the other has a note of that.
        assert "was decided by" not in status(mine).note

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "this coordinator follows" in caplog.text


def test_one_aborts_what_the_other_has_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it may see the receipts, and commit first.
    monkeypatch.setattr(timeouts, "RESUME_CHECK_S", BOUND_S)

    async def scenario(one: Scene, other: Scene) -> None:
        mine, theirs = await asyncio.gather(one.planned(), other.planned())
        await one.make_durable(mine)
        await end(one, mine)
        before = await one.plain.list()
        # It is decided, but the other one gets a failure first.
        theirs.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        assert await end(other, theirs) is State.COMMITTED
        assert "COMMIT was decided by another" in status(theirs).note
        assert await one.plain.list() == before

    play(scenario)


@pytest.mark.parametrize("kind", ["lost", "deadline"])
def test_a_timeout_in_planning_does_not_abort_what_another_has_planned(kind: str) -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        # Rank 1 goes to the other coordinator, and then rank 0 does, too.
        mine = one.registry.enter(one.context(0))
        mine.plans.add(one.plans[0])
        theirs = await other.planned()
        if kind == "lost":
            text = "its Plan call was cut off"
            mine.fail(save_pb2.FAILURE_KIND_LOST, text, 0, timed_out=True)
        else:
            mine.deadlines.plan = mine.deadlines.start
            mine.notify()
        await one.reach(mine, lambda: mine.state is State.STAGING)
        assert not status(mine).failures
        assert "0 of 2 ranks were durable" in status(mine).note
        await other.make_durable(theirs)
        assert await end(other, theirs) is await end(one, mine) is State.COMMITTED

    play(scenario)


def test_a_rank_that_reports_its_failure_ends_what_another_has_planned() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        mine = one.registry.enter(one.context(0))
        theirs = await other.planned()
        mine.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 0)
        assert await end(one, mine) is await end(other, theirs) is State.ABORTED

    play(scenario)


def test_receipts_of_a_host_that_is_gone_count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RESUME_CHECK_S", 100.0)
    monkeypatch.setattr(timeouts, "RESUME_LONGEST_CHECK_S", 100.0)

    async def scenario(one: Scene, other: Scene) -> None:
        save = await one.planned()
        for rank in (0, 1):
            await store_receipt(one, save, rank)
        save.request_storage_check()
        assert await end(one, save) is State.COMMITTED

    play(scenario)


def test_an_upload_that_arrives_after_the_abort_is_removed_too() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        save = await one.planned()
        name = attempt_of(save)
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 1)
        await end(one, save)
        late = object_names.data_file(name, 0, 0)
        await one.plain.create(late, b"late")
        bound = time.monotonic() + BOUND_S
        while await one.plain.stat(late) is not None:
            assert time.monotonic() < bound
            await asyncio.sleep(0.02)
        assert [info.key for info in await one.plain.list()] == [object_names.decision(name)]

    play(scenario)


def test_a_commit_whose_checkpoint_was_removed_ends_aborted_and_leaves_nothing() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        mine = await one.planned()

        async def meanwhile() -> None:
            for info in await one.plain.list():
                await one.plain.delete(info.key)

        one.store.before[object_names.METADATA] = meanwhile
        await one.make_durable(mine)
        assert await end(one, mine) is State.ABORTED
        assert "was removed from" in mine.outcome.text()
        assert await one.plain.list() == []

    play(scenario)


OVER = 0.001
"""Remaining seconds that a sidecar reports of a deadline that has passed."""


def report_again(scene: Scene, plan: float, save: float) -> Save:
    """Both ranks report to a restarted coordinator, with what they have left."""
    for rank in (0, 1):
        found = scene.registry.enter(scene.context(rank))
        found.deadlines.report(rank, plan, save)
        found.resume()
    return found


def test_a_resumed_save_has_no_deadline_for_its_plan() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        planned = await one.planned()
        again = report_again(other, OVER, 60)
        await other.reach(again, lambda: again.state is State.STAGING)
        await other.reach(again, lambda: time.monotonic() > again.deadlines.plan)
        await one.make_durable(planned)
        assert await end(one, planned) is await end(other, again) is State.COMMITTED

    play(scenario)


def test_a_save_that_is_resumed_after_its_deadline_is_finished() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        planned = await one.planned()
        again = report_again(other, OVER, OVER)
        await other.reach(again, lambda: again.state is State.STAGING)
        # Its uploads went on while there was no coordinator.
        await one.make_durable(planned)
        assert await end(one, planned) is await end(other, again) is State.COMMITTED

    play(scenario)


def test_a_save_that_is_resumed_after_its_deadline_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.2)

    async def scenario(one: Scene, other: Scene) -> None:
        await one.planned()
        again = report_again(other, OVER, OVER)
        assert await end(other, again) is State.ABORTED
        assert "was not durable in time" in again.outcome.text()

    play(scenario)


@pytest.mark.parametrize("where", ["root", "attempt"])
def test_storage_is_asked_for_a_resumed_save_until_it_answers(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.2)

    async def scenario(one: Scene, other: Scene) -> None:
        planned = await one.planned()
        await one.make_durable(planned)
        assert await end(one, planned) is State.COMMITTED
        other.store.unreadable = True
        if where == "root":
            other.stores.unreachable = True
        again = report_again(other, OVER, OVER)
        await other.reach(again, lambda: "503" in again.storage_wait and len(other.store.asked) > 1)
        await other.reach(
            again, lambda: time.monotonic() > again.deadlines.start + 2 * timeouts.RESUMED_SAVE_S
        )
        assert not again.ended
        other.stores.unreachable = other.store.unreadable = False
        assert await end(other, again) is State.COMMITTED

    play(scenario)


def test_the_earliest_deadline_of_the_ranks_counts_in_whatever_order_they_report() -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        for scene, order in ((one, (0, 1)), (other, (1, 0))):
            save = scene.registry.enter(scene.context(0))
            seconds = {0: 500.0, 1: 5000.0}
            for rank in order:
                save.deadlines.report(rank, 0, seconds[rank])
            # Once more, later.
            save.deadlines.report(0, 0, OVER)
            assert save.deadlines.start + 499 < save.deadline < save.deadlines.start + 600

    play(scenario)


@pytest.mark.parametrize("where", ["root", "attempt"])
def test_a_resumed_save_that_storage_does_not_answer_for_waits_for_no_rank(where: str) -> None:
    async def scenario(one: Scene, other: Scene) -> None:
        await one.planned()
        other.store.unreadable = True
        other.stores.unreachable = where == "root"
        again = report_again(other, OVER, OVER)
        await other.reach(again, lambda: "503" in again.storage_wait)
        shown = status(again).waiting_on
        assert shown.text.startswith(f"storage at {other.checkpoint_id} (")
        # There is no deadline before storage answers.
        assert (list(shown.ranks), shown.deadline_s) == ([], 0)

    play(scenario)
