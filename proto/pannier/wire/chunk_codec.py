"""Codec of the messages of a ``Write`` stream, without copies under the GIL; checksums of whole files and their blocks.

protobuf would copy the payload twice while holding the GIL. The encoder here allocates an
uninitialised ``bytes`` of the final length and moves a hand-made prefix and the payload in with
``memmove``, which releases the GIL; the decoder keeps a memoryview of the message. Both implement
``WriteRequest`` of ``sidecar.proto`` exactly: the peer may use any protobuf implementation. The checksums
of a file and of its blocks are combined from those of its chunks, so that no byte is read twice.
Thread-safe.
"""

import ctypes
import functools
import struct
from array import array
from dataclasses import dataclass
from typing import Final

import crc32c

from pannier.v1 import sidecar_pb2
from pannier.wire.errors import InvalidRequestError

CHUNK_BYTES: Final = 2 << 20
"""Payload of one message: each costs both ends several switches between threads, and fresh pages if it is larger."""
ACKNOWLEDGE_BYTES: Final = 16 << 20
"""Bytes between two acknowledgements of a stream; a sender goes on for at least as many without one."""
REPLICA_CHUNK_BYTES: Final = 1 << 20
"""Payload of one message between sidecars. Smaller, since protobuf encodes it, and a rate limit delays it as a whole."""
MAX_MESSAGE_BYTES: Final = 256 << 20
"""Limit of any message (a global plan at thousands of ranks is the largest)."""

BLOCK_BYTES: Final = 8 << 20
"""Size of the blocks of a data file that have a checksum each, in new receipts; readers use the receipt's own size."""

_HEADER = 1 << 3 | 2
_OFFSET = 2 << 3 | 0
_CRC32C = 3 << 3 | 5
_DATA = 4 << 3 | 2

_Tables = tuple[list[int], list[int], list[int], list[int]]

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_BYTES_DATA = bytes.__basicsize__ - 1


@dataclass(slots=True)
class Chunk:
    """Part of a data file to send. ``address`` must stay valid until it is encoded."""

    offset: int
    crc32c: int
    address: int
    size: int


@dataclass(slots=True)
class ReceivedChunk:
    """Part of a received data file; ``data`` is a view of the message."""

    offset: int
    crc32c: int
    data: memoryview


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(message: sidecar_pb2.FileHeader | Chunk) -> bytes:
    """Serialises one ``WriteRequest``. Threads may call it at the same time."""
    if isinstance(message, sidecar_pb2.FileHeader):
        return sidecar_pb2.WriteRequest(header=message).SerializeToString()
    prefix = b"".join(
        (
            bytes((_OFFSET,)),
            _varint(message.offset),
            bytes((_CRC32C,)),
            message.crc32c.to_bytes(4, "little"),
            bytes((_DATA,)),
            _varint(message.size),
        )
    )
    out: bytes = _new_bytes(None, len(prefix) + message.size)
    start = id(out) + _BYTES_DATA
    ctypes.memmove(start, prefix, len(prefix))
    ctypes.memmove(start + len(prefix), message.address, message.size)
    return out


def decode(message: bytes) -> sidecar_pb2.FileHeader | ReceivedChunk:
    """Parses one ``WriteRequest``. Raises InvalidRequestError when it isn't one.

    Our own clients' chunks take the fast path; anything else in valid protobuf
    goes through the generated parser.
    """
    fast = _decode_chunk(message)
    if fast is not None:
        return fast
    try:
        request = sidecar_pb2.WriteRequest.FromString(message)
    except Exception as error:  # protobuf's DecodeError has no public base
        raise InvalidRequestError(
            f"a Write message of {len(message)} bytes is malformed: {error}"
        ) from error
    if request.HasField("header"):
        return request.header
    return ReceivedChunk(request.offset, request.crc32c, memoryview(request.data))


def _decode_chunk(message: bytes) -> ReceivedChunk | None:
    try:
        if message[0] != _OFFSET:
            return None
        offset, at = _read_varint(message, 1)
        if message[at] != _CRC32C:
            return None
        crc = int.from_bytes(message[at + 1 : at + 5], "little")
        if message[at + 5] != _DATA:
            return None
        size, at = _read_varint(message, at + 6)
    except IndexError:
        return None
    if at + size != len(message):
        return None
    return ReceivedChunk(offset, crc, memoryview(message)[at:])


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def combine_crc32c(crc: int, next_crc: int, length: int) -> int:
    """Checksum of bytes with ``crc`` followed by ``length`` bytes with ``next_crc``; reads no byte."""
    power = 0
    while crc and length:
        if length & 1:
            crc = _applied(_zeros(power), crc)
        length >>= 1
        power += 1
    return crc ^ next_crc


def _applied(tables: _Tables, crc: int) -> int:
    first, second, third, fourth = tables
    return first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]


@functools.cache
def _zeros(power: int) -> _Tables:
    """How 2^power appended zero bytes change the checksum before them: a table for each byte of that checksum.

    crc32c is linear: the change is the checksum with the zeros, less the zeros' own contribution.
    """
    if power:
        half = _zeros(power - 1)
        bits = [_applied(half, _applied(half, 1 << bit)) for bit in range(32)]
    else:
        own = crc32c.crc32c(b"\0")
        bits = [crc32c.crc32c(b"\0", 1 << bit) ^ own for bit in range(32)]
    tables: _Tables = ([0], [0], [0], [0])
    for byte, table in enumerate(tables):
        for bit in range(8):
            table += [entry ^ bits[8 * byte + bit] for entry in table]
    return tables


@dataclass(frozen=True)
class Checksums:
    """The checksums of the first ``size`` bytes of a file."""

    size: int = 0
    whole: int = 0
    blocks: tuple[int, ...] = ()
    """Of each block, the last of which may be shorter; empty: they aren't known."""

    def followed_by(self, data: memoryview, crc: int | None = None) -> "Checksums":
        """The checksums with ``data`` after those bytes.

        Args:
            crc: crc32c of ``data``, if it is known.
        """
        size, whole, blocks = self.size, self.whole, list(self.blocks)
        start = 0
        while start < len(data):
            piece = data[start : start + BLOCK_BYTES - size % BLOCK_BYTES]
            own = crc32c.crc32c(piece) if crc is None or len(piece) < len(data) else crc
            block = blocks.pop() if size % BLOCK_BYTES else 0
            blocks.append(combine_crc32c(block, own, len(piece)))
            whole = combine_crc32c(whole, own, len(piece))
            start += len(piece)
            size += len(piece)
        return Checksums(size, whole, tuple(blocks))

    def columns(self) -> tuple[int, bytes]:
        """``block_bytes`` and ``block_crc32c`` of a :class:`~pannier.v1.records_pb2.DataFile`."""
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            return 0, b""
        return BLOCK_BYTES, struct.pack(f"<{len(self.blocks)}I", *self.blocks)


class RunningChecksums:
    """The checksums of a file's bytes as they are read, in order; not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self._block = 0
        """Of the block that has begun."""
        self._blocks = array("I")

    def add(self, data: memoryview) -> None:
        """Adds the bytes that follow."""
        start = 0
        while start < len(data):
            piece = data[start : start + BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._block = crc32c.crc32c(piece, self._block)
            self.size += len(piece)
            start += len(piece)
            if not self.size % BLOCK_BYTES:
                self._blocks.append(self._block)
                self._block = 0

    def of(self, start: int, end: int) -> int:
        """The checksum of the bytes from ``start`` to ``end``: boundaries of blocks, or the end of all bytes so far."""
        crc = 0
        for at in range(start, end, BLOCK_BYTES):
            number, length = at // BLOCK_BYTES, min(BLOCK_BYTES, end - at)
            block = self._blocks[number] if number < len(self._blocks) else self._block
            crc = combine_crc32c(crc, block, length)
        return crc

    def result(self) -> Checksums:
        """The checksums of all bytes so far."""
        blocks = tuple(self._blocks)
        if self.size % BLOCK_BYTES:
            blocks = (*blocks, self._block)
        return Checksums(self.size, self.of(0, self.size), blocks)
