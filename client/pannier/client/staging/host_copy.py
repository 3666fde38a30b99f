"""Copies of plain tensors, on any device, into host memory.

In: plain tensors and their offsets in the arena. Out: the bytes there, row-major, once
:meth:`TensorCopies.wait` returns; except for deferred copies. Copies between host addresses are
gathered and shared by several threads, since two cores copy about twice as fast as one, and torch's
own threads belong to the training loop. Copies from devices with streams are made by
:mod:`pannier.client.staging.device_copy`.
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
from pannier.common import timeouts
from pannier.wire.errors import InvalidRequestError

LARGE: Final = 256 << 10
"""Bytes; copies of at least this size are gathered and shared by threads."""
_HELD: Final = 256 << 20
"""Gathered sources of more bytes are copied at once: a planner may have allocated them for the save."""
_PIECE: Final = 8 << 20
"""A copy up to this size is made by one thread. Larger ones are cut into pieces as large as the
balance between threads allows: above a threshold (glibc.cpu.x86_non_temporal_threshold) the C
library writes past the caches, which takes a quarter less time."""
_ROUNDS: Final = 4
"""Pieces per thread, when all copies are large."""
_SINGLE_THREAD: Final = 8 << 20
"""Bytes in total up to which a second thread costs more than it saves."""
_MOST_THREADS: Final = 4


def threads() -> int:
    """How many threads may copy: this process's share of the host's cores."""
    cores = len(os.sched_getaffinity(0))
    # Set by torchrun: the ranks that stage at the same time on this host.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


class HostCopies:
    """Copies between host addresses, gathered and then made together. Not thread-safe."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int, int]] = []
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._sources: list[object] = []
        self._helping: list[None] = []
        """One entry for each helper thread that may be copying."""
        self._helper_ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bytes = 0

    def add(self, target: int, source: int, size: int, owner: object) -> None:
        """Gathers a copy of ``size`` bytes between two addresses.

        ``owner`` keeps the source alive; the caller keeps the target.
        """
        self._sources.append(owner)
        self._bytes += size
        self._copies.append((size, target, source))

    @property
    def bytes(self) -> int:
        """Sum of the gathered copies."""
        return self._bytes

    def run(self) -> None:
        """Returns when every byte is copied, or, if interrupted, when no thread copies any more."""
        count = threads() if self._bytes > _SINGLE_THREAD else 1
        self._cut(max(_PIECE, self._bytes // (_ROUNDS * count if count > 1 else 1)))
        try:
            for _ in range(1, count):
                # Not Thread.start: a signal handler that raises in it leaves a thread that never
                # runs.
                _thread.start_new_thread(self._help, ())
            self._copy_pieces()
        finally:
            self._pieces.clear()
            try:
                self._await_helpers()
            finally:
                self._sources.clear()
                self._bytes = 0

    def _await_helpers(self) -> None:
        """Waits until no helper copies, despite any interrupts; then raises the last of them."""
        interrupt: BaseException | None = None
        while self._helping:
            try:
                with suppress(queue.Empty):
                    self._helper_ended.get(timeout=timeouts.COPY_POLL_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _cut(self, most: int) -> None:
        """Cuts the copies into pieces of at most ``most`` bytes; large ones come first."""
        for size, target, source in sorted(self._copies, reverse=True):
            for start in range(0, size, most):
                self._pieces.append((target + start, source + start, min(most, size - start)))
        self._copies.clear()

    def _help(self) -> None:
        # Before the first piece: once the caller has cleared the pieces, it sees every helper.
        self._helping.append(None)
        try:
            self._copy_pieces()
        finally:
            self._helping.pop()
            self._helper_ended.put(None)

    def _copy_pieces(self) -> None:
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                return
            # Releases the GIL.
            ctypes.memmove(target, source, size)


def check_storage(tensor: torch.Tensor, name: str) -> None:
    """Raises InvalidRequestError for a tensor with elements that its storage doesn't hold any more."""
    held = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if held >= needed:
        return
    was = f"cut to {held} bytes, of which it needs {needed}" if held else "freed (resized to 0)"
    raise InvalidRequestError(f"{name!r} can't be saved: its storage was {was}")


class TensorCopies:
    """The tensor copies of one save. Not thread-safe.

    Args:
        devices: makes the copies from devices. Default: none of them is deferred.
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
        """Copies a plain tensor's elements, row-major; releases the GIL.

        Args:
            tensor: the source.
            target: the memory to copy to.
            offset: of its first byte in ``target``.
            name: for errors.
            value: the tensor that ``tensor`` was detached from.

        Raises InvalidRequestError: its storage was freed or cut.
        """
        if not tensor.numel() or self._gather(tensor, target, offset, name, value=value):
            return
        view = torch.frombuffer(
            target.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        )
        view.view(tensor.shape).copy_(tensor)

    def copy_to_view(
        self,
        tensor: torch.Tensor,
        view: torch.Tensor,
        buffer: FileBuffer,
        offset: int,
        name: str = "",
    ) -> None:
        """As :meth:`copy`, for a tensor with elements and a view of the buffer's memory."""
        if not self._gather(tensor, buffer, offset, name, view=view):
            view.copy_(tensor)

    def run(self) -> None:
        """Makes the gathered copies."""
        self._devices.run()
        self._host_copies.run()

    def limit_held(self) -> None:
        """Makes the gathered copies between host addresses if their sources hold much memory."""
        if self._host_copies.bytes > _HELD:
            self._host_copies.run()

    def wait(self) -> None:
        """Returns when no device writes any more. Drops gathered copies that were not made."""
        self._devices.wait()

    @property
    def copy_description(self) -> str:
        """See :attr:`DeviceCopies.copy_description`."""
        return self._devices.copy_description

    def start_deferred(self) -> DeferredCopies | None:
        """Starts the copies that may be deferred, if there are any; the last call."""
        return self._devices.start_deferred()

    def _gather(
        self,
        tensor: torch.Tensor,
        target: FileBuffer | SpillBuffer,
        offset: int,
        name: str,
        *,
        value: torch.Tensor | None = None,
        view: torch.Tensor | None = None,
    ) -> bool:
        """Makes, gathers or queues a copy; False: the caller must copy with torch."""
        kind = tensor.device.type
        queued = kind in device_stream.ASYNC_DEVICES
        if kind == "cpu" or queued:
            check_storage(tensor, name)
        if queued:
            self._devices.add(tensor, target, offset, name=name, value=value, view=view)
            return True
        if kind != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        address, size = target.address + offset, tensor.nbytes
        if size < LARGE or isinstance(target, SpillBuffer):
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            self._host_copies.add(address, tensor.data_ptr(), size, tensor)
        return True
