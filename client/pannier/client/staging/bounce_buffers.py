"""Copies from devices to the host: directly into pinned memory, or by way of a bounce buffer.

In: tensors on devices and their offsets in the arena. Out: the bytes in the arena. Large copies are
split, small ones packed into one bounce buffer. Blocking.
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
    """Its key in the state, for errors."""
    tensor: torch.Tensor
    """Detached."""
    target: FileBuffer | SpillBuffer
    offset: int
    """Of its first byte in ``target``."""
    view: torch.Tensor | None = None
    """The target as a tensor, if there is one."""


class DirectCopy(NamedTuple):
    """A copy to pinned memory."""

    stream: SideStream
    source: torch.Tensor
    address: int
    """Of its first byte in host memory."""
    view: torch.Tensor | None = None
    """The target as a tensor like the source, if there is one."""


class CopyOut(NamedTuple):
    """Where bytes of a bounce buffer are copied to."""

    target: FileBuffer | SpillBuffer
    offset: int
    size: int
    """Bytes."""


@dataclass
class BouncedCopy:
    """Tensors that are packed into one bounce buffer."""

    stream: SideStream
    sources: list[torch.Tensor] = field(default_factory=list)
    """Of one dtype."""
    copy_outs: list[CopyOut] = field(default_factory=list)
    """One per source, in the order in which they are packed."""
    size: int = 0
    """Bytes."""

    def add(self, copy: TensorCopy) -> None:
        """Appends a tensor."""
        size = copy.tensor.nbytes
        self.sources.append(copy.tensor)
        self.copy_outs.append(CopyOut(copy.target, copy.offset, size))
        self.size += size


class BounceQueue:
    """Copies on their way through bounce buffers. Not thread-safe."""

    def __init__(self, pool: PinnedBufferPool) -> None:
        self._pool = pool
        self._under_way: deque[tuple[DeviceEvent, PinnedBuffer, list[CopyOut]]] = deque()

    def put(self, copy: BouncedCopy, *, wait: bool = True) -> bool:
        """Queues a copy; False when no buffer is free and ``wait`` is False."""
        buffer = self._pool.acquire(wait=False)
        if buffer is None and not wait:
            return False
        while buffer is None and self._under_way:
            self._finish_oldest()
            buffer = self._pool.acquire(wait=False)
        if buffer is None:
            # This thread holds no buffer here. Threads that hold buffers never wait for another one.
            buffer = self._pool.acquire(wait=True)
        assert buffer is not None
        try:
            copy.stream.copy([buffer.memory[: copy.size]], [copy.stream.pack(copy.sources)])
        finally:
            self._under_way.append((copy.stream.record_event(), buffer, copy.copy_outs))
        return True

    def finish_all(self) -> None:
        """Returns when every queued copy has reached its target."""
        while self._under_way:
            self._finish_oldest()

    def abandon(self) -> None:
        """Drops the queued copies, once no device writes to their buffers any more."""
        while self._under_way:
            event, buffer, _ = self._under_way.popleft()
            try:
                event.synchronize()
            finally:
                self._pool.release(buffer)

    def _finish_oldest(self) -> None:
        event, buffer, copy_outs = self._under_way[0]
        event.synchronize()
        source = buffer.address
        for target, offset, size in copy_outs:
            # Releases the GIL.
            ctypes.memmove(target.address + offset, source, size)
            source += size
        self._under_way.popleft()
        self._pool.release(buffer)


def streams_of(direct: Iterable[DirectCopy], bounced: Iterable[BouncedCopy]) -> list[SideStream]:
    """The streams of these copies, each once."""
    used = dict.fromkeys(copy.stream for copy in direct)
    return list(used | dict.fromkeys(copy.stream for copy in bounced))


def start_direct_copies(copies: Iterable[DirectCopy]) -> None:
    """Queues copies on their streams, with one call for each."""
    by_stream: dict[SideStream, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for copy in copies:
        targets, sources = by_stream.setdefault(copy.stream, ([], []))
        targets.append(_target_view(copy) if copy.view is None else copy.view)
        sources.append(copy.source)
    for stream, (targets, sources) in by_stream.items():
        stream.copy(targets, sources)


def _target_view(copy: DirectCopy) -> torch.Tensor:
    source = copy.source
    # By address: a view of the memory would keep it from being unmapped.
    memory = (ctypes.c_char * source.nbytes).from_address(copy.address)
    with torch.inference_mode(False):
        view = torch.frombuffer(memory, dtype=source.dtype, count=source.numel())
    return view.view(source.shape)


def as_direct_copies(copy: BouncedCopy) -> Iterator[DirectCopy]:
    """The same copies without a bounce buffer, for pinned targets."""
    for source, copy_out in zip(copy.sources, copy.copy_outs, strict=True):
        yield DirectCopy(copy.stream, source, copy_out.target.address + copy_out.offset)


def split_copy(copy: TensorCopy, limit: int | None) -> Iterator[TensorCopy]:
    """Splits a copy into pieces that are contiguous in the target.

    Args:
        copy: of a large tensor.
        limit: bytes of each piece. None: only a tensor that has to be made contiguous on the
            device is split, so that it doesn't take its whole size there again.
    """
    tensor = copy.tensor
    if tensor.is_contiguous():
        if limit is None or tensor.nbytes <= limit:
            yield copy
            return
        offset = copy.offset
        for flat in torch.split(tensor.view(-1), limit // tensor.element_size()):
            yield copy._replace(tensor=flat, offset=offset, view=None)
            offset += flat.nbytes
        return
    most = limit or pinned_memory.BUFFER_BYTES
    if tensor.nbytes <= most:
        yield copy
        return
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    offset = copy.offset
    for rows in torch.split(tensor, max(1, most // row)):
        piece = copy._replace(tensor=rows[0] if len(rows) == 1 else rows, offset=offset, view=None)
        yield from split_copy(piece, limit) if piece.tensor.nbytes > most else (piece,)
        offset += rows.nbytes
