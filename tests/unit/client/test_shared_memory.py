"""Leased spool files: what is unmapped when, and what is released when mapping fails."""

import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.pinned_memory import pin
from pannier.client.transport import shared_memory
from pannier.client.transport.shared_memory import FileLeases
from pannier.common import timeouts
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import PannierError, UnavailableError
from pannier.wire.file_layout import STAMP_BYTES
from support.processes.stretch import BOUND_S

MIB = 1 << 20


def mapped(address: int) -> bool:
    """Whether the kernel has a mapping of this process at ``address``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return True
    return False


class Sidecar:
    """Leases files of memory, and passes their descriptors over a socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.released: list[str] = []
        self.address = 0
        """What :meth:`release` looks at."""
        self.mapped_at_release: bool | None = None
        self.reserved = 0
        self.holds_back = False
        """Whether descriptors stay here until they are passed."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()

    def connect(self) -> FileLeases:
        leases = FileLeases(self.path, self.reserve, self.release)
        self._connection, _ = self._listener.accept()
        return leases

    def reserve(self, sizes: Sequence[int]) -> sidecar_pb2.ReserveResponse:
        files = []
        for size in sizes:
            self.reserved += 1
            files.append(sidecar_pb2.LeasedFile(spool_file=f"file-{self.reserved}", capacity=size))
        if not self.holds_back:
            self.pass_descriptors(files)
        return sidecar_pb2.ReserveResponse(token=b"t" * 16, files=files)

    def pass_descriptors(self, files: Sequence[sidecar_pb2.LeasedFile]) -> None:
        """Puts descriptors of these into the socket."""
        fds = [os.memfd_create(file.spool_file) for file in files]
        for fd, file in zip(fds, files, strict=True):
            os.truncate(fd, file.capacity + STAMP_BYTES)
        socket.send_fds(self._connection, [bytes([len(fds)])], fds)
        for fd in fds:
            os.close(fd)

    def release(self, files: Sequence[str]) -> None:
        self.released += files
        self.mapped_at_release = mapped(self.address)

    def is_left(self) -> bool:
        """Whether the client has closed its connection."""
        self._connection.settimeout(BOUND_S)
        while data := self._connection.recv(1 << 10):
            assert not data.strip(b"t")  # tokens
        return True

    def close(self) -> None:
        self._connection.close()
        self._listener.close()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    made = Sidecar(str(tmp_path / "files"))
    yield made
    made.close()


class Runtime:
    """Stands for ``torch.cuda.cudart()``."""

    def __init__(self) -> None:
        self.mapped_at_unregister: list[bool] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped_at_unregister.append(mapped(address))
        return 0


@pytest.mark.parametrize("referenced", [False, True])
def test_a_file_is_unpinned_then_unmapped_then_released(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, referenced: bool
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    leases, pool = sidecar.connect(), ArenaPool(1)
    arena = pool.acquire([MIB], leases)
    mapping = arena.files[0].mapping
    assert mapping is not None
    assert pin(mapping, "cuda") == ""
    sidecar.address = mapping.address
    kept = [mapping] if referenced else []
    del mapping
    pool.release(arena, reuse=False)
    assert runtime.mapped_at_unregister == [True]
    assert sidecar.released == ["file-1"]
    assert sidecar.mapped_at_release is False
    kept.clear()
    assert len(runtime.mapped_at_unregister) == 1


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("step", ["_map", "populate"])
def test_files_that_cannot_all_be_mapped_are_all_released(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    leases = sidecar.connect()
    found = getattr(shared_memory, step)
    addresses: list[int] = []

    def fails_for_the_second(first: int, length: int) -> int | None:
        if addresses and step == "_map":
            raise PannierError("the host has no memory")
        result: int | None = found(first, length)
        addresses.append(result or first)
        if len(addresses) > 1:
            raise PannierError("the host has no memory")
        return result

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, step, fails_for_the_second)
        # The error, which pytest keeps, holds the frames that mapped them.
        with pytest.raises(PannierError, match="the host has no memory") as raised:
            leases.map_files([MIB, MIB, MIB])
    assert sidecar.released == ["file-1", "file-2", "file-3"]
    assert not any(map(mapped, addresses))
    assert open_files() == before
    assert not leases.lost
    assert leases.map_files([MIB])[0].file == "file-4"
    del raised


def test_files_whose_release_fails_too_leave_the_first_error(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = sidecar.connect()

    def fails(*_: object) -> None:
        raise PannierError("no memory")

    def release(_: Sequence[str]) -> None:
        raise UnavailableError("no sidecar")

    monkeypatch.setattr(shared_memory, "populate", fails)
    monkeypatch.setattr(leases, "_release", release)
    with pytest.raises(PannierError, match="no memory"):
        leases.map_files([MIB])


def test_late_descriptors_are_not_taken_for_those_of_the_next_files(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DESCRIPTORS_S", 0.05)
    leases = sidecar.connect()
    sidecar.holds_back = True
    with pytest.raises(UnavailableError, match="did not pass its files"):
        leases.map_files([MIB])
    # All leases have ended with the connection, and the client connects again.
    assert leases.lost
    assert sidecar.is_left()
    assert not sidecar.released
    with pytest.raises(PannierError):
        leases.map_files([2 * MIB])


def test_a_look_whether_the_sidecar_is_there_waits_for_nothing_that_another_thread_receives(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DESCRIPTORS_S", 0.05)
    leases = sidecar.connect()
    poll = select.poll

    class Meanwhile:
        """The other thread receives what is there right after the look."""

        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            found = self._poll.poll(timeout)
            leases._connection.recv(16)
            return found

    monkeypatch.setattr(select, "poll", Meanwhile)
    sidecar._connection.sendall(b"x")
    assert not leases.lost
    monkeypatch.setattr(select, "poll", poll)
    sidecar._connection.close()
    assert leases.lost
