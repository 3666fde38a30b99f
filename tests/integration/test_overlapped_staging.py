"""Overlapped staging, with real daemons; where a device is needed, one that copies on demand."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.wire.errors import InvalidRequestError, SaveAbortedError
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.states.host_streams import FakeStream, fake_backend, host_as_device

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TRANSPORTS = ("mapped", "streamed")


class Training:
    """A model with buffers, on the CPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def backward(self) -> None:
        self.model(torch.randn(4, 512)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("overlapped")) as daemons:
        yield daemons


@contextmanager
def connected(daemons: Daemons, transport: str = "auto") -> Iterator[Client]:
    settings = load_settings(sidecar=daemons.sidecar_address, transport=transport)
    with Client(settings) as client:
        yield client


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def assert_saved(path: Path, expected: dict[str, Any]) -> None:
    fresh = Training()
    fresh.step()
    into = fresh.state()
    dcp.load(into, checkpoint_id=path, no_dist=True)
    flat, wanted = (torch.utils._pytree.tree_leaves(tree) for tree in (into, expected))
    assert len(flat) == len(wanted)
    for found, value in zip(flat, wanted, strict=True):
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


def test_on_the_cpu_everything_is_staged_when_the_call_returns(
    daemons: Daemons, tmp_path: Path
) -> None:
    training = Training()
    with connected(daemons) as client:
        guard = client.guard(training.optimizer)
        handles, expected = [], []
        for number in range(3):
            expected.append(copied(training.state()))
            handle = client.async_save(
                training.state(), checkpoint_id=tmp_path / str(number), staging="overlapped"
            )
            assert handle.staging_completion.done()
            assert handle.staging_completion.result() is None
            assert handle.status().staging == ""
            handles.append(handle)
            training.step()
        for handle in handles:
            assert "copy" not in handle.result().seconds
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
        guard.remove()
        assert not training.optimizer._optimizer_step_pre_hooks
        training.step()
    for number, state in enumerate(expected):
        assert_saved(tmp_path / str(number), state)


@pytest.mark.parametrize("refusal", ["", "its file is on a disk"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_goes_on_while_the_device_copies(
    transport: str,
    refusal: str,
    daemons: Daemons,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, stream = Training(), FakeStream()
    found = fake_backend(stream, refusal=refusal, buffers=2)
    with connected(daemons, transport) as client, host_as_device(monkeypatch, found):
        client.guard(training.optimizer)
        expected = []
        # The third goes by a kept plan.
        for number in range(3):
            expected.append(copied(training.state()))
            stream.runs.clear()
            handle = client.async_save(
                training.state(), checkpoint_id=tmp_path / str(number), staging="overlapped"
            )
            assert not handle.staging_completion.done()
            # The forward pass changes the buffers.
            training.backward()
            assert handle.status().bytes_ingested == 0
            assert handle.status().staging == (f"bounced: {refusal}" if refusal else "pinned")
            while handle.status().waiting_on != "copies from cpu":
                time.sleep(0.01)
            threading.Timer(0.1, stream.runs.set).start()
            training.optimizer.step()
            training.optimizer.zero_grad()
            assert handle.staging_completion.result(BOUND_S) is None
            assert handle.result().seconds["copy"] > 0
    for number, state in enumerate(expected):
        assert_saved(tmp_path / str(number), state)


def test_a_device_that_fails_fails_that_save_alone(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, stream = Training(), FakeStream()
    with connected(daemons) as client, host_as_device(monkeypatch, fake_backend(stream)):
        client.guard(training.optimizer)

        def breaks() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        stream.runs.clear()
        handle = client.async_save(
            training.state(), checkpoint_id=tmp_path / "broken", staging="overlapped"
        )
        stream._queue[0] = breaks
        stream.runs.set()
        with pytest.raises(
            RuntimeError, match=r"illegal memory.*\ncopying from cpu(.|\n)*raised in save .*broken"
        ):
            handle.result(BOUND_S)
        with pytest.raises(RuntimeError, match="illegal memory"):
            handle.staging_completion.result(0)
        training.step()
        expected = copied(training.state())
        client.async_save(
            training.state(), checkpoint_id=tmp_path / "next", staging="overlapped"
        ).result(BOUND_S)
    assert not (tmp_path / "broken" / ".metadata").exists()
    assert_saved(tmp_path / "next", expected)


def test_a_step_that_waits_for_nothing_fails_the_save_by_name(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, stream = Training(), FakeStream()
    with connected(daemons) as client, host_as_device(monkeypatch, fake_backend(stream)):
        client.guard(training.optimizer, wait=False)
        stream.runs.clear()
        handle = client.async_save(
            training.state(), checkpoint_id=tmp_path / "torn", staging="overlapped"
        )
        training.step()
        stream.runs.set()
        with pytest.raises(SaveAbortedError, match=r"'model\.0\.weight' was changed before"):
            handle.result(BOUND_S)
    assert not (tmp_path / "torn" / ".metadata").exists()


def test_another_word_is_refused(daemons: Daemons, tmp_path: Path) -> None:
    with (
        connected(daemons) as client,
        pytest.raises(
            InvalidRequestError, match=r"staging='eager': use 'blocking' or 'overlapped'"
        ),
    ):
        client.async_save({}, checkpoint_id=tmp_path, staging="eager")
    assert not os.listdir(tmp_path)
