"""Leased spool files: what is unmapped when, and what is released when mapping fails."""

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pannier.client.staging.arena_pool import ArenaPool
from pannier.client.staging.pinned_memory import pin
from pannier.client.transport.shared_memory import FileLeases
from pannier.v1 import sidecar_pb2
from pannier.wire.file_layout import STAMP_BYTES

MIB = 1 << 20
PATTERN = b"\5" * 16


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
        self.pass_descriptors(files)
        return sidecar_pb2.ReserveResponse(token=b"t" * 16, files=files)

    def pass_descriptors(self, files: Sequence[sidecar_pb2.LeasedFile]) -> None:
        """They wait in the socket for whoever fetches them."""
        fds = [os.memfd_create(file.spool_file) for file in files]
        for fd, file in zip(fds, files, strict=True):
            os.truncate(fd, file.capacity + STAMP_BYTES)
        socket.send_fds(self._connection, [bytes([len(fds)])], fds)
        for fd in fds:
            os.close(fd)

    def release(self, files: Sequence[str]) -> None:
        self.released += files
        self.mapped_at_release = mapped(self.address)

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
