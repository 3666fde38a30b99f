"""What the jobs of one sidecar share: room and places for uploads. None starves another more than it must."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.sidecar.spool.budget import SharedBudget
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.sidecar.upload.concurrency import MOST, UploadSlots
from pannier.wire.errors import BusyError
from support.processes.daemons import memory_directory

MIB = 1 << 20


class Scene:
    """Spools of several jobs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spools: list[Spool] = []

    def spool(self, job: str, shared: SharedBudget, budget: int | None = None) -> Spool:
        self._spools.append(Spool(self._directory / job, budget, shared))
        return self._spools[-1]

    def close(self) -> None:
        for spool in self._spools:
            spool.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    directory = memory_directory()
    made = Scene(directory)
    yield made
    made.close()
    for path in directory.iterdir():
        path.rmdir()
    directory.rmdir()


def files(spool: Spool) -> int:
    return len(list(spool.directory.glob("*.data")))


def test_all_together_stay_within_the_total(scene: Scene) -> None:
    shared = SharedBudget(8 * MIB)
    a, b = scene.spool("a", shared), scene.spool("b", shared)
    held = a.take("a", 5 * MIB)
    with pytest.raises(BusyError, match="3145728 free of the 8388608 for all jobs"):
        b.take("b", 4 * MIB)
    assert shared.take_request()
    assert not shared.take_request()
    b.give(b.take("b", 3 * MIB))
    assert (a.room(), b.room()) == ((8 * MIB, 3 * MIB),) * 2
    a.give(held)
    assert shared.room(a.directory) == (8 * MIB, 8 * MIB)


def test_what_a_job_does_not_use_goes_before_it_is_refused(scene: Scene) -> None:
    shared = SharedBudget(8 * MIB)
    a, b = scene.spool("a", shared), scene.spool("b", shared)
    a.give(a.take("a", 4 * MIB))
    own = b.take("b", 2 * MIB)
    b.give(own)
    # First its own that doesn't fit, then another job's.
    taken = b.take("b", 8 * MIB)
    assert (files(a), files(b)) == (0, 1)
    assert not shared.take_request()
    b.give(taken)


def test_a_job_at_its_own_budget_takes_nothing_from_others(scene: Scene) -> None:
    shared = SharedBudget(16 * MIB)
    a, b = scene.spool("a", shared), scene.spool("b", shared, budget=4 * MIB)
    a.give(a.take("a", 8 * MIB))
    taken = b.take("b", 4 * MIB)
    with pytest.raises(BusyError, match="its budget of 4194304"):
        b.take("b", MIB)
    assert files(a) == 1
    assert not shared.take_request(), "others needn't give anything back"
    assert b.room() == (4 * MIB, 0)
    b.give(taken)


def test_a_spool_that_is_closed_counts_no_more(scene: Scene) -> None:
    shared = SharedBudget(4 * MIB)
    a, b = scene.spool("a", shared), scene.spool("b", shared)
    taken = a.take("a", 4 * MIB)
    scene._spools.remove(a)
    a.close()
    assert not taken.path.exists()
    b.give(b.take("b", 4 * MIB))


def test_two_that_need_room_at_once_never_wait_for_each_other(scene: Scene) -> None:
    shared = SharedBudget(8 * MIB)
    spools = {job: scene.spool(job, shared) for job in "abc"}
    refused: list[str] = []

    def work(job: str) -> None:
        spool, kept = spools[job], []
        for turn in range(200):
            try:
                kept.append(spool.take(job, (turn % 3 + 1) * MIB))
            except BusyError:
                refused.append(job)
            while len(kept) > turn % 3:
                spool.give(kept.pop(0))
        for file in kept:
            spool.give(file)

    threads = [threading.Thread(target=work, args=(job,)) for job in spools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sum(spool.reserved for spool in spools.values()) <= 8 * MIB
    assert sum(_sizes(spool) for spool in spools.values()) <= 8 * MIB


def _sizes(spool: Spool) -> int:
    return sum(path.stat().st_size for path in spool.directory.glob("*.data"))


def test_files_stay_in_their_own_directory(scene: Scene) -> None:
    shared = SharedBudget()
    a, b = scene.spool("a", shared), scene.spool("b", shared)
    first: SpoolFile = a.take("a", MIB)
    a.give(first)
    second = b.take("b", MIB)
    assert second.path.parent == b.directory
    assert a.take("a", MIB) is first
    for spool, file in ((a, first), (b, second)):
        spool.give(file)


class Upload:
    """One that runs until it is told to end."""

    def __init__(self, slots: UploadSlots, job: str, weight: int = 1) -> None:
        self.job = job
        self.running = False
        self._over = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(slots, weight))

    async def _run(self, slots: UploadSlots, weight: int) -> None:
        async with slots.slot(weight, lambda: False, self.job):
            self.running = True
            await self._over.wait()
            self.running = False

    async def end(self) -> None:
        self._over.set()
        await self.task


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_job_never_takes_the_last_place_from_others() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        slots.share(True)
        greedy = [Upload(slots, "a") for _ in range(2 * MOST)]
        await _settle()
        assert sum(each.running for each in greedy) == MOST - 1
        late = Upload(slots, "b")
        await _settle()
        assert late.running
        for each in (late, *greedy):
            await each.end()

    asyncio.run(check())


def test_memory_is_left_for_one_more_of_others() -> None:
    async def check() -> None:
        slots = UploadSlots(100)
        slots.share(True)
        greedy = [Upload(slots, "a", 30) for _ in range(3)]
        late = Upload(slots, "b", 30)
        await _settle()
        assert [each.running for each in greedy] == [True, True, False]
        assert late.running
        for each in (*greedy[:2], late, greedy[2]):
            await each.end()

    asyncio.run(check())


def test_who_has_fewest_goes_first() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        slots.share(True)
        greedy = [Upload(slots, "a") for _ in range(2 * MOST)]
        await _settle()
        modest = [Upload(slots, "b") for _ in range(MOST)]
        await _settle()
        for turn in range(3):
            await greedy[turn].end()
            await _settle()
        running = [each.job for each in (*greedy, *modest) if each.running]
        # Each place that became free went to the one with fewer, though the other had asked before.
        assert (running.count("a"), running.count("b")) == (MOST // 2, MOST // 2)
        for each in (*greedy, *modest):
            each._over.set()
        for each in (*greedy, *modest):
            await each.task

    asyncio.run(check())


def test_alone_a_job_has_all_places() -> None:
    async def check() -> None:
        slots = UploadSlots(1000)
        uploads = [Upload(slots, "a") for _ in range(2 * MOST)]
        await _settle()
        assert sum(each.running for each in uploads) == MOST
        for each in uploads:
            each._over.set()
        for each in uploads:
            await each.task

    asyncio.run(check())
