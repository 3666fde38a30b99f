"""Each attempt ends once: races of committers and attempts on one store."""

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import crc32c
import pytest
from google.protobuf import json_format
from torch.distributed.checkpoint.metadata import Metadata

from pannier.attempts import decisions, metadata_swap
from pannier.attempts.commit import SupersededError
from pannier.attempts.delete_attempt import remove_attempt
from pannier.attempts.manifests import publish, read_manifest
from pannier.attempts.receipts import find_receipts
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata import pickle_metadata
from pannier.coordinator.incarnations import Claim, Incarnations
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.storage import ConflictError, StorageError, Store, open_store
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.object_names import METADATA, Attempt
from support.actors.ranks_by_hand import local_plan, make_manifest, rank_plans, tensor
from support.storage.unreliable_store import UnreliableStore

GROUP = "g00000000"
_places = itertools.count()


@asynccontextmanager
async def fresh_store() -> AsyncIterator[Store]:
    store = open_store(f"memory://commit-{next(_places)}/step")
    yield store
    for info in await store.list():
        await store.delete(info.key)
    await store.close()


def on_fresh_store(scenario: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        async with fresh_store() as store:
            await scenario(store)

    asyncio.run(main())


def save_of(attempt: Attempt) -> save_pb2.SaveId:
    return save_pb2.SaveId(
        job="j",
        incarnation=attempt.incarnation,
        group=attempt.group,
        number=attempt.number,
    )


def proposal(
    attempt: Attempt,
    outcome: "records_pb2.Outcome" = records_pb2.OUTCOME_COMMIT,
    metadata: bytes = b"",
) -> records_pb2.Decision:
    return decisions.new_decision(
        outcome, save=save_of(attempt), attempt=attempt, host="here", metadata=metadata
    )


async def ingest(store: Store, attempt: Attempt) -> None:
    """What stands in storage before an attempt is committed."""
    for key in (object_names.manifest(attempt.name), object_names.receipt(attempt.name, 0)):
        with suppress(ConflictError):
            await store.create(key, b"")


async def commit_all(store: Store, attempt: Attempt, metadata: bytes) -> records_pb2.Decision:
    """The three steps in order, as the save task takes them."""
    await ingest(store, attempt)
    data = await metadata_swap.publish_candidate(store, attempt.name, metadata)
    decision = await decisions.decide(store, proposal(attempt, metadata=data))
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        await metadata_swap.install(store, decision)
    return decision


FIRST, SECOND = (Attempt(1, number, GROUP, "a") for number in (1, 2))


def test_two_committers_of_one_attempt_agree() -> None:
    async def scenario(store: Store) -> None:
        one, two = await asyncio.gather(
            commit_all(store, FIRST, b"metadata by one"),
            commit_all(store, FIRST, b"metadata by two"),
        )
        assert one == two
        assert await store.read(METADATA) in (b"metadata by one", b"metadata by two")
        assert one.metadata_crc32c == crc32c.crc32c(await store.read(METADATA))

    on_fresh_store(scenario)


def test_commit_and_abort_race_to_one_decision() -> None:
    async def scenario(store: Store) -> None:
        aborting = decisions.decide(store, proposal(FIRST, records_pb2.OUTCOME_ABORT))
        one, two = await asyncio.gather(commit_all(store, FIRST, b"metadata"), aborting)
        assert one == two
        exists = await store.stat(METADATA) is not None
        assert exists == (one.outcome == records_pb2.OUTCOME_COMMIT)

    on_fresh_store(scenario)


def test_lost_decision_is_obeyed() -> None:
    async def scenario(store: Store) -> None:
        unsteady = UnreliableStore(store)
        aborted = proposal(FIRST, records_pb2.OUTCOME_ABORT)
        key = object_names.decision(FIRST.name)
        unsteady.before[key] = lambda: decisions.decide(store, aborted)
        decision = await commit_all(unsteady, FIRST, b"metadata")
        assert decision == aborted
        assert await store.stat(METADATA) is None

    on_fresh_store(scenario)


def test_lost_answer_of_our_own_decision_is_ours() -> None:
    async def scenario(store: Store) -> None:
        unsteady = UnreliableStore(store)
        unsteady.lose.add(object_names.decision(FIRST.name))
        ours = proposal(FIRST)
        with pytest.raises(StorageError, match="was lost"):
            await decisions.decide(unsteady, ours)
        assert await decisions.decide(unsteady, ours) == ours
        assert (await decisions.decide(unsteady, proposal(FIRST))).decided_by == ours.decided_by

    on_fresh_store(scenario)


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)])
def test_newer_attempt_stands_whatever_the_order(order: tuple[Attempt, Attempt]) -> None:
    async def scenario(store: Store) -> None:
        for attempt in order:
            await commit_all(store, attempt, f"metadata of {attempt.name}".encode())
        assert await store.read(METADATA) == f"metadata of {SECOND.name}".encode()
        assert await metadata_swap.find_newer(store, FIRST) == SECOND
        assert await metadata_swap.find_newer(store, SECOND) is None

    on_fresh_store(scenario)


def test_newer_attempt_stands_when_both_swap_at_once() -> None:
    async def scenario(store: Store) -> None:
        unsteady = UnreliableStore(store)
        # The newer one commits between the older one's look and its swap.
        unsteady.before[METADATA] = lambda: commit_all(store, SECOND, b"newer")
        await commit_all(unsteady, FIRST, b"older")
        assert await store.read(METADATA) == b"newer"

    on_fresh_store(scenario)


def test_newer_incarnation_is_newer_than_any_number() -> None:
    async def scenario(store: Store) -> None:
        await commit_all(store, Attempt(2, 1, GROUP, "b"), b"new life")
        await commit_all(store, Attempt(1, 99, GROUP, "a"), b"old life")
        assert await store.read(METADATA) == b"new life"

    on_fresh_store(scenario)


def test_many_attempts_at_once_leave_the_newest() -> None:
    async def scenario(store: Store) -> None:
        attempts = [Attempt(1, number, GROUP, "a") for number in range(1, 9)]
        await asyncio.gather(*(commit_all(store, a, a.name.encode()) for a in attempts))
        assert await store.read(METADATA) == attempts[-1].name.encode()

    on_fresh_store(scenario)


def test_foreign_metadata_is_older_than_anything() -> None:
    async def scenario(store: Store) -> None:
        await store.create(METADATA, b"written by torch")
        assert await metadata_swap.find_newer(store, FIRST) is None
        await ingest(store, FIRST)
        await metadata_swap.publish_candidate(store, FIRST.name, b"ours")
        decided = proposal(FIRST, metadata=b"ours")
        decided.overwrite = save_pb2.OVERWRITE_ANY
        await metadata_swap.install(store, await decisions.decide(store, decided))
        assert await store.read(METADATA) == b"ours"

    on_fresh_store(scenario)


def test_commit_of_a_dead_coordinator_is_finished_by_another() -> None:
    async def scenario(store: Store) -> None:
        await ingest(store, FIRST)
        await metadata_swap.publish_candidate(store, FIRST.name, b"metadata")
        await decisions.decide(store, proposal(FIRST, metadata=b"metadata"))
        decision = await decisions.read_decision(store, FIRST.name)
        assert decision is not None
        await metadata_swap.install(store, decision)
        await metadata_swap.install(store, decision)
        assert await store.read(METADATA) == b"metadata"

    on_fresh_store(scenario)


def test_candidate_that_is_not_what_was_decided_is_not_installed() -> None:
    async def scenario(store: Store) -> None:
        await metadata_swap.publish_candidate(store, FIRST.name, b"damaged!")
        decision = await decisions.decide(store, proposal(FIRST, metadata=b"metadata"))
        with pytest.raises(IntegrityError, match="decided"):
            await metadata_swap.install(store, decision)
        assert await store.stat(METADATA) is None

    on_fresh_store(scenario)


def test_damaged_decision_is_named() -> None:
    async def scenario(store: Store) -> None:
        await store.create(object_names.decision(FIRST.name), b"\xff not JSON")
        with pytest.raises(IntegrityError, match=object_names.decision(FIRST.name)):
            await decisions.read_decision(store, FIRST.name)

    on_fresh_store(scenario)


def test_after_an_abort_the_decision_alone_stays() -> None:
    async def scenario(store: Store) -> None:
        other, data = object_names.manifest(SECOND.name), object_names.data_file(SECOND.name, 3, 0)
        for key in (
            object_names.manifest(FIRST.name),
            object_names.receipt(FIRST.name, 3),
            object_names.metadata_candidate(FIRST.name),
            object_names.data_file(FIRST.name, 3, 0),
            object_names.objects_file(FIRST.name, 3),
            other,
            data,
        ):
            await store.create(key, b"x")
        await decisions.decide(store, proposal(FIRST, records_pb2.OUTCOME_ABORT))
        await remove_attempt(store, FIRST.name)
        keys = {info.key for info in await store.list()}
        assert keys == {object_names.decision(FIRST.name), other, data}

    on_fresh_store(scenario)


def test_second_manifest_of_an_attempt_gives_way() -> None:
    plans = rank_plans(local_plan([tensor("w", 4)]), local_plan([tensor("w", 4)]))
    context = sidecar_pb2.SaveContext(save=save_of(FIRST), checkpoint_id="memory://x/y")
    one = make_manifest(context, FIRST, plans, make_global_plan(plans, FIRST.name))
    other_plans = rank_plans(local_plan([tensor("w", 4)]), local_plan([]))
    two = make_manifest(context, FIRST, other_plans, make_global_plan(other_plans, FIRST.name))

    async def scenario(store: Store) -> None:
        assert await read_manifest(store, FIRST.name, Manifest) is None
        assert await publish(store, one) is one
        standing = await publish(store, two)
        assert standing.plan_id == one.plan_id != two.plan_id
        assert standing.final_plan(0) == one.final_plan(0)

    on_fresh_store(scenario)


def test_receipts_in_storage_are_found() -> None:
    async def scenario(store: Store) -> None:
        for rank in (0, 2):
            receipt = records_pb2.Receipt(attempt=FIRST.name, rank=rank)
            await store.create(object_names.receipt(FIRST.name, rank), receipt.SerializeToString())
        await store.create(object_names.receipt(FIRST.name, 1), b"\xff")
        found = await find_receipts(store, FIRST.name, [0, 1, 2, 3])
        assert [receipt.rank for receipt in found] == [0, 2]

    on_fresh_store(scenario)


def test_metadata_bytes_are_torchs() -> None:
    plans = rank_plans(local_plan([tensor("w", 4)]))
    plan = make_global_plan(plans, FIRST.name)
    data = pickle_metadata(plan.metadata, checkpoint_id="gs://b/c", attempt=FIRST.name)
    metadata = pickle.loads(data)
    assert isinstance(metadata, Metadata)
    assert metadata.storage_meta is not None
    assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id) == (
        "gs://b/c",
        FIRST.name,
    )


async def number_of(root: Store, job: str, incarnation: str, **fields: Any) -> int:
    """The number that a coordinator assigns which hasn't read the root yet."""
    return await Incarnations().number_of(root, Claim(job, incarnation, **fields))


def test_incarnations_that_ask_at_once_get_different_numbers() -> None:
    async def scenario(root: Store) -> None:
        asked = ["a", "b", "c", "a", "b", "c"]
        numbers = await asyncio.gather(*(number_of(root, "job", each) for each in asked))
        assert numbers[:3] == numbers[3:]
        assert sorted(numbers[:3]) == [1, 2, 3]
        # The same id in another job is another incarnation.
        assert await number_of(root, "other", "a") == 4
        assert await number_of(root, "job", "b") == numbers[1]

    on_fresh_store(scenario)


def test_number_is_taken_from_the_winner_of_the_race() -> None:
    async def scenario(root: Store) -> None:
        unsteady = UnreliableStore(root)
        key = f"{object_names.incarnations_prefix()}{1:012d}"
        unsteady.before[key] = lambda: number_of(root, "job", "b")
        assert await number_of(unsteady, "job", "a") == 2
        unsteady.before[f"{object_names.incarnations_prefix()}{3:012d}"] = lambda: number_of(
            root, "job", "c"
        )
        assert await number_of(unsteady, "job", "c") == 3

    on_fresh_store(scenario)


async def lose_records(root: Store) -> None:
    for info in await root.list(object_names.incarnations_prefix()):
        await root.delete(info.key)


def test_numbers_continue_above_those_of_attempts_when_the_records_are_lost() -> None:
    async def scenario(root: Store) -> None:
        assert [await number_of(root, "job", each) for each in ("a", "b")] == [1, 2]
        for checkpoint, attempt in (
            ("step-1/", Attempt(1, 9, GROUP, "a")),
            ("step-2/", Attempt(2, 1, GROUP, "b")),
        ):
            await root.create(checkpoint + object_names.manifest(attempt.name), b"")
        await lose_records(root)
        # A running incarnation keeps the number of its attempts.
        assert await number_of(root, "job", "b") == 2
        await lose_records(root)
        assert await number_of(root, "job", "c") == 3
        assert await number_of(root, "job", "a") == 1

    on_fresh_store(scenario)


def test_attempts_of_an_incarnation_that_another_coordinator_has_numbered_dont_raise_it() -> None:
    async def scenario(root: Store) -> None:
        class Meanwhile(UnreliableStore):
            async def list_directories(self, prefix: str = "") -> Sequence[str]:
                number = await number_of(root, "job", "a")
                own = object_names.manifest(Attempt(number, 1, GROUP, "a").name)
                await root.create(f"step-1/{own}", b"")
                return await root.list_directories(prefix)

        assert await number_of(Meanwhile(root), "job", "a") == 1

    on_fresh_store(scenario)


def test_numbers_end_where_names_of_attempts_do() -> None:
    async def scenario(root: Store) -> None:
        last = Attempt(object_names.LARGEST_NUMBER, 1, GROUP, "a")
        await root.create(f"step-1/{object_names.manifest(last.name)}", b"")
        with pytest.raises(IntegrityError, match="another root"):
            await number_of(root, "job", "b")

    on_fresh_store(scenario)


def test_an_incarnation_that_another_has_followed_gets_no_number() -> None:
    async def scenario(root: Store) -> None:
        assert await number_of(root, "job", "first") == 1
        assert await number_of(root, "job", "second", seen=1, host="node-7") == 2
        named = r"incarnation late of job job is not its newest: incarnation second \(number 2\).*"
        with pytest.raises(SupersededError, match=named + "from host node-7.*PANNIER_JOB"):
            await number_of(root, "job", "late", seen=1)
        keys = [info.key for info in await root.list(object_names.incarnations_prefix())]
        assert keys == [object_names.incarnation_record(number) for number in (1, 2)]
        # One that begins again sees the second, and follows it.
        assert await number_of(root, "job", "third", seen=2) == 3
        # Those that have a number keep it.
        assert await number_of(root, "job", "first", seen=0) == 1
        # Others of the root don't concern it, nor do processes that save by themselves.
        assert await number_of(root, "other", "a", seen=0) == 4
        assert await number_of(root, "job", "aside", seen=0, apart=True) == 3
        assert await number_of(root, "job", "fourth", seen=3) == 6

    on_fresh_store(scenario)


def test_an_incarnation_that_is_followed_while_it_takes_a_number_gets_none() -> None:
    async def scenario(root: Store) -> None:
        unsteady = UnreliableStore(root)
        unsteady.before[object_names.incarnation_record(1)] = lambda: number_of(
            root, "job", "newer"
        )
        with pytest.raises(SupersededError, match="newer"):
            await number_of(unsteady, "job", "older", seen=0)
        assert len(await root.list(object_names.incarnations_prefix())) == 1

    on_fresh_store(scenario)


def test_an_incarnation_gets_its_number_back_where_the_records_were_lost() -> None:
    async def scenario(root: Store) -> None:
        own = Attempt(await number_of(root, "job", "a", seen=0), 1, GROUP, "a")
        await root.create(f"step-1/{object_names.manifest(own.name)}", b"")
        await lose_records(root)
        assert await number_of(root, "job", "b") == 2
        assert await number_of(root, "job", "a", seen=0) == 1

    on_fresh_store(scenario)


@pytest.mark.parametrize("apart", [False, True])
def test_the_newest_is_found_though_another_coordinator_has_numbered_it(apart: bool) -> None:
    async def scenario(root: Store) -> None:
        known, own = Incarnations(), Claim("job", "a", apart=apart)
        number = await known.number_of(root, own)
        await known.check_newest(root, own, number)
        await number_of(root, "other", "x")
        await number_of(root, "job", "aside", apart=True)
        await known.check_newest(root, own, number)
        # Not the next number: attempts show higher ones than records do.
        shown = Attempt(7, 1, GROUP, "z")
        await root.create(f"step-1/{object_names.manifest(shown.name)}", b"")
        assert await number_of(root, "job", "b") == 8
        if apart:
            await known.check_newest(root, own, number)
            return
        with pytest.raises(SupersededError, match=r"incarnation b \(number 8\)"):
            await known.check_newest(root, own, number)

    on_fresh_store(scenario)


OTHERS = {
    "another job": save_pb2.SaveId(job="other", incarnation="a", group=GROUP, number=1),
    "another incarnation": save_pb2.SaveId(job="j", incarnation="b", group=GROUP, number=1),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_decision_of_another_save_is_not_obeyed(other: save_pb2.SaveId) -> None:
    async def scenario(store: Store) -> None:
        theirs = proposal(FIRST, metadata=b"theirs")
        theirs.save.CopyFrom(other)
        key = object_names.decision(FIRST.name)
        await store.create(key, json_format.MessageToJson(theirs).encode())
        named = f"{object_names.save_text(other)}, not of {object_names.save_text(save_of(FIRST))}"
        with pytest.raises(IntegrityError, match=named):
            await decisions.decide(store, proposal(FIRST))
        with pytest.raises(IntegrityError, match=named):
            await decisions.read_decision(store, FIRST.name, save_of(FIRST))

    on_fresh_store(scenario)


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_manifest_of_another_save_is_not_adopted(other: save_pb2.SaveId) -> None:
    async def scenario(store: Store) -> None:
        plans = rank_plans(local_plan([tensor("w", 4)]))
        plan = make_global_plan(plans, FIRST.name)
        theirs, ours = (
            make_manifest(
                sidecar_pb2.SaveContext(save=save, ranks=[0], world_size=1), FIRST, plans, plan
            )
            for save in (other, save_of(FIRST))
        )
        await store.create(object_names.manifest(FIRST.name), theirs.data)
        named = f"{object_names.save_text(other)}, not of {object_names.save_text(save_of(FIRST))}"
        with pytest.raises(IntegrityError, match=named):
            await publish(store, ours)
        with pytest.raises(IntegrityError, match=named):
            await read_manifest(store, FIRST.name, Manifest, save_of(FIRST))

    on_fresh_store(scenario)


def test_damaged_incarnation_record_is_named() -> None:
    async def scenario(root: Store) -> None:
        await root.create(f"{object_names.incarnations_prefix()}{1:012d}", b"nonsense")
        with pytest.raises(IntegrityError, match="000000000001"):
            await number_of(root, "job", "a")

    on_fresh_store(scenario)


def test_decision_is_json_that_others_can_read() -> None:
    async def scenario(store: Store) -> None:
        failure = save_pb2.Failure(rank=3, host="h", kind=save_pb2.FAILURE_KIND_LOST, message="m")
        made = decisions.new_decision(
            records_pb2.OUTCOME_ABORT,
            save=save_of(FIRST),
            attempt=FIRST,
            host="here",
            failures=[failure],
        )
        await decisions.decide(store, made)
        text = await store.read(object_names.decision(FIRST.name))
        assert json_format.Parse(text, records_pb2.Decision()).failures == [failure]
        with pytest.raises(ConflictError):
            await store.create(object_names.decision(FIRST.name), b"other")

    on_fresh_store(scenario)
