"""Tests of torch_xla programs: skipped where it isn't installed (``make test-xla`` has it)."""

from pathlib import Path

import pytest

from support.states import xla

HERE = Path(__file__).parent
TIMEOUT_S = 400
"""Of a test that says nothing else: its programs import for seconds, and compile each new shape."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = pytest.mark.skip(reason="torch_xla isn't installed here: make test-xla")
    for item in items:
        if HERE in item.path.parents:
            if not xla.AVAILABLE:
                item.add_marker(reason)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(params=xla.DEVICES, ids=lambda number: f"devices{number}")
def devices(request: pytest.FixtureRequest) -> int:
    """How many virtual devices a program sees: each number that is tested."""
    number: int = request.param
    return number
