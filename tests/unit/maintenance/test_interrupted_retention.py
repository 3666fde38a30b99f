"""Retention that fails, or is stopped, halfway: the checkpoint is intact, or the next run removes the rest."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pannier.client.loading.storage_reader import StorageReader
from pannier.maintenance.delete_checkpoint import plan_removal
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.retention_run import Outcome, retain
from pannier.storage import HeldError, ObjectInfo, StorageError, Store, open_store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND, ABORTED, OTHER = (f"i1-inc-g0000000a-s{number}" for number in (1, 2, 3, 4))
LEASES = object_names.leases_prefix()

Hook = Callable[[], Awaitable[None]]


class Interrupted(UnreliableStore):
    """Runs code around the removal of ``.metadata`` and other steps of a removal.

    Args:
        hooks: by key or prefix: called before its object is removed, or it is listed.
        late: called after the removal of ``.metadata``.
        hold: of ``.metadata``.
    """

    def __init__(
        self, inner: Store, hooks: dict[str, Hook], late: Hook | None = None, hold: str = ""
    ) -> None:
        super().__init__(inner)
        self._hooks = hooks
        self._late = late
        self._hold = hold

    async def stat(self, key: str) -> ObjectInfo | None:
        info = await super().stat(key)
        if info is not None and key == object_names.METADATA:
            return dataclasses.replace(info, hold=self._hold)
        return info

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        if prefix in self._hooks and await self.inner.list(object_names.removal_mark(SECOND)):
            await self._hooks[prefix]()
        return await super().list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        if self._hold and key == object_names.METADATA:
            raise HeldError("403")
        if key in self._hooks:
            await self._hooks[key]()
        await super().delete(key, generation=generation)
        if self._late is not None and key == object_names.METADATA:
            await self._late()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """step-1, which was saved twice and aborted once, may go."""
    write_attempt(tmp_path / "step-1", FIRST)
    write_attempt(tmp_path / "step-1", SECOND)
    write_decision(tmp_path / "step-1", ABORTED, records_pb2.OUTCOME_ABORT)
    write_attempt(tmp_path / "step-2", OTHER)
    return tmp_path


async def refuse() -> None:
    raise StorageError("503")


async def stop() -> None:
    """As SIGTERM does to the coordinator: cancels the task that runs this."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def retained(root: Path, job: str = "job", dry_run: bool = False, **faults: Any) -> Outcome | None:
    """The outcome for step-1; None: it has none, or the run was cancelled."""

    def opener(url: str) -> Store:
        store = open_store(url)
        return Interrupted(store, **faults) if faults and url.endswith("step-1") else store

    async def run() -> Outcome | None:
        policy = Policy(newest=1)
        try:
            outcomes = await retain(
                opener, str(root), policy, job=job, host="here", dry_run=dry_run
            )
        except asyncio.CancelledError:
            return None
        found = {each.checkpoint.name: each for each in outcomes}
        return found.get("step-1")

    return asyncio.run(run())


def check_intact(root: Path, before: set[str]) -> None:
    """No mark is left, so that it is loaded; and the next run removes it."""
    assert files_below(root / "step-1") == before
    reader = StorageReader(root / "step-1")
    reader.resolve()
    reader.release()
    outcome = retained(root)
    assert outcome is not None
    assert not outcome.reasons
    assert not (root / "step-1").exists()


@pytest.mark.parametrize("fault", [refuse, stop])
@pytest.mark.parametrize("at", [LEASES, object_names.METADATA])
def test_before_metadata_is_removed_the_marks_are_taken_back(
    root: Path, at: str, fault: Hook
) -> None:
    before = files_below(root / "step-1")
    outcome = retained(root, hooks={at: fault})
    if fault is refuse:
        assert outcome is not None
        assert outcome.spared
        assert "could not be removed: 503" in outcome.why
    check_intact(root, before)


def test_a_mark_whose_answer_was_lost_is_taken_back_too(root: Path) -> None:
    before = files_below(root / "step-1")

    class Losing(UnreliableStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            self.lose.add(object_names.removal_mark(FIRST))
            return await super().create(key, data)

    def opener(url: str) -> Store:
        store = open_store(url)
        return Losing(store) if url.endswith("step-1") else store

    asyncio.run(retain(opener, str(root), Policy(newest=1), job="job", host="here"))
    check_intact(root, before)


@pytest.mark.parametrize("seen", [True, False], ids=["held before", "held meanwhile"])
def test_what_is_held_is_not_marked(root: Path, seen: bool) -> None:
    before = files_below(root / "step-1")

    async def hold() -> None:
        raise HeldError("403: it is under a hold")

    faults: dict[str, Any] = {"hooks": {} if seen else {object_names.METADATA: hold}}
    outcome = retained(root, hold="temporaryHold" if seen else "", **faults)
    assert outcome is not None
    assert outcome.spared
    assert "under a hold" in outcome.why
    assert files_below(root / "step-1") == before
    if seen:
        dry = retained(root, hold="temporaryHold", dry_run=True, **faults)
        assert dry == outcome
    check_intact(root, before)


def test_what_is_held_is_not_marked_by_rm_either(root: Path) -> None:
    async def run() -> None:
        store = Interrupted(open_store(str(root / "step-1")), {}, hold="eventBasedHold")
        with pytest.raises(HeldError, match=r"under a hold \(eventBasedHold\)"):
            await plan_removal(store)

    asyncio.run(run())


def test_a_removal_of_metadata_whose_answer_was_lost_is_one(root: Path) -> None:
    outcome = retained(root, hooks={}, late=refuse)
    assert outcome is not None
    assert not outcome.reasons
    assert not (root / "step-1").exists()


def test_stopped_right_after_metadata_was_removed_the_marks_stay(root: Path) -> None:
    """Else ``pannier recover`` would install it again."""
    assert retained(root, hooks={}, late=stop) is None
    left = files_below(root / "step-1")
    assert {object_names.removal_mark(FIRST), object_names.removal_mark(SECOND)} <= left
    assert object_names.METADATA not in left
    assert retained(root) is not None
    assert not (root / "step-1").exists()


@pytest.mark.parametrize("fault", [refuse, stop])
@pytest.mark.parametrize(
    "at",
    [
        object_names.data_file(FIRST, 0, 0),
        object_names.receipt(SECOND, 1),
        object_names.removal_mark(SECOND),
        object_names.decision(SECOND),
    ],
)
def test_the_next_run_removes_what_is_left_without_metadata(
    root: Path, at: str, fault: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = retained(root, hooks={at: fault})
    left = files_below(root / "step-1")
    assert object_names.decision(SECOND) in left
    assert object_names.METADATA not in left
    if fault is refuse:
        assert outcome is not None
        assert not outcome.reasons, "it is no checkpoint any more"
        assert "the next run continues: 503" in caplog.text
    assert retained(root, job="another") is None
    assert retained(root, dry_run=True) is not None
    assert files_below(root / "step-1") == left
    outcome = retained(root)
    assert outcome is not None
    assert not outcome.reasons
    assert outcome.removed > 0
    assert not (root / "step-1").exists()


@pytest.mark.parametrize("what", ["a save in progress", "a commit in progress"])
def test_what_is_left_waits_for_a_save_to_the_same_id(root: Path, what: str) -> None:
    assert retained(root, hooks={}, late=stop) is None
    place, newer = root / "step-1", "i2-inc-g0000000a-s1"
    metadata = write_attempt(place, newer, commit=False)
    if what == "a commit in progress":
        write_decision(place, newer, records_pb2.OUTCOME_COMMIT, metadata)
    before = files_below(place)
    assert retained(root) is None
    assert files_below(place) == before


def test_without_metadata_but_unmarked_it_was_not_removed_by_pannier(root: Path) -> None:
    (root / "step-1" / object_names.METADATA).unlink()
    write(root / "step-1" / object_names.removal_mark(FIRST), b"{}")
    before = files_below(root / "step-1")
    assert retained(root) is None
    assert files_below(root / "step-1") == before


def test_a_removal_whose_request_takes_effect_after_it_was_given_up_leaves_the_marks(
    root: Path,
) -> None:
    """Else ``pannier recover`` would install it again."""

    class Delayed(UnreliableStore):
        generation: str | None = None

        async def delete(self, key: str, *, generation: str | None = None) -> None:
            if key == object_names.METADATA:
                self.generation = generation
                await refuse()
            await super().delete(key, generation=generation)
            if key == object_names.removal_mark(SECOND):
                await self.inner.delete(object_names.METADATA, generation=self.generation)

    def opener(url: str) -> Store:
        store = open_store(url)
        return Delayed(store) if url.endswith("step-1") else store

    asyncio.run(retain(opener, str(root), Policy(newest=1), job="job", host="here"))
    left = files_below(root / "step-1")
    assert {object_names.removal_mark(FIRST), object_names.removal_mark(SECOND)} <= left
    assert object_names.METADATA not in left
    assert retained(root) is not None
    assert not (root / "step-1").exists()


def test_a_checkpoint_whose_removal_has_begun_takes_no_loadable_ones_place(root: Path) -> None:
    """``pannier rm`` of the newest one was killed after its mark."""
    write(root / "step-2" / object_names.removal_mark(OTHER), b'{"reason": "pannier rm"}')
    outcome = retained(root)
    assert outcome is not None
    assert outcome.why == "newest"
    assert not (root / "step-2").exists()


def test_a_removal_that_has_begun_is_completed_though_a_rule_would_keep_the_checkpoint(
    root: Path,
) -> None:
    write(root / "step-1" / object_names.removal_mark(SECOND), b'{"reason": "retention"}')

    async def run() -> list[Outcome]:
        return await retain(open_store, str(root), Policy(newest=5), job="job", host="here")

    outcomes = {each.checkpoint.name: each for each in asyncio.run(run())}
    assert not outcomes["step-1"].reasons
    assert outcomes["step-2"].why == "newest"
    assert not (root / "step-1").exists()


@pytest.mark.parametrize("at", [object_names.METADATA, object_names.receipt(SECOND, 1)])
def test_a_refusal_of_storage_is_in_the_outcome(root: Path, at: str) -> None:
    outcome = retained(root, hooks={at: refuse})
    assert outcome is not None
    assert isinstance(outcome.error, StorageError)
