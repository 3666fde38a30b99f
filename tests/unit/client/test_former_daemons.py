"""What is done for the daemons of a job's earlier starts, without real processes."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client.config import Settings
from pannier.client.embedded import former_daemons, launcher
from pannier.client.embedded.daemon_spec import DaemonSpec, job_daemons, write_record
from pannier.common import env_fingerprint
from pannier.wire import addresses
from support.processes.daemons import short_directory
from support.processes.stretch import BOUND_S

JOB, OTHER = "run 7", "run 8"
HERE = socket.gethostname()
SUCCESSOR = {"coordinator": "10.0.0.2:7070", "cert": "/c", "key": "/k", "ca": "/a"}


class Starts:
    """A job's starts on this host."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(runtime_dir=directory, spool=directory / "spool")
        self.on_start: list[Path] = []
        self.up: set[Path] = set()

    def add(self, word: str, job: str = JOB, host: str = HERE, **environment: str) -> DaemonSpec:
        """One that was started with these variables."""
        directory = addresses.job_dir(self.settings.runtime_dir, job, word, host)
        directory.mkdir()
        pair = job_daemons(self.settings, directory, coordinator="10.0.0.1:7070")
        write_record(pair)
        own = {**launcher.environment(self.settings, pair), **environment}
        text = env_fingerprint.encode(env_fingerprint.record(own))
        (directory / env_fingerprint.FILE).write_text(text)
        return pair

    def tend(self, newest: DaemonSpec) -> None:
        former_daemons._recover(self.settings, newest, JOB, SUCCESSOR)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    directory = short_directory()
    made = Starts(directory)

    def ensure(settings: Settings, pair: DaemonSpec) -> str:
        made.on_start.append(pair.directory)
        return ""

    monkeypatch.setattr(launcher, "ensure", ensure)
    monkeypatch.setattr(launcher, "is_up", lambda pair: pair.directory in made.up)
    yield made
    shutil.rmtree(directory)


def successor_record(pair: DaemonSpec) -> object:
    path = pair.directory / addresses.SUCCESSOR
    return json.loads(path.read_text()) if path.exists() else None


def test_all_of_the_job_are_notified_and_those_that_were_killed_are_started_again(
    starts: Starts,
) -> None:
    running, killed, other = starts.add("one"), starts.add("two"), starts.add("one", OTHER)
    # As on a file system that hosts have in common.
    elsewhere = starts.add("three", host="another host")
    starts.up = {running.directory, other.directory}
    newest = starts.add("new")
    starts.tend(newest)
    assert starts.on_start == [killed.directory]
    assert successor_record(running) == successor_record(killed) == SUCCESSOR
    assert successor_record(other) is None
    assert successor_record(elsewhere) is None
    assert successor_record(newest) is None


def test_a_later_start_on_one_host_has_its_usual_coordinator_end_them(starts: Starts) -> None:
    former_daemons.recover_former_daemons(starts.settings, JOB)
    assert starts.on_start == []
    killed = starts.add("one")
    former_daemons.recover_former_daemons(starts.settings, JOB)
    for thread in threading.enumerate():
        if thread.name == "pannier-former":
            thread.join(BOUND_S)
    assert starts.on_start == [killed.directory]
    usual = addresses.embedded_coordinator(starts.settings.runtime_dir)
    assert successor_record(killed) == {"coordinator": usual}


def test_those_with_other_storage_are_left_alone(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = starts.add("one", STORAGE_EMULATOR_HOST="http://10.0.0.9:1")
    starts.tend(starts.add("new"))
    assert starts.on_start == []
    assert successor_record(elsewhere) is None
    assert "STORAGE_EMULATOR_HOST" in caplog.text


def test_a_record_that_cannot_be_read_hides_none_of_the_others(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    broken, killed = starts.add("a"), starts.add("b")
    (broken.directory / "daemons.json").write_text("{")
    starts.tend(starts.add("new"))
    assert starts.on_start == [killed.directory]
    assert str(broken.directory) in caplog.text


def test_logs_of_those_that_left_stay_for_a_day(starts: Starts) -> None:
    old, young, full = (starts.add(word, OTHER).directory for word in ("old", "young", "full"))
    for directory in (old, young, full):
        for path in directory.iterdir():
            path.unlink()
        (directory / addresses.LOG).write_text("a log\n")
    (full / "something").touch()
    yesterday = time.time() - 90000
    for directory in (old, full):
        os.utime(directory / addresses.LOG, (yesterday, yesterday))
    starts.tend(starts.add("new"))
    assert [directory.exists() for directory in (old, young, full)] == [False, True, True]


def test_a_pair_is_read_as_it_was_written(starts: Starts) -> None:
    from pannier.client.embedded.daemon_spec import read_record

    pair = starts.add("one")
    assert read_record(pair.directory) == pair
    assert pair.spool == starts.settings.runtime_dir / "spool" / pair.directory.name
    assert not pair.serves_others
    assert job_daemons(starts.settings, pair.directory, listen="10.0.0.1:1").serves_others
    assert read_record(starts.settings.runtime_dir) is None
