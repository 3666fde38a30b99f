"""Hosts and a bucket for pods."""

from collections.abc import Iterator

import pytest

from support.cluster import check_available
from support.gcs_server import GcsServer
from support.netns import HERE, Network


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    check_available()
    with Network("trainer", "coordinator") as made:
        yield made


@pytest.fixture(scope="module")
def bucket(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs"), host=network.address(HERE)) as server:
        yield server
