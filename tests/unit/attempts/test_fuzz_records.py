"""What is read from a bucket, fuzzed: taken, or refused as damaged; nothing of it is run."""

import asyncio
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from pannier.attempts import decisions, leases
from pannier.attempts.listing import CheckpointState, list_checkpoints
from pannier.attempts.manifests import read_manifest
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import stat_metadata
from pannier.attempts.receipts import find_receipts
from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import open_dir
from pannier.client.loading.metadata_reader import fetch_metadata
from pannier.client.loading.torch_metadata import build_metadata
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata import build_checked
from pannier.coordinator.commit.receipt_check import check_external_metadata, check_receipt
from pannier.coordinator.incarnations import Claim, Incarnations
from pannier.storage import Store, open_store
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.records import MOST_RECORD
from support.fuzzing import FUZZ, accepted, messages
from support.plan_messages import FLOAT32, columns, make_items

ATTEMPT = "i1-a1-g00000000-s1"

json_texts = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 3000, b'{"number": ' + b"9" * 5000 + b"}", b""]),
    st.sampled_from([b"{}", b"[]", b"null", b'{"outcome": 7}', b'{"renew_s": "NaN"}', b"\xff"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda some: st.one_of(
            st.lists(some, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["outcome", "save", "attempt", "failures", "renew_s", "pid", "number", "job"]
                ),
                some,
                max_size=3,
            ),
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


async def _with(directory: Path, key: str, data: bytes, use: Any) -> Any:
    """What ``use`` makes of a checkpoint where the object is."""
    path = directory / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    store: Store = open_store(str(directory))
    try:
        return await use(store)
    finally:
        await store.close()


def read(directory: Path, key: str, data: bytes, use: Any) -> list[Any]:
    """The same as a list; empty when it is refused as it should be."""
    return accepted(lambda: asyncio.run(_with(directory, key, data, use)))


@FUZZ
@given(data=json_texts)
@example(data=b"[" * 100_000)
def test_decisions_and_leases(directory: Path, data: bytes) -> None:
    read(
        directory,
        object_names.decision(ATTEMPT),
        data,
        lambda store: decisions.read_decision(store, ATTEMPT),
    )
    (found,) = read(directory, object_names.lease(ATTEMPT, "t0"), data, leases.find_leases)
    # One that can't be read protects its attempt, for a time that ends.
    assert [lease.attempt for lease in found] == [ATTEMPT]
    assert 0 < found[0].expires < float("inf")


@FUZZ
@given(decision=messages(records_pb2.Decision))
def test_a_decision_is_read_as_it_was_written(
    directory: Path, decision: records_pb2.Decision
) -> None:
    try:
        data = json_format.MessageToJson(decision, sort_keys=True).encode()
    except json_format.SerializeToJsonError:
        return  # an outcome that has no name
    for found in read(
        directory,
        object_names.decision(ATTEMPT),
        data,
        lambda store: decisions.read_decision(store, ATTEMPT),
    ):
        assert found == decision or decision.decided_at != decision.decided_at


@FUZZ
@given(data=json_texts, name=st.sampled_from(["000000000001", "1", "٣", "9" * 5000, "9" * 30, "x"]))
@example(data=b'{"job": "j", "incarnation": "a"}', name="000000000001")
@example(data=b'{"number": 1e400}', name="000000000001")
@example(data=b"[" * 100_000, name="000000000001")
@example(data=b"{}", name="9" * 30)
def test_incarnation_records(tmp_path_factory: Any, data: bytes, name: str) -> None:
    directory = tmp_path_factory.mktemp("incarnations")
    key = f"{object_names.incarnations_prefix()}{name[:200]}"
    for number in read(
        directory, key, data, lambda store: Incarnations().number_of(store, Claim("j", "a"))
    ):
        # It becomes part of names.
        attempt = object_names.Attempt(number, 1, "g00000000", "a")
        assert object_names.Attempt.parse(attempt.name) == attempt


@FUZZ
@given(
    data=st.one_of(
        st.binary(max_size=200),
        messages(records_pb2.Receipt).map(records_pb2.Receipt.SerializeToString),
    )
)
def test_receipts_in_a_bucket(directory: Path, data: bytes) -> None:
    key = object_names.receipt(ATTEMPT, 0)
    (found,) = read(directory, key, data, lambda store: find_receipts(store, ATTEMPT, [0, 1]))
    assert all(receipt.rank == 0 for receipt in found)


@FUZZ
@given(
    manifest=messages(records_pb2.PlanManifest, depth=4),
    receipts=st.lists(messages(records_pb2.Receipt), max_size=3),
)
def test_manifests_and_receipts_make_a_checkpoint_or_are_refused(
    manifest: records_pb2.PlanManifest, receipts: list[records_pb2.Receipt]
) -> None:
    data = manifest.SerializeToString()
    for parsed in accepted(Manifest.parse, data):
        for receipt in receipts:
            accepted(check_receipt, parsed, receipt)
        accepted(check_external_metadata, manifest.metadata, dict(enumerate(receipts)))
    accepted(build_checked, data, receipts)


@FUZZ
@given(data=st.binary(max_size=200))
def test_what_is_no_manifest(data: bytes) -> None:
    for parsed in accepted(Manifest.parse, data):
        accepted(parsed.share, 0)
        accepted(parsed.final_plan, 0)


def sound() -> tuple[bytes, list[records_pb2.Receipt]]:
    """A manifest and the receipts of its ranks, as they should be."""
    items = make_items(
        ["w", "n"],
        [FLOAT32],
        fqn=[0, 0, 1],
        kind=[plan_pb2.ITEM_KIND_SHARD, plan_pb2.ITEM_KIND_SHARD, plan_pb2.ITEM_KIND_BYTE_IO],
        hint=[1, 2, 0],
        ndim=[1, 1, 0],
        property=[0, 0, 0],
        size=[8, 8],
        chunk_offset=[0, 4],
        chunk_size=[4, 4],
    )
    names = [
        object_names.data_file(ATTEMPT, 0, 0),
        object_names.data_file(ATTEMPT, 1, 0),
        object_names.objects_file(ATTEMPT, 1),
    ]
    manifest = records_pb2.PlanManifest(
        attempt=ATTEMPT,
        checkpoint_id="/c/step-1",
        members=[records_pb2.Member(rank=rank, host="h", digest="d") for rank in (0, 1)],
        metadata=plan_pb2.GlobalMetadata(
            items=items,
            files=names,
            placement=plan_pb2.Placement(
                **columns(file=[0, 1, 2], offset=[0, 0, 0], length=[100, 100, 0])
            ),
        ),
        **columns(owner=[0, 1, 1], position=[0, 0, 1]),
    )
    parsed = Manifest.parse(manifest.SerializeToString())
    receipts = [
        records_pb2.Receipt(
            attempt=ATTEMPT,
            plan_id=parsed.plan_id,
            rank=rank,
            files=[
                records_pb2.DataFile(name=file.name, size=file.size or 10)
                for file in parsed.final_plan(rank).files
            ],
        )
        for rank in (0, 1)
    ]
    receipts[1].varying.add(position=1, file=names[2], offset=0, length=10)
    return parsed.data, receipts


def test_the_sound_ones_make_a_checkpoint() -> None:
    manifest, receipts = sound()
    candidate = build_checked(manifest, receipts)
    assert set(build_metadata(candidate, "x").state_dict_metadata) == {"w", "n"}
    names = referenced_files(candidate, "x")
    assert names == set(records_pb2.PlanManifest.FromString(manifest).metadata.files)


@FUZZ
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), which=st.integers(0, 2))
def test_one_wrong_byte_in_manifest_or_receipt(at: float, byte: int, which: int) -> None:
    manifest, receipts = sound()
    records: list[bytes] = [manifest, *(each.SerializeToString() for each in receipts)]
    spoiled = bytearray(records[which])
    spoiled[int(at * len(spoiled))] = byte
    records[which] = bytes(spoiled)
    try:
        receipts = [records_pb2.Receipt.FromString(each) for each in records[1:]]
    except DecodeError:
        return  # find_receipts leaves it out
    for candidate in accepted(build_checked, records[0], receipts):
        assert referenced_files(candidate, "x") <= {
            *(object_names.data_file(ATTEMPT, rank, 0) for rank in (0, 1)),
            object_names.objects_file(ATTEMPT, 1),
        }


class _Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def _evils(mark: Path) -> list[bytes]:
    touch = f"open({str(mark)!r}, 'w')"
    return [
        pickle.dumps(_Evil(eval, touch), protocol=4),
        pickle.dumps({"storage_data": _Evil(exec, touch)}, protocol=2),
        pickle.dumps(_Evil(Path.touch, mark), protocol=4),
        f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(),
        f"cbuiltins\neval\n(S{touch!r}\ntR.".encode(),
        f"c__builtin__\neval\n(S{touch!r}\ntR.".encode(),
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f\x8c\x04" + b"a" * 9,
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02" + b"]" * 10 + b"a" * 9 + b".",
        b"",
    ]


READERS = (referenced_files, build_metadata)


def test_no_pickle_of_a_bucket_runs_anything(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for content in _evils(mark):
        for reader in READERS:
            with pytest.raises(PannierError):
                reader(content, "x")
    assert not mark.exists()


@FUZZ
@given(
    data=st.binary(max_size=100),
    at=st.floats(0, 1, exclude_max=True),
    instead=st.binary(max_size=4),
    cut=st.booleans(),
)
def test_a_damaged_pickle_is_refused_or_read(
    data: bytes, at: float, instead: bytes, cut: bool
) -> None:
    manifest, receipts = sound()
    good = build_checked(manifest, receipts)
    place = int(at * len(good))
    spoiled = good[:place] + instead + (b"" if cut else good[place + len(instead) :])
    for content in (data, b"\x80\x04" + data, spoiled):
        for reader in READERS:
            accepted(reader, content, "x")


def test_a_record_that_is_longer_than_a_real_one_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 3 GiB takes a stranger no time to write."""
    keys = [object_names.decision(ATTEMPT), object_names.receipt(ATTEMPT, 0)]
    for key in (*keys, object_names.manifest(ATTEMPT), object_names.METADATA):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / key).open("wb") as file:
            file.truncate(3 << 30)

    async def read_all() -> None:
        store = open_store(str(tmp_path))
        try:
            with pytest.raises(IntegrityError, match="has 3221225472 bytes, at most"):
                await decisions.read_decision(store, ATTEMPT)
            assert not await find_receipts(store, ATTEMPT, [0])
            with pytest.raises(IntegrityError, match="manifest has 3221225472 bytes"):
                await read_manifest(store, ATTEMPT, Manifest)
            with pytest.raises(IntegrityError, match="metadata has 3221225472 bytes"):
                await stat_metadata(store)
            (found,) = await list_checkpoints(store, None)
            assert found.state is CheckpointState.FOREIGN
        finally:
            await store.close()

    tracemalloc.start()
    try:
        asyncio.run(read_all())
        directory = open_dir(tmp_path)
        assert not Receipts(directory, ATTEMPT).recorded([f"__{ATTEMPT}_0_0.distcp"], threads=1)
        with pytest.raises(IntegrityError, match=r"\.metadata has 3221225472 bytes"):
            fetch_metadata(directory)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_RECORD
    finally:
        tracemalloc.stop()
