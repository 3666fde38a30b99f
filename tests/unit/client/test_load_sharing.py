"""What one rank needs of a checkpoint's files, and what receipts say of those."""

from dataclasses import replace
from pathlib import Path

import crc32c
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import open_dir
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.restore import load_sharing
from pannier.client.restore.load_sharing import _needed, _records
from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums
from pannier.wire.records import parse_blocks
from support.storage import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ATTEMPT = "i1-inc-g0000000a-s7"


@pytest.fixture
def plan(tmp_path: Path) -> tuple[Metadata, list[ReadItem]]:
    state = {"w": torch.ones(64, 100), "step": {1, 2}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = StorageReader(tmp_path).read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    items = planner.create_local_plan().items
    return metadata, sorted(items, key=lambda item: item.storage_index.fqn)


def test_small_archives_are_needed_whole(plan: tuple[Metadata, list[ReadItem]]) -> None:
    metadata, items = plan
    (spans,) = _needed(metadata, items, "here").values()
    infos = [metadata.storage_data[item.storage_index] for item in items]
    assert sorted(spans) == sorted((each.offset, each.offset + each.length) for each in infos)


def test_of_large_tensors_their_heads_and_parts_are_needed(
    plan: tuple[Metadata, list[ReadItem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_sharing, "REMOTE_REQUEST_BYTES", 100)
    metadata, (_, item) = plan
    rows = replace(item, storage_offsets=torch.Size([10, 0]), lengths=torch.Size([3, 100]))
    (spans,) = _needed(metadata, [rows], "here").values()
    head, part = sorted(spans)
    start = metadata.storage_data[item.storage_index].offset
    assert head.start == start
    assert (part.start, part.end - part.start) == (head.end + 10 * 400, 3 * 400)
    # Of parts that overlap, all of it is read.
    (spans,) = _needed(metadata, [item, rows], "here").values()
    assert [each.start for each in spans] == [start]
    assert spans[0].end - start == metadata.storage_data[item.storage_index].length


def test_files_without_receipts_are_known_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1000))
    found = _records(Receipts(open_dir(tmp_path), ""), ["f", "missing"])
    assert found.keys() == {"f"}
    assert (found["f"].size, found["f"].block_crc32c) == (1000, b"")
    # An attempt whose records are gone is none that can't be read.
    assert _records(Receipts(open_dir(tmp_path), ATTEMPT), ["f"]).keys() == {"f"}


def test_receipts_without_checksums_of_usual_blocks_say_nothing_of_them() -> None:
    content = bytes(3000)
    whole = Checksums().followed_by(memoryview(content))
    size, column = whole.columns()
    small = records_pb2.DataFile(name="s", size=3000, crc32c=crc32c.crc32c(content))
    assert parse_blocks(load_sharing._normal(small)) == (small.crc32c,)
    usual = records_pb2.DataFile(name="u", size=3000, block_bytes=size, block_crc32c=column)
    assert parse_blocks(load_sharing._normal(usual)) == whole.blocks
    for other in (
        records_pb2.DataFile(name="o", size=BLOCK_BYTES + 1, crc32c=1),
        records_pb2.DataFile(name="o", size=3000, block_bytes=1000, block_crc32c=bytes(12)),
    ):
        assert load_sharing._normal(other).block_crc32c == b""


def test_a_receipt_is_read_once_for_all_files_of_its_rank(tmp_path: Path) -> None:
    checkpoints.write_attempt(tmp_path, ATTEMPT)
    names = [path.name for path in tmp_path.glob("*.distcp")]
    found = _records(Receipts(open_dir(tmp_path), ATTEMPT), names)
    assert found.keys() == set(names)
    assert all(each.crc32c for each in found.values())
