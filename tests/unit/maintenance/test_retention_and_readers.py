"""Retention and readers: whatever their order, one of the two sees the other."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pannier.client.loading import catalog, read_lease
from pannier.client.loading.filesystem import MissingError
from pannier.client.loading.storage_reader import StorageReader
from pannier.common.locations import Pattern
from pannier.coordinator.background.retention import Retention
from pannier.coordinator.stores import Stores
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.retention_run import Outcome, read_record, retain
from pannier.storage import ObjectInfo, StorageError, Store, open_store
from pannier.wire import object_names
from pannier.wire.object_names import Attempt
from pannier.wire.retention_record import RetentionRecord
from support.processes.cli import pannier_here as pannier
from support.storage.checkpoints import write, write_attempt
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore

GROUP = "g0000000a"
NEWEST = Policy(newest=1)

Step = Callable[[], Awaitable[None]]


def attempt(number: int) -> str:
    return Attempt(1, number, GROUP, "inc").name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, of which the first may go."""
    for number in (1, 2):
        write_attempt(tmp_path / "run" / f"step-{number}", attempt(number), ranks=1, files=1)
    return tmp_path / "run"


def retained(root: Path, opener: Callable[[str], Store] = open_store) -> dict[str, Outcome]:
    outcomes = asyncio.run(retain(opener, str(root), NEWEST, job="job", host="here"))
    return {each.checkpoint.name: each for each in outcomes}


def at(root: Path, key: str, then: Callable[[], object]) -> Callable[[str], Store]:
    """Opens stores in whose first write of ``key`` at step-1 ``then`` comes between."""
    seen = []

    async def come_between() -> None:
        # A reader is blocking code, of another process.
        await asyncio.to_thread(then)

    def opener(url: str) -> Store:
        store = UnreliableStore(open_store(url))
        if url.endswith("step-1") and not seen:
            store.before[key] = come_between
        return store

    return opener


class Deleting(UnreliableStore):
    """Something comes between right before ``.metadata`` is deleted."""

    def __init__(self, inner: Store, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self._then = then

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        if key == object_names.METADATA:
            await asyncio.to_thread(self._then)
        await super().delete(key, generation=generation)


def test_a_lease_that_is_taken_after_the_first_look_spares_the_checkpoint(root: Path) -> None:
    before = files_below(root / "step-1")
    reader = StorageReader(root / "step-1")
    mark = object_names.removal_mark(attempt(1))
    outcome = retained(root, at(root, mark, reader.resolve))["step-1"]
    assert outcome.spared
    assert "is being read by process" in outcome.why
    reader.release()
    assert files_below(root / "step-1") == before, "no mark is left"
    # The record doesn't list it as removed.
    with pytest.raises(MissingError, match="step-3 is no checkpoint: it doesn't exist"):
        StorageReader(root / "step-3").resolve()
    record = asyncio.run(read(root))
    assert record.removed == []
    assert "is being read by" in record.kept["job"]["step-1"][0]
    assert not retained(root)["step-1"].reasons
    assert not (root / "step-1").exists()


@pytest.mark.parametrize(
    "content",
    [
        b'{"removed": [1]}',
        b'{"removed": 1, "kept": [], "pattern": 1}',
        b'{"kept": {"job": 1, "other": {"step-1": 1}}}',
        b'{"removed": [{"name": "step-9", "job": "job", "bytes": 1, "time": 1e400}]}',
        b"[" * 100_000,
        b"\xff",
        None,
    ],
    ids=["a number", "other shapes", "other reasons", "no time", "deep", "no text", "a directory"],
)
def test_a_record_of_another_shape_holds_up_no_removal(root: Path, content: bytes | None) -> None:
    """Any process that may write below the root could end retention for ever."""
    record = root / object_names.retention_record()
    if content is None:
        record.mkdir(parents=True)
    else:
        write(record, content)
    assert not retained(root)["step-1"].reasons
    assert not (root / "step-1").exists()
    with pytest.raises(MissingError, match="step-1 is no checkpoint"):
        StorageReader(root / "step-1").resolve()
    (line,) = pannier("ls", str(root), "--json").json_lines()
    if content is not None:
        assert [each.name for each in asyncio.run(read(root)).removed] == ["step-1"]
        assert line["kept_for"] == ["newest"]


def test_what_a_record_has_of_other_jobs_and_of_former_runs_stays(root: Path) -> None:
    former = {"name": "step-0", "job": "job", "bytes": 7, "time": 1.0}
    kept = {"other": {"step-7": ["the newest"]}}
    record = {"removed": [1, former, {**former, "name": 3}], "kept": {**kept, "bad": 1}}
    write(root / object_names.retention_record(), json.dumps(record).encode())
    retained(root)
    found = asyncio.run(read(root))
    assert [each.name for each in found.removed] == ["step-0", "step-1"]
    assert found.kept["other"] == kept["other"]


async def read(root: Path) -> RetentionRecord:
    store = open_store(str(root))
    try:
        return await read_record(store)
    finally:
        await store.close()


def test_a_reader_that_comes_after_the_second_look_gives_up_and_says_what_to_load(
    root: Path,
) -> None:
    messages: list[str] = []

    def come_late() -> None:
        with pytest.raises(MissingError) as caught:
            StorageReader(root / "step-1").resolve()
        messages.append(str(caught.value))

    def opener(url: str) -> Store:
        store = open_store(url)
        return Deleting(store, come_late) if url.endswith("step-1") else store

    assert not retained(root, opener)["step-1"].reasons
    assert not (root / "step-1").exists()
    (text,) = messages
    assert f"{root}/step-1 is being removed by retention on here" in text
    assert f"the newest below {root} is {root}/step-2: load that" in text


def test_a_lease_that_is_written_late_is_let_go_when_the_mark_is_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has resolved .metadata before the mark, and writes its lease after the second look."""
    taken: list[read_lease.Lease | None] = []

    def take_late(*arguments: object, **named: object) -> read_lease.Lease | None:
        write(root / "step-1" / object_names.removal_mark(attempt(1)), b"{}")
        taken.append(take(*arguments, **named))  # type: ignore[arg-type]
        return taken[-1]

    take = read_lease.take
    monkeypatch.setattr(read_lease, "take", take_late)
    with pytest.raises(MissingError, match="step-1 is being removed; the newest"):
        StorageReader(root / "step-1").resolve()
    assert taken
    assert not (root / "step-1" / ".pannier" / "leases").exists()


def test_the_load_of_what_retention_has_removed_says_so(root: Path) -> None:
    """Between ``latest`` and ``load`` newer checkpoints were committed."""
    assert not retained(root)["step-1"].reasons
    with pytest.raises(StorageError) as caught:
        StorageReader(root / "step-1").resolve()
    text = str(caught.value)
    assert f"{root}/step-1 is no checkpoint: retention (job job) removed it at 20" in text
    assert f"the newest below {root} is {root}/step-2: load that" in text


def test_another_ones_marks_are_not_taken_back(root: Path) -> None:
    """``pannier rm`` has begun to remove it, while a reader holds a lease."""
    mark = root / "step-1" / object_names.removal_mark(attempt(1))
    write(mark, b'{"by": "elsewhere"}')
    lease = root / "step-1" / object_names.lease(attempt(1), "abc")

    def lease_it() -> None:
        write(lease, b"{}")

    outcome = retained(root, at(root, object_names.removal_mark(attempt(1)), lease_it))["step-1"]
    assert outcome.spared
    assert mark.read_bytes() == b'{"by": "elsewhere"}'


class Watching(UnreliableStore):
    """Runs code once before ``.metadata`` is deleted, or before leases are listed after a mark was written."""

    def __init__(
        self, inner: Store, listing: Step | None = None, deleting: Step | None = None
    ) -> None:
        super().__init__(inner)
        self._listing = listing
        self._deleting = deleting
        self._wrote = False

    async def _write(self, key: str, write: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
        self._wrote = True
        return await super()._write(key, write)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        if self._listing and self._wrote and prefix == object_names.leases_prefix():
            step, self._listing = self._listing, None
            await step()
        return await super().list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        if self._deleting and key == object_names.METADATA:
            step, self._deleting = self._deleting, None
            await step()
        await super().delete(key, generation=generation)


async def retain_by(root: Path, **steps: Step) -> Outcome:
    """Another run's outcome for step-1."""

    def opener(url: str) -> Store:
        store = open_store(url)
        return Watching(store, **steps) if url.endswith("step-1") else store

    outcomes = await retain(opener, str(root), NEWEST, job="job", host="here")
    return next(each for each in outcomes if each.checkpoint.name == "step-1")


def test_of_two_runs_none_removes_what_has_no_mark_because_the_other_took_it_back(
    root: Path,
) -> None:
    """The first run gives up for a reader whom the second one, which found the first one's mark, doesn't see."""
    mark = root / "step-1" / object_names.removal_mark(attempt(1))
    lease = root / "step-1" / object_names.lease(attempt(1), "abc")

    async def run() -> None:
        looked, given_up = asyncio.Event(), asyncio.Event()
        seconds: list[asyncio.Task[Outcome]] = []

        async def second_looks() -> None:
            async def wait() -> None:
                looked.set()
                await given_up.wait()
                # The reader has written its lease, and looks for a mark now.
                assert mark.exists()
                lease.unlink()

            seconds.append(asyncio.create_task(retain_by(root, deleting=wait)))
            await looked.wait()
            write(lease, b"{}")

        assert (await retain_by(root, listing=second_looks)).spared
        given_up.set()
        assert not (await seconds[0]).reasons

    asyncio.run(run())
    assert files_below(root / "step-1") == set()


def test_a_run_that_replaced_the_mark_of_another_does_not_take_it_back(root: Path) -> None:
    """The other run has seen no lease, and is about to remove the checkpoint."""
    mark = root / "step-1" / object_names.removal_mark(attempt(1))
    lease = root / "step-1" / object_names.lease(attempt(1), "abc")

    async def run() -> None:
        async def second_gives_up() -> None:
            async def come() -> None:
                write(lease, b"{}")

            assert (await retain_by(root, listing=come)).spared
            assert mark.exists(), "the reader finds it"
            lease.unlink()

        assert not (await retain_by(root, deleting=second_gives_up)).reasons

    asyncio.run(run())
    assert files_below(root / "step-1") == set()


def test_saves_that_are_committed_in_another_order_stay_both_until_the_next(tmp_path: Path) -> None:
    """The coordinator reports commits as they come: the second save's first, then the first one's."""
    root = tmp_path / "run"

    async def run() -> None:
        retention = Retention(Stores(), NEWEST, host="here")

        async def commit(number: int) -> set[str]:
            # By a coordinator whose clock is behind.
            write_attempt(root / f"step-{number}", attempt(number), decided_at=1000.0 - number)
            retention.committed(f"{root}/step-{number}", "job", attempt(number))
            while retention._tasks:
                await asyncio.gather(*retention._tasks.values())
            return {path.name for path in root.glob("step-*")}

        assert await commit(100) == {"step-100"}
        assert await commit(300) == {"step-300"}
        assert await commit(200) == {"step-200", "step-300"}
        assert await commit(400) == {"step-400"}
        await retention.stop()

    asyncio.run(run())


NESTED = "checkpoint-*/dcp"


def test_a_pattern_removes_deeper_checkpoints_and_the_directories_that_only_had_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    policy = Policy(newest=1, pattern=Pattern(NESTED))

    async def run() -> list[str]:
        retention = Retention(Stores(), policy, host="here")

        async def commit(step: int) -> None:
            directory = root / f"checkpoint-{step}"
            write(directory / object_names.incarnation_record(1), b"{}")
            write_attempt(directory / "dcp", attempt(step), ranks=1, files=1)
            retention.committed(f"{directory}/dcp", "job", attempt(step))
            while retention._tasks:
                await asyncio.gather(*retention._tasks.values())

        for step in (9, 10):
            if step == 10:
                write(root / "checkpoint-9" / "trainer_state.json", b"{}")
            await commit(step)
        await commit(11)
        retention.committed(f"{root}/other", "job", attempt(12))
        retention.committed(f"{root}/another", "job", attempt(13))
        assert not retention._tasks
        await retention.stop()
        return sorted(path.name for path in root.glob("*"))

    with caplog.at_level("WARNING"):
        # What a framework wrote beside a checkpoint is its own.
        assert asyncio.run(run()) == [".pannier", "checkpoint-11", "checkpoint-9"]
    assert files_below(root / "checkpoint-9") == {
        "trainer_state.json",
        object_names.incarnation_record(1),
    }
    assert f"retention never removes {root}/other and its like: the pattern {NESTED}" in caplog.text
    assert "another" not in caplog.text
    assert [each.step for each in catalog.list_checkpoints(root, pattern=NESTED)] == [11]
    with pytest.raises(StorageError) as caught:
        StorageReader(root / "checkpoint-10" / "dcp").resolve()
    text = str(caught.value)
    assert "checkpoint-10/dcp is no checkpoint: retention (job job) removed it at 20" in text
    assert f"the newest below {root} is {root}/checkpoint-11/dcp: load that" in text


def test_a_number_that_a_later_start_has_just_taken_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        write_attempt(root / f"checkpoint-{step}" / "dcp", attempt(step), ranks=1, files=1)
        for number in (1, 2):
            write(root / f"checkpoint-{step}" / object_names.incarnation_record(number), b"{}")
    policy = Policy(newest=1, pattern=Pattern(NESTED))
    asyncio.run(retain(open_store, str(root), policy, job="job", host="here"))
    left = files_below(root / "checkpoint-1")
    assert left == {object_names.incarnation_record(number) for number in (1, 2)}
