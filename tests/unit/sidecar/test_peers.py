"""Channels to the sidecars of other hosts: which are opened, avoided and replaced."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import crc32c
import grpc
import pytest

from pannier.common import timeouts
from pannier.daemon.listeners import server_options
from pannier.sidecar.restore.block_fetcher import BlockFetcher, SourceRequest
from pannier.sidecar.restore.peers import PeerBlock, Peers
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.errors import ConfigurationError, IntegrityError, PannierError, UnavailableError
from support.processes.ranks import free_port

MIB = 1 << 20


class Replaced:
    """TLS files that are replaced. As the real ones, they are compared with those of the last channel."""

    def __init__(self) -> None:
        self.replaced = False

    def changed(self) -> bool:
        return self.replaced

    def channel_credentials(self) -> grpc.ChannelCredentials:
        self.replaced = False
        return grpc.ssl_channel_credentials()


class Scripted(restore_pb2_grpc.PeerServicer):
    """A peer that sends what a test says."""

    def __init__(self) -> None:
        self.responses: list[restore_pb2.ReadBlockResponse] = []

    async def ReadBlock(
        self, request: restore_pb2.ReadBlockRequest, context: Any
    ) -> AsyncIterator[restore_pb2.ReadBlockResponse]:
        if request.spool_only:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        for each in self.responses:
            yield each


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Scripted, Peers, restore_pb2.FetchHost]]:
    server = grpc.aio.server(options=server_options())
    scripted = Scripted()
    restore_pb2_grpc.add_PeerServicer_to_server(scripted, server)
    address = f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    peers = Peers(None, "", insecure=False)
    try:
        yield scripted, peers, restore_pb2.FetchHost(host="node-1", peer_address=address)
    finally:
        await peers.close()
        await server.stop(None)


def response(data: bytes = b"", **fields: Any) -> restore_pb2.ReadBlockResponse:
    return restore_pb2.ReadBlockResponse(data=data, **fields)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "10.0.0.7:7073",
            "node-1 at 10.0.0.7:7073 is on another host, and this sidecar has no TLS",
        ),
        ("unix:///run/pannier.sock", "is not host:port"),
        ("nonsense", "the peer address of node-1='nonsense'"),
    ],
)
def test_an_address_that_this_host_may_not_connect_to_is_refused(
    address: str, message: str
) -> None:
    async def main() -> None:
        peers = Peers(None, "", insecure=False)
        with pytest.raises(ConfigurationError, match=message):
            peers.stub(restore_pb2.FetchHost(host="node-1", peer_address=address))

    asyncio.run(main())


def test_a_block_comes_in_pieces_with_signs_of_life() -> None:
    async def main() -> None:
        async with serving() as (peer, peers, host):
            data = bytes(MIB) + b"end"
            peer.responses = [
                response(),
                response(data[:MIB]),
                response(data[MIB:], crc32c=crc32c.crc32c(data)),
            ]
            block = PeerBlock(peers, host, restore_pb2.ReadBlockRequest(file="a"))
            # The first one has to be connected to.
            for quiet_s in (timeouts.BLOCK_FIRST_STALL_S, timeouts.BLOCK_STALL_S):
                request = SourceRequest()
                assert b"".join(await block.read(request)) == data
                assert request.quiet_s == quiet_s

    asyncio.run(main())


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([response(b"data")], "which sent none"),
        ([response(b"data", crc32c=7)], "which sent 00000007"),
        ([response(bytes(MIB))] * 9, "node-1 sent more than a block of a"),
    ],
)
def test_a_peer_that_sends_nonsense_is_an_error_by_its_name(
    responses: list[restore_pb2.ReadBlockResponse], message: str
) -> None:
    async def main() -> None:
        async with serving() as (peer, peers, host):
            peer.responses = responses
            block = PeerBlock(peers, host, restore_pb2.ReadBlockRequest(file="a"))
            with pytest.raises(IntegrityError, match=message):
                await block.read(SourceRequest())

    asyncio.run(main())


def test_a_peer_that_fails_is_avoided_and_logged_once_until_it_answers_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving() as (peer, peers, host):
            peer.responses = [response(b"data", crc32c=crc32c.crc32c(b"data"))]
            block = PeerBlock(peers, host, restore_pb2.ReadBlockRequest(file="a"))
            for error in (UnavailableError("gone"), None, UnavailableError("gone")):
                block.failed(error)
            assert not peers.is_usable(host)
            monkeypatch.setattr(timeouts, "PEER_AVOIDED_S", 0.0)
            block.failed(None)
            assert peers.is_usable(host)
            await BlockFetcher(1).fetch([block], 4, None, "block 0 of a")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    texts = [record.message.partition(" at ")[0] for record in caplog.records]
    assert texts == ["blocks that the sidecar of node-1", "the sidecar of node-1"]


def test_a_peer_whose_blocks_are_all_corrupt_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with serving() as (peer, peers, host):
            # Sent as it lies there.
            peer.responses = [response(b"data", crc32c=crc32c.crc32c(b"data"))]
            fetcher, request = BlockFetcher(1), restore_pb2.ReadBlockRequest(file="a", crc32c=7)
            for _ in range(3):
                with pytest.raises(IntegrityError, match="from node-1, the receipt has 00000007"):
                    await fetcher.fetch([PeerBlock(peers, host, request)], 4, 7, "block 0 of a")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    (record,) = (each for each in caplog.records if each.name.endswith("restore.peers"))
    assert record.message.startswith("blocks that the sidecar of node-1")


def test_what_is_not_in_a_peers_spool_is_no_fault_of_it() -> None:
    async def main() -> None:
        async with serving() as (_, peers, host):
            request = restore_pb2.ReadBlockRequest(file="a", spool_only=True)
            block = PeerBlock(peers, host, request)
            with pytest.raises(NotFoundError, match="not here") as caught:
                await block.read(SourceRequest())
            error: PannierError = caught.value
            block.failed(error)
            assert peers.is_usable(host)
            # One wrong block isn't a reason to read the others elsewhere.
            block.failed(IntegrityError("wrong"))
            assert peers.is_usable(host)

    asyncio.run(main())


def test_replaced_certificates_and_long_idleness_lead_to_other_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        tls = Replaced()
        peers = Peers(tls, "sidecar", insecure=False)  # type: ignore[arg-type]
        host = restore_pb2.FetchHost(host="node-1", peer_address="10.0.0.7:7073")
        peers.stub(host)
        (first,) = peers._channels.values()
        await peers.tick()
        assert list(peers._channels.values()) == [first]
        tls.replaced = True
        await peers.tick()
        peers.stub(host)
        (second,) = peers._channels.values()
        assert second is not first
        # Calls may still be under way on the first.
        assert len(peers._retired) == 1
        monkeypatch.setattr(timeouts, "STORE_KEPT_S", -1.0)
        monkeypatch.setattr(timeouts, "BLOCK_S", -1.0)
        peers._retired = [(0.0, channel) for _, channel in peers._retired]
        await peers.tick()
        assert not peers._channels
        assert not peers._retired
        await peers.close()

    asyncio.run(main())


def test_no_channel_keeps_replaced_certificates_when_another_one_is_opened_first() -> None:
    async def main() -> None:
        tls = Replaced()
        peers = Peers(tls, "sidecar", insecure=False)  # type: ignore[arg-type]
        old, new = (
            restore_pb2.FetchHost(host=f"node-{number}", peer_address=f"10.0.0.{number}:7073")
            for number in (1, 2)
        )
        peers.stub(old)
        (first,) = peers._channels.values()
        tls.replaced = True
        peers.stub(new)
        await peers.tick()
        assert list(peers._channels) == [new.peer_address]
        assert [channel for _, channel in peers._retired] == [first]
        await peers.close()

    asyncio.run(main())
