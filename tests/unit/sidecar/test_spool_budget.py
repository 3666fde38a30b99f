"""The budget that the spools of several jobs share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.sidecar.spool.budget import SharedBudget
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.wire.errors import BusyError
from support.processes.daemons import memory_directory
from support.processes.stretch import BOUND_S

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


def room(spool: Spool) -> tuple[int, int]:
    """The most that it can have, and what is free."""
    spool.measure()
    return spool.usage.capacity, spool.usage.free


def test_all_together_stay_within_the_total(scene: Scene) -> None:
    shared = SharedBudget(8 * MIB)
    a, b = scene.spool("a", shared), scene.spool("b", shared)
    held = a.take("a", 5 * MIB)
    with pytest.raises(BusyError, match="3145728 free of the 8388608 for all jobs"):
        b.take("b", 4 * MIB)
    assert shared.take_request()
    assert not shared.take_request()
    b.give(b.take("b", 3 * MIB))
    assert (room(a), room(b)) == ((8 * MIB, 3 * MIB),) * 2
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
    assert room(b) == (4 * MIB, 0)
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
        thread.join(BOUND_S)
    assert not any(thread.is_alive() for thread in threads)
    assert sum(spool.reserved() for spool in spools.values()) <= 8 * MIB
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
