"""``pannier gc`` in buckets, killed on the way, and against everything that may come between."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.common.fault_points import VARIABLE
from pannier.maintenance.gc import Rules, sweep
from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.actors.history import History
from support.processes.cli import pannier
from support.processes.cli import pannier_here as here
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.directories import files_below
from support.storage.gcs_server import GcsServer
from support.storage.s3_server import S3Server
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND, THIRD = (f"i1-inc-g0000000a-s{number}" for number in (1, 2, 3))
NOW = ("--grace", "0", "--abandoned-after", "0")


def messy(place: Path) -> set[str]:
    """A checkpoint with everything that may be left; returns what must stay."""
    write_attempt(place, FIRST)
    write_attempt(place, THIRD)
    kept = {name for name in files_below(place) if FIRST not in name}
    write_attempt(place, SECOND, commit=False)
    write_decision(place, SECOND, records_pb2.OUTCOME_ABORT)
    write(place / object_names.data_file("i1-inc-g0000000a-s4", 0, 0), b"never planned")
    write(place / object_names.lease(THIRD, "old"), b'{"renewS": 1e-9}')
    return kept | {object_names.decision(SECOND), object_names.decision("i1-inc-g0000000a-s4")}


def test_a_bucket_is_cleaned_up(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    place = tmp_path / "step-1"
    kept = messy(place)
    fs = fsspec.filesystem("gs", token="anon", use_listings_cache=False)
    fs.put(str(tmp_path), "bucket/run", recursive=True)
    everything = files_below(place)
    dry = here("gc", "gs://bucket/run", "--dry-run", "--json", *NOW)
    planned = {line["name"] for line in dry.json_lines() if line["action"] == "would-remove"}
    assert {name.partition("step-1/")[2] for name in fs.find("bucket/run")} == everything
    done = here("gc", "gs://bucket/run", "--json", *NOW)
    assert done.code == 0, done
    removed = {line["name"] for line in done.json_lines() if line["action"] == "removed"}
    left = {name.partition("step-1/")[2] for name in fs.find("bucket/run")}
    assert left == kept
    assert everything - kept <= removed
    # What only the run itself adds: the mark of what is superseded.
    assert removed - {object_names.superseded_mark(FIRST)} == planned | {
        name for name in removed if FIRST in name
    } - {object_names.superseded_mark(FIRST)}
    assert here("verify", "gs://bucket/run/step-1").code == 0


def test_a_multipart_upload_that_was_never_completed_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as s3:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        for attempt, directory in ((FIRST, "step-1"), (SECOND, "step-2")):
            key = f"run/{directory}/{object_names.data_file(attempt, 0, 0)}"
            fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
        # Another program may keep its uploads pending; some keys are none that Pannier could have.
        others = ["other/file", "run//part", "run/datasets/train.parquet"]
        for key in others:
            fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)

        def uploads() -> list[str]:
            answer = fs.call_s3("list_multipart_uploads", Bucket="bucket")
            return sorted(item["Key"] for item in answer.get("Uploads", []))

        assert len(uploads()) == 5
        # One attempt may be under way: its upload stays, whatever the server says of its age.
        manifest = records_pb2.PlanManifest(
            save=object_names.Attempt.parse(FIRST).save, attempt=FIRST
        )
        manifest.members.add(rank=0, host="node")
        key = f"bucket/run/step-1/{object_names.manifest(FIRST)}"
        fs.pipe_file(key, manifest.SerializeToString())
        young = here("gc", "s3://bucket/run", "--json")
        assert young.code == 0, young
        assert [key for key in uploads() if key not in others] == [
            f"run/step-1/{object_names.data_file(FIRST, 0, 0)}"
        ]
        result = here("gc", "s3://bucket/run", "--json", *NOW)
        assert result.code == 0, result
        assert uploads() == others


@pytest.mark.parametrize(
    "at",
    [
        "sweep.mark.after",
        "sweep.deletion.before:5",
        "sweep.deletion.after:9",
        "sweep.decision.after",
    ],
)
def test_killed_on_the_way_it_leaves_a_whole_checkpoint_and_is_run_again(
    tmp_path: Path, at: str
) -> None:
    place = tmp_path / "step-1"
    kept = messy(place)
    killed = pannier("gc", str(tmp_path), *NOW, env={VARIABLE: at})
    assert killed.code == -9, killed
    assert kept <= files_below(place) | {object_names.decision("i1-inc-g0000000a-s4")}
    assert here("verify", str(place)).code == 0
    assert here("gc", str(tmp_path), *NOW).code == 0
    assert files_below(place) == kept
    assert here("verify", str(place)).code == 0


class Interrupted(UnreliableStore):
    """Something else happens before some of its operations."""

    def __init__(self, inner: Store, steps: dict[int, Callable[[], Awaitable[None]]]) -> None:
        super().__init__(inner)
        self._steps = steps
        self._count = itertools.count()

    async def _between(self) -> None:
        step = self._steps.pop(next(self._count), None)
        if step is not None:
            await step()

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await self._between()
        return await super().create(key, data)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self._between()
        return await super().read(key, offset, length)

    async def stat(self, key: str) -> ObjectInfo | None:
        await self._between()
        return await super().stat(key)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        await self._between()
        return await super().list(prefix)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        await self._between()
        await super().delete(key, generation=generation)


_places = itertools.count()


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 25), during=st.integers(0, 12))
def test_whatever_comes_between_nothing_that_is_needed_goes(
    seed: int, before: int, during: int
) -> None:
    """Attempts, decisions, late writes, leases and other sweepers, before a sweep and within it."""

    async def run() -> None:
        store = open_store(f"memory://cleanup-{next(_places)}/step")
        chance = random.Random(seed)
        history = History(store, chance)
        for _ in range(before):
            await history.step()
        steps = {chance.randrange(60): history.step for _ in range(during)}
        rules = Rules(grace_s=chance.choice([0, 1000]), abandoned_after_s=chance.choice([0, 1000]))
        complete, unsteady = history.complete(), Interrupted(store, steps)
        await sweep(unsteady, rules, now=await history.now(), host="sweeper", dry_run=False)
        assert await history.aborted_by("sweeper", complete) == []
        await history.check()
        for _ in range(3):
            await history.step()
        await history.check()
        # The memory is the process's, and every listing goes through all of it.
        for info in await store.list():
            await store.delete(info.key)

    asyncio.run(run())
