"""A node of several jobs; tests of one sidecar have a host of their own."""

from collections.abc import Iterator

import pytest

from support.actors.nodes import NodeHost, node_host


@pytest.fixture
def host() -> Iterator[NodeHost]:
    with node_host() as made:
        yield made


@pytest.fixture
def two(host: NodeHost) -> NodeHost:
    """Serves jobs ``a`` and ``b``."""
    host.job("a")
    host.job("b")
    host.start()
    return host
