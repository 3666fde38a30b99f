"""Copies from devices to host memory, on a side stream, in as few and large pieces as can be.

In: plain tensors of devices and where their elements go, row-major. Out: nothing once
:meth:`DeviceCopies.wait` returns, but a :class:`Rest` for what may arrive later. Large tensors go
straight to a pinned arena. Small ones are packed on the device and go, like all tensors for an
arena that can't be pinned, to a ring of pinned buffers and from there by memmove.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from pannier.client import torch_compat
from pannier.client.staging import device_stream, pinned_memory
from pannier.client.staging.arena import Arena, Region, Spill
from pannier.client.staging.bounce_buffers import (
    Bounce,
    Bouncing,
    Copy,
    Direct,
    divided,
    lanes_of,
    queue,
)
from pannier.client.staging.deferred_copies import Rest
from pannier.client.staging.device_stream import Lane, Mark
from pannier.client.staging.pinned_memory import Ring

_SMALL: Final = 64 << 10
"""Bytes; queueing a copy of so little costs the host more than the device."""
_BATCH: Final = 64 << 20
"""Bytes that are gathered before they are queued."""
_HELD: Final = 512 << 20
"""Bytes of tensors that are kept alive by copies under way: a planner may have made them for us."""
SNAPSHOT: Final = 256 << 20
"""Bytes, at most, of what may change at once that are copied on the device first."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

Late = Callable[[torch.Tensor], bool]
"""Whether a tensor is changed by nothing but what waits for its copy."""


@dataclass(frozen=True)
class Means:
    """By which copies are made; tests have others."""

    lane: Callable[[torch.device], Lane] = device_stream.lane
    pin: Callable[..., str] = pinned_memory.pin
    ring: Ring = pinned_memory.ring


USUAL: Final = Means()


class DeviceCopies:
    """The copies of one save. Not thread-safe.

    Args:
        late: tells which tensors may arrive after :meth:`wait`. None: none may.
    """

    def __init__(self, late: Late | None = None, means: Means | None = None) -> None:
        self._late = late
        self._means = means or USUAL
        self._gathered: list[Copy] = []
        self._gathered_bytes = 0
        self._bouncing = Bouncing(self._means.ring)
        self._held: deque[tuple[list[Mark], list[Copy], int]] = deque()
        self._rest: list[Copy] = []
        self._fleeting: list[Copy] = []
        """What may change at once, and is copied on the device before."""
        self._fleeting_bytes = 0
        self._pinned: dict[Region | Spill, bool] = {}
        self.how = ""
        """The way that was taken, for people; empty when nothing came from a device."""

    def add(
        self,
        tensor: torch.Tensor,
        target: Region | Spill,
        offset: int,
        *,
        name: str = "",
        value: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        """Takes on a copy of a plain tensor with elements.

        Args:
            tensor: the source.
            target: where it goes.
            offset: of its first byte there.
            name: for errors.
            value: what ``tensor`` was detached from.
            place: the target as a tensor, by address, if there is one.
        """
        copy = Copy(name, tensor.detach(), target, offset, place)
        if self._late is not None and isinstance(target, Region):
            if self._late(tensor if value is None else value):
                self._rest.append(copy)
                return
            if self._fleeting_bytes + tensor.nbytes <= SNAPSHOT:
                self._fleeting.append(copy)
                self._fleeting_bytes += tensor.nbytes
                return
        self._gathered.append(copy)
        self._gathered_bytes += tensor.nbytes
        if self._gathered_bytes >= _BATCH:
            self._queue_gathered()

    def run(self) -> None:
        """Queues all that must arrive, and makes sure of the rest that may change."""
        self._rest += self._snapshots()
        self._queue_gathered()

    def wait(self) -> None:
        """Returns when what was queued has arrived; what was not is dropped. Also after a failure."""
        self._gathered.clear()
        self._gathered_bytes = 0
        try:
            self._bouncing.land_all()
            while self._held:
                self._release_oldest()
        finally:
            self._bouncing.abandon()

    def rest(self) -> "Rest | None":
        """Queues what may arrive later, as far as there is room; the last call of a save."""
        copies, self._rest = self._rest, []
        if not copies:
            return None
        direct, bounces = self._divided(copies)
        _follow(copies, self._means)
        return Rest(copies, direct, bounces, Bouncing(self._means.ring), how=self.how)

    def _snapshots(self) -> list[Copy]:
        copies, self._fleeting = self._fleeting, []
        snapshots = []
        for number, copy in enumerate(copies):
            try:
                taken = self._means.lane(copy.tensor.device).snapshot(copy.tensor)
            except torch.OutOfMemoryError:
                # The device has no room: then the host waits for these.
                self._gathered += copies[number:]
                break
            snapshots.append(copy._replace(tensor=taken))
        return snapshots

    def _queue_gathered(self) -> None:
        copies, self._gathered = self._gathered, []
        size, self._gathered_bytes = self._gathered_bytes, 0
        if not copies:
            return
        direct, bounces = self._divided(copies)
        _follow(copies, self._means)
        try:
            for job in bounces:
                self._bouncing.put(job)
            queue(direct)
        finally:
            marks = [lane.mark() for lane in lanes_of(direct, bounces)]
            self._held.append((marks, copies, size))
        while len(self._held) > 1 and sum(entry[2] for entry in self._held) > _HELD:
            self._release_oldest()

    def _release_oldest(self) -> None:
        marks, _, _ = self._held[0]
        for mark in marks:
            mark.synchronize()
        self._held.popleft()

    def _divided(self, copies: Iterable[Copy]) -> tuple[list[Direct], list[Bounce]]:
        """Copies as pieces that fit; small ones packed."""
        direct: list[Direct] = []
        bounces: list[Bounce] = []
        packs: dict[tuple[Lane, torch.dtype], Bounce] = {}
        for copy in copies:
            lane = self._means.lane(copy.tensor.device)
            size = copy.tensor.nbytes
            is_pinned = self._is_pinned(copy)
            if size < _SMALL:
                key = (lane, copy.tensor.dtype)
                pack = packs.get(key)
                if pack is None or pack.size + size > self._means.ring.slot_bytes:
                    pack = packs[key] = Bounce(lane)
                    bounces.append(pack)
                pack.add(copy)
            elif is_pinned:
                direct += [
                    Direct(lane, piece.tensor, piece.target.address + piece.offset, piece.place)
                    for piece in divided(copy, None)
                ]
            else:
                for piece in divided(copy, self._means.ring.slot_bytes):
                    bounce = Bounce(lane)
                    bounce.add(piece)
                    bounces.append(bounce)
        return direct, bounces

    def _is_pinned(self, copy: Copy) -> bool:
        target = copy.target
        known = self._pinned.get(target)
        if known is None:
            reason = "it may move"
            if isinstance(target, Region) and target.mapping is not None:
                reason = self._means.pin(target.mapping, copy.tensor.device.type)
                self.how = f"bounced: {reason}" if reason else self.how or "pinned"
            known = self._pinned[target] = not reason
        return known


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """This rank's plain tensors on devices with streams, at any depth of mappings and lists."""
    if isinstance(value, torch.Tensor):
        for tensor in torch_compat.local_tensors(value):
            if tensor.device.type in device_stream.ASYNC_DEVICES and type(tensor) in _PLAIN:
                yield tensor
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def make_ready(arena: Arena, state: Any, means: Means | None = None) -> None:
    """Pins what the first save of ``state`` into ``arena`` would have to pin."""
    means = means or USUAL
    for device in {tensor.device for tensor in tensors_in(state)}:
        means.lane(device)
        means.ring.make_ready()
        for region in arena.files:
            if region.mapping is not None:
                means.pin(region.mapping, device.type)


def _follow(copies: Iterable[Copy], means: Means) -> None:
    for device in {copy.tensor.device for copy in copies}:
        means.lane(device).follow()
