"""What removes a checkpoint, or an aborted save, ends its uploads, and leaves those of other saves."""

import asyncio
from pathlib import Path

import pytest

from pannier.attempts.delete_attempt import remove_attempt
from pannier.maintenance.delete_checkpoint import plan_removal, remove_checkpoint
from pannier.maintenance.gc import Rules, sweep, sweep_unfinished
from pannier.storage import Store, open_store
from pannier.storage.base import Unfinished
from pannier.v1 import records_pb2
from pannier.wire import object_names
from support.storage.checkpoints import write, write_attempt, write_decision
from support.storage.unreliable_store import UnreliableStore

OLD, NEW = (f"i1-inc-g0000000a-s{number}" for number in (1, 2))
NAMELESS = ".pannier-7-abc"
FOREIGN = "model.safetensors"
BELOW = f"deeper/{object_names.data_file(OLD, 0, 0)}"


class Uploading(UnreliableStore):
    """Has unfinished uploads, as S3 does."""

    def __init__(self, inner: Store, *keys: str) -> None:
        super().__init__(inner)
        self.uploads = [Unfinished(key, 0, 0.0, key) for key in keys]

    async def list_unfinished(self) -> list[Unfinished]:
        return list(self.uploads)

    async def discard(self, item: Unfinished) -> None:
        self.uploads.remove(item)


class ByKey(Uploading):
    """Lists an upload by its exact key only, as MinIO does."""

    lists_by_key = True

    async def list_unfinished(self) -> list[Unfinished]:
        return []

    async def list_unfinished_of(self, key: str) -> list[Unfinished]:
        return [item for item in self.uploads if item.key == key]


OWN = [
    object_names.data_file(OLD, 0, 1),
    object_names.objects_file(OLD, 1),
    object_names.extra_file(OLD, 0),
]


@pytest.mark.parametrize("way", ["abort", "gc", "gc --dry-run", "rm"])
def test_uploads_that_are_listed_by_their_key_alone_are_found_by_the_manifest(
    tmp_path: Path, way: str
) -> None:
    write_attempt(tmp_path, OLD, commit=way == "rm")
    (tmp_path / OWN[0]).unlink()
    if way != "rm":
        write_decision(tmp_path, OLD, records_pb2.OUTCOME_ABORT)
    other = object_names.data_file(NEW, 0, 0)

    async def main() -> list[str]:
        store = ByKey(open_store(str(tmp_path)), *OWN, other)
        if way == "abort":
            await remove_attempt(store, OLD)
        elif way == "rm":
            await remove_checkpoint(store, await plan_removal(store), host="here")
        else:
            dry = way != "gc"
            report = await sweep(store, Rules(), now=2000, host="here", dry_run=dry)
            gone = [
                removed.name
                async for removed in sweep_unfinished(
                    store,
                    Rules(),
                    aborted=report.aborted,
                    undecided=report.undecided,
                    planned=report.planned,
                    now=2000,
                    dry_run=dry,
                )
            ]
            assert sorted(gone) == sorted(OWN)
        await store.close()
        return [item.key for item in store.uploads]

    assert asyncio.run(main()) == ([*OWN, other] if way == "gc --dry-run" else [other])


@pytest.mark.parametrize("planned", [False, True], ids=["torch's plan", "Pannier's plan"])
@pytest.mark.parametrize("before", [False, True], ids=["begins after", "begins before"])
def test_uploads_of_another_save_stay(tmp_path: Path, planned: bool, before: bool) -> None:
    """Torch's plan has no manifest yet, so that nothing but its uploads shows it."""
    write_attempt(tmp_path, OLD)
    own, other = (object_names.data_file(attempt, 0, 9) for attempt in (OLD, NEW))

    def begin() -> None:
        if planned:
            write(tmp_path / object_names.manifest(NEW), b"x")

    async def main() -> list[str]:
        store = Uploading(open_store(str(tmp_path)), own, other, NAMELESS, BELOW)
        if before:
            begin()
        plan = await plan_removal(store)
        begin()
        await remove_checkpoint(store, plan, host="here")
        await store.close()
        return [item.key for item in store.uploads]

    left = asyncio.run(main())
    assert left == ([other, NAMELESS, BELOW] if planned else [other, BELOW])


def test_what_names_no_attempt_goes_where_there_is_no_other(tmp_path: Path) -> None:
    write_attempt(tmp_path, OLD)

    async def main() -> list[str]:
        store = Uploading(
            open_store(str(tmp_path)), NAMELESS, f".pannier/{OLD}/{NAMELESS}", BELOW, FOREIGN
        )
        await remove_checkpoint(store, await plan_removal(store), host="here")
        await store.close()
        return [item.key for item in store.uploads]

    assert asyncio.run(main()) == [BELOW, FOREIGN], "another program's upload is not Pannier's"
