"""Embedded daemons of another version, or of an environment that was removed, and a trainer of this one."""

import logging
import os
import shutil
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pannier.client.client import Client
from pannier.client.config import load_settings
from pannier.client.embedded.daemon_spec import host_daemons
from pannier.client.embedded.launcher import is_idle
from pannier.common import daemon_record
from pannier.common.daemon_record import DaemonRecord
from pannier.wire import addresses
from pannier.wire.version import package_version
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import await_serving, clean_environment
from support.processes.processes import Process
from support.processes.stretch import BOUND_S

STATE = {"w": torch.ones(10)}


class Others:
    """Starts daemons that aren't those of this process."""

    def __init__(self, embedded: Path, directory: Path, stack: ExitStack) -> None:
        self._embedded = embedded
        self._directory = directory
        self._stack = stack

    def start(
        self,
        *flags: str,
        python: Path | str = sys.executable,
        version: str | None = None,
    ) -> Process:
        """``pannier up`` as a client starts it, of another version."""
        environment = {}
        if version is not None:
            # The first distribution of that name on the path counts.
            distribution = self._directory / "path" / f"pannier-{version}.dist-info"
            distribution.mkdir(parents=True)
            (distribution / "METADATA").write_text(f"Name: pannier\nVersion: {version}\n")
            environment["PYTHONPATH"] = str(distribution.parent)
        process = Process(
            "up",
            [str(python), "-m", "pannier.cli", "up", "--runtime-dir", str(self._embedded), *flags],
            environment=clean_environment(environment),
            log=self._directory / "up.log",
        )
        self._stack.callback(process.close)
        await_serving(addresses.embedded_sidecar(self._embedded), process=process)
        return process

    @property
    def record(self) -> DaemonRecord:
        """Of the daemons that run now."""
        found = daemon_record.read(self._embedded)
        assert found is not None
        return found


IDLE_EXIT = ("--idle-exit", "300")


@pytest.fixture
def others(embedded: Path, tmp_path: Path) -> Iterator[Others]:
    with ExitStack() as stack:
        yield Others(embedded, tmp_path, stack)


def save(path: Path) -> None:
    with Client(load_settings()) as client:
        client.save(STATE, checkpoint_id=path)
    assert (path / ".metadata").exists()


def lines_about_others(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("using the daemons in")]


def test_idle_daemons_of_another_version_are_replaced(others: Others, tmp_path: Path) -> None:
    earlier = others.start(*IDLE_EXIT, version="9.9")
    assert others.record.version == "9.9"
    save(tmp_path / "step-1")
    assert earlier.wait(BOUND_S) == 0
    assert others.record.version == package_version()
    assert others.record.pid != earlier.pid


def test_busy_daemons_of_another_version_are_used_with_one_line_in_the_log(
    others: Others, embedded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = others.start(*IDLE_EXIT, version="9.9")
    spec = host_daemons(load_settings())
    with (
        caplog.at_level(logging.WARNING, "pannier"),
        Client(load_settings(sidecar=addresses.embedded_sidecar(embedded))) as their_trainer,
    ):
        their_trainer.save(STATE, checkpoint_id=tmp_path / "theirs")
        assert not is_idle(spec)
        save(tmp_path / "step-1")
        save(tmp_path / "step-2")
    (line,) = lines_about_others(caplog)
    user = daemon_record.user_name(os.getuid())
    assert line == (
        f"using the daemons in {embedded} (pannier 9.9 of the environment {sys.prefix}, process "
        f"{earlier.pid} of user {user}), though they are of another version, this process is pannier "
        f"{package_version()}: when they are idle, `pannier down --runtime-dir {embedded}` ends them"
    )
    assert others.record.pid == earlier.pid
    wait_until(lambda: is_idle(spec))
    save(tmp_path / "step-3")
    assert earlier.wait(BOUND_S) == 0
    assert others.record.version == package_version()


@pytest.mark.extended
def test_daemons_that_were_started_by_hand_are_not_replaced(
    others: Others, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = others.start(version="9.9")
    save(tmp_path / "step-1")
    assert others.record.pid == by_hand.pid
    assert len(lines_about_others(caplog)) == 1


@pytest.mark.extended
def test_idle_daemons_of_a_removed_environment_are_replaced(others: Others, tmp_path: Path) -> None:
    removed = tmp_path / "venv"
    venv.create(removed, symlinks=True)
    (packages,) = removed.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join(filter(os.path.isdir, sys.path)))
    earlier = others.start(*IDLE_EXIT, python=removed / "bin" / "python")
    assert others.record.prefix == str(removed)
    save(tmp_path / "step-1")
    assert others.record.pid == earlier.pid
    wait_until(lambda: is_idle(host_daemons(load_settings())))
    shutil.rmtree(removed)
    save(tmp_path / "step-2")
    assert earlier.wait(BOUND_S) == 0
    assert others.record.prefix == sys.prefix
