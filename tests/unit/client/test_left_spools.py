"""What is done for the spools that a job's earlier starts left, without real processes."""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client.config import Settings
from pannier.client.embedded import launcher, left_spools
from pannier.client.embedded.daemon_spec import (
    DaemonSpec,
    environment,
    host_daemons,
    job_daemons,
    read_record,
    write_files,
)
from pannier.client.identity import World
from pannier.client.transport.membership import Membership
from pannier.common.daemon_record import DaemonRecord, decisive_variables
from pannier.wire import addresses
from support.actors.scripted_sidecar import ScriptedSidecar, wait_until
from support.processes.daemons import short_directory

JOB, OTHER = "run 7", "run 8"
HERE = socket.gethostname()


class Starts:
    """A job's starts on this host."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(runtime_dir=directory, spool=directory / "spool")
        self.started: list[DaemonSpec] = []
        self.up: set[Path] = set()

    def add(
        self,
        word: str,
        job: str = JOB,
        place: str = HERE,
        listen: str | None = None,
        **variables: str,
    ) -> DaemonSpec:
        """One that was started with these variables."""
        directory = addresses.job_dir(self.settings.runtime_dir, job, word, place)
        directory.mkdir()
        pair = job_daemons(self.settings, directory, listen=listen, coordinator="10.0.0.1:7070")
        write_files(pair)
        assert pair.spool is not None
        pair.spool.mkdir(parents=True)
        own = {**environment(self.settings, pair), **variables}
        DaemonRecord.of_this_process(decisive_variables(own), exits_idle=True).write(directory)
        return pair

    def begin(self, newest: DaemonSpec) -> None:
        earlier = [
            path
            for path in addresses.job_dirs(self.settings.runtime_dir)
            if path != newest.directory
        ]
        left_spools.upload(self.settings, earlier)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    directory = short_directory()
    made = Starts(directory)

    def start(settings: Settings, pair: DaemonSpec) -> None:
        write_files(pair)
        made.started.append(pair)

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(left_spools, "is_serving", lambda directory: directory in made.up)
    yield made
    shutil.rmtree(directory)


def test_a_sidecar_starts_on_each_spool_here_whose_daemons_were_killed(starts: Starts) -> None:
    """Whatever the host is called now, and whichever job was killed."""
    running, killed, other = starts.add("one"), starts.add("two"), starts.add("one", OTHER)
    renamed = starts.add("three", place="as this host was called before")
    # As on a file system that hosts have in common: the record is here, the spool isn't.
    elsewhere = starts.add("four", place="another host")
    assert elsewhere.spool is not None
    elsewhere.spool.rmdir()
    starts.up = {running.directory}
    starts.begin(starts.add("new"))
    assert {each.directory for each in starts.started} == {
        *(killed.directory, other.directory, renamed.directory)
    }


def test_a_spool_that_a_sidecar_has_locked_is_not_left(starts: Starts) -> None:
    held = starts.add("one")
    assert held.spool is not None
    fd = os.open(held.spool, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = read_record(held.directory)
    starts.begin(starts.add("new"))
    os.close(fd)
    assert starts.started == []
    assert read_record(held.directory) == before
    starts.begin(starts.add("newer"))
    assert held.directory in {each.directory for each in starts.started}


def test_where_the_coordinator_was_the_sidecar_starts_alone(starts: Starts) -> None:
    killed = starts.add("one", listen="10.0.0.1:7070")
    starts.begin(starts.add("new"))
    (alone,) = starts.started
    assert (alone.directory, alone.spool) == (killed.directory, killed.spool)
    # Its certificate is for that one's address.
    assert alone.flags == ("--coordinator", "10.0.0.1:7070", *killed.flags[2:])
    # A later start with rank 0 here doesn't take it for one with a coordinator.
    assert read_record(killed.directory) == alone
    assert not alone.serves_others


def test_a_later_start_on_one_host_has_them_uploaded_too(starts: Starts) -> None:
    current = host_daemons(starts.settings)
    left_spools.upload_aside(starts.settings, current)
    killed = starts.add("one")
    left_spools.upload_aside(starts.settings, current)
    wait_until(lambda: bool(starts.started))
    assert [each.directory for each in starts.started] == [killed.directory]


def test_what_killed_daemons_left_is_uploaded_also_by_a_start_whose_daemons_run(
    starts: Starts,
) -> None:
    killed, current = starts.add("one"), starts.add("new")
    world = World(alone=True)
    world.known_daemons = current
    with ScriptedSidecar(current.directory, name="sidecar.sock"):
        Membership(world, starts.settings).sidecar().close()
        wait_until(lambda: bool(starts.started))
    assert [each.directory for each in starts.started] == [killed.directory]


def test_those_with_other_storage_are_left_alone(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    starts.add("one", STORAGE_EMULATOR_HOST="http://10.0.0.9:1")
    starts.begin(starts.add("new"))
    assert starts.started == []
    assert "STORAGE_EMULATOR_HOST" in caplog.text


def test_a_record_that_cannot_be_read_hides_none_of_the_others(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    broken, killed = starts.add("a"), starts.add("b")
    (broken.directory / "daemons.json").write_text("{")
    starts.begin(starts.add("new"))
    assert [each.directory for each in starts.started] == [killed.directory]
    assert f"start left in {broken.directory} are not uploaded: " in caplog.text


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
    starts.begin(starts.add("new"))
    assert [directory.exists() for directory in (old, young, full)] == [False, True, True]


def test_a_pair_is_read_as_it_was_written(starts: Starts) -> None:
    pair = starts.add("one")
    assert read_record(pair.directory) == pair
    assert pair.spool == starts.settings.runtime_dir / "spool" / pair.directory.name
    assert not pair.serves_others
    assert job_daemons(starts.settings, pair.directory, listen="10.0.0.1:1").serves_others
    assert read_record(starts.settings.runtime_dir) is None
