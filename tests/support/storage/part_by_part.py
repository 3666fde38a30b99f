"""A directory as what :func:`~pannier.client.loading.range_reader.read_ranges` reads."""

from collections.abc import Sequence
from typing import Protocol

from pannier.client.restore.local_file import Part


class Files(Protocol):
    def read_into(self, name: str, offset: int, target: memoryview) -> None: ...


class PartByPart:
    """Reads each part by itself, unless blocks are wanted.

    Args:
        blocks: whether parts of a block are asked for together; :attr:`asked` has how many each time.
    """

    def __init__(self, files: Files, *, blocks: bool = False) -> None:
        self._files = files
        self._blocks = blocks
        self.asked: list[int] = []

    def reads_blocks(self, name: str) -> bool:
        return self._blocks

    def read_parts(self, name: str, parts: Sequence[Part]) -> None:
        self.asked.append(len(parts))
        for offset, target in parts:
            self._files.read_into(name, offset, target)
