"""Daemons that write to a bucket, and a client of theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client import Client
from pannier.client.config import load_settings
from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer


@pytest.fixture
def daemons(server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, environment=server.env) as running:
        yield running
    server.clear()


@pytest.fixture
def client(
    daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    for name, value in {**daemons.env(), **server.env}.items():
        monkeypatch.setenv(name, value)
    with Client(load_settings()) as made:
        yield made
