"""Copies from devices to host memory, on a side stream, in pieces as few and large as possible.

In: plain tensors on devices and their offsets in the arena. Out: the bytes there, row-major, once
:meth:`DeviceCopies.wait` returns; those that may complete later are in :class:`DeferredCopies`.
Large tensors are copied directly into a pinned arena. Small ones are packed on the device and, like
all tensors for an arena that can't be pinned, copied to a bounce buffer and from there by memmove.
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
    DirectCopies,
    TensorCopy,
    split_copy,
    start_direct_copies,
    streams_of,
)
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.staging.pinned_memory import PinnedBufferPool

_SMALL: Final = 64 << 10
"""Bytes; queueing a copy smaller than this costs the host more time than the device."""
_BATCH: Final = 64 << 20
"""Bytes that are gathered before they are queued."""
_HELD: Final = 512 << 20
"""Most bytes of sources that copies under way keep alive: a planner may have allocated them for the save."""
SNAPSHOT_BYTES: Final = 256 << 20
"""Most bytes of tensors that may change once the call returns, and so are first copied on the device."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

MayDefer = Callable[[torch.Tensor], bool]
"""Whether a tensor may be copied later, because everything that changes it waits for its copy."""


@dataclass(frozen=True)
class CopyBackend:
    """The streams and the pinned memory that copies use; replaced by tests."""

    side_stream: Callable[[torch.device], SideStream] = device_stream.side_stream
    pin: Callable[..., str] = pinned_memory.pin
    pool: PinnedBufferPool = pinned_memory.shared_pool


DEFAULT_BACKEND: Final = CopyBackend()


class DeviceCopies:
    """The copies from devices of one save. Not thread-safe.

    Args:
        may_defer: which tensors may be copied after :meth:`wait`. None: none.
    """

    def __init__(
        self, may_defer: MayDefer | None = None, backend: CopyBackend | None = None
    ) -> None:
        self._may_defer = may_defer
        self._backend = backend or DEFAULT_BACKEND
        self._gathered: list[TensorCopy] = []
        self._gathered_bytes = 0
        self._bounce_queue = BounceQueue(self._backend.pool)
        self._held: deque[tuple[list[DeviceEvent], list[TensorCopy], int]] = deque()
        """Batches that are queued: events after them, their sources, and bytes of these."""
        self._deferred: list[TensorCopy] = []
        self._to_snapshot: list[TensorCopy] = []
        """Deferred copies of tensors that may change once the call returns: first copied on the device."""
        self._snapshot_bytes = 0
        self._pinned: dict[FileBuffer | SpillBuffer, bool] = {}
        self.copy_description = ""
        """How bytes were copied, human-readable: ``pinned`` or ``bounced: <reason>``; empty: none."""

    def add(self, copy: TensorCopy, value: torch.Tensor) -> None:
        """Adds a copy. ``value``: the tensor of the state that it copies, not detached."""
        size = copy.tensor.nbytes
        if self._may_defer is not None and isinstance(copy.target, FileBuffer):
            if self._may_defer(value):
                self._deferred.append(copy)
                return
            if self._snapshot_bytes + size <= SNAPSHOT_BYTES:
                self._to_snapshot.append(copy)
                self._snapshot_bytes += size
                return
        self._gathered.append(copy)
        self._gathered_bytes += size
        if self._gathered_bytes >= _BATCH:
            self._queue_gathered()

    def run(self) -> None:
        """Queues all copies that can't be deferred; takes snapshots for those that can."""
        self._deferred += self._take_snapshots()
        self._queue_gathered()

    def wait(self) -> None:
        """Returns when the queued copies are complete; drops all others. May be called after a failure."""
        self._gathered.clear()
        self._gathered_bytes = 0
        try:
            self._bounce_queue.finish_all()
            while self._held:
                self._release_oldest()
        finally:
            self._bounce_queue.abandon()

    def start_deferred(self) -> DeferredCopies | None:
        """Queues the deferred copies, as far as bounce buffers are free; the last call of a save."""
        copies, self._deferred = self._deferred, []
        if not copies:
            return None
        direct, bounced = self._split(copies)
        _wait_for_caller(copies, self._backend)
        return DeferredCopies(
            copies,
            direct,
            bounced,
            BounceQueue(self._backend.pool),
            copy_description=self.copy_description,
        )

    def _take_snapshots(self) -> list[TensorCopy]:
        copies, self._to_snapshot = self._to_snapshot, []
        snapshots = []
        for number, copy in enumerate(copies):
            try:
                snapshot = self._backend.side_stream(copy.tensor.device).snapshot(copy.tensor)
            except torch.OutOfMemoryError:
                # The device has no memory for the remaining snapshots: these copies are not deferred.
                self._gathered += copies[number:]
                break
            snapshots.append(copy._replace(tensor=snapshot))
        return snapshots

    def _queue_gathered(self) -> None:
        copies, self._gathered = self._gathered, []
        size, self._gathered_bytes = self._gathered_bytes, 0
        if not copies:
            return
        direct, bounced = self._split(copies)
        _wait_for_caller(copies, self._backend)
        try:
            for copy in bounced:
                self._bounce_queue.put(copy)
            start_direct_copies(direct)
        finally:
            events = [stream.record_event() for stream in streams_of(direct, bounced)]
            self._held.append((events, copies, size))
        while len(self._held) > 1 and sum(held for _, _, held in self._held) > _HELD:
            self._release_oldest()

    def _release_oldest(self) -> None:
        events, _, _ = self._held[0]
        for event in events:
            event.synchronize()
        self._held.popleft()

    def _split(self, copies: Iterable[TensorCopy]) -> tuple[DirectCopies, list[BouncedCopy]]:
        """Splits large copies and packs small ones."""
        direct: DirectCopies = {}
        bounced: list[BouncedCopy] = []
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
                    bounced.append(pack)
                pack.add(copy)
            elif is_pinned:
                direct.setdefault(stream, []).extend(split_copy(copy, None))
            else:
                for piece in split_copy(copy, self._backend.pool.buffer_bytes):
                    single = BouncedCopy(stream)
                    single.add(piece)
                    bounced.append(single)
        return direct, bounced

    def _is_pinned(self, copy: TensorCopy) -> bool:
        target = copy.target
        known = self._pinned.get(target)
        if known is None:
            reason = "it may move"  # a buffer that grows
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
    """Pins the memory that the first save of ``state`` into ``arena`` would have to pin."""
    backend = backend or DEFAULT_BACKEND
    for device in {tensor.device for tensor in device_tensors(state)}:
        backend.side_stream(device)
        backend.pool.allocate_all()
        for buffer in arena.files:
            if buffer.mapping is not None:
                backend.pin(buffer.mapping, device.type)


def _wait_for_caller(copies: Iterable[TensorCopy], backend: CopyBackend) -> None:
    for device in {copy.tensor.device for copy in copies}:
        backend.side_stream(device).wait_for_caller()
