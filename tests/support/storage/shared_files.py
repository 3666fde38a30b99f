"""The blocks of a directory's files, as a rank has them through sidecars; they come when a test lets them."""

import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import crc32c

from pannier.client.restore.shared_blocks import FetchedBlock
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import IntegrityError, PannierError


@dataclass(frozen=True)
class Place:
    """Of a block."""

    offset: int
    size: int
    crc32c: int | None


class SharedFiles:
    """A ``BlockReader``.

    Args:
        directory: of the files.
        wait: leave requests pending for :meth:`answer`.
    """

    def __init__(self, directory: Path, *, wait: bool = False) -> None:
        self.directory = directory
        self.wait = wait
        self.requests: list[tuple[str, int]] = []
        self.pending: list[Future[FetchedBlock]] = []
        self.released = 0
        self.signs = 0
        self.error: PannierError | None = None
        """What requests end with."""

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def find(self, name: str, block: int) -> Place | None:
        offset = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, os.path.getsize(self.directory / name) - offset)
        if size <= 0:
            return None
        return Place(offset, size, crc32c.crc32c(self.content(name, block)))

    def first_source(self, name: str, block: int) -> str:
        return "node-7"

    def content(self, name: str, block: int) -> bytes:
        with (self.directory / name).open("rb") as file:
            file.seek(block * BLOCK_BYTES)
            return file.read(BLOCK_BYTES)

    def message_count(self) -> int:
        return self.signs

    def request(self, name: str, block: int) -> "Future[FetchedBlock]":
        self.requests.append((name, block))
        wanted: Future[FetchedBlock] = Future()
        if self.error is not None:
            wanted.set_exception(self.error)
        elif self.wait:
            self.pending.append(wanted)
        else:
            wanted.set_result(Block(self, self.content(name, block)))
        return wanted

    def answer(self, content: bytes) -> None:
        """Lets the earliest pending request have this block."""
        self.signs += 1
        self.pending.pop(0).set_result(Block(self, content))

    def close(self) -> None:
        for each in self.pending:
            each.set_exception(self.error or IntegrityError("the reader was closed"))
        self.pending.clear()


class Block:
    """One that has come."""

    def __init__(self, files: SharedFiles, content: bytes) -> None:
        self.content = content
        self.files = files

    def copy(self, memory: memoryview) -> str:
        self.release()
        if len(self.content) != len(memory):
            raise IntegrityError("a block of another size")
        memory[:] = self.content
        return "node-7"

    def release(self) -> None:
        self.files.released += 1
