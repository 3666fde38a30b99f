"""What earlier starts of a job left below a root is finished by the first save of the next one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.coordinator.background.earlier_attempts import EarlierAttempts
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.stores import Stores
from pannier.daemon.status_registry import StatusRegistry
from pannier.storage import DeniedError, HeldError, ObjectInfo, StorageError, Store
from pannier.storage.base import limited
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import context
from support.processes.stretch import BOUND_S, until
from support.storage.checkpoints import write_attempt
from support.storage.unreliable_store import UnreliableStore

GROUP = object_names.group_name((0, 1))
LEFT = f"i1-aa-{GROUP}-s3"
KEY = f"job/aa/{GROUP}/3"


class Counted(UnreliableStore):
    """A root that counts listings of all of it, and fails some."""

    def __init__(self, inner: Store, places: "Places") -> None:
        super().__init__(inner)
        self._places = places

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        if not prefix:
            self._places.listed.append(self.url)
            if self._places.problems:
                raise self._places.problems.pop()
        return await super().list(prefix)

    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        return await self.inner.list_directories(prefix)


class Places(Stores):
    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []
        self.problems: list[StorageError] = []

    def open_root(self, root: str) -> Store:
        return Counted(super().open_root(root), self)


async def build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
    raise AssertionError("the coordinator that died had written the candidate")


class Scene:
    """A coordinator of incarnation ``bb``, the second one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores = Places()
        self.status = StatusRegistry()
        self.known: set[str] = set()
        self.sweeper = Sweeper(self.stores)
        self.earlier = EarlierAttempts(
            *(self.stores, self.status),
            build=build,
            host="here",
            is_known=lambda save: object_names.save_text(save) in self.known,
            sweeper=self.sweeper,
        )

    async def begin(self, incarnation: str = "bb", number: int = 1) -> None:
        """The incarnation's ``number``-th save is planned."""
        who = context(0, str(self.root / f"step-{10 + number}"), incarnation=incarnation)
        attempt = await self.stores.attempt(who)
        await self.stores.begin(who, attempt)
        # As by the save's task, whose deadline doesn't count.
        with limited(until=lambda: 0.0):
            self.earlier.begin(who, attempt)

    def state(self, key: str = KEY) -> "save_pb2.SaveState":
        return self.status.get(key).state

    async def done(self) -> None:
        await until(lambda: not self.earlier.busy)


def run(root: Path, story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(root)
        first = context(0, str(root / "step-1"), incarnation="aa")
        assert (await scene.stores.attempt(first)).incarnation_number == 1
        try:
            await story(scene)
        finally:
            await scene.earlier.stop()
            await scene.sweeper.stop()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RESUME_CHECK_S", 0.02)
    monkeypatch.setattr(timeouts, "RESUME_LONGEST_CHECK_S", 0.02)


def without_receipt(place: Path, rank: int, *, timeout_s: float = 0) -> Callable[[], None]:
    """An attempt that lacks a rank's receipt; returns what writes it."""
    write_attempt(place, LEFT, commit=False, timeout_s=timeout_s)
    receipt = place / object_names.receipt(LEFT, rank)
    data = receipt.read_bytes()
    receipt.unlink()

    def write() -> None:
        # As a whole: the coordinator may be reading.
        receipt.with_name("new").write_bytes(data)
        receipt.with_name("new").replace(receipt)

    return write


def test_what_is_complete_is_committed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = write_attempt(tmp_path / "step-3", LEFT, commit=False)

    async def story(scene: Scene) -> None:
        await scene.begin()
        assert scene.earlier.busy
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED
        assert (tmp_path / "step-3" / ".metadata").read_bytes() == metadata

    with caplog.at_level(logging.INFO):
        run(tmp_path, story)
    assert f"save {KEY} to {tmp_path / 'step-3'}" in caplog.text


def test_a_missing_receipt_is_waited_for_by_name(tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    write = without_receipt(place, 1, timeout_s=900)

    async def story(scene: Scene) -> None:
        await scene.begin()
        await until(lambda: scene.status.list())
        shown = scene.status.get(KEY)
        assert shown.state == save_pb2.SAVE_STATE_UPLOADING
        assert shown.checkpoint_id == str(place)
        assert list(shown.waiting_on.ranks) == [1]
        assert "node-1" in shown.waiting_on.text
        assert 800 < shown.waiting_on.deadline_s <= 900
        assert [each.phase for each in shown.ranks] == [
            save_pb2.RANK_PHASE_DURABLE,
            save_pb2.RANK_PHASE_MISSING,
        ]
        write()
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED
        assert (place / ".metadata").exists()

    run(tmp_path, story)


def test_one_whose_time_is_over_is_aborted_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.2)
    place = tmp_path / "step-3"
    without_receipt(place, 1, timeout_s=0.1)

    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.done()
        shown = scene.status.get(KEY)
        assert shown.state == save_pb2.SAVE_STATE_ABORTED
        assert "its time is over: receipts are missing of host node-1: rank 1" in (
            shown.failures[0].message
        )
        left = [path for path in place.rglob("*") if path.is_file()]
        assert left == [place / object_names.decision(LEFT)]

    run(tmp_path, story)


def test_what_was_never_planned_ends_a_saves_time_after_its_last_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.1)
    monkeypatch.setattr(timeouts, "DEFAULT_SAVE_S", 0.2)
    place = tmp_path / "step-3"
    write_attempt(place, LEFT, commit=False, timeout_s=900)
    (place / object_names.manifest(LEFT)).unlink()
    for rank in (0, 1):
        (place / object_names.receipt(LEFT, rank)).unlink()

    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.done()
        shown = scene.status.get(KEY)
        assert shown.state == save_pb2.SAVE_STATE_ABORTED
        assert "it has no plan manifest" in shown.failures[0].message
        left = [path for path in place.rglob("*") if path.is_file()]
        assert left == [place / object_names.decision(LEFT)]

    run(tmp_path, story)


@pytest.mark.parametrize("durable", [True, False], ids=["one rank is durable", "none is"])
def test_what_torch_plans_has_a_saves_time_for_the_receipts_that_its_manifest_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.2)
    place = tmp_path / "step-3"
    write = without_receipt(place, 1)
    manifest = place / object_names.manifest(LEFT)
    content = manifest.read_bytes()
    manifest.unlink()
    receipt = place / object_names.receipt(LEFT, 0)
    kept = receipt.read_bytes()
    if not durable:
        receipt.unlink()

    async def story(scene: Scene) -> None:
        await scene.begin()
        await until(lambda: scene.status.list())
        await asyncio.sleep(3 * timeouts.RESUMED_SAVE_S)
        shown = scene.status.get(KEY)
        assert shown.state == save_pb2.SAVE_STATE_UPLOADING
        assert shown.waiting_on.deadline_s > timeouts.DEFAULT_SAVE_S / 2
        # Its own coordinator goes on.
        receipt.with_name("new").write_bytes(kept)
        receipt.with_name("new").replace(receipt)
        write()
        manifest.with_name("new").write_bytes(content)
        manifest.with_name("new").replace(manifest)
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED

    run(tmp_path, story)


def test_what_was_written_lately_has_time_though_its_own_is_over(tmp_path: Path) -> None:
    write = without_receipt(tmp_path / "step-3", 0, timeout_s=0.001)

    async def story(scene: Scene) -> None:
        await scene.begin()
        await until(lambda: scene.status.list())
        assert scene.status.get(KEY).waiting_on.deadline_s > timeouts.RESUMED_SAVE_S / 2
        write()
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED

    run(tmp_path, story)


def test_another_process_may_finish_it(tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    without_receipt(place, 1)

    async def story(scene: Scene) -> None:
        await scene.begin()
        await until(lambda: scene.status.list())
        # As `pannier gc` or the coordinator of yet another start.
        (place / object_names.receipt(LEFT, 0)).unlink()
        write_attempt(place, LEFT)
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED

    run(tmp_path, story)


def test_only_earlier_attempts_of_the_job_are_finished(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        for place, attempt in (
            # An incarnation of no known job, the save's own, and one below another root.
            (tmp_path / "step-1", f"i1-cc-{GROUP}-s1"),
            (tmp_path / "step-2", f"i2-bb-{GROUP}-s1"),
            (tmp_path / "deeper" / "step-3", LEFT),
        ):
            write_attempt(place, attempt, commit=False)
        await scene.begin()
        await scene.done()
        assert scene.status.list() == []
        assert len(scene.stores.listed) == 1

    run(tmp_path, story)
    assert not list(tmp_path.rglob(".metadata"))


def test_starts_of_one_launcher_are_one_job_whatever_its_name(tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    attempts = {}

    async def main() -> None:
        scene = Scene(tmp_path)
        for incarnation, job, launch in (
            ("aa", "job", "7"),
            ("bb", "job-2", "8"),
            ("cc", "job-3", "7"),
        ):
            who = context(0, str(tmp_path / "step-1"), incarnation=incarnation)
            who.save.job, who.launch = job, launch
            attempts[incarnation] = who, await scene.stores.attempt(who)
            await scene.stores.begin(*attempts[incarnation])
        write_attempt(place, LEFT, commit=False)
        scene.earlier.begin(*attempts["bb"])
        assert not scene.earlier.busy
        scene.earlier.begin(*attempts["cc"])
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED
        await scene.sweeper.stop()

    asyncio.run(main())
    assert (place / ".metadata").exists()


def test_the_root_is_listed_once_for_an_incarnation_and_never_for_the_first(
    tmp_path: Path,
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin("aa")
        assert not scene.earlier.busy
        for number in (1, 2):
            await scene.begin(number=number)
            await scene.done()
        assert len(scene.stores.listed) == 1

    run(tmp_path, story)


def test_storage_that_does_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "STEP_AGAIN_S", 0.01)
    write_attempt(tmp_path / "step-3", LEFT, commit=False)

    async def story(scene: Scene) -> None:
        scene.stores.problems = [StorageError("503"), StorageError("503")]
        await scene.begin()
        await scene.done()
        assert scene.state() == save_pb2.SAVE_STATE_COMMITTED

    run(tmp_path, story)
    assert "503" in caplog.text


def test_what_may_not_be_listed_is_left_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_attempt(tmp_path / "step-3", LEFT, commit=False)

    async def story(scene: Scene) -> None:
        scene.stores.problems = [DeniedError("403: storage.objects.list")]
        await scene.begin()
        await scene.done()
        assert scene.status.list() == []

    run(tmp_path, story)
    assert f"left at {tmp_path} is left to the job's next start: 403" in caplog.text


def test_what_sidecars_report_here_is_left_to_its_save(tmp_path: Path) -> None:
    write = without_receipt(tmp_path / "step-3", 1)

    async def story(scene: Scene) -> None:
        await scene.begin()
        await until(lambda: scene.status.list())
        scene.known.add(KEY)
        await scene.done()
        write()
        await scene.begin("cc")
        await scene.done()

    run(tmp_path, story)
    assert not list(tmp_path.rglob(".metadata"))


def test_what_a_hold_keeps_from_its_commit_is_left_and_the_hold_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_attempt(tmp_path / "step-3", LEFT, commit=False)
    original = Counted.replace

    async def replace(self: Counted, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        if key == object_names.METADATA:
            raise HeldError(f"{key} is under a hold (event-based)")
        return await original(self, key, data, expected=expected)

    monkeypatch.setattr(Counted, "replace", replace)

    async def story(scene: Scene) -> None:
        await scene.begin()
        # The coordinator may exit when it is idle.
        await scene.done()
        shown = scene.status.get(KEY)
        assert shown.state == save_pb2.SAVE_STATE_IN_DOUBT
        assert "under a hold (event-based)" in shown.failures[0].message

    run(tmp_path, story)
