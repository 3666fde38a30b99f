"""Huge pages of the spool's files, and ordinary ones where the kernel has none."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client.transport.shared_memory import FileLeases, SpoolMapping
from pannier.sidecar.spool import huge_pages
from pannier.sidecar.spool.huge_pages import add_huge_pages
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


def test_a_trainer_maps_the_huge_pages_of_a_spool_file_as_such(memory: Path, file: int) -> None:
    if not add_huge_pages(file, 0, 2 * MIB):
        pytest.skip("this kernel has no huge pages")
    spool = Spool(memory / "spool")
    taken = spool.take("job", 9 * MIB)
    mapping = SpoolMapping(leases(), "f", taken.stageable, taken.fd)
    assert mapped_whole(mapping.address) == 8 * MIB
    ctypes.memset(mapping.address, 7, mapping.capacity)
    mapping.seal()
    assert mapped_whole(mapping.address) == 8 * MIB
    assert os.pread(taken.fd, 10 * MIB, 0) == bytes([7]) * mapping.capacity + bytes(STAMP_BYTES)
    spool.close()


def test_a_file_that_grows_keeps_its_bytes(file: int) -> None:
    os.posix_fallocate(file, 0, 3 * MIB)
    os.pwrite(file, b"x" * (3 * MIB), 0)
    add_huge_pages(file, 3 * MIB, 9 * MIB)
    os.posix_fallocate(file, 3 * MIB, 6 * MIB)
    assert os.pread(file, 10 * MIB, 0) == b"x" * (3 * MIB) + bytes(6 * MIB)
    assert os.fstat(file).st_blocks * 512 == 9 * MIB


def test_without_huge_pages_space_is_reserved_in_ordinary_ones(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory:
        def __getattr__(self, name: str) -> object:
            return getattr(libc, name)

        def madvise(self, address: int, length: int, advice: int) -> int:
            ctypes.set_errno(12)
            return -1

    libc = huge_pages._libc
    monkeypatch.setattr(huge_pages, "_libc", NoMemory())
    spool = Spool(memory / "spool")
    taken = spool.take("job", 9 * MIB)
    assert os.fstat(taken.fd).st_blocks * 512 == taken.capacity == 9 * MIB
    spool.close()


def test_a_file_on_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_is_tmpfs", lambda fd: False)
    with open(tmp_path / "file", "wb") as file:
        assert add_huge_pages(file.fileno(), 0, 8 * MIB) == 0
        assert os.fstat(file.fileno()).st_size == 0
