"""Host memory that devices write to directly: pinned arenas, and bounce buffers for other arenas.

In: mappings of arenas. Out: whether the device's driver has pinned them, or why not. A mapping is
registered once and stays registered until just before it is unmapped. Where that is impossible
(files on a disk), copies go through a :class:`PinnedBufferPool`, a few buffers of torch's own pinned
memory. Thread-safe.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from weakref import WeakKeyDictionary, finalize

import torch

from pannier.client.interrupts import Condition
from pannier.client.staging.arena import MemoryMapping
from pannier.client.torch_compat import on_current_device

_log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 16 << 20
BUFFERS: Final = 4
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""

_lock = threading.Lock()
_reasons: "WeakKeyDictionary[MemoryMapping, str]" = WeakKeyDictionary()


def pin(mapping: MemoryMapping, device_type: str) -> str:
    """Pins a mapping for devices of a type; returns why it can't be pinned, or "".

    Only the first call for a mapping takes time (0.1 to 0.4 s per GiB).
    """
    with _lock:
        reason = _reasons.get(mapping)
        if reason is None:
            reason = _reasons[mapping] = _register(mapping, device_type)
            if reason:
                _log.warning("copies from %s go through a bounce buffer: %s", device_type, reason)
        return reason


def _register(mapping: MemoryMapping, device_type: str) -> str:
    if device_type != "cuda":
        return f"memory can't be registered for {device_type}"
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(mapping.address, mapping.capacity, _PORTABLE)
    if int(code):
        _forget_error()
        text = runtime.cudaGetErrorString(code)
        return f"cudaHostRegister refuses {mapping.capacity} bytes of the arena: {text}"
    # Runs once, before the memory is unmapped: called by the mapping's source, or when the mapping is freed.
    unpin = mapping.unpin = finalize(
        mapping, _unregister, os.getpid(), mapping.address, on_current_device()
    )
    # At the end of the process the driver unregisters it.
    unpin.atexit = False
    return ""


def _unregister(
    pid: int, address: int, on_device: Callable[[], AbstractContextManager[object]]
) -> None:
    # In a forked child there is neither the memory nor a device.
    if os.getpid() != pid:
        return
    # In other threads device 0 is current, where the driver might make a context for a process that
    # doesn't use it.
    with on_device():
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostUnregister(address)):
            _forget_error()


def _forget_error() -> None:
    """Clears CUDA's last error, which the next CUDA call in the process would raise otherwise."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        _log.debug("cleared: %s", error)


class PinnedBuffer:
    """A bounce buffer."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """Pinned bytes."""
        self.address = memory.data_ptr()


class PinnedBufferPool:
    """Buffers of pinned memory, allocated when they are first needed. Thread-safe.

    Args:
        allocate: allocates a buffer of a size, bytes.
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
        """Allocates all buffers that there may be."""
        with self._changed:
            while self._missing:
                self._free.append(PinnedBuffer(self._allocate(self.buffer_bytes)))
                self._missing -= 1

    def acquire(self, *, wait: bool) -> PinnedBuffer | None:
        """A free buffer; None when there is none and ``wait`` is False.

        A thread that waits must hold no buffer: so those that hold one always release it.
        """
        with self._changed:
            if not self._free and self._missing:
                self._free.append(PinnedBuffer(self._allocate(self.buffer_bytes)))
                self._missing -= 1
            if wait:
                self._changed.wait_for(lambda: self._free)
            return self._free.pop() if self._free else None

    def release(self, buffer: PinnedBuffer) -> None:
        """Gives back a buffer to which no device writes any more."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


def _pinned(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # Pageable memory is only slower.
        _log.warning("%d bytes of pinned memory can't be allocated: %s", size, error)
        return torch.empty(size, dtype=torch.uint8, device="cpu")


shared_pool: Final = PinnedBufferPool()
"""The bounce buffers of this process."""
