"""A server in this process, and a channel to it."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pannier.wire.addresses import channel_options
from support.network.in_process_server import Served


@pytest.fixture
def served(sockets: Path) -> Iterator[Served]:
    with Served(sockets) as running:
        yield running


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address, options=channel_options()) as opened:
        yield opened
