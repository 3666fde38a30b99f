"""Storage that is gone for longer than any save's deadline: saves are lost, training isn't held up."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.client.transport.connection import SidecarConnection
from pannier.common import timeouts
from pannier.wire.errors import BusyError, PannierError, SaveSkippedError
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.slow

TIMEOUT_S = 6.0
"""Of a save in the outage."""
IN_FLIGHT = 2
STATE = {"w": torch.ones(1 << 18), "step": 1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "gcs") as running:
        yield running


@pytest.fixture
def client(server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(timeouts, "DECISION_S", 1.0)
    with Daemons(tmp_path, environment=server.env) as daemons:
        for name, value in daemons.env(PANNIER_MAX_IN_FLIGHT=str(IN_FLIGHT)).items():
            monkeypatch.setenv(name, value)
        with Client(load_settings()) as running:
            yield running
            # The outage is over: close() waits for saves.
            server.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the sidecar that the training loop has waited for."""
    made: list[str] = []
    unary = SidecarConnection.call_repeatedly

    def counted(self: SidecarConnection, method: str, *args: Any, **kwargs: Any) -> Any:
        # Those of the main thread are made aside, while it waits.
        if threading.current_thread().name in ("MainThread", "pannier-work"):
            made.append(method)
        return unary(self, method, *args, **kwargs)

    monkeypatch.setattr(SidecarConnection, "call_repeatedly", counted)
    return made


@pytest.mark.parametrize("on_busy", ["skip", "wait", "raise"])
def test_no_call_waits_for_storage_that_is_gone_for_longer_than_saves_live(
    client: Client, server: GcsServer, calls: list[str], on_busy: str
) -> None:
    client.save(STATE, checkpoint_id="gs://bucket/run/step-0")
    server.fault(kind="status", status=503, message="over capacity", times=-1)
    calls.clear()
    lost = 0
    for number in range(1, 2 * (IN_FLIGHT + 1), IN_FLIGHT + 1):
        handles = [
            client.async_save(
                STATE,
                checkpoint_id=f"gs://bucket/run/step-{number + i}",
                on_busy=on_busy,
                timeout=TIMEOUT_S,
            )
            for i in range(IN_FLIGHT)
        ]
        if on_busy == "raise":
            with pytest.raises(BusyError):
                client.async_save(
                    STATE, checkpoint_id="gs://bucket/run/busy", on_busy="raise", timeout=60
                )
        elif on_busy == "skip":
            skipped = client.async_save(
                STATE, checkpoint_id="gs://bucket/run/busy", on_busy="skip", timeout=60
            )
            assert isinstance(skipped.exception(BOUND_S), SaveSkippedError)
        for handle in handles:
            # Aborted, or in doubt as long as the abort can't be written.
            assert isinstance(handle.exception(BOUND_S), PannierError)
            lost += 1
        # Its staging memory was given back before.
        assert client.saves.idle == IN_FLIGHT
    # No plan was asked for: each save went by the plan of the first one.
    assert "Plan" not in calls
    assert lost == 2 * IN_FLIGHT
    server.clear()
    client.save(STATE, checkpoint_id="gs://bucket/run/last", timeout=BOUND_S)
    assert "Plan" not in calls


def test_a_plan_that_storage_delays_is_a_skip_where_the_loop_skips(
    client: Client, server: GcsServer, calls: list[str]
) -> None:
    client.save(STATE, checkpoint_id="gs://bucket/run/step-0")
    server.fault(kind="status", status=503, message="over capacity", times=-1)
    changed = {**STATE, "more": torch.ones(3)}
    for number in (1, 2):
        handle = client.async_save(
            changed,
            checkpoint_id=f"gs://bucket/run/step-{number}",
            on_busy="skip",
            timeout=60 * BOUND_S,
        )
        with pytest.raises(SaveSkippedError, match="its plan waits for storage at gs://bucket/run"):
            handle.result(BOUND_S)
    server.clear()
    client.save(changed, checkpoint_id="gs://bucket/run/step-3", timeout=BOUND_S)


def test_training_that_stands_still_is_shown_while_it_does_and_no_longer(
    server: GcsServer, client: Client
) -> None:
    client.save(STATE, checkpoint_id="gs://bucket/still/first")
    server.fault(kind="status", status=503, times=-1)
    for number in range(IN_FLIGHT):
        client.async_save(STATE, checkpoint_id=f"gs://bucket/still/step-{number}")
    waiting = threading.Thread(
        target=client.async_save, args=(STATE,), kwargs={"checkpoint_id": "gs://bucket/still/last"}
    )
    waiting.start()
    sidecar = os.environ["PANNIER_SIDECAR"]
    coordinator = sidecar.replace("s0.sock", "c.sock")

    def shown(address: str) -> str:
        return pannier("status", "--address", address).out

    line = re.compile(r"training waits: 1 rank in async_save of last for \d+ s \(room\)")
    for address in (sidecar, coordinator):
        wait_until(lambda address=address: line.search(shown(address)) is not None)
    assert waiting.is_alive()
    server.clear()
    waiting.join(BOUND_S)
    assert not waiting.is_alive()
    for address in (sidecar, coordinator):
        wait_until(lambda address=address: "training waits" not in shown(address))
