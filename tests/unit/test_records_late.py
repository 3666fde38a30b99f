"""Whoever is late with a commit changes nothing: the checkpoint was removed, or is another's by now."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from pannier.records.decisions import decide
from pannier.records.ending import SupersededError, carry_out, prepare_commit
from pannier.records.installing import RemovedError
from pannier.storage import ConflictError, Store, open_store
from pannier.v1 import save_pb2
from pannier.wire import identity
from pannier.wire.identity import METADATA, Attempt
from support.unsteady import Unsteady

GROUP = "g00000000"
FIRST, SECOND = Attempt(1, 1, GROUP), Attempt(1, 2, GROUP)
_places = itertools.count()

WRITES = {
    "candidate": identity.metadata_candidate(FIRST.name),
    "decision": identity.decision(FIRST.name),
    "metadata": METADATA,
}


def on_fresh_store(scenario: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        store = open_store(f"memory://late-{next(_places)}/step")
        try:
            await scenario(store)
        finally:
            for info in await store.list():
                await store.delete(info.key)
            await store.close()

    asyncio.run(main())


async def commit(store: Store, attempt: Attempt) -> None:
    """As a coordinator does that has heard of all receipts."""
    proposal = await prepare_commit(
        store,
        save=save_pb2.SaveId(job="j", incarnation="a", group=GROUP, number=attempt.number),
        attempt=attempt,
        plan_id="p",
        metadata=attempt.name.encode(),
        host="here",
    )
    await carry_out(store, await decide(store, proposal))


async def ingest(store: Store, attempt: Attempt) -> None:
    for key in (identity.receipt(attempt.name, 0), identity.data_file(attempt.name, 0, 0)):
        with suppress(ConflictError):
            await store.create(key, b"x")


async def remove_all(store: Store) -> None:
    """As a user does who removes the checkpoint: ``.metadata`` first."""
    for info in sorted(await store.list(), key=lambda info: info.key != METADATA):
        await store.delete(info.key)


@pytest.mark.parametrize("write", WRITES)
def test_a_removed_checkpoint_does_not_come_back(write: str) -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = Unsteady(store)

        async def meanwhile() -> None:
            await commit(store, FIRST)
            await remove_all(store)

        late.before[WRITES[write]] = meanwhile
        with pytest.raises(RemovedError, match=FIRST.name):
            await commit(late, FIRST)
        assert await store.list() == []

    on_fresh_store(scenario)


def test_a_lost_answer_does_not_bring_it_back_either() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = Unsteady(store)

        async def meanwhile() -> None:
            await commit(store, FIRST)
            await remove_all(store)

        late.before[METADATA] = meanwhile
        late.lose.add(METADATA)
        proposal = await prepare_commit(
            store,
            save=save_pb2.SaveId(job="j", incarnation="a", group=GROUP, number=1),
            attempt=FIRST,
            plan_id="p",
            metadata=FIRST.name.encode(),
            host="here",
        )
        decision = await decide(store, proposal)
        for _ in range(2):
            with suppress(Exception):
                await carry_out(late, decision)
        assert await store.list() == []

    on_fresh_store(scenario)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("removed", [False, True])
def test_a_superseded_one_does_not_come_back(write: str, removed: bool) -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = Unsteady(store)

        async def meanwhile() -> None:
            await commit(store, FIRST)
            await ingest(store, SECOND)
            await commit(store, SECOND)
            if removed:
                await remove_all(store)

        late.before[WRITES[write]] = meanwhile
        with suppress(RemovedError, SupersededError):
            await commit(late, FIRST)
        if removed:
            assert await store.list() == []
        else:
            assert await store.read(METADATA) == SECOND.name.encode()

    on_fresh_store(scenario)


def test_an_attempt_that_is_still_there_keeps_its_metadata() -> None:
    """Whoever removes it is at it, and looks for ``.metadata`` in the end."""

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = Unsteady(store)
        late.before[METADATA] = lambda: store.delete(identity.data_file(FIRST.name, 0, 0))
        await commit(late, FIRST)
        assert await store.read(METADATA) == FIRST.name.encode()

    on_fresh_store(scenario)
