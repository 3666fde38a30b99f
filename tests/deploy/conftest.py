"""Hosts and a bucket for pods."""

from collections.abc import Iterator

import pytest

from support.kubernetes.cluster import check_available
from support.network.netns import HERE, Network
from support.storage.gcs_server import GcsServer


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    check_available()
    with Network("trainer", "coordinator") as made:
        yield made


@pytest.fixture(scope="module")
def bucket(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs"), host=network.address(HERE)) as server:
        yield server
