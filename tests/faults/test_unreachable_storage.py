"""Storage that nothing answers for: every save fails soon, with the cause."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pannier.client import Client, SaveAbortedError, console
from pannier.client.config import load_settings
from pannier.common import timeouts
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.slow

STATE = {"w": torch.ones(8)}


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """One that refuses connections, or accepts them and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if request.param == "unresponsive":
            taken.listen()
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def client(
    endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Client]:
    """One whose daemons look for storage at the endpoint: its own, or configured ones."""
    with ExitStack() as stack:
        if request.param == "embedded":
            request.getfixturevalue("embedded")
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        else:
            environment = {"STORAGE_EMULATOR_HOST": endpoint}
            daemons = stack.enter_context(Daemons(tmp_path, environment=environment, start=False))
            daemons.coordinator.constants["pannier.common.timeouts.STORAGE_CONTACT_S"] = 8.0
            daemons.coordinator.start()
            daemons.sidecar.start()
            for name, value in daemons.env().items():
                monkeypatch.setenv(name, value)
        yield stack.enter_context(Client(load_settings()))


@pytest.mark.parametrize(
    ("endpoint", "client"),
    [
        ("unresponsive", "configured"),
        ("refuses", "embedded"),
        pytest.param("refuses", "configured", marks=pytest.mark.extended),
    ],
    indirect=True,
)
def test_a_first_save_says_soon_that_storage_can_not_be_reached(
    client: Client,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 3.0)
    monkeypatch.setattr(console, "_FACTOR", 1.5)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "pannier"),
        pytest.raises(SaveAbortedError, match="gs://bucket/run can't be reached") as raised,
    ):
        client.async_save(STATE, checkpoint_id="gs://bucket/run/step-1", timeout=600)
    # Far below the 300 s of plan_timeout.
    assert time.monotonic() - began < 2 * BOUND_S
    (failure,) = raised.value.failures.values()
    assert failure.kind == "STORAGE"
    waits = [each.getMessage() for each in caplog.records if each.name == "pannier.client"]
    # The first may come before daemons that are just starting have found each other, the last while the save is aborted.
    waited = "async_save to gs://bucket/run/step-1 has waited "
    assert all(each.startswith(waited) for each in waits)
    assert any("for storage at gs://bucket/run/step-1" in each for each in waits)
    port = endpoint.rpartition(":")[2]
    assert port in str(raised.value) or "no answer" in str(raised.value)


def test_a_save_by_a_known_plan_names_what_storage_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        GcsServer(tmp_path / "gcs") as server,
        Daemons(tmp_path, environment=server.env) as daemons,
    ):
        for name, value in daemons.env(PANNIER_PLAN_TIMEOUT="20").items():
            monkeypatch.setenv(name, value)
        with Client(load_settings()) as client:
            client.save(STATE, checkpoint_id="gs://bucket/run/step-1")
            server.fault(kind="status", status=503, message="over capacity", times=-1)
            handle = client.async_save(STATE, checkpoint_id="gs://bucket/run/step-2", timeout=60)
            with pytest.raises(SaveAbortedError, match="over capacity") as raised:
                handle.result(BOUND_S)
            assert "gs://bucket/run/step-2" in str(raised.value)
            server.clear()
