"""The server for other hosts' sidecars, with the service ``Peer`` alone, by mutual TLS.

In: the sidecar's settings, the blocks of its host, and its replicas. Out: a server at ``--peers`` as long as
the context lasts, and the fields of LocateResponse that describe it. On the event loop.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from pannier.daemon.interceptors import AdmissionInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_tcp, server_options
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.replicas.exchange import Replicas
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.rpc.peer_servicer import LIMITS, PeerServicer
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger(__name__)

_STOP_S: Final = 0.5


def peer_fields(config: SidecarConfig, address: str) -> restore_pb2.LocateResponse:
    """The fields of LocateResponse by which other hosts reach this one at ``address``; empty: they can't."""
    return restore_pb2.LocateResponse(
        host=config.host,
        peer_address=address,
        peer_tls=bool(address) and config.tls is not None,
        peer_name=config.peers_name if address else "",
    )


@asynccontextmanager
async def serving_peers(
    config: SidecarConfig, blocks: HostBlocks, replicas: Replicas
) -> AsyncIterator[str]:
    """Serves blocks to other hosts and takes their replicas if ``--peers`` is set; yields the address, or "".

    An embedded sidecar takes another port if its own is in use, or serves no peers: saves don't
    depend on them. Raises ConfigurationError: the address can't be bound.
    """
    if config.peers is None:
        yield ""
        return
    server = grpc.aio.server(
        options=server_options(), interceptors=[ErrorInterceptor(), AdmissionInterceptor(LIMITS)]
    )
    restore_pb2_grpc.add_PeerServicer_to_server(PeerServicer(blocks, replicas), server)
    try:
        address = bind_tcp(
            server, config.peers, setting="--peers", tls=config.tls, any_port=config.embedded
        )
    except ConfigurationError as error:
        if not config.embedded:
            raise
        _log.warning("other hosts can't read blocks of checkpoints here: %s", error)
        yield ""
        return
    await server.start()
    try:
        yield address
    finally:
        await server.stop(_STOP_S)
