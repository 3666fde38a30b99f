"""The memory of the tensors that a load fills: which of it may be written directly, and when.

In: the planner's tensors. Out: their memory, and whether it overlaps with that of earlier ones. Not
thread-safe; for one load.
"""

import ctypes
from bisect import bisect
from typing import Final

import torch

_UNDIVIDED: Final = ("xla",)
"""Devices to which a tensor must be copied as a whole."""


class TargetMemory:
    """The memory that earlier reads fill, so that no later one fills the same at the same time."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        """Start and end address of each, sorted and disjoint."""

    def add(self, target: torch.Tensor) -> bool:
        """Adds a target; False if it overlaps with an earlier one, as tied weights do."""
        start, end = _extent(target)
        first = bisect(self._places, (start,))
        if first and self._places[first - 1][1] > start:
            first -= 1
        last = bisect(self._places, (end,))
        overlapping = self._places[first:last]
        for other in overlapping:
            start, end = min(start, other[0]), max(end, other[1])
        if start < end:
            self._places[first:last] = [(start, end)]
        return not overlapping

    def start_again(self, target: torch.Tensor) -> None:
        """Forgets earlier targets, whose reads were used; ``target`` is the first of the next ones."""
        self._places.clear()
        self.add(target)


def _extent(target: torch.Tensor) -> tuple[int, int]:
    """First address and end of a strided tensor on the host; an empty extent for others."""
    if type(target) is not torch.Tensor or target.layout is not torch.strided:
        return 0, 0
    if target.device.type != "cpu" or not target.numel():
        return 0, 0
    start = target.data_ptr()
    if target.is_contiguous():
        return start, start + target.nbytes
    last = sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
    return start, start + (last + 1) * target.element_size()


def memory_of(target: torch.Tensor) -> memoryview | None:
    """The memory of a plain row-major tensor on the host; None: it isn't one."""
    if not is_divisible(target) or target.device.type != "cpu" or not target.is_contiguous():
        return None
    address = target.data_ptr()
    if not address:
        # A wrapper of functionalization, which has another tensor's memory.
        return None
    memory = (ctypes.c_char * target.nbytes).from_address(address)
    # Threads may still write to it when an exception of a signal handler has ended the load.
    memory.owner = target  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def is_divisible(tensor: torch.Tensor) -> bool:
    """Whether its elements may be copied part by part, or together with those of others."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type not in _UNDIVIDED
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
