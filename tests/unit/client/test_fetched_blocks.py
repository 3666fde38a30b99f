"""Blocks from a sidecar's memory, against a played sidecar."""

import os
import queue
from array import array
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import grpc
import pytest

from pannier.client.restore import fetched_blocks
from pannier.client.restore.fetched_blocks import FetchedBlocks
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.restore_plan import BlockTable, Host, LoadName, RankPlan, SharedFile
from pannier.client.transport.channel import SidecarChannel
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums
from pannier.wire.errors import IntegrityError, UnavailableError
from support.processes.stretch import BOUND_S

DATA = os.urandom(BLOCK_BYTES + 1000)
OFFSET = 4096
"""Of the file's bytes in the sidecar's memory."""


class Sidecar(restore_pb2_grpc.RestoreServicer):
    """Answers as its test says."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[restore_pb2.FetchRequest] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[restore_pb2.FetchResponse | None] = queue.SimpleQueue()

    def Fetch(self, messages: Any, context: Any) -> Iterator[restore_pb2.FetchResponse]:
        def receive() -> None:
            try:
                for each in messages:
                    self.received.put(each)
            finally:
                self.answers.put(None)

        pool = futures.ThreadPoolExecutor(1)
        pool.submit(receive)
        yield restore_pb2.FetchResponse(memory=restore_pb2.FetchMemory(token=b"t", descriptors="d"))
        yield from iter(self.answers.get, None)
        pool.shutdown(wait=False)

    def next(self, kind: str) -> Any:
        message = self.received.get(timeout=BOUND_S)
        assert message.WhichOneof("request") == kind, message
        return getattr(message, kind)

    def answer(self, **fields: Any) -> None:
        self.answers.put(restore_pb2.FetchResponse(block=restore_pb2.FetchedBlock(**fields)))


@pytest.fixture
def sidecar(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    memory = os.memfd_create("blocks")
    os.write(memory, bytes(OFFSET) + DATA)

    @contextmanager
    def connect(path: str, digest: bytes) -> Iterator[None]:
        assert path == str(sockets / "d")
        yield

    monkeypatch.setattr(fetched_blocks, "connect_descriptors", connect)
    monkeypatch.setattr(fetched_blocks, "fetch_descriptors", lambda *_: [os.dup(memory)])
    played = Sidecar()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    restore_pb2_grpc.add_RestoreServicer_to_server(played, server)
    server.add_insecure_port(f"unix://{sockets}/s.sock")
    server.start()
    yield played
    server.stop(0).wait(BOUND_S)
    os.close(memory)


@pytest.fixture
def progress() -> LoadProgress:
    return LoadProgress()


@pytest.fixture
def blocks(sidecar: Sidecar, sockets: Path, progress: LoadProgress) -> Iterator[FetchedBlocks]:
    sums = Checksums().followed_by(memoryview(DATA))
    size, column = sums.columns()
    record = records_pb2.DataFile(
        name="f", size=len(DATA), block_bytes=size, block_crc32c=column, crc32c=sums.whole
    )
    hosts = (Host("a", "node-a"), Host("b", "node-b", "b:1"), Host("c", "node-c", "c:1"))
    file = SharedFile(
        record.SerializeToString(),
        (1,),
        array("I", [0, 1]),
        array("i", [2, -1]),
        array("I", [3, 3]),
        array("I", [5, 0]),
    )
    made = FetchedBlocks(
        SidecarChannel(f"unix://{sockets}/s.sock"),
        BlockTable(RankPlan(hosts, 0, {"f": file})),
        LoadName("load", "gs://b/step", "i1-a-g0-s1", 7),
        progress,
    )
    yield made
    made.close()


def test_a_block_is_copied_checked_and_released(sidecar: Sidecar, blocks: FetchedBlocks) -> None:
    last, first = blocks.request("f", 1), blocks.request("f", 0)
    start = sidecar.next("start")
    assert (start.load, start.attempt, start.rank, start.own) == ("load", "i1-a-g0-s1", 7, 0)
    assert [each.peer_address for each in start.hosts] == ["", "b:1", "c:1"]
    assert start.files.files[0].size == len(DATA)
    requests = [sidecar.next("block") for _ in range(2)]
    assert [(each.block, each.HasField("owner")) for each in requests] == [(1, False), (0, True)]
    assert (requests[1].owner, requests[1].readers, requests[1].owner_readers) == (2, 3, 5)
    assert list(requests[1].holders) == [1]
    sidecar.answer(id=requests[1].id, offset=OFFSET, size=BLOCK_BYTES, source="node-b")
    sidecar.answer(id=requests[0].id, offset=OFFSET + BLOCK_BYTES, size=1000, kept=True)
    for wanted, block, source in ((first, 0, "node-b"), (last, 1, "node-a")):
        place = blocks.find("f", block)
        assert place is not None
        memory = bytearray(place.size)
        assert wanted.result(BOUND_S).copy(memoryview(memory)) == source
        assert memory == DATA[place.offset : place.offset + place.size]
    assert {sidecar.next("done"), sidecar.next("done")} == {each.id for each in requests}
    assert not blocks.has("g")
    assert blocks.find("f", 2) is None


def test_other_bytes_than_the_receipts_are_not_used(
    sidecar: Sidecar, blocks: FetchedBlocks
) -> None:
    wrong, short = blocks.request("f", 1), blocks.request("f", 1)
    sidecar.next("start")
    sums = {"crc32c": crc32c.crc32c(DATA[:1000])}
    sidecar.answer(id=sidecar.next("block").id, offset=OFFSET, size=1000, source="node-b", **sums)
    sidecar.answer(id=sidecar.next("block").id, offset=len(DATA), size=999)
    memory = memoryview(bytearray(1000))
    with pytest.raises(IntegrityError, match="block 1 came from node-b with crc32c"):
        wrong.result(BOUND_S).copy(memory)
    with pytest.raises(IntegrityError, match="came from bucket with 999 bytes, it has 1000"):
        short.result(BOUND_S).copy(memory)
    assert {sidecar.next("done"), sidecar.next("done")} == {1, 2}


def test_what_the_sidecar_could_not_have_says_why(sidecar: Sidecar, blocks: FetchedBlocks) -> None:
    wanted = blocks.request("f", 0)
    sidecar.next("start")
    sidecar.answer(id=sidecar.next("block").id, error="the bucket is closed")
    with pytest.raises(UnavailableError, match="the bucket is closed"):
        wanted.result(BOUND_S)
    assert blocks.message_count() == 2


def test_a_stream_that_ends_fails_all_requests(sidecar: Sidecar, blocks: FetchedBlocks) -> None:
    wanted = [blocks.request("f", block) for block in (0, 1)]
    sidecar.next("start")
    sidecar.answers.put(None)
    for each in wanted:
        with pytest.raises(UnavailableError):
            each.result(BOUND_S)
    with pytest.raises(UnavailableError):
        blocks.request("f", 0).result(BOUND_S)
