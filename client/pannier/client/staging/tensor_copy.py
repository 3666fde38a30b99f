"""Copies of plain tensors, of whatever device, into host memory.

In: detached or undetached plain tensors and where their elements go, row-major.
Out: nothing, once :meth:`Transfers.wait` returns, but what may arrive later. Copies between host
addresses are gathered for several threads, those from devices that can queue them are left to
:mod:`pannier.client.staging.device_copy`.
"""

import ctypes
from typing import Final

import torch

from pannier.client.staging import device_stream
from pannier.client.staging.arena import Region, Spill
from pannier.client.staging.deferred_copies import Rest
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import HostCopies
from pannier.wire.errors import InvalidRequestError

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
        target: Region | Spill,
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
        self, tensor: torch.Tensor, place: torch.Tensor, region: Region, offset: int, name: str = ""
    ) -> None:
        """:meth:`copy` of a tensor with elements to a view, by address, of the region."""
        if not self._gather(tensor, region, offset, name, place=place):
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
    def how(self) -> str:
        """By which way bytes came from devices; see :attr:`DeviceCopies.how`."""
        return self._devices.how

    def rest(self) -> Rest | None:
        """Begins what may arrive later, if there is any; the last call."""
        return self._devices.rest()

    def _gather(
        self,
        tensor: torch.Tensor,
        target: Region | Spill,
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
        if size < LARGE or isinstance(target, Spill):
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            self._host_copies.add(address, tensor.data_ptr(), size, tensor)
        return True
