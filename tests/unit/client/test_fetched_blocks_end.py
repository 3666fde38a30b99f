"""Blocks that a scripted sidecar fetches for a rank, through its memory."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c
import grpc
import pytest

from pannier.client.restore import fetched_blocks
from pannier.client.restore.fetched_blocks import FetchedBlocks
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.restore_plan import (
    BlockTable,
    Host,
    LoadName,
    RankNeeds,
    Span,
    merge,
    plan_restore,
)
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.errors import UnavailableError
from support.processes.descriptors import opened
from support.processes.stretch import BOUND_S

CONTENT = b"bytes of a block"
MEMORY = "memory of the test's sidecar"


class Sidecar(restore_pb2_grpc.RestoreServicer):
    """Answers as a test wants."""

    def __init__(self) -> None:
        self.answer = restore_pb2.FetchedBlock()
        self.may_end = threading.Event()
        self.may_end.set()

    def Fetch(
        self, requests: Iterator[restore_pb2.FetchRequest], context: Any
    ) -> Iterator[restore_pb2.FetchResponse]:
        yield restore_pb2.FetchResponse(memory=restore_pb2.FetchMemory(size=len(CONTENT)))
        for each in requests:
            if each.HasField("block"):
                found = restore_pb2.FetchedBlock(
                    id=each.block.id, size=len(CONTENT), crc32c=crc32c.crc32c(CONTENT)
                )
                found.MergeFrom(self.answer)
                yield restore_pb2.FetchResponse(block=found)
        assert self.may_end.wait(BOUND_S)


@pytest.fixture
def sidecar() -> Sidecar:
    return Sidecar()


@pytest.fixture
def progress() -> LoadProgress:
    return LoadProgress()


@pytest.fixture
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rank gets a descriptor of."""
    fd = os.memfd_create(MEMORY)
    os.write(fd, CONTENT)
    near, far = socket.socketpair()
    far.close()
    monkeypatch.setattr(fetched_blocks, "connect_descriptors", lambda *_: near)
    monkeypatch.setattr(fetched_blocks, "fetch_descriptors", lambda *_: [fd])


@pytest.fixture
def blocks(
    sidecar: Sidecar, progress: LoadProgress, sockets: Path, _memory: None
) -> Iterator[FetchedBlocks]:
    server = grpc.server(ThreadPoolExecutor(2))
    restore_pb2_grpc.add_RestoreServicer_to_server(sidecar, server)
    address = f"unix://{sockets}/s.sock"
    server.add_insecure_port(address)
    server.start()
    record = records_pb2.DataFile(name="f", size=len(CONTENT))
    spans = {"f": merge([Span(0, len(CONTENT))])}
    needs = [RankNeeds(rank, Host("key", "node-0"), spans=spans) for rank in range(2)]
    plan, _ = plan_restore(needs, {"f": record})
    assert plan is not None
    load = LoadName("load", "/c", "", 0)
    made = FetchedBlocks(SidecarChannel(address), BlockTable(plan), load, progress)
    yield made
    sidecar.may_end.set()
    made.close()
    server.stop(None).wait()


def take(blocks: FetchedBlocks) -> str:
    found = bytearray(len(CONTENT))
    source = blocks.request("f", 0).result(BOUND_S).copy(memoryview(found))
    assert found == CONTENT
    return source


@pytest.mark.parametrize("stopped", [False, True])
def test_its_end_closes_the_sidecars_memory(
    blocks: FetchedBlocks,
    sidecar: Sidecar,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    monkeypatch.setattr(timeouts, "FETCH_CLOSE_S", 0.01 if stopped else BOUND_S)
    if stopped:
        sidecar.may_end.clear()
    assert take(blocks) == "bucket"
    assert MEMORY in opened()
    blocks.close()
    assert MEMORY not in opened()
    with pytest.raises(UnavailableError, match="the load has ended"):
        take(blocks)
