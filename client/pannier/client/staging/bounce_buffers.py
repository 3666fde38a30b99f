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
    """A tensor with elements to be copied, row-major."""

    name: str
    """Its key in the state, for errors."""
    tensor: torch.Tensor
    """Plain, detached."""
    target: FileBuffer | SpillBuffer
    offset: int
    """Of its first byte in ``target``."""
    view: torch.Tensor | None = None
    """The target as a tensor, if there is one."""

    def target_view(self) -> torch.Tensor:
        """The target as a tensor. It doesn't keep the memory from being unmapped."""
        if self.view is not None:
            return self.view
        tensor = self.tensor
        memory = (ctypes.c_char * tensor.nbytes).from_address(self.target.address + self.offset)
        with torch.inference_mode(False):
            view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel())
        return view.view(tensor.shape)


@dataclass
class BouncedCopy:
    """Tensors that are packed into one bounce buffer."""

    stream: SideStream
    copies: list[TensorCopy] = field(default_factory=list)
    """Of one dtype, in the order in which they are packed."""
    size: int = 0
    """Bytes."""

    def add(self, copy: TensorCopy) -> None:
        """Appends a tensor."""
        self.copies.append(copy)
        self.size += copy.tensor.nbytes


DirectCopies = dict[SideStream, list[TensorCopy]]
"""Copies to pinned memory, by stream."""


_Target = tuple[FileBuffer | SpillBuffer, int, int]
"""Memory that bytes of a bounce buffer are copied to; offset and size."""


class BounceQueue:
    """Copies on their way through bounce buffers. Not thread-safe."""

    def __init__(self, pool: PinnedBufferPool) -> None:
        self._pool = pool
        self._under_way: deque[tuple[DeviceEvent, PinnedBuffer, list[_Target]]] = deque()

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
            packed = copy.stream.pack([each.tensor for each in copy.copies])
            copy.stream.copy([buffer.memory[: copy.size]], [packed])
        finally:
            # Without the tensors, which needn't live as long.
            targets = [(each.target, each.offset, each.tensor.nbytes) for each in copy.copies]
            self._under_way.append((copy.stream.record_event(), buffer, targets))
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
        event, buffer, targets = self._under_way[0]
        event.synchronize()
        source = buffer.address
        for target, offset, size in targets:
            # Releases the GIL.
            ctypes.memmove(target.address + offset, source, size)
            source += size
        self._under_way.popleft()
        self._pool.release(buffer)


def streams_of(direct: DirectCopies, bounced: Iterable[BouncedCopy]) -> list[SideStream]:
    """The streams of these copies, each once."""
    return list(dict.fromkeys([*direct, *(copy.stream for copy in bounced)]))


def start_direct_copies(direct: DirectCopies) -> None:
    """Queues copies on their streams, with one call for each stream."""
    for stream, copies in direct.items():
        stream.copy([copy.target_view() for copy in copies], [copy.tensor for copy in copies])


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
