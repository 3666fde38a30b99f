"""Blocks for other hosts: so many at a time, with signs of life for the calls that wait."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import crc32c
import grpc
import pytest

from pannier.common import timeouts
from pannier.daemon.interceptors import ErrorInterceptor
from pannier.daemon.listeners import server_options
from pannier.sidecar.restore.block_cache import BlockCache, BlockKey, Fetched, WantedBlock
from pannier.sidecar.rpc.peer_servicer import PeerServicer
from pannier.sidecar.rpc.send_turns import SendTurns
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.chunk_codec import BLOCK_BYTES
from support.processes.stretch import BOUND_S, until

PIECES = [b"a" * 1000, b"b" * 1000, b"c"]
DATA = b"".join(PIECES)


class Blocks:
    """A host's blocks: of file ``spool`` in its spool, of others from storage."""

    def __init__(self) -> None:
        self.host = "node-0"
        self.cache = BlockCache(16 * BLOCK_BYTES)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = self.closed = self.sent = 0

    async def check_peer(self, request: restore_pb2.ReadBlockRequest) -> None:
        pass

    def read_spool(
        self, request: restore_pb2.ReadBlockRequest
    ) -> AsyncGenerator[bytes, None] | None:
        return self._pieces() if request.file == "spool" else None

    def request_for_peer(self, request: restore_pb2.ReadBlockRequest) -> Any:
        key = BlockKey("load", "id", "attempt", request.file, request.block, len(DATA), None)
        wanted = WantedBlock(key, len(DATA), request.readers, self._fetch)
        return self.cache.request(wanted, "a peer")

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self.reading += 1
        try:
            for piece in PIECES:
                await self.gate.wait()
                yield piece
        finally:
            self.reading -= 1
            self.closed += 1

    async def _fetch(self) -> Fetched:
        await self.gate.wait()
        return Fetched(PIECES, crc32c.crc32c(DATA), "")


@asynccontextmanager
async def serving(*, turns: int = 12) -> AsyncIterator[SimpleNamespace]:
    server = grpc.aio.server(options=server_options(), interceptors=[ErrorInterceptor()])
    blocks = Blocks()
    servicer = PeerServicer(blocks, None)  # type: ignore[arg-type]
    servicer._turns = SendTurns(turns)
    restore_pb2_grpc.add_PeerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = restore_pb2_grpc.PeerStub(channel)

            def read(file: str, host: str = "node-1", **fields: Any) -> Any:
                request = restore_pb2.ReadBlockRequest(
                    load="load", attempt="a", file=file, host=host, **fields
                )
                return stub.ReadBlock(request, timeout=BOUND_S)

            yield SimpleNamespace(blocks=blocks, turns=servicer._turns, read=read)
    finally:
        await server.stop(None)
        await blocks.cache.close()


async def received(call: Any) -> tuple[bytes, int]:
    """The bytes, and how many signs of life came."""
    data, signs = b"", 0
    async for response in call:
        data += response.data
        signs += not response.data
    assert response.crc32c == crc32c.crc32c(data)
    return data, signs


@pytest.mark.parametrize("file", ["spool", "fetched"])
def test_a_peer_that_waits_for_a_block_gets_signs_of_life(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ALIVE_S", 0.01)

    async def main() -> None:
        async with serving() as host:
            host.blocks.gate.clear()
            call = host.read(file, readers=1)
            for _ in range(3):
                assert not (await anext(aiter(call))).data
            host.blocks.gate.set()
            assert (await received(call))[0] == DATA
            await until(lambda: not host.turns.taken)
            assert not host.blocks.cache.used

    asyncio.run(main())


@pytest.mark.parametrize("file", ["spool", "fetched"])
def test_calls_beyond_the_turns_wait_and_a_call_that_ends_gives_its_turn(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_ALIVE_S", 0.01)

    async def main() -> None:
        async with serving(turns=2) as host:
            taken = [host.turns.take("node-7") for _ in range(2)]
            calls = [host.read(file, block=number, readers=1) for number in range(5)]
            for call in calls:
                assert not (await anext(aiter(call))).data
            assert not host.blocks.reading
            calls.pop().cancel()
            for turn in taken:
                host.turns.give("node-7", turn)
            for data, _ in await asyncio.gather(*map(received, calls)):
                assert data == DATA
            host.blocks.gate.clear()
            left = host.read(file, block=9, readers=1)
            await anext(aiter(left))
            left.cancel()
            await until(lambda: not host.turns.taken)
            await until(lambda: not host.blocks.reading)

    asyncio.run(main())


def test_a_file_that_is_not_in_the_spool_any_more_is_no_error_of_this_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with serving() as host:
            host.blocks.read_spool = gone
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await received(host.read("spool", spool_only=True))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND

    def gone(request: restore_pb2.ReadBlockRequest) -> None:
        raise NotFoundError(f"{request.file} is gone")

    asyncio.run(main())
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_host_that_does_not_receive_leaves_turns_to_the_others() -> None:
    async def main() -> None:
        turns = SendTurns(most=3, to_a_host=2)
        stuck = [turns.take("node-1") for _ in range(4)]
        assert [turn.done() for turn in stuck] == [True, True, False, False]
        others = [turns.take("node-2") for _ in range(2)]
        assert [turn.done() for turn in others] == [True, False]
        turns.give("node-2", others[0])
        assert others[1].done()
        # One that waits no longer frees no turn.
        turns.give("node-1", stuck[2])
        assert not stuck[3].done()
        turns.give("node-1", stuck[0])
        assert stuck[3].done()
        assert turns.taken == 3

    asyncio.run(main())
