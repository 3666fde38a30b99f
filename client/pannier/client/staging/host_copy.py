"""Copies from host memory to host memory, on as many cores as are this rank's.

In: addresses. Out: nothing, once the bytes have arrived. One core copies at
about half of what two do, and torch's own threads are the training loop's.
"""

import _thread
import ctypes
import os
import queue
from collections import deque
from contextlib import suppress
from typing import Final

import torch

from pannier.client.staging import device_stream
from pannier.client.staging.arena import FileBuffer, SpillBuffer
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.wire.errors import InvalidRequestError

_PIECE: Final = 8 << 20
"""A copy up to this size is one thread's. Beyond, pieces are as large as the threads' balance
allows: above a threshold of its own (of glibc.cpu.x86_non_temporal_threshold) the C library writes
past the caches, which takes a quarter less time."""
_ROUNDS: Final = 4
"""Pieces of a thread, when all copies are large."""
_ALONE: Final = 8 << 20
"""Up to so many bytes a second thread costs more than it brings."""
_MOST_THREADS: Final = 4
_LOOK_S: Final = 0.01
"""How often the caller looks whether helpers still copy, besides when one has ended."""


def threads() -> int:
    """How many threads a copy may take: this process's share of the host's cores."""
    cores = len(os.sched_getaffinity(0))
    # torchrun says how many ranks stage at the same time.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


class HostCopies:
    """Copies that are gathered, then done together. Not thread-safe."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int, int]] = []
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._sources: list[object] = []
        self._helping: list[None] = []
        """One entry for each helper that may be at a piece."""
        self._helped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bytes = 0

    def add(self, target: int, source: int, size: int, owner: object) -> None:
        """Gathers a copy of ``size`` bytes between two addresses.

        ``owner`` keeps the source alive; the target is the caller's to keep.
        """
        self._sources.append(owner)
        self._bytes += size
        self._copies.append((size, target, source))

    @property
    def bytes(self) -> int:
        """Of the gathered copies."""
        return self._bytes

    def run(self) -> None:
        """Returns when every byte is copied, or, if interrupted, when no thread copies any more."""
        count = threads() if self._bytes > _ALONE else 1
        self._cut(max(_PIECE, self._bytes // (_ROUNDS * count if count > 1 else 1)))
        try:
            for _ in range(1, count):
                # Not Thread.start: an exception of a signal handler in it leaves a thread that
                # never runs.
                _thread.start_new_thread(self._help, ())
            self._work()
        finally:
            self._pieces.clear()
            try:
                self._await_helpers()
            finally:
                self._sources.clear()
                self._bytes = 0

    def _await_helpers(self) -> None:
        """Waits until no helper copies, through any number of interrupts; then raises the last."""
        interrupt: BaseException | None = None
        while self._helping:
            try:
                with suppress(queue.Empty):
                    self._helped.get(timeout=_LOOK_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _cut(self, most: int) -> None:
        """Makes pieces of at most so many bytes, the large ones first: small ones fill the end."""
        for size, target, source in sorted(self._copies, reverse=True):
            for start in range(0, size, most):
                self._pieces.append((target + start, source + start, min(most, size - start)))
        self._copies.clear()

    def _help(self) -> None:
        # Before a piece is taken: a caller that finds no helper after clearing the pieces is alone.
        self._helping.append(None)
        try:
            self._work()
        finally:
            self._helping.pop()
            self._helped.put(None)

    def _work(self) -> None:
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                return
            # Without the GIL.
            ctypes.memmove(target, source, size)


LARGE: Final = 256 << 10
"""Bytes; copies of so much are gathered and shared among threads."""
_HELD: Final = 256 << 20
"""Bytes of tensors that are kept alive by gathered copies: a planner may have made them for us."""


def freed_error(name: str) -> InvalidRequestError:
    """The refusal of a tensor without elements to copy."""
    return InvalidRequestError(f"{name!r} can't be saved: its storage was freed (resized to 0)")


class Transfers:
    """Copies under way. Not thread-safe.

    Args:
        devices: makes those from devices. Default: one by which all arrive before :meth:`wait`
            returns.
    """

    def __init__(self, devices: DeviceCopies | None = None) -> None:
        self._host_copies = HostCopies()
        self._devices = devices or DeviceCopies()

    def copy(
        self,
        tensor: torch.Tensor,
        target: FileBuffer | SpillBuffer,
        offset: int,
        *,
        name: str = "",
        value: torch.Tensor | None = None,
    ) -> None:
        """Copies a plain tensor's elements, row-major, without holding the GIL.

        Args:
            tensor: the source.
            target: where it goes.
            offset: of its first byte there.
            name: for errors.
            value: what ``tensor`` was detached from.

        Raises InvalidRequestError when there are none, for its storage was freed.
        """
        if not tensor.numel() or self._gather(tensor, target, offset, name, value=value):
            return
        place = torch.frombuffer(
            target.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        )
        place.view(tensor.shape).copy_(tensor)

    def copy_to_view(
        self,
        tensor: torch.Tensor,
        place: torch.Tensor,
        buffer: FileBuffer,
        offset: int,
        name: str = "",
    ) -> None:
        """:meth:`copy` of a tensor with elements to a view, by address, of the buffer."""
        if not self._gather(tensor, buffer, offset, name, place=place):
            place.copy_(tensor)

    def run(self) -> None:
        """Makes the copies that were gathered."""
        self._devices.run()
        self._host_copies.run()

    def bound(self) -> None:
        """Makes the gathered copies between host addresses if they keep much memory alive."""
        if self._host_copies.bytes > _HELD:
            self._host_copies.run()

    def wait(self) -> None:
        """Returns when no device writes any more. Gathered copies that weren't run are dropped."""
        self._devices.wait()

    @property
    def copy_description(self) -> str:
        """By which way bytes came from devices; see :attr:`DeviceCopies.copy_description`."""
        return self._devices.copy_description

    def start_deferred(self) -> DeferredCopies | None:
        """Begins what may arrive later, if there is any; the last call."""
        return self._devices.start_deferred()

    def _gather(
        self,
        tensor: torch.Tensor,
        target: FileBuffer | SpillBuffer,
        offset: int,
        name: str,
        *,
        value: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> bool:
        """Takes on a copy that isn't made at once."""
        kind = tensor.device.type
        queued = kind in device_stream.ASYNC_DEVICES
        if (kind == "cpu" or queued) and not tensor.untyped_storage().nbytes():
            raise freed_error(name)
        if queued:
            self._devices.add(tensor, target, offset, name=name, value=value, place=place)
            return True
        if kind != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        address, size = target.address + offset, tensor.nbytes
        if size < LARGE or isinstance(target, SpillBuffer):
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            self._host_copies.add(address, tensor.data_ptr(), size, tensor)
        return True
