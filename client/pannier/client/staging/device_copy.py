"""Copies from devices to host memory, on a side stream, in as few and large pieces as can be.

In: plain tensors of devices and where their elements go, row-major. Out: nothing once
:meth:`DeviceCopies.wait` returns, but a :class:`DeferredCopies` for what may arrive later. Large tensors go
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
from pannier.client.staging.arena import Arena, FileBuffer, SpillBuffer
from pannier.client.staging.bounce_buffers import (
    BouncedCopy,
    BounceQueue,
    DirectCopy,
    TensorCopy,
    split_copy,
    start_direct_copies,
    streams_of,
)
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.staging.pinned_memory import PinnedBufferPool

_SMALL: Final = 64 << 10
"""Bytes; queueing a copy of so little costs the host more than the device."""
_BATCH: Final = 64 << 20
"""Bytes that are gathered before they are queued."""
_HELD: Final = 512 << 20
"""Bytes of tensors that are kept alive by copies under way: a planner may have made them for us."""
SNAPSHOT_BYTES: Final = 256 << 20
"""Bytes, at most, of what may change at once that are copied on the device first."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

MayDefer = Callable[[torch.Tensor], bool]
"""Whether a tensor is changed by nothing but what waits for its copy."""


@dataclass(frozen=True)
class CopyBackend:
    """By which copies are made; tests have others."""

    side_stream: Callable[[torch.device], SideStream] = device_stream.side_stream
    pin: Callable[..., str] = pinned_memory.pin
    pool: PinnedBufferPool = pinned_memory.shared_pool


DEFAULT_BACKEND: Final = CopyBackend()


class DeviceCopies:
    """The copies of one save. Not thread-safe.

    Args:
        may_defer: tells which tensors may arrive after :meth:`wait`. None: none may.
    """

    def __init__(
        self, may_defer: MayDefer | None = None, backend: CopyBackend | None = None
    ) -> None:
        self._may_defer = may_defer
        self._backend = backend or DEFAULT_BACKEND
        self._gathered: list[TensorCopy] = []
        self._gathered_bytes = 0
        self._bouncing = BounceQueue(self._backend.pool)
        self._held: deque[tuple[list[DeviceEvent], list[TensorCopy], int]] = deque()
        self._deferred: list[TensorCopy] = []
        self._fleeting: list[TensorCopy] = []
        """What may change at once, and is copied on the device before."""
        self._fleeting_bytes = 0
        self._pinned: dict[FileBuffer | SpillBuffer, bool] = {}
        self.copy_description = ""
        """The way that was taken, for people; empty when nothing came from a device."""

    def add(
        self,
        tensor: torch.Tensor,
        target: FileBuffer | SpillBuffer,
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
        copy = TensorCopy(name, tensor.detach(), target, offset, place)
        if self._may_defer is not None and isinstance(target, FileBuffer):
            if self._may_defer(tensor if value is None else value):
                self._deferred.append(copy)
                return
            if self._fleeting_bytes + tensor.nbytes <= SNAPSHOT_BYTES:
                self._fleeting.append(copy)
                self._fleeting_bytes += tensor.nbytes
                return
        self._gathered.append(copy)
        self._gathered_bytes += tensor.nbytes
        if self._gathered_bytes >= _BATCH:
            self._queue_gathered()

    def run(self) -> None:
        """Queues all that must arrive, and makes sure of the rest that may change."""
        self._deferred += self._snapshots()
        self._queue_gathered()

    def wait(self) -> None:
        """Returns when what was queued has arrived; what was not is dropped. Also after a failure."""
        self._gathered.clear()
        self._gathered_bytes = 0
        try:
            self._bouncing.finish_all()
            while self._held:
                self._release_oldest()
        finally:
            self._bouncing.abandon()

    def start_deferred(self) -> DeferredCopies | None:
        """Queues what may arrive later, as far as there is room; the last call of a save."""
        copies, self._deferred = self._deferred, []
        if not copies:
            return None
        direct, bounces = self._divided(copies)
        _follow(copies, self._backend)
        return DeferredCopies(
            copies,
            direct,
            bounces,
            BounceQueue(self._backend.pool),
            copy_description=self.copy_description,
        )

    def _snapshots(self) -> list[TensorCopy]:
        copies, self._fleeting = self._fleeting, []
        snapshots = []
        for number, copy in enumerate(copies):
            try:
                taken = self._backend.side_stream(copy.tensor.device).snapshot(copy.tensor)
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
        _follow(copies, self._backend)
        try:
            for job in bounces:
                self._bouncing.put(job)
            start_direct_copies(direct)
        finally:
            events = [stream.record_event() for stream in streams_of(direct, bounces)]
            self._held.append((events, copies, size))
        while len(self._held) > 1 and sum(entry[2] for entry in self._held) > _HELD:
            self._release_oldest()

    def _release_oldest(self) -> None:
        events, _, _ = self._held[0]
        for event in events:
            event.synchronize()
        self._held.popleft()

    def _divided(self, copies: Iterable[TensorCopy]) -> tuple[list[DirectCopy], list[BouncedCopy]]:
        """Copies as pieces that fit; small ones packed."""
        direct: list[DirectCopy] = []
        bounces: list[BouncedCopy] = []
        packs: dict[tuple[SideStream, torch.dtype], BouncedCopy] = {}
        for copy in copies:
            stream = self._backend.side_stream(copy.tensor.device)
            size = copy.tensor.nbytes
            is_pinned = self._is_pinned(copy)
            if size < _SMALL:
                key = (stream, copy.tensor.dtype)
                pack = packs.get(key)
                if pack is None or pack.size + size > self._backend.pool.buffer_bytes:
                    pack = packs[key] = BouncedCopy(stream)
                    bounces.append(pack)
                pack.add(copy)
            elif is_pinned:
                direct += [
                    DirectCopy(
                        stream, piece.tensor, piece.target.address + piece.offset, piece.place
                    )
                    for piece in split_copy(copy, None)
                ]
            else:
                for piece in split_copy(copy, self._backend.pool.buffer_bytes):
                    bounce = BouncedCopy(stream)
                    bounce.add(piece)
                    bounces.append(bounce)
        return direct, bounces

    def _is_pinned(self, copy: TensorCopy) -> bool:
        target = copy.target
        known = self._pinned.get(target)
        if known is None:
            reason = "it may move"
            if isinstance(target, FileBuffer) and target.mapping is not None:
                reason = self._backend.pin(target.mapping, copy.tensor.device.type)
                self.copy_description = (
                    f"bounced: {reason}" if reason else self.copy_description or "pinned"
                )
            known = self._pinned[target] = not reason
        return known


def device_tensors(value: Any) -> Iterator[torch.Tensor]:
    """This rank's plain tensors on devices with streams, at any depth of mappings and lists."""
    if isinstance(value, torch.Tensor):
        for tensor in torch_compat.local_tensors(value):
            if tensor.device.type in device_stream.ASYNC_DEVICES and type(tensor) in _PLAIN:
                yield tensor
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from device_tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from device_tensors(inner)


def prepare_arena(arena: Arena, state: Any, backend: CopyBackend | None = None) -> None:
    """Pins what the first save of ``state`` into ``arena`` would have to pin."""
    backend = backend or DEFAULT_BACKEND
    for device in {tensor.device for tensor in device_tensors(state)}:
        backend.side_stream(device)
        backend.pool.allocate_all()
        for buffer in arena.files:
            if buffer.mapping is not None:
                backend.pin(buffer.mapping, device.type)


def _follow(copies: Iterable[TensorCopy], backend: CopyBackend) -> None:
    for device in {copy.tensor.device for copy in copies}:
        backend.side_stream(device).wait_for_caller()
