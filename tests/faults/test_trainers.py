"""Trainers that get SIGTERM, that wake up late, or whose sidecar has exited."""

import logging
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pannier.client import (
    BusyError,
    Client,
    InDoubtError,
    SaveAbortedError,
    SaveSkippedError,
)
from pannier.client.config import load_settings
from pannier.client.transport.file_stream import FileSource
from pannier.v1 import save_pb2
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.steering import TRAINER, order, outcome
from support.processes.stretch import BOUND_S
from support.processes.watching import ABORTED, COMMITTED, await_save

MIB = 256
"""So many take the sidecar a moment."""


def streaming(status: save_pb2.SaveStatus) -> bool:
    return any(rank.phase == save_pb2.RANK_PHASE_STREAMING for rank in status.ranks)


def check(client: Client, target: str, name: str, value: float) -> None:
    loaded = {name: torch.zeros(MIB << 18)}
    client.load(loaded, checkpoint_id=target)
    assert bool((loaded[name] == value).all())


def await_stopped(pid: int) -> None:
    """Returns when the process has come to the point at which it stops itself."""
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.mark.slow
def test_a_trainer_that_gets_sigterm_goes_when_its_save_is_ingested(
    daemons: Daemons, tmp_path: Path
) -> None:
    target = str(tmp_path / "root" / "step-1")
    environment = daemons.env(GO=str(tmp_path), ROOT=str(tmp_path / "root"), SIGTERM="exit")
    sidecar = daemons.sidecar
    sidecar.environment["PANNIER_PAUSE_AT"] = "sidecar.ingested.before"
    sidecar.restart()
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        order(tmp_path, 1, 0, mib=MIB)
        await_stopped(daemons.sidecar.pid)
        trainer = ranks.processes[0]
        trainer.signal(signal.SIGTERM)
        time.sleep(1)
        assert trainer.returncode is None
        sidecar.resume()
        assert trainer.wait(BOUND_S) == 143
        await_save(daemons.coordinator_address, target, lambda s: s.state == COMMITTED)
    with Client(load_settings()) as client:
        check(client, target, "w0", 1.0)


@pytest.mark.slow
def test_a_trainer_that_wakes_up_late_changes_nothing_and_gets_an_error(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "root" / "step-1")
    environment = daemons.env(
        GO=str(tmp_path), ROOT=str(tmp_path / "root"), PANNIER_TRANSPORT="streamed"
    )
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        order(tmp_path, 1, 0, mib=MIB, timeout=20, stop_at=40)
        await_save(daemons.sidecar_address, target, streaming)
        await_stopped(ranks.processes[0].pid)
        await_save(daemons.coordinator_address, target, lambda s: s.state == ABORTED)
        for name, value in daemons.env().items():
            monkeypatch.setenv(name, value)
        # Another process of the job saves to the same id, over the memory that was freed.
        with Client(load_settings()) as client:
            client.save({"w0": torch.full((MIB << 18,), 9.0)}, checkpoint_id=target, timeout=60)
            objects = sorted(str(path) for path in Path(target).rglob("*"))
            ranks.processes[0].resume()
            assert re.match(r"failed: .*rank 0 .*deadline( of 20 s)? passed", outcome(ranks, 1, 0))
            check(client, target, "w0", 9.0)
            assert sorted(str(path) for path in Path(target).rglob("*")) == objects


@pytest.mark.slow
def test_a_sidecar_that_is_gone_for_good_is_named_at_the_deadline(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in daemons.env().items():
        monkeypatch.setenv(name, value)
    daemons.sidecar.environment["PANNIER_PAUSE_AT"] = "sidecar.ingested.before"
    daemons.sidecar.restart()
    client = Client(load_settings(max_in_flight=1))
    state = {"w": torch.ones(MIB << 18)}
    began = time.monotonic()
    handle = client.async_save(state, checkpoint_id=str(tmp_path / "root" / "1"), timeout=20)
    await_stopped(daemons.sidecar.pid)
    daemons.sidecar.kill()
    assert handle.status().bytes_ingested < handle.status().bytes
    with pytest.raises(SaveSkippedError):
        client.save(state, checkpoint_id=str(tmp_path / "root" / "2"), on_busy="skip")
    with pytest.raises(BusyError):
        client.save(state, checkpoint_id=str(tmp_path / "root" / "3"), on_busy="raise")
    named = re.compile(r"the sidecar at unix:.* \(last seen \d+ s ago; not connected\)")
    wait_until(lambda: named.match(handle.status().waiting_on) is not None)
    # In doubt, when it was killed while it was asked to ingest the rank.
    ended = (SaveAbortedError, InDoubtError)
    with pytest.raises(ended, match=r"sidecar at unix:.*can't be reached"):
        handle.result(BOUND_S)
    assert time.monotonic() - began > 8
    client.close()


@pytest.mark.slow
def test_a_sidecar_that_is_killed_and_loses_its_spool_gets_everything_again(
    daemons: Daemons,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in daemons.env(PANNIER_TRANSPORT="streamed").items():
        monkeypatch.setenv(name, value)
    target = str(tmp_path / "root" / "step-1")
    killed, chunks = threading.Event(), FileSource.chunks

    def stop_halfway(source: FileSource, start: int) -> Iterator[Any]:
        for index, chunk in enumerate(chunks(source, start)):
            assert index < 40 or killed.wait(BOUND_S)
            yield chunk

    monkeypatch.setattr(FileSource, "chunks", stop_halfway)
    with Client(load_settings()) as client, caplog.at_level(logging.WARNING, "pannier.client"):
        state = {"w0": torch.full((MIB << 18,), 3.0)}
        handle = client.async_save(state, checkpoint_id=target, timeout=60)
        wait_until(lambda: handle.status().bytes_ingested > 0)
        daemons.sidecar.kill()
        killed.set()
        held = handle.status().bytes_ingested
        assert 0 < held < handle.status().bytes
        shutil.rmtree(daemons.spool / "0")
        time.sleep(1)
        daemons.sidecar.start()
        handle.result(BOUND_S)
        check(client, target, "w0", 3.0)
        lost = [each for each in caplog.records if "lost the sidecar" in each.message]
        assert len(lost) == 1
