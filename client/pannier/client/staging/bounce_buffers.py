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
from pannier.client.staging.arena import Region, Spill
from pannier.client.staging.device_stream import Lane, Mark
from pannier.client.staging.pinned_memory import Ring, RingSlot


class Copy(NamedTuple):
    """A tensor to be copied."""

    name: str
    tensor: torch.Tensor
    """Detached."""
    target: Region | Spill
    offset: int
    place: torch.Tensor | None = None
    """The target as a tensor, if there is one."""


class Direct(NamedTuple):
    """A copy to pinned memory."""

    lane: Lane
    source: torch.Tensor
    address: int
    place: torch.Tensor | None = None
    """There, as a tensor like the source."""


class Landing(NamedTuple):
    """Where bytes of a ring's slot go."""

    target: Region | Spill
    offset: int
    size: int


@dataclass
class Bounce:
    """Copies by way of a ring's slot, one behind the other."""

    lane: Lane
    sources: list[torch.Tensor] = field(default_factory=list)
    """Of one dtype."""
    landings: list[Landing] = field(default_factory=list)
    size: int = 0
    """Bytes."""

    def add(self, copy: Copy) -> None:
        """One more tensor."""
        size = copy.tensor.nbytes
        self.sources.append(copy.tensor)
        self.landings.append(Landing(copy.target, copy.offset, size))
        self.size += size


class Bouncing:
    """Pieces on their way through the ring's slots. Not thread-safe."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: deque[tuple[Mark, RingSlot, list[Landing]]] = deque()

    def put(self, job: Bounce, *, wait: bool = True) -> bool:
        """Queues a job; False when there is no slot for it and ``wait`` is False."""
        slot = self._ring.take(wait=False)
        if slot is None:
            if not wait:
                return False
            if self._under_way:
                self._land()
                slot = self._ring.take(wait=False)
            while slot is None and self._under_way:
                self._land()
                slot = self._ring.take(wait=False)
            if slot is None:
                slot = self._ring.take(wait=True)
        assert slot is not None
        try:
            job.lane.copy([slot.memory[: job.size]], [job.lane.pack(job.sources)])
        finally:
            self._under_way.append((job.lane.mark(), slot, job.landings))
        return True

    def land_all(self) -> None:
        """Returns when all has arrived."""
        while self._under_way:
            self._land()

    def abandon(self) -> None:
        """Lets go of what has not arrived, once no device writes to the slots."""
        while self._under_way:
            mark, slot, _ = self._under_way.popleft()
            try:
                mark.synchronize()
            finally:
                self._ring.give(slot)

    def _land(self) -> None:
        mark, slot, landings = self._under_way[0]
        mark.synchronize()
        source = slot.address
        for target, offset, size in landings:
            # Without the GIL.
            ctypes.memmove(target.address + offset, source, size)
            source += size
        self._under_way.popleft()
        self._ring.give(slot)


def lanes_of(direct: Iterable[Direct], bounces: Iterable[Bounce]) -> list[Lane]:
    """Each lane once."""
    used = dict.fromkeys(copy.lane for copy in direct)
    return list(used | dict.fromkeys(bounce.lane for bounce in bounces))


def queue(copies: Iterable[Direct]) -> None:
    """Queues copies on their lanes."""
    by_lane: dict[Lane, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for copy in copies:
        targets, sources = by_lane.setdefault(copy.lane, ([], []))
        targets.append(_place(copy) if copy.place is None else copy.place)
        sources.append(copy.source)
    for lane, (targets, sources) in by_lane.items():
        lane.copy(targets, sources)


def _place(copy: Direct) -> torch.Tensor:
    source = copy.source
    # By address: a view of the memory would keep it from being unmapped.
    memory = (ctypes.c_char * source.nbytes).from_address(copy.address)
    with torch.inference_mode(False):
        place = torch.frombuffer(memory, dtype=source.dtype, count=source.numel())
    return place.view(source.shape)


def unpacked(job: Bounce) -> Iterator[Direct]:
    """The same without the ring, for pinned targets."""
    for source, landing in zip(job.sources, job.landings, strict=True):
        yield Direct(job.lane, source, landing.target.address + landing.offset)


def divided(copy: Copy, limit: int | None) -> Iterator[Copy]:
    """Divides a copy into pieces that are contiguous in the target.

    Args:
        copy: of a large tensor.
        limit: bytes of each piece. None: only what has to be made contiguous on the device is
            divided, so that it doesn't take as much memory there again.
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
    most = limit or pinned_memory.SLOT_BYTES
    if tensor.nbytes <= most:
        yield copy
        return
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    at = copy.offset
    for part in torch.split(tensor, max(1, most // row)):
        piece = copy._replace(tensor=part[0] if len(part) == 1 else part, offset=at, place=None)
        yield from divided(piece, limit) if piece.tensor.nbytes > most else (piece,)
        at += part.nbytes
