"""Host memory that devices write to directly: pinned arenas, and a ring for those that can't be.

In: mappings of arenas. Out: whether the device's driver has them pinned, or why not. A mapping is
registered once and stays so until just before it is unmapped. Where that is impossible (files on a
disk), copies go by :class:`PinnedBufferPool`, a few buffers of torch's own pinned memory. Thread-safe.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary, finalize

import torch

from pannier.client.interrupts import Condition
from pannier.client.staging.arena import MemoryMapping

_log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 16 << 20
BUFFERS: Final = 4
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""

_lock = threading.Lock()
_found: "WeakKeyDictionary[MemoryMapping, str]" = WeakKeyDictionary()


def pin(mapping: MemoryMapping, kind: str) -> str:
    """Pins a mapping for devices of a kind; returns why it can't be, or "".

    Only the first call for a mapping takes time (0.1 to 0.4 s per GiB).
    """
    with _lock:
        reason = _found.get(mapping)
        if reason is None:
            reason = _found[mapping] = _register(mapping, kind)
            if reason:
                _log.warning("copies from %s go by a pinned buffer: %s", kind, reason)
        return reason


def _register(mapping: MemoryMapping, kind: str) -> str:
    if kind != "cuda":
        return f"memory can't be registered for {kind}"
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(mapping.address, mapping.capacity, _PORTABLE)
    if int(code):
        _forget_error()
        text = runtime.cudaGetErrorString(code)
        return f"cudaHostRegister refuses {mapping.capacity} bytes of the arena: {text}"
    # Runs before the mapping lets go of its memory. At the process's end the driver does it.
    finalize(mapping, _unregister, os.getpid(), mapping.address).atexit = False
    return ""


def _unregister(pid: int, address: int) -> None:
    # A forked child has neither the memory nor a device.
    if os.getpid() != pid:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostUnregister(address)):
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps the last error for whoever asks next, who would take it for his own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        _log.debug("as expected: %s", error)


class PinnedBuffer:
    """A buffer of the ring."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """Bytes, pinned."""
        self.address = memory.data_ptr()


class PinnedBufferPool:
    """Buffers of pinned memory, made when they are first needed. Thread-safe.

    Args:
        allocate: gives so many bytes.
        buffers: how many there may be.
        buffer_bytes: size of each.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] | None = None,
        buffers: int = BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.buffer_bytes = buffer_bytes
        self._allocate = allocate or _pinned
        self._missing = buffers
        self._free: list[PinnedBuffer] = []
        self._changed = Condition()

    def allocate_all(self) -> None:
        """Makes all that may be needed."""
        with self._changed:
            while self._missing:
                self._free.append(PinnedBuffer(self._allocate(self.buffer_bytes)))
                self._missing -= 1

    def acquire(self, *, wait: bool) -> PinnedBuffer | None:
        """A buffer; None when there is none and ``wait`` is False.

        Whoever waits must hold no buffer: those that do give theirs back without another.
        """
        with self._changed:
            if not self._free and self._missing:
                self._free.append(PinnedBuffer(self._allocate(self.buffer_bytes)))
                self._missing -= 1
            if wait:
                self._changed.wait_for(lambda: self._free)
            return self._free.pop() if self._free else None

    def release(self, buffer: PinnedBuffer) -> None:
        """Gives a buffer back, which no device writes to any more."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


def _pinned(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # Pageable memory is only slower.
        _log.warning("there are no %d bytes of pinned memory: %s", size, error)
        return torch.empty(size, dtype=torch.uint8, device="cpu")


shared_pool: Final = PinnedBufferPool()
"""The process's own."""
