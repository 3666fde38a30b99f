"""After a commit the coordinator removes what it superseded, in time, and tries again when it can't."""

import asyncio
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.stores import Stores
from pannier.storage import ObjectInfo, StorageError, Store, open_store
from pannier.wire import object_names
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write_attempt
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND, THIRD = (f"i1-inc-g0000000a-s{number}" for number in (1, 2, 3))


class Watched(UnreliableStore):
    """Notes when the decision of an attempt is deleted; fails some listings."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gone: dict[str, asyncio.Event] = {
            object_names.decision(attempt): asyncio.Event() for attempt in (FIRST, SECOND, THIRD)
        }
        self.failing = 0

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        if self.failing:
            self.failing -= 1
            raise StorageError("503")
        return await super().list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        await super().delete(key, generation=generation)
        if key in self.gone:
            self.gone[key].set()

    async def until_gone(self, attempt: str) -> None:
        await asyncio.wait_for(self.gone[object_names.decision(attempt)].wait(), BOUND_S)


class OnePlace(Stores):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def open(self, checkpoint_id: str) -> Store:
        return self.store


def left(place: Path, attempt: str) -> list[str]:
    return sorted(
        str(path.relative_to(place))
        for path in [*place.glob(f"__{attempt}_*"), *place.glob(f".pannier/{attempt}/**/*")]
    )


def test_a_superseded_attempt_goes_when_its_grace_period_has_passed(tmp_path: Path) -> None:
    place = tmp_path / "step-1"

    async def run() -> None:
        store = Watched(open_store(str(place)))
        sweeper = Sweeper(OnePlace(store), grace_s=0.5)
        write_attempt(place, FIRST)
        sweeper.committed(str(place))
        before = left(place, FIRST)
        content = write_attempt(place, SECOND)
        sweeper.committed(str(place))
        begin = asyncio.get_running_loop().time()
        await store.until_gone(FIRST)
        assert asyncio.get_running_loop().time() - begin >= 0.4
        assert before
        assert left(place, FIRST) == []
        assert (place / ".metadata").read_bytes() == content
        write_attempt(place, THIRD)
        sweeper.committed(str(place))
        await store.until_gone(SECOND)
        assert left(place, SECOND) == []
        await sweeper.stop()

    asyncio.run(run())


def test_a_sweep_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "SWEEP_AGAIN_S", 0.05)
    place = tmp_path / "step-1"

    async def run() -> None:
        store = Watched(open_store(str(place)))
        sweeper = Sweeper(OnePlace(store), grace_s=0)
        write_attempt(place, FIRST)
        write_attempt(place, SECOND)
        store.failing = 3
        sweeper.committed(str(place))
        await store.until_gone(FIRST)
        await sweeper.stop()

    asyncio.run(run())


def test_what_is_waited_for_does_not_hold_a_coordinator_that_ends(tmp_path: Path) -> None:
    place = tmp_path / "step-1"

    async def run() -> None:
        store = Watched(open_store(str(place)))
        sweeper = Sweeper(OnePlace(store), grace_s=3600)
        write_attempt(place, FIRST)
        write_attempt(place, SECOND)
        marking = asyncio.Event()

        async def note() -> None:
            marking.set()

        store.before[object_names.superseded_mark(FIRST)] = note
        sweeper.committed(str(place))
        await asyncio.wait_for(marking.wait(), BOUND_S)
        await asyncio.wait_for(sweeper.stop(), BOUND_S)

    asyncio.run(run())
    assert (place / object_names.data_file(FIRST, 0, 0)).exists()
