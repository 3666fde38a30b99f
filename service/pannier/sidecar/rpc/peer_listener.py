"""Where other hosts reach this sidecar: a server with the service ``Peer`` alone, for mutual TLS.

In: the sidecar's settings, and the blocks of its host. Out: a server at ``--peers`` as long as the context
lasts, and what Locate's responses say of it. On the event loop.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from pannier.daemon.interceptors import AdmissionInterceptor, ErrorInterceptor
from pannier.daemon.listeners import bind_tcp, server_options
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.rpc.peer_servicer import LIMITS, PeerServicer
from pannier.v1 import restore_pb2, restore_pb2_grpc

_STOP_S: Final = 0.5


def peer_fields(config: SidecarConfig) -> restore_pb2.LocateResponse:
    """How other hosts reach this one."""
    return restore_pb2.LocateResponse(
        host=config.host,
        peer_address=config.peers or "",
        peer_tls=config.peers is not None and config.tls is not None,
        peer_name=config.peers_name if config.peers is not None else "",
    )


@asynccontextmanager
async def serving_peers(config: SidecarConfig, blocks: HostBlocks) -> AsyncIterator[None]:
    """Serves blocks to other hosts, if they are to be. Raises ConfigurationError: the address is taken."""
    if config.peers is None:
        yield
        return
    server = grpc.aio.server(
        options=server_options(), interceptors=[AdmissionInterceptor(LIMITS), ErrorInterceptor()]
    )
    restore_pb2_grpc.add_PeerServicer_to_server(PeerServicer(blocks), server)
    bind_tcp(server, config.peers, setting="--peers", tls=config.tls)
    await server.start()
    try:
        yield
    finally:
        await server.stop(_STOP_S)
