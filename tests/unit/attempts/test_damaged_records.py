"""Damaged or forged records in a bucket are reported, and nothing else breaks."""

import asyncio
import functools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.attempts.listing import list_checkpoints
from pannier.coordinator.commit.metadata import build_checked
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.maintenance.inspect import by_checkpoint
from pannier.maintenance.recover import End, find_interrupted, finish_attempt, predict_outcome
from pannier.maintenance.verify import verify
from pannier.storage import open_store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError
from support.actors.ranks_by_hand import (
    context,
    local_plan,
    make_manifest,
    rank_plans,
    receipt_of,
    tensor,
    thing,
)
from support.processes.daemons import short_directory
from support.storage.checkpoints import write

ATTEMPT = object_names.Attempt(1, 1, object_names.group_name((0, 1)), "aa").name
RECORDS = [
    object_names.manifest(ATTEMPT),
    object_names.receipt(ATTEMPT, 0),
    object_names.receipt(ATTEMPT, 1),
    object_names.metadata_candidate(ATTEMPT),
    object_names.decision(ATTEMPT),
]


async def build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
    return build_checked(manifest, receipts)


@functools.cache
def records() -> dict[str, bytes]:
    """All objects of a checkpoint of two ranks, committed by ``recover``'s own steps."""
    plans = rank_plans(local_plan([tensor("w", 4)]), local_plan([tensor("b", 4), thing("step")]))
    plan = make_global_plan(plans, ATTEMPT)
    attempt = object_names.Attempt.parse(ATTEMPT)
    manifest = make_manifest(context(0, "/run/step-1"), attempt, plans, plan)
    found = {object_names.manifest(ATTEMPT): manifest.data}
    for rank in (0, 1):
        receipt = receipt_of(manifest.final_plan(rank), rank)
        found[object_names.receipt(ATTEMPT, rank)] = receipt.SerializeToString()
        found |= {file.name: bytes(file.size) for file in receipt.files}
    with laid_out(found) as place:
        asyncio.run(look_and_end(place))
        names = [path for path in place.rglob("*") if path.is_file()]
        return {str(path.relative_to(place)): path.read_bytes() for path in names}


@contextmanager
def laid_out(objects: dict[str, bytes]) -> Iterator[Path]:
    """The objects as files of a new directory."""
    place = short_directory()
    try:
        for name, data in objects.items():
            write(place / name, data)
        yield place
    finally:
        shutil.rmtree(place)


async def look_and_end(place: Path) -> list[End]:
    """All that reads records, and what ends attempts."""
    store = open_store(str(place))
    try:
        await list_checkpoints(store)
        by_checkpoint(await store.list())
        with suppress(PannierError):
            await verify(store, progress=lambda done, total: None)
        ends = []
        for found in await find_interrupted(store):
            foreseen = await predict_outcome(store, found, abort=False)
            outcome = await finish_attempt(store, found, build=build, host="here", abort=False)
            # Of what isn't committed although it was foreseen, nothing is lost.
            assert outcome.end in (foreseen.end, End.UNDECIDED)
            ends.append(outcome.end)
        return ends
    finally:
        await store.close()


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, int, bytes]:
    """Which record, how, where, and with what."""
    which = draw(st.sampled_from(RECORDS))
    how = draw(st.sampled_from(["cut", "flip", "insert", "replace", "remove"]))
    return which, how, draw(st.integers(0, 1 << 16)), draw(st.binary(min_size=1, max_size=24))


def damaged(data: bytes, how: str, at: int, by: bytes) -> bytes:
    at %= len(data) + 1
    if not data:
        return by
    if how == "cut":
        return data[:at]
    if how == "flip":
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (by[0] or 1)]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + by + data[at:]
    return by


@given(many=st.lists(damages(), min_size=1, max_size=3), committed=st.sampled_from([0, 1, 2]))
@settings(max_examples=150)
def test_damaged_records_are_reported_and_nothing_breaks(
    many: list[tuple[str, str, int, bytes]], committed: int
) -> None:
    """``committed``: 0 nothing is decided, 1 the decision is there, 2 ``.metadata`` too."""
    objects = dict(records())
    if committed < 2:
        del objects[object_names.METADATA]
    if committed < 1:
        del objects[object_names.decision(ATTEMPT)]
    for which, how, at, by in many:
        if how == "remove":
            objects.pop(which, None)
        elif which in objects:
            objects[which] = damaged(objects[which], how, at, by)
    with laid_out(objects) as place:
        asyncio.run(look_and_end(place))
        metadata = place / object_names.METADATA
        # Without the decision, the stored candidate is used if it can be read.
        if committed == 2 and object_names.decision(ATTEMPT) in objects:
            assert metadata.read_bytes() == records()[object_names.METADATA]
        for path in place.glob("*.distcp"):
            assert path.read_bytes() == records()[path.name]


def test_what_is_whole_is_committed() -> None:
    """Or else the test above would prove little."""
    objects = {name: data for name, data in records().items() if name != object_names.METADATA}
    del objects[object_names.decision(ATTEMPT)]
    with laid_out(objects) as place:
        assert asyncio.run(look_and_end(place)) == [End.COMMITTED]
        assert (place / object_names.METADATA).read_bytes() == records()[object_names.METADATA]
