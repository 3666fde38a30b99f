"""What copies are made of: pieces that go straight to pinned memory, or by way of the ring.

In: tensors of devices and where their elements go. Out: pieces, and bytes in their place. Blocking
code.
"""

import ctypes
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pannier.client.staging import pinned_memory
from pannier.client.staging.arena import FileBuffer, SpillBuffer
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.staging.pinned_memory import PinnedBuffer, PinnedBufferPool


class TensorCopy(NamedTuple):
    """A tensor to be copied."""

    name: str
    tensor: torch.Tensor
    """Detached."""
    target: FileBuffer | SpillBuffer
    offset: int
    place: torch.Tensor | None = None
    """The target as a tensor, if there is one."""


class DirectCopy(NamedTuple):
    """A copy to pinned memory."""

    stream: SideStream
    source: torch.Tensor
    address: int
    place: torch.Tensor | None = None
    """There, as a tensor like the source."""


class CopyOut(NamedTuple):
    """Where bytes of a ring's buffer go."""

    target: FileBuffer | SpillBuffer
    offset: int
    size: int


@dataclass
class BouncedCopy:
    """Copies by way of a ring's buffer, one behind the other."""

    stream: SideStream
    sources: list[torch.Tensor] = field(default_factory=list)
    """Of one dtype."""
    copy_outs: list[CopyOut] = field(default_factory=list)
    size: int = 0
    """Bytes."""

    def add(self, copy: TensorCopy) -> None:
        """One more tensor."""
        size = copy.tensor.nbytes
        self.sources.append(copy.tensor)
        self.copy_outs.append(CopyOut(copy.target, copy.offset, size))
        self.size += size


class BounceQueue:
    """Pieces on their way through the ring's slots. Not thread-safe."""

    def __init__(self, pool: PinnedBufferPool) -> None:
        self._pool = pool
        self._under_way: deque[tuple[DeviceEvent, PinnedBuffer, list[CopyOut]]] = deque()

    def put(self, job: BouncedCopy, *, wait: bool = True) -> bool:
        """Queues a job; False when there is no buffer for it and ``wait`` is False."""
        buffer = self._pool.acquire(wait=False)
        if buffer is None:
            if not wait:
                return False
            if self._under_way:
                self._land()
                buffer = self._pool.acquire(wait=False)
            while buffer is None and self._under_way:
                self._land()
                buffer = self._pool.acquire(wait=False)
            if buffer is None:
                buffer = self._pool.acquire(wait=True)
        assert buffer is not None
        try:
            job.stream.copy([buffer.memory[: job.size]], [job.stream.pack(job.sources)])
        finally:
            self._under_way.append((job.stream.record_event(), buffer, job.copy_outs))
        return True

    def finish_all(self) -> None:
        """Returns when all has arrived."""
        while self._under_way:
            self._land()

    def abandon(self) -> None:
        """Lets go of what has not arrived, once no device writes to the slots."""
        while self._under_way:
            event, buffer, _ = self._under_way.popleft()
            try:
                event.synchronize()
            finally:
                self._pool.release(buffer)

    def _land(self) -> None:
        event, buffer, copy_outs = self._under_way[0]
        event.synchronize()
        source = buffer.address
        for target, offset, size in copy_outs:
            # Without the GIL.
            ctypes.memmove(target.address + offset, source, size)
            source += size
        self._under_way.popleft()
        self._pool.release(buffer)


def streams_of(direct: Iterable[DirectCopy], bounces: Iterable[BouncedCopy]) -> list[SideStream]:
    """Each stream once."""
    used = dict.fromkeys(copy.stream for copy in direct)
    return list(used | dict.fromkeys(bounce.stream for bounce in bounces))


def start_direct_copies(copies: Iterable[DirectCopy]) -> None:
    """Queues copies on their streams."""
    by_stream: dict[SideStream, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for copy in copies:
        targets, sources = by_stream.setdefault(copy.stream, ([], []))
        targets.append(_target_view(copy) if copy.place is None else copy.place)
        sources.append(copy.source)
    for stream, (targets, sources) in by_stream.items():
        stream.copy(targets, sources)


def _target_view(copy: DirectCopy) -> torch.Tensor:
    source = copy.source
    # By address: a view of the memory would keep it from being unmapped.
    memory = (ctypes.c_char * source.nbytes).from_address(copy.address)
    with torch.inference_mode(False):
        place = torch.frombuffer(memory, dtype=source.dtype, count=source.numel())
    return place.view(source.shape)


def as_direct_copies(job: BouncedCopy) -> Iterator[DirectCopy]:
    """The same without the ring, for pinned targets."""
    for source, copy_out in zip(job.sources, job.copy_outs, strict=True):
        yield DirectCopy(job.stream, source, copy_out.target.address + copy_out.offset)


def split_copy(copy: TensorCopy, limit: int | None) -> Iterator[TensorCopy]:
    """Divides a copy into pieces that are contiguous in the target.

    Args:
        copy: of a large tensor.
        limit: bytes of each piece. None: only what has to be made contiguous on the device is
            split_copy, so that it doesn't take as much memory there again.
    """
    tensor = copy.tensor
    if tensor.is_contiguous():
        if limit is None or tensor.nbytes <= limit:
            yield copy
            return
        at = copy.offset
        for part in torch.split(tensor.view(-1), limit // tensor.element_size()):
            yield copy._replace(tensor=part, offset=at, place=None)
            at += part.nbytes
        return
    most = limit or pinned_memory.BUFFER_BYTES
    if tensor.nbytes <= most:
        yield copy
        return
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    at = copy.offset
    for part in torch.split(tensor, max(1, most // row)):
        piece = copy._replace(tensor=part[0] if len(part) == 1 else part, offset=at, place=None)
        yield from split_copy(piece, limit) if piece.tensor.nbytes > most else (piece,)
        at += part.nbytes
