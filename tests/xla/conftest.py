"""Tests of torch_xla programs: skipped where it isn't installed (``make test-xla`` has it)."""

from pathlib import Path

import pytest

from support import xla

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if xla.AVAILABLE:
        return
    reason = pytest.mark.skip(reason="torch_xla isn't installed here: make test-xla")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(reason)


@pytest.fixture(params=xla.DEVICES, ids=lambda number: f"devices{number}")
def devices(request: pytest.FixtureRequest) -> int:
    """How many virtual devices a program sees: each number that is tested."""
    number: int = request.param
    return number
