"""Saving one id again and again costs no more requests than at first, also after aborts."""

import asyncio
from pathlib import Path

import pytest

from pannier.attempts.commit import carry_out, prepare_commit
from pannier.attempts.decisions import decide, new_decision
from pannier.attempts.listing import list_checkpoints
from pannier.common.locations import Pattern
from pannier.maintenance.recover import find_interrupted
from pannier.maintenance.superseded import sweep_checkpoint
from pannier.storage import Store, open_store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.object_names import METADATA, Attempt
from support.storage.gcs_server import GcsServer

GROUP = "g0000000a"
SAVES = 30
ALLOWANCE = 2
"""Requests by which two saves may differ."""


def save_of(attempt: Attempt) -> save_pb2.SaveId:
    return save_pb2.SaveId(job="j", incarnation="a", group=GROUP, number=attempt.number)


async def ingest(store: Store, attempt: Attempt) -> None:
    for key in (object_names.manifest(attempt.name), object_names.receipt(attempt.name, 0)):
        await store.create(key, attempt.name.encode())


async def save(store: Store, attempt: Attempt) -> None:
    """All that a coordinator does from the last receipt on."""
    await ingest(store, attempt)
    proposal = await prepare_commit(
        store,
        save=save_of(attempt),
        attempt=attempt,
        plan_id="p",
        metadata=b"%016d" % attempt.number,
        host="here",
    )
    await carry_out(store, await decide(store, proposal))
    await sweep_checkpoint(store, grace_s=3600)


async def abort(store: Store, attempt: Attempt) -> None:
    await ingest(store, attempt)
    proposal = new_decision(
        records_pb2.OUTCOME_ABORT, save=save_of(attempt), attempt=attempt, host="here"
    )
    await carry_out(store, await decide(store, proposal))


def count(server: GcsServer) -> int:
    return len(server.requests())


@pytest.mark.parametrize("aborts", [0, SAVES])
def test_a_late_save_to_one_id_costs_what_an_early_one_does(tmp_path: Path, aborts: int) -> None:
    async def run(server: GcsServer) -> dict[int, int]:
        options = {"endpoint_url": server.url, "token": "anon"}
        store = open_store("gs://bucket/run/last", storage_options=options)
        costs = {}
        try:
            for number in range(1, aborts + 1):
                await abort(store, Attempt(1, number, GROUP, "a"))
            for number in range(1, SAVES + 1):
                before = count(server)
                await save(store, Attempt(1, aborts + number, GROUP, "a"))
                costs[number] = count(server) - before
            assert await store.read(METADATA) == b"%016d" % (aborts + SAVES)
        finally:
            await store.close()
        return costs

    with GcsServer(tmp_path) as server:
        costs = asyncio.run(run(server))
    assert costs[SAVES] <= costs[3] + ALLOWANCE, costs
    assert costs[3] <= 25 + ALLOWANCE, costs


def test_looking_for_what_is_interrupted_takes_one_listing(tmp_path: Path) -> None:
    """Where the store lists checksums, what is finished shows without any reading."""

    async def run(server: GcsServer) -> int:
        options = {"endpoint_url": server.url, "token": "anon"}
        store = open_store("gs://bucket/run/last", storage_options=options)
        try:
            for number in range(1, SAVES + 1):
                await save(store, Attempt(1, number, GROUP, "a"))
            await abort(store, Attempt(1, SAVES + 1, GROUP, "a"))
            before = count(server)
            assert await find_interrupted(store) == []
            return count(server) - before
        finally:
            await store.close()

    with GcsServer(tmp_path) as server:
        assert asyncio.run(run(server)) == 1


def test_a_pattern_takes_a_listing_per_level_and_checkpoint(tmp_path: Path) -> None:
    """Whatever else lies below the root, and however deep."""

    async def run(server: GcsServer) -> list[str]:
        options = {"endpoint_url": server.url, "token": "anon"}
        root = open_store("gs://bucket/run", storage_options=options)
        try:
            for number in (1, 2, 3):
                name = f"checkpoint-{number}/dcp"
                store = open_store(f"gs://bucket/run/{name}", storage_options=options)
                await save(store, Attempt(1, number, GROUP, "a"))
                await store.close()
                await root.create(f"checkpoint-{number}/logs/deep/a", b"x")
                await root.create(f"logs-{number}/deep/a", b"x")
            before = count(server)
            found = await list_checkpoints(root, Pattern("checkpoint-*/dcp"))
            assert [each.name for each in found] == [f"checkpoint-{n}/dcp" for n in (1, 2, 3)]
            return [each[1] for each in server.requests()[before:]]
        finally:
            await root.close()

    with GcsServer(tmp_path) as server:
        asked = asyncio.run(run(server))
    assert not [each for each in asked if "logs" in each]
    # The root, and of each checkpoint its objects; its decision is known since it was written.
    assert len(asked) <= 1 + 3 + 3, asked
