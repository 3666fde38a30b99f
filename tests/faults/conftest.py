"""Daemons that write to a bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer


@pytest.fixture
def daemons(server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, environment=server.env) as running:
        yield running
    server.clear()
