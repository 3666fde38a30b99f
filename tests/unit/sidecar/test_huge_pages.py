"""Huge pages of the spool's files, and ordinary ones where the kernel has none."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client.transport.shared_memory import FileLeases, SpoolMapping
from pannier.sidecar.spool import huge_pages
from pannier.sidecar.spool.huge_pages import collapse
from pannier.sidecar.spool.spool import Spool
from pannier.wire.file_layout import STAMP_BYTES
from support.processes.daemons import memory_directory

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    made = memory_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def file(memory: Path) -> Iterator[int]:
    fd = os.open(memory / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def mapped_whole(address: int) -> int:
    """Bytes of the mapping at ``address`` that the kernel maps as huge pages of shared memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    found = next(line for line in lines[begin:] if line.startswith("ShmemPmdMapped:"))
    return int(found.split()[1]) << 10


def leases() -> FileLeases:
    return object.__new__(FileLeases)


def collapses(fd: int) -> None:
    """Skips the test where the kernel has no huge pages."""
    os.posix_fallocate(fd, 0, 2 * MIB)
    try:
        collapse(fd, 0, 2 * MIB)
    except OSError as error:
        pytest.skip(f"no huge pages: {error}")


def test_a_trainer_maps_the_huge_pages_of_a_spool_file_as_such(memory: Path, file: int) -> None:
    collapses(file)
    spool = Spool(memory / "spool")
    taken = spool.take("job", 9 * MIB)
    mapping = SpoolMapping(leases(), "f", taken.stageable, taken.fd)
    ctypes.memset(mapping.address, 6, mapping.capacity)
    assert mapped_whole(mapping.address) == 0
    spool.collapse(lambda: True)
    assert os.pread(taken.fd, 10 * MIB, 0) == bytes([6]) * mapping.capacity + bytes(STAMP_BYTES)
    ctypes.memset(mapping.address, 7, mapping.capacity)
    assert mapped_whole(mapping.address) == 8 * MIB
    mapping.seal()
    assert mapped_whole(mapping.address) == 8 * MIB
    assert os.pread(taken.fd, 10 * MIB, 0) == bytes([7]) * mapping.capacity + bytes(STAMP_BYTES)
    spool.close()


def test_a_file_that_has_grown_keeps_its_bytes_and_gets_huge_pages_for_the_rest(
    memory: Path, file: int
) -> None:
    collapses(file)
    spool = Spool(memory / "spool")
    taken = spool.take("job", 11 * MIB)
    os.pwrite(taken.fd, b"x" * (11 * MIB), 0)
    spool.collapse(lambda: True)
    spool.give(taken)
    assert spool.take("job", 13 * MIB) is taken
    assert taken.collapsed == 11 * MIB
    spool.collapse(lambda: True)
    assert taken.collapsed == taken.capacity == 13 * MIB
    assert os.pread(taken.fd, 14 * MIB, 0) == b"x" * (11 * MIB) + bytes(2 * MIB)
    mapping = SpoolMapping(leases(), "f", taken.stageable, taken.fd)
    ctypes.memset(mapping.address, 7, mapping.capacity)
    assert mapped_whole(mapping.address) == 12 * MIB
    spool.close()


def test_nothing_is_moved_while_a_save_is_under_way(memory: Path) -> None:
    spool = Spool(memory / "spool")
    taken = spool.take("job", 9 * MIB)
    answers = iter([True, False])
    spool.collapse(lambda: next(answers))
    assert taken.collapsed == 8 * MIB
    spool.close()


@pytest.mark.parametrize(("error", "calls"), [(errno.ENOMEM, 1), (errno.EAGAIN, 3)])
def test_what_can_not_be_moved_is_tried_once_and_stays_as_it_is(
    memory: Path, monkeypatch: pytest.MonkeyPatch, error: int, calls: int
) -> None:
    class Failing:
        calls = 0

        def __getattr__(self, name: str) -> object:
            return getattr(libc, name)

        def madvise(self, address: int, length: int, advice: int) -> int:
            Failing.calls += 1
            ctypes.set_errno(error)
            return -1

    libc = huge_pages._libc
    monkeypatch.setattr(huge_pages, "_libc", Failing())
    monkeypatch.setattr(huge_pages, "_huge_page", lambda: 2 * MIB)
    spool = Spool(memory / "spool")
    taken = spool.take("job", 20 * MIB)
    os.pwrite(taken.fd, b"x" * MIB, 0)
    for _ in range(2):
        spool.collapse(lambda: True)
    assert Failing.calls == calls
    assert os.pread(taken.fd, MIB, 0) == b"x" * MIB
    spool.close()


def test_a_file_on_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "is_tmpfs", lambda fd: False)
    with open(tmp_path / "file", "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MIB)
        with pytest.raises(OSError, match="not supported"):
            collapse(file.fileno(), 0, 8 * MIB)
