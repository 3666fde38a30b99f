"""Blocks that a rank without a sidecar reads from other hosts, against played ones."""

import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import crc32c
import grpc
import pytest

from pannier.client.restore.peer_blocks import PeerBlocks
from pannier.client.restore.restore_plan import BlockTable, Host, LoadName, RankPlan, SharedFile
from pannier.common import timeouts
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.chunk_codec import Checksums
from pannier.wire.errors import UnavailableError
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S

DATA = b"a block of this many bytes"
Answer = Callable[[restore_pb2.ReadBlockRequest, Any], Iterator[restore_pb2.ReadBlockResponse]]


def sends(data: bytes) -> Answer:
    def answer(request: Any, context: Any) -> Iterator[restore_pb2.ReadBlockResponse]:
        yield restore_pb2.ReadBlockResponse()
        yield restore_pb2.ReadBlockResponse(data=data[:5])
        yield restore_pb2.ReadBlockResponse(data=data[5:], crc32c=crc32c.crc32c(data))

    return answer


def has_not(request: Any, context: Any) -> Iterator[restore_pb2.ReadBlockResponse]:
    context.abort(grpc.StatusCode.NOT_FOUND, "it isn't here")
    yield from ()


def stalls(request: Any, context: Any) -> Iterator[restore_pb2.ReadBlockResponse]:
    ended = threading.Event()
    context.add_callback(ended.set)
    yield restore_pb2.ReadBlockResponse()
    ended.wait(BOUND_S)


class Peer(restore_pb2_grpc.PeerServicer):
    """A host that answers in its way."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[restore_pb2.ReadBlockRequest] = []

    def ReadBlock(self, request: Any, context: Any) -> Iterator[restore_pb2.ReadBlockResponse]:
        self.requests.append(request)
        yield from self.answer(request, context)


Start = Callable[..., tuple[PeerBlocks, list[Peer]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Hosts: all but the last have the file in their spools, the last one owns its block."""
    with ExitStack() as stack:

        def run(*answers: Answer, receipt: bool = True) -> tuple[PeerBlocks, list[Peer]]:
            peers, hosts = [Peer(answer) for answer in answers], []
            for number, peer in enumerate(peers):
                server = grpc.server(futures.ThreadPoolExecutor(4))
                restore_pb2_grpc.add_PeerServicer_to_server(peer, server)
                port = server.add_insecure_port("127.0.0.1:0")
                server.start()
                stack.callback(lambda server=server: server.stop(0).wait(BOUND_S))
                hosts.append(Host(f"key-{number}", f"node-{number}", f"127.0.0.1:{port}"))
            sums = Checksums().followed_by(memoryview(DATA))
            record = records_pb2.DataFile(name="f", size=len(DATA))
            if receipt:
                record.block_bytes, record.block_crc32c = sums.columns()
            last = len(peers) - 1
            file = SharedFile(
                record.SerializeToString(),
                tuple(range(last)),
                array("I", [0]),
                array("i", [last]),
                array("I", [1]),
                array("I", [4]),
            )
            plan = RankPlan(tuple(hosts), None, {"f": file})
            load = LoadName("load", "gs://b/step", "i1-a-g0-s1", 3)
            blocks = PeerBlocks(BlockTable(plan), load, "node-9", None)
            stack.callback(blocks.close)
            return blocks, peers

        yield run


def read(blocks: PeerBlocks) -> tuple[bytes, str]:
    memory = bytearray(len(DATA))
    source = blocks.request("f", 0).result(BOUND_S).copy(memoryview(memory))
    return bytes(memory), source


def test_a_block_comes_from_a_spool_and_else_from_its_owner(start: Start) -> None:
    blocks, (spool, owner) = start(sends(DATA), sends(DATA))
    assert read(blocks) == (DATA, "node-0")
    (request,) = spool.requests
    assert (request.load, request.file, request.file_size) == ("load", "f", len(DATA))
    assert request.spool_only
    assert request.HasField("crc32c")
    spool.answer = has_not
    for _ in range(2):
        assert read(blocks) == (DATA, "node-1")
    # It may have other blocks.
    assert len(spool.requests) == 3
    assert not owner.requests[0].spool_only
    assert owner.requests[0].readers == 4


def test_a_wrong_block_is_taken_from_the_next_host(start: Start) -> None:
    blocks, _ = start(sends(DATA.upper()), sends(DATA))
    assert read(blocks) == (DATA, "node-1")
    blocks, (owner,) = start(sends(DATA.upper()), receipt=False)
    # Without a receipt the owner's own checksum counts.
    assert read(blocks) == (DATA.upper(), "node-0")
    owner.answer = sends(DATA + b"more")
    with pytest.raises(UnavailableError, match="node-0: node-0 sent more bytes"):
        read(blocks)


def test_a_host_that_stalls_or_is_dead_is_not_asked_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "FETCH_POLL_S", 0.02)
    monkeypatch.setattr(timeouts, "FETCH_STALL_S", 1.0)
    blocks, (first, _) = start(stalls, sends(DATA))
    for _ in range(2):
        assert read(blocks) == (DATA, "node-1")
    assert len(first.requests) == 1
    assert "no more blocks are read from node-0" in caplog.text
    assert "shows no sign of life" in caplog.text
    blocks, _ = start(stalls)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            read(blocks)


def test_without_certificates_no_host_that_requires_them_is_asked() -> None:
    file = SharedFile(
        records_pb2.DataFile(name="f", size=len(DATA)).SerializeToString(),
        (),
        *(array(code, [value]) for code, value in (("I", 0), ("i", 0), ("I", 1), ("I", 2))),
    )
    host = Host("key", "node-0", f"127.0.0.1:{free_port()}", requires_tls=True)
    load = LoadName("load", "gs://b/step", "", 3)
    blocks = PeerBlocks(BlockTable(RankPlan((host,), None, {"f": file})), load, "node-9", None)
    with pytest.raises(UnavailableError, match="node-0 requires TLS, and PANNIER_TLS_CERT"):
        read(blocks)
    blocks.close()
