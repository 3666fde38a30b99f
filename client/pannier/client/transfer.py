"""Copies of plain tensors, of whatever device, into host memory.

In: detached or undetached plain tensors and where their elements go, row-major.
Out: nothing, once :meth:`Transfers.wait` returns. Copies between host addresses are
gathered for several threads, those from devices that can queue them are queued.
"""

import ctypes
from typing import Final

import torch

from pannier.client.arena import Region, Spill
from pannier.client.copying import HostCopies

LARGE: Final = 256 << 10
"""Bytes; copies of so much are gathered and shared among threads."""
_ASYNC_DEVICES: Final = frozenset({"cuda", "xpu"})
"""Device types whose copies to the host can be queued and waited for together."""


class Transfers:
    """Copies under way. Not thread-safe."""

    def __init__(self) -> None:
        self._host_copies = HostCopies()
        self._queued: set[torch.device] = set()
        self._spill_is_target = False

    def copy(self, tensor: torch.Tensor, target: Region | Spill, offset: int) -> None:
        """Copies a plain tensor's elements, row-major, without holding the GIL.

        Raises ValueError when there are none, for its storage was freed.
        """
        if not tensor.numel():
            return
        if self._gather(tensor, target, offset):
            return
        place = torch.frombuffer(
            target.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        ).view(tensor.shape)
        self._queue(tensor, place)
        self._spill_is_target |= isinstance(target, Spill) and bool(self._queued)

    def copy_to_view(
        self, tensor: torch.Tensor, place: torch.Tensor, region: Region, offset: int
    ) -> None:
        """:meth:`copy` of a tensor with elements to a view of the region at ``offset``."""
        if not self._gather(tensor, region, offset):
            self._queue(tensor, place)

    def before_growing(self) -> None:
        """To be called before a spill grows: it may move, and what goes there must have arrived."""
        if self._spill_is_target:
            self._synchronize()

    def run(self) -> None:
        """Makes the copies that were gathered."""
        self._host_copies.run()

    def wait(self) -> None:
        """Returns when no device writes any more. Gathered copies that weren't run are dropped."""
        self._synchronize()

    def _gather(self, tensor: torch.Tensor, target: Region | Spill, offset: int) -> bool:
        """Copies by address, where that is possible."""
        kind = tensor.device.type
        if (kind == "cpu" or kind in _ASYNC_DEVICES) and not tensor.untyped_storage().nbytes():
            raise ValueError("its storage was freed (resized to 0)")
        if kind != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        address, size = target.address + offset, tensor.nbytes
        if size < LARGE or isinstance(target, Spill):
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            self._host_copies.add(address, tensor.data_ptr(), size, tensor)
        return True

    def _queue(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        if tensor.device.type not in _ASYNC_DEVICES:
            place.copy_(tensor)
            return
        if tensor.is_conj() or tensor.is_neg():
            # A queued copy would apply the bits on the host before the data is there.
            tensor = tensor.resolve_conj().resolve_neg()
        place.copy_(tensor, non_blocking=True)
        self._queued.add(tensor.device)

    def _synchronize(self) -> None:
        for device in self._queued:
            torch.get_device_module(device).current_stream(device).synchronize()
        self._queued.clear()
        self._spill_is_target = False
