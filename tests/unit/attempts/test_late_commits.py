"""A late commit changes nothing when the checkpoint was removed or replaced meanwhile."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import decide, new_decision, read_decision
from pannier.attempts.metadata_swap import OccupiedError, RemovedError
from pannier.maintenance.gc import Rules, sweep
from pannier.maintenance.recover import Found, find_interrupted
from pannier.storage import ConflictError, ObjectInfo, Store, open_store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.object_names import METADATA, Attempt
from support.storage.checkpoints import write_attempt
from support.storage.unreliable_store import UnreliableStore

GROUP = "g00000000"
FIRST, SECOND = (Attempt(1, number, GROUP, "a") for number in (1, 2))
_places = itertools.count()

WRITES = {
    "candidate": object_names.metadata_candidate(FIRST.name),
    "decision": object_names.decision(FIRST.name),
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


async def commit(
    store: Store,
    attempt: Attempt,
    *,
    job: str = "j",
    overwrite: "save_pb2.Overwrite" = save_pb2.OVERWRITE_UNSPECIFIED,
) -> None:
    """As a coordinator does that has all receipts."""
    proposal = await prepare_commit(
        store,
        overwrite=overwrite,
        save=save_pb2.SaveId(job=job, incarnation="a", group=GROUP, number=attempt.number),
        attempt=attempt,
        plan_id="p",
        metadata=attempt.name.encode(),
        host="here",
    )
    await carry_out(store, await decide(store, proposal))


async def ingest(store: Store, attempt: Attempt) -> None:
    name = attempt.name
    for key in (
        object_names.manifest(name),
        object_names.receipt(name, 0),
        object_names.data_file(name, 0, 0),
    ):
        with suppress(ConflictError):
            await store.create(key, b"x")


async def remove_all(store: Store) -> None:
    """As a user does who removes the checkpoint: ``.metadata`` first."""
    for info in sorted(await store.list(), key=lambda info: info.key != METADATA):
        await store.delete(info.key)


class Stale(UnreliableStore):
    """Lists as a network file system may for a while: without what is new. Names are fresh."""

    def __init__(self, inner: Store, hidden: str) -> None:
        super().__init__(inner)
        self.hidden = hidden
        """What the names of objects that aren't listed begin with."""

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        return [info for info in await super().list(prefix) if not info.key.startswith(self.hidden)]


@pytest.mark.parametrize(
    "hidden",
    [
        object_names.attempts_prefix(),
        object_names.receipts_prefix(FIRST.name),
        object_names.decision(FIRST.name),
    ],
)
def test_a_stale_listing_removes_nothing(tmp_path: Path, hidden: str) -> None:
    metadata = write_attempt(tmp_path, FIRST.name)
    (tmp_path / METADATA).unlink()

    async def main() -> None:
        store = open_store(str(tmp_path))
        decision = await read_decision(store, FIRST.name)
        assert decision is not None
        before = await store.list()
        await carry_out(Stale(store, hidden), decision)
        assert await store.read(METADATA) == metadata
        assert len(await store.list()) == len(before) + 1

    asyncio.run(main())


def test_a_stale_listing_makes_no_older_attempt_replace_a_newer_one(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST.name)
    newer = write_attempt(tmp_path, SECOND.name)

    async def main() -> None:
        store = Stale(open_store(str(tmp_path)), object_names.attempt_prefix(SECOND.name))
        decision = await read_decision(store, FIRST.name)
        assert decision is not None
        await carry_out(store, decision)
        assert await store.read(METADATA) == newer

    asyncio.run(main())


def test_a_stale_listing_gives_up_nothing_that_is_complete(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST.name, commit=False)

    async def main() -> None:
        store = Stale(open_store(str(tmp_path)), object_names.receipts_prefix(FIRST.name))
        (found,) = await find_interrupted(store)
        assert found.found is Found.COMPLETE
        rules = Rules(abandoned_after_s=0)
        report = await sweep(store, rules, now=time.time(), host="here", dry_run=False)
        assert [kept.why for kept in report.kept] == [
            "all its ranks are durable: run `pannier recover` to commit it"
        ]
        assert report.removed == []

    asyncio.run(main())


def test_a_lost_compare_and_swap_pauses_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def uniform(least: float, most: float) -> float:
        assert least == 0
        pauses.append(most)
        return 0

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = UnreliableStore(store)

        async def others(count: int) -> None:
            seen = await store.stat(METADATA)
            expected = seen.generation if seen is not None else None
            await store.replace(METADATA, b"%d" % count, expected=expected)
            if count:
                late.before[METADATA] = lambda: others(count - 1)

        late.before[METADATA] = lambda: others(3)
        monkeypatch.setattr("pannier.storage.retry.random.uniform", uniform)
        await commit(late, FIRST, overwrite=save_pb2.OVERWRITE_ANY)
        assert await store.read(METADATA) == FIRST.name.encode()

    on_fresh_store(scenario)
    assert pauses == [0.5, 1, 2, 2]


@pytest.mark.parametrize("write", WRITES)
def test_a_removed_checkpoint_does_not_come_back(write: str) -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = UnreliableStore(store)

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
        late = UnreliableStore(store)

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
        late = UnreliableStore(store)

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


async def forget(store: Store, attempt: Attempt) -> None:
    """Aborts the attempt, as another coordinator does, and removes its decision, as ``pannier gc`` does."""
    proposal = new_decision(
        records_pb2.OUTCOME_ABORT,
        save=save_pb2.SaveId(job="j", incarnation="a", group=GROUP, number=attempt.number),
        attempt=attempt,
        host="elsewhere",
    )
    await carry_out(store, await decide(store, proposal))
    await store.delete(object_names.decision(attempt.name))
    assert not await store.list(object_names.attempt_prefix(attempt.name))


@pytest.mark.parametrize("write", ["candidate", "decision"])
@pytest.mark.parametrize("sidecar_too", [False, True])
@pytest.mark.parametrize("saved_before", [False, True])
def test_one_whose_abort_is_forgotten_replaces_nothing(
    write: str, sidecar_too: bool, saved_before: bool
) -> None:
    """A coordinator was stopped until ``pannier gc`` had removed the ABORT; its sidecar, too."""
    key = {
        "candidate": object_names.metadata_candidate(SECOND.name),
        "decision": object_names.decision(SECOND.name),
    }[write]

    async def scenario(store: Store) -> None:
        if saved_before:
            await ingest(store, FIRST)
            await commit(store, FIRST)
        before = await store.stat(METADATA)
        await ingest(store, SECOND)
        late = UnreliableStore(store)

        async def meanwhile() -> None:
            await forget(store, SECOND)
            if sidecar_too:
                await store.create(object_names.receipt(SECOND.name, 0), b"x")

        late.before[key] = meanwhile
        with pytest.raises(RemovedError, match=SECOND.name):
            await commit(late, SECOND)
        assert await store.stat(METADATA) == before
        assert not await store.list(object_names.attempt_prefix(SECOND.name))

    on_fresh_store(scenario)


def test_an_attempt_that_is_still_there_keeps_its_metadata() -> None:
    """The removal is still running, and checks ``.metadata`` at its end."""

    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        late = UnreliableStore(store)
        late.before[METADATA] = lambda: store.delete(object_names.data_file(FIRST.name, 0, 0))
        await commit(late, FIRST)
        assert await store.read(METADATA) == FIRST.name.encode()

    on_fresh_store(scenario)


# Which checkpoint a save may replace.

OWN, NEVER, ANY = (
    save_pb2.OVERWRITE_UNSPECIFIED,
    save_pb2.OVERWRITE_NEVER,
    save_pb2.OVERWRITE_ANY,
)


@pytest.mark.parametrize(
    ("stands", "overwrite", "says"),
    [
        ("own", OWN, ""),
        ("own", NEVER, "overwrite=False"),
        ("own", ANY, ""),
        ("another's", OWN, "job other, and this is job j"),
        ("another's", NEVER, "job other"),
        ("another's", ANY, ""),
        ("foreign", OWN, "Pannier didn't write"),
        ("foreign", NEVER, "Pannier didn't write"),
        ("foreign", ANY, ""),
        ("nothing", NEVER, ""),
    ],
)
@pytest.mark.parametrize("when", ["before", "decision", "metadata"])
def test_a_checkpoint_is_replaced_only_by_who_may(
    when: str, stands: str, overwrite: "save_pb2.Overwrite", says: str
) -> None:
    async def scenario(store: Store) -> None:
        async def stand() -> None:
            if stands == "foreign":
                await store.create(METADATA, b"torch's")
            elif stands != "nothing":
                await ingest(store, FIRST)
                await commit(store, FIRST, job="j" if stands == "own" else "other")

        await ingest(store, SECOND)
        late = UnreliableStore(store)
        if when == "before":
            await stand()
        else:
            late.before[METADATA if when == "metadata" else object_names.decision(SECOND.name)] = (
                stand
            )
        if not says:
            await commit(late, SECOND, overwrite=overwrite)
            assert await store.read(METADATA) == SECOND.name.encode()
            return
        with pytest.raises(OccupiedError, match=f"{says}.*overwrite=True"):
            await commit(late, SECOND, overwrite=overwrite)
        kept = b"torch's" if stands == "foreign" else FIRST.name.encode()
        assert await store.read(METADATA) == kept
        if when != "before":
            # Decided, and never installed later.
            left = [info.key for info in await store.list(object_names.attempt_prefix(SECOND.name))]
            assert left == []

    on_fresh_store(scenario)


@pytest.mark.parametrize("removed", [True, False])
def test_what_a_late_coordinator_has_written_of_a_removed_checkpoint_is_no_foreign_one(
    tmp_path: Path, removed: bool
) -> None:
    """It undoes that in a moment; without records alone, files may still make it a checkpoint."""
    metadata = write_attempt(tmp_path, FIRST.name)

    async def main() -> None:
        store = open_store(str(tmp_path))
        for info in await store.list():
            if info.key != METADATA and (removed or not info.key.startswith("__")):
                await store.delete(info.key)
        await ingest(store, SECOND)
        if removed:
            await commit(store, SECOND)
        else:
            with pytest.raises(OccupiedError, match="Pannier didn't write"):
                await commit(store, SECOND)
        expected = SECOND.name.encode() if removed else metadata
        assert await store.read(METADATA) == expected
        await store.close()

    asyncio.run(main())
