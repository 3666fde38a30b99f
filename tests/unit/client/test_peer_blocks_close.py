"""Blocks that a rank without a sidecar reads from other hosts, when its load ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pannier.client.restore.peer_blocks import PeerBlocks
from pannier.client.restore.restore_plan import (
    BlockTable,
    Host,
    LoadName,
    RankNeeds,
    Span,
    merge,
    plan_restore,
)
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import UnavailableError
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S

COUNT = 12


class Peer(restore_pb2_grpc.PeerServicer):
    """Never sends a block."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_end = threading.Event()

    def ReadBlock(
        self, request: restore_pb2.ReadBlockRequest, context: Any
    ) -> Iterator[restore_pb2.ReadBlockResponse]:
        self.asked += 1
        context.add_callback(self.may_end.set)
        self.may_end.wait(BOUND_S)
        yield restore_pb2.ReadBlockResponse()


@pytest.fixture
def peer() -> Iterator[Peer]:
    yield (made := Peer())
    made.may_end.set()


@pytest.fixture
def blocks(peer: Peer) -> Iterator[PeerBlocks]:
    server = grpc.server(ThreadPoolExecutor(COUNT))
    restore_pb2_grpc.add_PeerServicer_to_server(peer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    size = COUNT * BLOCK_BYTES
    record = records_pb2.DataFile(
        name="f", size=size, block_bytes=BLOCK_BYTES, block_crc32c=bytes(4 * COUNT)
    )
    needs = [
        RankNeeds(0, Host("key", "node-1", address), frozenset({"f"})),
        RankNeeds(1, None, spans={"f": merge([Span(0, size)])}, asks_peers=True),
    ]
    _, plan = plan_restore(needs, {"f": record})
    assert plan is not None
    made = PeerBlocks(BlockTable(plan), LoadName("load", "/c", "attempt", 1), "here", None)
    yield made
    made.close()
    server.stop(None).wait()


def test_its_end_ends_all_requests_also_those_that_wait_for_a_thread(
    blocks: PeerBlocks, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [blocks.request("f", number) for number in range(COUNT)]
    wait_until(lambda: peer.asked)
    blocks.close()
    for each in (*requests, blocks.request("f", 0)):
        with pytest.raises(UnavailableError, match=r"the load has ended|no more blocks"):
            each.result(BOUND_S)
    # A host whose call was cancelled has not failed.
    assert not caplog.records
