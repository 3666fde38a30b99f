"""Extra files of a checkpoint are visible with its commit, whichever process finishes it, and gone with it."""

import asyncio
import itertools
import pickle
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import decide, new_decision, read_decision
from pannier.attempts.extra_files import ExtraFilesError, write_copies
from pannier.attempts.metadata_refs import saved_by
from pannier.attempts.metadata_swap import OccupiedError, RemovedError
from pannier.maintenance.delete_checkpoint import plan_removal, remove_checkpoint
from pannier.maintenance.gc import Rules, sweep
from pannier.maintenance.recover import End, Outcome, find_interrupted, finish_attempt
from pannier.maintenance.superseded import sweep_checkpoint
from pannier.maintenance.verify import verify
from pannier.storage import HeldError, ObjectInfo, StorageError, Store, open_store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, SaveAbortedError
from pannier.wire.object_names import METADATA, Attempt
from support.actors.ranks_by_hand import extra_receipt
from support.storage.unreliable_store import UnreliableStore

GROUP = "g00000000"
FIRST, SECOND, THIRD = (Attempt(1, number, GROUP, "a") for number in (1, 2, 3))
_places = itertools.count()
T = TypeVar("T")
Files = Mapping[str, bytes]


def on_fresh_store(scenario: Callable[[Store], Awaitable[T]]) -> T:
    async def main() -> T:
        store = open_store(f"memory://extra-{next(_places)}/step")
        try:
            return await scenario(store)
        finally:
            for info in await store.list():
                await store.delete(info.key)
            await store.close()

    return asyncio.run(main())


async def ingest(store: Store, attempt: Attempt, files: Files) -> records_pb2.Receipt:
    """What is in storage before an attempt is committed."""
    receipt, data = extra_receipt(attempt.name, 0, files)
    manifest = records_pb2.PlanManifest(
        save=save_of(attempt), attempt=attempt.name, members=[records_pb2.Member(rank=0, host="h")]
    )
    if data:
        await store.create(receipt.files[0].name, data)
    await store.create(object_names.manifest(attempt.name), manifest.SerializeToString())
    await store.create(object_names.receipt(attempt.name, 0), receipt.SerializeToString())
    return receipt


def metadata_of(attempt: str) -> bytes:
    """A ``.metadata`` that refers to no data files."""
    return pickle.dumps(
        Metadata({}, storage_data={}, storage_meta=StorageMeta("", save_id=attempt))
    )


def save_of(attempt: Attempt, job: str = "j") -> save_pb2.SaveId:
    return save_pb2.SaveId(job=job, incarnation="a", group=GROUP, number=attempt.number)


async def commit(store: Store, attempt: Attempt, files: Files, job: str = "j") -> None:
    """As a coordinator does, from the last receipt on; it may be the second that does."""
    receipt, _ = extra_receipt(attempt.name, 0, files)
    proposal = await prepare_commit(
        store,
        save=save_of(attempt, job),
        attempt=attempt,
        plan_id="p",
        metadata=metadata_of(attempt.name),
        receipts=[receipt],
        host="here",
    )
    decision = await repeated(lambda: decide(store, proposal))
    await repeated(lambda: carry_out(store, decision))


async def repeated(step: Callable[[], Awaitable[T]]) -> T:
    """As the coordinator does: the outcome may be unknown."""
    for _ in range(20):
        with suppress(StorageError):
            return await step()
    return await step()


async def save(store: Store, attempt: Attempt, files: Files) -> None:
    await ingest(store, attempt, files)
    await commit(store, attempt, files)


async def remove(store: Store) -> None:
    await remove_checkpoint(store, await plan_removal(store), host="here")


async def plain(store: Store) -> dict[str, bytes]:
    """What a plain tool sees beside ``.metadata`` and the data files."""
    names = [info.key for info in await store.list()]
    return {
        name: await store.read(name)
        for name in names
        if not (name == METADATA or object_names.attempt_of(name))
    }


OLD = {"meta.pt": b"old", "rng/0.pt": b"rng of old", "state.json": b"{}"}
NEW = {"meta.pt": b"new", "state.json": b"{}", "empty": b""}


def test_they_appear_with_the_commit_and_go_with_the_checkpoint() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        assert await plain(store) == {}
        watched = UnreliableStore(store)
        seen: list[dict[str, bytes]] = []

        async def look() -> None:
            seen.append(await plain(store))

        for name in OLD:
            watched.before[name] = look
        watched.before[object_names.decision(FIRST.name)] = look
        watched.before[METADATA] = look
        await commit(watched, FIRST, OLD)
        # Nothing before COMMIT, all before .metadata.
        assert seen[0] == {}
        assert seen[-1] == OLD
        assert await plain(store) == OLD
        await remove(store)
        assert await store.list() == []

    on_fresh_store(scenario)


def test_a_later_save_to_the_same_id_replaces_them() -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        await store.create("notes.txt", b"a user's")
        await save(store, SECOND, NEW)
        assert await plain(store) == {**NEW, "notes.txt": b"a user's"}
        await save(store, THIRD, {})
        assert await plain(store) == {"notes.txt": b"a user's"}

    on_fresh_store(scenario)


def test_a_file_that_no_save_wrote_is_named_before_it_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(store: Store) -> None:
        await store.create("config.json", b"the user's own")
        await ingest(store, FIRST, {"config.json": b"1", "rng": b"1"})
        await commit(store, FIRST, {"config.json": b"1", "rng": b"1"})
        (message,) = [each.message for each in caplog.records]
        assert message == (
            f"{store.url}: no save has written config.json as it is there now: the extra file of that name "
            "replaces it"
        )
        caplog.clear()
        await ingest(store, SECOND, {"config.json": b"2", "rng": b"2"})
        await commit(store, SECOND, {"config.json": b"2", "rng": b"2"})
        assert not caplog.records

    on_fresh_store(scenario)


def test_what_someone_else_wrote_since_stays() -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        info = await store.stat("meta.pt")
        assert info is not None
        await store.replace("meta.pt", b"edited", expected=info.generation)
        await save(store, SECOND, {})
        assert await plain(store) == {"meta.pt": b"edited"}
        await remove(store)
        assert [info.key for info in await store.list()] == ["meta.pt"]

    on_fresh_store(scenario)


def test_what_someone_edited_stays_when_an_earlier_attempt_is_swept() -> None:
    new = {"meta.pt": b"new", "other.json": b"{}"}

    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        await save(store, SECOND, new)
        info = await store.stat("meta.pt")
        assert info is not None
        await store.replace("meta.pt", b"edited", expected=info.generation)
        # Also where another copy is written again.
        await store.delete("other.json")
        await sweep_checkpoint(store, grace_s=0)
        assert FIRST.name not in {object_names.attempt_of(each.key) for each in await store.list()}
        assert await plain(store) == {**new, "meta.pt": b"edited"}

    on_fresh_store(scenario)


def test_what_an_earlier_attempt_wrote_late_is_replaced() -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        await save(store, SECOND, {"meta.pt": b"new"})
        info = await store.stat("meta.pt")
        assert info is not None
        # By a process that was killed just then.
        await store.replace("meta.pt", OLD["meta.pt"], expected=info.generation)
        await sweep_checkpoint(store, grace_s=0)
        assert await plain(store) == {"meta.pt": b"new"}

    on_fresh_store(scenario)


def test_an_aborted_attempt_leaves_none() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        decision = new_decision(
            records_pb2.OUTCOME_ABORT, save=save_of(FIRST), attempt=FIRST, host="here"
        )
        await carry_out(store, await decide(store, decision))
        assert [info.key for info in await store.list()] == [object_names.decision(FIRST.name)]

    on_fresh_store(scenario)


@pytest.mark.parametrize("name", [*OLD, METADATA])
def test_who_finishes_the_commit_completes_them(name: str) -> None:
    """The coordinator dies before it writes ``name``."""

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        dying = UnreliableStore(store)

        async def die() -> None:
            raise asyncio.CancelledError

        dying.before[name] = die
        with pytest.raises(asyncio.CancelledError):
            await commit(dying, FIRST, OLD)
        assert await store.stat(METADATA) is None
        await recover(store)
        assert await plain(store) == OLD
        assert await store.read(METADATA) == metadata_of(FIRST.name)

    on_fresh_store(scenario)


async def recover(store: Store, *, abort: bool = False) -> list[Outcome]:
    """``pannier recover`` of what is undecided or unfinished."""

    async def build(manifest: bytes, receipts: Any) -> bytes:
        return metadata_of(receipts[0].attempt)

    return [
        await finish_attempt(store, each, build=build, host="there", abort=abort)
        for each in await find_interrupted(store)
    ]


def test_recover_commits_them_from_receipts_alone() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        await recover(store)
        assert await plain(store) == OLD

    on_fresh_store(scenario)


def test_the_sweep_removes_what_a_dying_coordinator_left_of_the_replaced_checkpoint() -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        await ingest(store, SECOND, NEW)
        dying = UnreliableStore(store)
        original = dying.delete

        async def die(key: str, *, generation: str | None = None) -> None:
            if key == "rng/0.pt":
                raise asyncio.CancelledError
            await original(key, generation=generation)

        dying.delete = die  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await commit(dying, SECOND, NEW)
        assert await plain(store) == {**NEW, "rng/0.pt": b"rng of old"}
        await sweep_checkpoint(store, grace_s=3600)
        assert await plain(store) == NEW
        # The superseded attempt itself stays for its readers.
        assert await store.list(object_names.data_prefix(FIRST.name))

    on_fresh_store(scenario)


def test_a_name_that_could_not_be_written_is_found_before_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = open_store(str(tmp_path / "step"))
        for files, problem in (
            ({"logs": b"x"}, "logs is a directory"),
            ({"note.txt/x": b"x"}, "note.txt is a file"),
        ):
            await ingest(store, FIRST, files)
            (tmp_path / "step" / "logs").mkdir(exist_ok=True)
            (tmp_path / "step" / "note.txt").write_text("a user's")
            with pytest.raises(ExtraFilesError, match=problem):
                await commit(store, FIRST, files)
            assert await read_decision(store, FIRST.name) is None
            await recover(store)
            decision = await read_decision(store, FIRST.name)
            assert decision is not None
            assert decision.outcome == records_pb2.OUTCOME_ABORT
            await store.delete(object_names.decision(FIRST.name))
        await store.close()

    asyncio.run(scenario())


def test_a_held_name_is_found_before_commit() -> None:
    class Holding(UnreliableStore):
        async def stat(self, key: str) -> ObjectInfo | None:
            info = await super().stat(key)
            held = info is not None and key == "meta.pt"
            return ObjectInfo(**{**vars(info), "hold": "event-based"}) if held else info

    async def scenario(store: Store) -> None:
        await store.create("meta.pt", b"kept for the auditors")
        await ingest(store, FIRST, OLD)
        with pytest.raises(HeldError, match=r"meta\.pt is under a hold \(event-based\)"):
            await commit(Holding(store), FIRST, OLD)
        assert await read_decision(store, FIRST.name) is None

    on_fresh_store(scenario)


async def prepare(store: Store, *receipts: records_pb2.Receipt) -> records_pb2.Decision:
    return await prepare_commit(
        store,
        save=save_of(FIRST),
        attempt=FIRST,
        plan_id="p",
        metadata=b"m",
        receipts=receipts,
        host="here",
    )


def test_ranks_may_give_files_of_their_own_and_equal_ones() -> None:
    async def scenario(store: Store) -> None:
        receipts = [
            extra_receipt(FIRST.name, rank, {f"rng/{rank}.pt": b"%d" % rank, "meta.pt": b"same"})[0]
            for rank in (1, 0)
        ]
        found = (await prepare(store, *receipts)).extra_files
        assert [(each.name, each.file) for each in found] == [
            ("meta.pt", object_names.extra_file(FIRST.name, 0)),
            ("rng/0.pt", object_names.extra_file(FIRST.name, 0)),
            ("rng/1.pt", object_names.extra_file(FIRST.name, 1)),
        ]

    on_fresh_store(scenario)


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        ({"a": b"1"}, {"a": b"2"}, r"ranks 0 \(host node-0\) and 1 \(host node-1\) give different"),
        ({"a": b"1"}, {"a/b": b"1"}, r"'a' and 'a/b' can't be both"),
    ],
)
def test_files_that_cannot_be_in_one_checkpoint_fail_the_save(
    one: Files, other: Files, problem: str
) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(ExtraFilesError, match=problem):
            await prepare(
                store, extra_receipt(FIRST.name, 0, one)[0], extra_receipt(FIRST.name, 1, other)[0]
            )

    on_fresh_store(scenario)


async def damage(store: Store, attempt: Attempt) -> None:
    """Changes the bytes of its extra files."""
    name = object_names.extra_file(attempt.name, 0)
    info = await store.stat(name)
    assert info is not None
    await store.replace(name, b"x" * info.size, expected=info.generation)


def test_damaged_bytes_are_not_installed() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        await damage(store, FIRST)
        with pytest.raises(IntegrityError, match=r"extra\.distcp is damaged: the extra file '"):
            await commit(store, FIRST, OLD)
        assert await store.stat(METADATA) is None

    on_fresh_store(scenario)


@pytest.mark.parametrize("abort", [False, True])
def test_recover_reports_damaged_bytes(abort: bool) -> None:
    """Others behind it are finished: it doesn't raise."""

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        await damage(store, FIRST)
        (outcome,) = await recover(store, abort=abort)
        assert (outcome.end, "is damaged" in outcome.reason) == (End.UNDECIDED, True)

    on_fresh_store(scenario)


def test_the_sweep_reports_damaged_bytes() -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        await save(store, SECOND, NEW)
        await damage(store, SECOND)
        await store.delete("meta.pt")
        report = await sweep(store, Rules(), now=time.time(), host="h", dry_run=False)
        assert "is damaged" in report.kept[-1].why

    on_fresh_store(scenario)


@pytest.mark.parametrize(
    ("damage", "status"), [(b"olt", "checksum"), (b"o", "size"), (None, "missing")]
)
def test_verify_compares_them(damage: bytes | None, status: str) -> None:
    async def scenario(store: Store) -> None:
        await save(store, FIRST, OLD)
        info = await store.stat("meta.pt")
        assert info is not None
        if damage is None:
            await store.delete("meta.pt")
        else:
            await store.replace("meta.pt", damage, expected=info.generation)
        found = await verify(store, progress=lambda *_: None)
        # The manifest here is no real one.
        bad = {each.name: each.status for each in found.findings if each.name in OLD}
        assert bad == {"meta.pt": status, "rng/0.pt": "ok", "state.json": "ok"}

    on_fresh_store(scenario)


# Writers at the same time.


class Stepwise(UnreliableStore):
    """Each request waits until its turn comes; some never get one: their process was killed."""

    def __init__(self, inner: Store, turn: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._turn = turn

    async def _write(self, key: str, write: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
        await self._turn()
        return await super()._write(key, write)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self._turn()
        return await super().read(key, offset, length)

    async def stat(self, key: str) -> ObjectInfo | None:
        await self._turn()
        return await super().stat(key)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        await self._turn()
        return await super().list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        await self._turn()
        await super().delete(key, generation=generation)


class Turns:
    """Lets one of several processes make its next request, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._waiting: list[asyncio.Future[None]] = []
        self._running = 0

    async def _turn(self) -> None:
        own: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(own)
        await own

    async def run(self, store: Store, *works: Callable[[Store], Awaitable[None]]) -> None:
        """Runs them to their ends."""
        tasks = [asyncio.ensure_future(work(Stepwise(store, self._turn))) for work in works]
        while not all(task.done() for task in tasks):
            # Until each waits for its turn, or has ended.
            for _ in range(20):
                await asyncio.sleep(0)
            if self._waiting:
                turn = self._waiting.pop(self._chance.randrange(len(self._waiting)))
                # One of several requests is cancelled when another one fails.
                if not turn.done():
                    turn.set_result(None)
        for task in tasks:
            with suppress(
                RemovedError, OccupiedError, SupersededError, SaveAbortedError, IntegrityError
            ):
                task.result()


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_of_requests_the_last_files_are_those_of_the_checkpoint(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0)
    monkeypatch.setattr("pannier.common.timeouts.CONFLICT_AGAIN_S", 0)
    names = ("a", "b", "c/d")
    contents = {
        attempt: {
            name: chance.choice((b"same", attempt.name.encode()))
            for name in names
            if chance.random() < 0.7
        }
        for attempt in (FIRST, SECOND, THIRD)
    }

    async def gc(store: Store) -> None:
        rules = Rules(grace_s=0, abandoned_after_s=3600)
        await sweep(store, rules, now=2e9, host="gc", dry_run=False)

    async def scenario(store: Store) -> None:
        for attempt, files in contents.items():
            await ingest(store, attempt, files)
        if chance.random() < 0.5:
            await commit(store, FIRST, contents[FIRST])

        def committer(attempt: Attempt) -> Callable[[Store], Awaitable[None]]:
            return lambda each: commit(each, attempt, contents[attempt])

        works = [committer(attempt) for attempt in contents for _ in range(chance.randint(1, 2))]
        removals = chance.choice(([], [gc], [remove], [remove, gc]))
        await Turns(chance).run(store, *works, *removals)
        if remove in removals:
            # One that was overtaken by a commit leaves the rest to gc.
            await gc(store)
        info = await store.stat(METADATA)
        found = await plain(store)
        if info is None:
            assert found == {}
        else:
            standing, _ = saved_by(await store.read(METADATA), store.url)
            assert found == contents[Attempt.parse(standing)]

    on_fresh_store(scenario)


def test_an_unknown_answer_of_a_copy_is_settled_by_another_try() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        losing = UnreliableStore(store)
        losing.lose.add("meta.pt")
        # Which tries again.
        await commit(losing, FIRST, OLD)
        assert not losing.lose
        assert await plain(store) == OLD

    on_fresh_store(scenario)


def test_a_copy_that_is_being_written_when_the_attempt_is_found_removed_does_not_stay() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, OLD)
        slow = UnreliableStore(store)

        async def remove_attempt() -> None:
            for info in await store.list():
                await store.delete(info.key)
            # Meanwhile the other copies find the data file removed.
            await turns(100)

        slow.before["meta.pt"] = remove_attempt
        with pytest.raises(RemovedError):
            await commit(slow, FIRST, OLD)
        await turns(200)
        assert await store.list() == []

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    on_fresh_store(scenario)


def test_after_an_error_no_other_copy_is_begun() -> None:
    files = {f"{number:02}": b"x" for number in range(20)}

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST, files)
        failing = UnreliableStore(store)

        async def fail() -> None:
            raise StorageError("the file system is read-only")

        failing.before["00"] = fail
        receipt, _ = extra_receipt(FIRST.name, 0, files)
        decision = records_pb2.Decision(attempt=FIRST.name, extra_files=receipt.extra_files)
        with pytest.raises(StorageError, match="read-only"):
            await write_copies(failing, decision)
        assert len(await plain(store)) < len(files) - 1

    on_fresh_store(scenario)
