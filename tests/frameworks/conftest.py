"""Tests of the adapters with real frameworks: skipped where one isn't installed (``make test-frameworks`` has them)."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer

HERE = Path(__file__).parent
TIMEOUT_S = 400
"""Of a test that says nothing else: its programs import for seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            framework = item.path.stem.removeprefix("test_")
            if find_spec(framework) is None:
                reason = f"{framework} isn't installed here: make test-frameworks"
                item.add_marker(pytest.mark.skip(reason=reason))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="module")
def daemons(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Those of the module's jobs, which keep their two newest checkpoints."""
    directory = tmp_path_factory.mktemp("daemons")
    arguments = ["--keep-newest", "2"]
    with Daemons(directory, environment=server.env, coordinator_arguments=arguments) as running:
        yield running
