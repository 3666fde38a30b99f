"""Which spool a sidecar takes that is given none, on a directory in place of /dev/shm."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pannier.common.cgroup import MemoryLimit
from pannier.common.daemon_record import recorded_spool
from pannier.sidecar.spool import default_spool
from pannier.sidecar.spool.journal import FORMAT, header
from pannier.sidecar.spool.spool import Spool
from pannier.wire.version import WIRE_VERSION

NAME = f"pannier-{os.getuid()}-v{WIRE_VERSION}"
Start = Callable[[str], Spool]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    monkeypatch.setattr(default_spool, "_MEMORY", made)
    monkeypatch.setattr(default_spool, "_has_room", lambda: True)
    return made


@pytest.fixture
def start(tmp_path: Path, memory: Path) -> Iterator[Start]:
    """Opens the default spool of a container, whose runtime directory has the same path in each."""
    opened: list[Spool] = []

    def open_there(container: str) -> Spool:
        directory = tmp_path / container / NAME
        directory.mkdir(parents=True, exist_ok=True)
        opened.append(default_spool.open_default(directory, None))
        return opened[-1]

    yield open_there
    for spool in opened:
        with suppress(OSError):  # the test has closed it
            spool.close(None)


def test_containers_that_share_memory_have_a_spool_each(start: Start, memory: Path) -> None:
    assert [start(name).directory for name in "abc"] == [
        *(memory / NAME, memory / f"{NAME}-2", memory / f"{NAME}-3"),
    ]


def test_a_sidecar_that_starts_again_has_the_spool_that_it_had(
    start: Start, memory: Path, tmp_path: Path
) -> None:
    first, second = start("a"), start("b")
    assert recorded_spool(tmp_path / "b" / NAME) == second.directory
    first.close(None)
    second.close(None)
    assert start("b").directory == second.directory
    assert start("a").directory == first.directory


def test_what_a_killed_sidecar_left_is_found_without_its_runtime_directory(
    start: Start, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under systemd's PrivateTmp, or in a container that was replaced; also if it is what fills the memory."""
    left = start("a")
    (left.directory / "00000001.data").write_bytes(b"x")
    left.close(None)
    monkeypatch.setattr(default_spool, "_has_room", lambda: False)
    assert start("a new one").directory == left.directory


def test_what_a_sidecar_of_another_version_left_is_taken_over(
    start: Start, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a host's memory, and holds the newest save: without a sidecar on it, both are lost without a word."""
    other = f"pannier-{os.getuid()}-v{WIRE_VERSION - 1}"
    for name in (other, f"{other}-job-x"):
        (memory / name).mkdir(mode=0o700)
        (memory / name / "00000001.data").write_bytes(b"x")
    assert start("a").directory == memory / other
    assert start("b").directory == memory / NAME


def test_a_sidecar_with_an_empty_spool_takes_over_what_another_version_left(
    start: Start, memory: Path
) -> None:
    """As after a rollback and a second upgrade: the usual directory of this version is there."""
    mine = start("a")
    mine.close(None)
    other = memory / f"pannier-{os.getuid()}-v{WIRE_VERSION - 1}"
    other.mkdir(mode=0o700)
    (other / "00000001.data").write_bytes(b"x")
    taken = start("a")
    assert taken.directory == other
    taken.close(None)
    (mine.directory / "00000001.data").write_bytes(b"x")
    (other / "00000001.data").unlink(missing_ok=True)
    assert start("c").directory == mine.directory


def test_a_spool_that_only_a_newer_version_reads_stays_and_is_named(
    start: Start, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = memory / f"pannier-{os.getuid()}-v{WIRE_VERSION + 1}"
    newer.mkdir(mode=0o700)
    (newer / "journal").write_bytes(header(FORMAT + 1))
    assert start("a").directory == memory / NAME
    assert f"{newer}/journal has format {FORMAT + 1}" in caplog.text
    assert "Start that version, which uploads them" in caplog.text
    assert (newer / "journal").read_bytes() == header(FORMAT + 1)


def test_a_sidecar_whose_spool_another_has_taken_over_takes_another(start: Start) -> None:
    mine = start("a")
    mine.close(None)
    start("b")
    assert start("a").directory != mine.directory


def test_another_users_directory_is_passed_by(start: Start, memory: Path) -> None:
    (memory / NAME).mkdir()
    (memory / NAME).chmod(0o777)
    assert start("a").directory == memory / f"{NAME}-2"


def test_a_start_of_a_job_on_several_hosts_has_its_own(
    start: Start, memory: Path, tmp_path: Path
) -> None:
    start("a")
    directory = tmp_path / "job-1-2-3"
    directory.mkdir()
    spool = default_spool.open_default(directory, None)
    assert spool.directory == memory / f"{NAME}-job-1-2-3"
    spool.close(None)


@pytest.mark.parametrize(
    ("free", "memory_size", "limit", "roomy"),
    [
        (1 << 30, 8 << 30, None, False),  # a container with a small /dev/shm
        (2 << 30, 8 << 30, None, True),
        (3 << 30, 1 << 40, None, False),
        (4 << 30, 1 << 40, None, True),
        # One whose memory limit leaves less than its /dev/shm.
        (2 << 30, 8 << 30, MemoryLimit(1 << 30, 800 << 20, "/"), False),
        (2 << 30, 8 << 30, MemoryLimit(1 << 30, 600 << 20, "/"), True),
    ],
)
def test_memory_is_used_only_with_room_for_a_state_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    memory_size: int,
    limit: MemoryLimit | None,
    roomy: bool,
) -> None:
    monkeypatch.setattr(default_spool, "memory_limit", lambda: limit)
    sizes = {"SC_PHYS_PAGES": memory_size >> 12, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(default_spool, "_MEMORY", tmp_path)
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_bavail=free >> 12, f_frsize=4096)
    )
    (first, *_) = default_spool._candidates(tmp_path / "run")
    assert first == (tmp_path / NAME if roomy else tmp_path / "run" / "spool")
