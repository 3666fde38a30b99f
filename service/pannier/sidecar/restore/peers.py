"""The sidecars of other hosts, from which this one reads blocks.

In: their addresses, as the loads name them. Out: blocks, or errors that name the host. Channels are kept
while loads use them. A peer that fails or stalls isn't asked for a moment, and is logged once until it
answers again. On the event loop.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc

from pannier.common import timeouts
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.restore.block_cache import block_threads
from pannier.sidecar.restore.block_fetcher import SourceRequest, checksum
from pannier.storage import NotFoundError
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.addresses import channel_options, is_loopback, keepalive_options, parse_address
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    PannierError,
    from_rpc_error,
)
from pannier.wire.tls import Tls, is_unix, open_aio_channel, tls_of

_log = logging.getLogger(__name__)

_WINDOW: Final = 4 << 20
"""Bytes of a block that may arrive before they are read."""


class Peers:
    """Channels to peers, and which of them are avoided.

    Args:
        tls: None: plaintext.
        name: a name that all peers' certificates have; empty: the host of each one's address.
        insecure: plaintext is wanted also to other hosts.
    """

    def __init__(self, tls: Tls | None, name: str, *, insecure: bool) -> None:
        self._tls = tls
        self._name = name
        self._insecure = insecure
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used_at: dict[str, float] = {}
        self._retired: list[tuple[float, grpc.aio.Channel]] = []
        """Channels that get no new calls, and when they are closed."""
        self._avoided: dict[str, float] = {}
        """By address: until when the peer isn't asked, on the monotonic clock."""
        self._connected: set[str] = set()
        """Addresses of peers that have answered on their channels."""
        self._logged: set[str] = set()
        """Addresses of peers whose failure was logged."""

    @staticmethod
    def of(config: SidecarConfig) -> "Peers":
        """The peers of a sidecar with these settings."""
        # Not config.tls: its ``changed`` compares the files with its last channel, the coordinator's.
        tls = tls_of(config.tls_cert, config.tls_key, config.tls_ca)
        return Peers(tls, config.peers_name, insecure=config.insecure_listen)

    def is_usable(self, peer: restore_pb2.FetchHost) -> bool:
        """Whether the peer has an address and isn't avoided now."""
        return bool(peer.peer_address) and (
            self._avoided.get(peer.peer_address, 0.0) <= time.monotonic()
        )

    def check(self, peer: restore_pb2.FetchHost) -> None:
        """Raises ConfigurationError unless the peer's address is one that this host may connect to."""
        address = parse_address(peer.peer_address, setting=f"the peer address of {peer.host}")
        if is_unix(address):
            raise ConfigurationError(f"the peer address {address} of {peer.host} is not host:port")
        host = address.rpartition(":")[0].strip("[]")
        if self._tls is None and not self._insecure and not is_loopback(host):
            raise ConfigurationError(
                f"{peer.host} at {address} is on another host, and this sidecar has no TLS: give it "
                "--tls-cert, --tls-key, --tls-ca, or --insecure-listen in a network of trusted hosts"
            )

    def stub(self, peer: restore_pb2.FetchHost) -> Any:
        """For calls of its ``Peer`` service. Raises ConfigurationError as :meth:`check`."""
        address = peer.peer_address
        channel = self._channels.get(address)
        if channel is None:
            self.check(peer)
            # ``changed`` compares with the last channel's certificate, which is this one's afterwards.
            self._retire_outdated()
            options: list[tuple[str, Any]] = [
                *channel_options(),
                *keepalive_options(),
                ("grpc.http2.lookahead_bytes", _WINDOW),
            ]
            if self._name:
                options.append(("grpc.ssl_target_name_override", self._name))
            channel = self._channels[address] = open_aio_channel(address, options, self._tls)
        self._used_at[address] = time.monotonic()
        return restore_pb2_grpc.PeerStub(channel)

    def is_connected(self, peer: restore_pb2.FetchHost) -> bool:
        """Whether it has answered before, so that no connection has to be made first."""
        return peer.peer_address in self._connected

    def mark_connected(self, peer: restore_pb2.FetchHost) -> None:
        """Notes that the peer has answered."""
        if peer.peer_address in self._channels:
            self._connected.add(peer.peer_address)

    def mark_good(self, peer: restore_pb2.FetchHost) -> None:
        """Notes that the peer has sent the right block."""
        self._avoided.pop(peer.peer_address, None)
        if peer.peer_address in self._logged:
            self._logged.discard(peer.peer_address)
            _log.info("the sidecar of %s at %s sends blocks again", peer.host, peer.peer_address)

    def mark_bad(self, peer: restore_pb2.FetchHost, why: str, *, avoid: bool) -> None:
        """Notes that the peer has failed, or sent a wrong block; ``avoid``: it isn't asked for a while."""
        if avoid:
            self._avoided[peer.peer_address] = time.monotonic() + timeouts.PEER_AVOIDED_S
        if peer.peer_address not in self._logged:
            self._logged.add(peer.peer_address)
            _log.warning(
                "blocks that the sidecar of %s at %s has are read elsewhere for now: %s",
                *(peer.host, peer.peer_address, why),
            )

    async def tick(self) -> None:
        """Closes channels that weren't used for a while, or have old certificates."""
        now = time.monotonic()
        self._retire_outdated()
        for address, used_at in list(self._used_at.items()):
            if now - used_at > timeouts.STORE_KEPT_S:
                self._retire(address)
        for each in [each for each in self._retired if each[0] <= now]:
            self._retired.remove(each)
            await each[1].close()

    async def close(self) -> None:
        """Closes all channels."""
        for channel in [*self._channels.values(), *(channel for _, channel in self._retired)]:
            await channel.close()
        self._channels.clear()
        self._retired.clear()
        self._used_at.clear()

    def _retire_outdated(self) -> None:
        """Retires all channels if the certificates have been replaced since the last one was opened."""
        if self._channels and self._tls is not None and self._tls.changed():
            for address in list(self._channels):
                self._retire(address)

    def _retire(self, address: str) -> None:
        """The next call of the peer opens another channel."""
        del self._used_at[address]
        self._connected.discard(address)
        # Calls may be under way there.
        end = time.monotonic() + timeouts.BLOCK_S
        self._retired.append((end, self._channels.pop(address)))


class PeerBlock:
    """One block at a peer; see :class:`pannier.sidecar.restore.block_fetcher.BlockSource`."""

    kind = "peer"
    shows_life = True

    def __init__(
        self, peers: Peers, peer: restore_pb2.FetchHost, request: restore_pb2.ReadBlockRequest
    ) -> None:
        self.host = peer.host
        self._peers = peers
        self._peer = peer
        self._request = request

    async def read(self, request: SourceRequest) -> Sequence[bytes]:
        """Raises PannierError naming the peer; NotFoundError: the file isn't in its spool."""
        pieces = []
        size = 0
        crc = None
        if not self._peers.is_connected(self._peer):
            # Time for name resolution and TLS handshake, which another host would need as well.
            request.quiet_s = max(request.quiet_s, timeouts.BLOCK_FIRST_STALL_S)
        call = self._peers.stub(self._peer).ReadBlock(self._request, timeout=timeouts.BLOCK_S)
        try:
            async for response in call:
                request.mark_seen()
                self._peers.mark_connected(self._peer)
                if response.data:
                    pieces.append(response.data)
                    size += len(response.data)
                if size > BLOCK_BYTES:
                    raise IntegrityError(
                        f"{self._peer.host} sent more than a block of {self._request.file}"
                    )
                if response.HasField("crc32c"):
                    crc = response.crc32c
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(error.details() or "") from error
            name = f"sidecar of {self._peer.host} at {self._peer.peer_address}"
            raise from_rpc_error(error, peer=name) from error
        finally:
            call.cancel()
        if not self._request.HasField("crc32c"):
            found = await block_threads.run(checksum, pieces)
            if found != crc:
                raise IntegrityError(
                    f"a block of {self._request.file} came with crc32c {found:08x} from "
                    f"{self._peer.host}, which sent {'none' if crc is None else f'{crc:08x}'}"
                )
        return pieces

    def succeeded(self) -> None:
        """The peer isn't avoided any longer."""
        self._peers.mark_good(self._peer)

    def failed(self, error: PannierError | None) -> None:
        """Avoids the peer for a while, unless it lacks the block or sent a wrong one."""
        if error is None:
            self._peers.mark_bad(self._peer, "it doesn't answer, or takes long", avoid=True)
        elif not isinstance(error, NotFoundError):
            self._peers.mark_bad(
                self._peer, str(error), avoid=not isinstance(error, IntegrityError)
            )
