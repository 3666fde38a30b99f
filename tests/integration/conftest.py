"""What several modules of these tests start once each."""

from collections.abc import Iterator

import pytest

from support.network.otel_collector import Collector, collecting


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made
