"""Where other hosts reach a sidecar: its own address, or for an embedded one any port of it."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.rpc.peer_listener import peer_fields, serving_peers
from pannier.wire.errors import ConfigurationError


def config(peers: str | None, *, embedded: bool = False) -> SidecarConfig:
    return SidecarConfig(
        coordinator="host:1",
        spool=Path("/spool"),
        host="node-0",
        peers=peers,
        peers_name="name",
        embedded=embedded,
        insecure_listen=True,
    )


def served_at(settings: SidecarConfig) -> str:
    async def main() -> str:
        blocks: Any = None
        replicas: Any = None
        async with serving_peers(settings, blocks, replicas) as address:
            if address:
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), 5).close()
            return address

    return asyncio.run(main())


def test_without_an_address_nothing_is_served() -> None:
    assert served_at(config(None)) == ""
    fields = peer_fields(config(None), "")
    assert (fields.host, fields.peer_address, fields.peer_name) == ("node-0", "", "")


def test_an_embedded_sidecar_whose_port_is_in_use_takes_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=rf"can't listen on {address} \(--peers\)"):
            served_at(config(address))
        found = served_at(config(address, embedded=True))
    assert found.startswith("127.0.0.1:")
    assert found != address
    fields = peer_fields(config(address, embedded=True), found)
    assert (fields.peer_address, fields.peer_name, fields.peer_tls) == (found, "name", False)


def test_an_embedded_sidecar_whose_address_is_another_hosts_goes_on_without_peers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert served_at(config("192.0.2.1:7073", embedded=True)) == ""
    assert "other hosts can't read blocks of checkpoints here" in caplog.text
    with pytest.raises(ConfigurationError):
        served_at(config("192.0.2.1:7073"))
