"""A played rank that loads: it requests blocks from a sidecar, over the raw calls, and maps them."""

import mmap
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import grpc

from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import open_dir
from pannier.client.transport.shared_memory import (
    connect_descriptors,
    fetch_descriptors,
    socket_beside,
)
from pannier.v1 import records_pb2, restore_pb2, restore_pb2_grpc
from pannier.wire.auth_token import digest, token_metadata
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums
from pannier.wire.version import WIRE_VERSION
from support.processes.channels import OWN_CONNECTION
from support.processes.stretch import BOUND_S

Block = restore_pb2.FetchedBlock


def data_file(name: str, data: bytes, *, receipt: bool = True) -> records_pb2.DataFile:
    """As a receipt has it, or without its checksums."""
    file = records_pb2.DataFile(name=name, size=len(data))
    if receipt:
        sums = Checksums().followed_by(memoryview(data))
        file.crc32c = sums.whole
        file.block_bytes, file.block_crc32c = sums.columns()
    return file


def committed(
    checkpoint_id: str, attempt: str, names: Sequence[str], options: Mapping[str, Any] | None = None
) -> list[records_pb2.DataFile]:
    """The files as the receipts in storage have them.

    Args:
        options: of the file system.
    """
    found = Receipts(open_dir(checkpoint_id, options), attempt).recorded(names, threads=1)
    return [found[name] for name in names]


@dataclass(frozen=True)
class Checkpoint:
    """What is loaded: the same on all its ranks."""

    id: str
    attempt: str
    files: Sequence[records_pb2.DataFile]
    load: str


class BlockReader:
    """One rank's stream. A context manager, at whose end the stream ends and the memory is unmapped.

    Args:
        address: of the rank's sidecar.
        hosts: of the load, by name and peer address; the rank's is number ``own``.
        token: of the rank's job, where the sidecar requires one.
    """

    def __init__(
        self,
        address: str,
        checkpoint: Checkpoint,
        *,
        rank: int = 0,
        hosts: Sequence[tuple[str, str]] = (),
        own: int = 0,
        token: str = "",
    ) -> None:
        self.address = address
        self._token = token
        self._metadata = token_metadata(token) if token else ()
        self.checkpoint = checkpoint
        self._start = restore_pb2.FetchStart(
            load=checkpoint.load,
            checkpoint_id=checkpoint.id,
            attempt=checkpoint.attempt,
            rank=rank,
            hosts=[restore_pb2.FetchHost(host=h, peer_address=a) for h, a in hosts],
            own=own,
            files=restore_pb2.FetchFiles(files=checkpoint.files),
            wire_version=WIRE_VERSION,
        )
        self._channel = grpc.insecure_channel(address, options=OWN_CONNECTION)
        self._stub: Any = restore_pb2_grpc.RestoreStub(self._channel)
        self._sent: queue.Queue[restore_pb2.FetchRequest | None] = queue.Queue()
        self._answers: queue.Queue[Block | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._receive)
        self._count = 0
        self._ready = threading.Event()
        self.alive = 0
        """Signs of life so far."""
        self.memory: mmap.mmap | None = None

    def locate(self, files: Sequence[str] = ()) -> restore_pb2.LocateResponse:
        """As a rank does before its load is planned."""
        request = restore_pb2.LocateRequest(
            attempt=self.checkpoint.attempt,
            files=files,
            load=self.checkpoint.load,
            checkpoint_id=self.checkpoint.id,
        )
        response: restore_pb2.LocateResponse = self._stub.Locate(
            request, timeout=BOUND_S, metadata=self._metadata
        )
        return response

    def __enter__(self) -> "BlockReader":
        self._sent.put(restore_pb2.FetchRequest(start=self._start))
        self._call = self._stub.Fetch(iter(self._sent.get, None), metadata=self._metadata)
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._sent.put(None)
        self._call.cancel()
        self._thread.join(BOUND_S)
        self._channel.close()
        if self.memory is not None:
            self.memory.close()

    def request(
        self,
        block: int,
        *,
        file: int = 0,
        holders: Sequence[int] = (),
        owner: int | None = None,
        readers: int = 0,
        owner_readers: int = 0,
    ) -> int:
        """Requests a block; its id."""
        self._count += 1
        request = restore_pb2.BlockRequest(
            id=self._count,
            file=file,
            block=block,
            holders=holders,
            owner=owner,
            readers=readers,
            owner_readers=owner_readers,
        )
        self._sent.put(restore_pb2.FetchRequest(block=request))
        return self._count

    def next(self) -> Block:
        """The next block that arrives; raises the error that ended the stream."""
        answer = self._answers.get(timeout=BOUND_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def blocks(self, count: int) -> list[Block]:
        """So many, in the order of their requests."""
        return sorted((self.next() for _ in range(count)), key=lambda block: block.id)

    def content(self, block: Block) -> bytes:
        """A block's bytes, which have the checksum that came with it."""
        assert not block.error, block.error
        assert self._ready.wait(BOUND_S)
        assert self.memory is not None
        data = self.memory[block.offset : block.offset + block.size]
        assert crc32c.crc32c(data) == block.crc32c
        return data

    def take(self, block: Block) -> bytes:
        """A block's bytes, after which it is released."""
        data = self.content(block)
        self.release(block.id)
        return data

    def release(self, number: int) -> None:
        self._sent.put(restore_pb2.FetchRequest(done=number))

    def read(self, count: int, **arguments: Any) -> bytes:
        """The first ``count`` blocks of the file, requested together."""
        for number in range(count):
            self.request(number, **arguments)
        found = {}
        for _ in range(count):
            block = self.next()
            found[block.id] = self.take(block)
        return b"".join(found[key] for key in sorted(found))

    def _receive(self) -> None:
        try:
            for response in self._responses():
                kind = response.WhichOneof("response")
                if kind == "memory":
                    self._map(response.memory)
                elif kind == "block":
                    self._answers.put(response.block)
                else:
                    self.alive += 1
        except Exception as error:  # noqa: BLE001 - raised in the test
            self._answers.put(error)

    def _responses(self) -> Iterator[restore_pb2.FetchResponse]:
        yield from self._call

    def _map(self, memory: restore_pb2.FetchMemory) -> None:
        path = socket_beside(self.address, memory.descriptors)
        first = digest(self._token) if memory.token_first else b""
        with connect_descriptors(path, first) as connection:
            (fd,) = fetch_descriptors(connection, memory.token, 1)
        try:
            self.memory = mmap.mmap(fd, memory.size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._ready.set()


def whole_blocks(count: int, seed: int = 1) -> bytes:
    """Bytes that differ from block to block; the last block is shorter."""
    size = count * BLOCK_BYTES - 4321
    line = bytes((seed * 31 + number * 7) % 251 for number in range(65537))
    return (line * (size // len(line) + 1))[:size]
