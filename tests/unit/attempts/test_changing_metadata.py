"""A commit judges one ``.metadata``, though others are written and removed at the same time."""

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from pannier.attempts.commit import prepare_commit
from pannier.attempts.decisions import decide
from pannier.attempts.metadata_swap import OccupiedError, install
from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.object_names import METADATA, Attempt
from support.storage.unreliable_store import UnreliableStore

GROUP = "g00000000"
FIRST, SECOND = (Attempt(1, number, GROUP, "a") for number in (1, 2))
OWN = SECOND.name.encode()
FOREIGN = b"torch's"
_places = itertools.count()

Then = Callable[[Store, str, records_pb2.Decision], Awaitable[None]]
"""Something that another process does; it gets the store, the generation of ``.metadata`` and the COMMIT."""


class Between(UnreliableStore):
    """Another process acts right before the ``number``-th call of ``operation`` for ``key``."""

    def __init__(
        self,
        inner: Store,
        operation: str,
        key: str,
        number: int,
        then: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(inner)
        self._at = (operation, key)
        self._left = number
        self._then = then

    async def _called(self, operation: str, key: str) -> None:
        if (operation, key) == self._at:
            self._left -= 1
            if self._left == 0:
                await self._then()

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self._called("read", key)
        return await super().read(key, offset, length)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        await self._called("list", prefix)
        return await super().list(prefix)


def metadata_of(attempt: Attempt, *files: str) -> bytes:
    places = {MetadataIndex(name): _StorageInfo(name, 0, 1) for name in files}
    meta = StorageMeta("", save_id=attempt.name)
    return pickle.dumps(Metadata({}, storage_data=places, storage_meta=meta))


LATE = metadata_of(FIRST, object_names.data_file(FIRST.name, 0, 0))
"""What a late coordinator writes of an attempt that was removed, and removes again."""


async def vanish(store: Store, generation: str, _decision: records_pb2.Decision) -> None:
    """It is removed again."""
    await store.delete(METADATA, generation=generation)


async def commit(store: Store, _generation: str, decision: records_pb2.Decision) -> None:
    """Another coordinator installs the same COMMIT."""
    await install(store, decision)


async def both(store: Store, generation: str, decision: records_pb2.Decision) -> None:
    await vanish(store, generation, decision)
    await commit(store, generation, decision)


async def nothing(_store: Store, _generation: str, _decision: records_pb2.Decision) -> None:
    """No other process acts."""


def play(
    stands: bytes, operation: str, key: str, number: int, then: Then
) -> tuple[bytes, set[str], set[str]]:
    """Installs a COMMIT over what stands; returns ``.metadata``, and the records before and after."""

    async def main() -> tuple[bytes, set[str], set[str]]:
        store = open_store(f"memory://changing-{next(_places)}/step")
        records = object_names.attempt_prefix(SECOND.name)
        try:
            for name in (
                object_names.manifest(SECOND.name),
                object_names.receipt(SECOND.name, 0),
                object_names.data_file(SECOND.name, 0, 0),
            ):
                await store.create(name, b"x")
            proposal = await prepare_commit(
                store,
                save=save_pb2.SaveId(job="j", incarnation="a", group=GROUP, number=2),
                attempt=SECOND,
                plan_id="p",
                metadata=OWN,
                host="here",
            )
            decision = await decide(store, proposal)
            before = {info.key for info in await store.list(records)}
            info = await store.create(METADATA, stands)
            between = Between(
                *(store, operation, key, number),
                lambda: then(store, info.generation, decision),
            )
            try:
                await install(between, decision)
            finally:
                after = {info.key for info in await store.list(records)}
                found = await store.read(METADATA)
            return found, before, after
        finally:
            for each in await store.list():
                await store.delete(each.key)
            await store.close()

    return asyncio.run(main())


@pytest.mark.parametrize("then", [vanish, commit, both])
@pytest.mark.parametrize(
    ("operation", "key"), [("list", object_names.attempts_prefix()), ("read", METADATA)]
)
def test_what_changes_while_it_is_compared_is_not_taken_for_foreign(
    operation: str, key: str, then: Then
) -> None:
    found, before, after = play(LATE, operation, key, 1, then)
    assert found == OWN
    assert after == before


def test_a_removed_attempt_without_data_files_is_not_taken_for_foreign() -> None:
    found, before, after = play(metadata_of(FIRST), "read", METADATA, 1, nothing)
    assert found == OWN
    assert after == before


@pytest.mark.parametrize("then", [vanish, both])
def test_a_foreign_checkpoint_that_goes_before_the_records_do_keeps_them(then: Then) -> None:
    """The second reading is the last one before they are removed."""
    found, before, after = play(FOREIGN, "read", METADATA, 2, then)
    assert found == OWN
    assert after == before


def test_a_foreign_checkpoint_that_stays_is_kept() -> None:
    with pytest.raises(OccupiedError):
        play(FOREIGN, "read", METADATA, 1, nothing)
