"""Checkpoints whose bytes an extension of torch's writer transforms, as compression would."""

import io
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension


class Flipped(StreamTransformExtension):
    """Inverts each byte: what compression is to a reader that doesn't know it."""

    class _Stream(io.RawIOBase):
        def __init__(self, stream: IO[bytes]) -> None:
            self.stream = stream

        def write(self, data: Any) -> int:
            return self.stream.write(bytes(255 - byte for byte in bytes(data)))

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data = self.stream.read(len(buffer))
            buffer[: len(data)] = bytes(255 - byte for byte in data)
            return len(data)

    @staticmethod
    def registry_name() -> str:
        return "stream.flipped"

    @staticmethod
    def from_descriptor(version: str) -> "Flipped":
        return Flipped()

    def get_descriptor(self) -> str:
        return "stream.flipped/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", self._Stream(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", self._Stream(input))


def transformed(path: Path) -> tuple[dcp.FileSystemWriter, dcp.FileSystemReader]:
    registry = ExtensionRegistry()
    registry.register(Flipped)
    writer = dcp.FileSystemWriter(path, _extensions=[Flipped()])
    return writer, dcp.FileSystemReader(path, _extension_registry=registry)
