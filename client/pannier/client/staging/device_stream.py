"""A device's side stream, on which copies to the host run beside the training step.

In: tensors of one device and places in host memory. Out: events in the stream, by which the host or
the training stream waits. The only module that touches streams and events; it uses what torch
offers for every accelerator (``torch.get_device_module``). Nothing here blocks the host but
:meth:`DeviceEvent.synchronize`. Thread-safe: streams are.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from pannier.client import torch_compat

ASYNC_DEVICES: Final = frozenset({"cuda", "xpu"})
"""Device types whose copies to the host can be queued."""
_PACKED_AS_THEY_ARE: Final = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    }
)
_BITS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By size in bytes, dtypes that devices can concatenate."""


class DeviceEvent(Protocol):
    """A point in a stream: torch's ``Event``."""

    def query(self) -> bool:
        """Whether the device has come past it."""

    def synchronize(self) -> None:
        """Returns when it has; without the GIL."""


class SideStream:
    """The side stream of one device. What is queued runs in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        # Waiting for an event spins on a core unless it is told not to.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}

    def wait_for_caller(self) -> None:
        """What is queued here from now on waits for what the caller's stream has queued so far."""
        self._stream.wait_stream(self._module.current_stream(self.device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to the host. The sources must live until a later event is passed."""
        with torch.no_grad(), self._module.stream(self._stream):
            torch_compat.copy_all(list(targets), list(map(_real, sources)), non_blocking=True)

    def pack(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Queues the gathering of tensors of one dtype, row-major; gives their bytes.

        The result belongs to this stream: it is for :meth:`copy` alone, and may be dropped at once.
        """
        with torch.no_grad(), self._module.stream(self._stream):
            return _packed(sources)

    def snapshot(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in the device's memory, made in the order of the caller's stream."""
        with torch.no_grad():
            return _real(source).clone(memory_format=torch.contiguous_format)

    def record_event(self) -> DeviceEvent:
        """An event behind all that was queued."""
        recorded: Any = self._module.Event(**self._event_options)
        recorded.record(self._stream)
        event: DeviceEvent = recorded
        return event

    def make_caller_wait(self, event: DeviceEvent) -> None:
        """What the caller's stream gets from now on waits, on the device, for ``event``."""
        self._module.current_stream(self.device).wait_event(event)


def is_capturing() -> bool:
    """Whether the calling thread records a CUDA graph instead of running its kernels."""
    return (
        torch.cuda.is_available()
        and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and torch.cuda.is_current_stream_capturing()
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    # A queued copy would apply these bits on the host before the data is there.
    return tensor.resolve_conj().resolve_neg()


def _packed(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    tensors = [_real(source) for source in sources]
    dtype = tensors[0].dtype
    if dtype not in _PACKED_AS_THEY_ARE:
        tensors = [tensor.view(_BITS[dtype.itemsize]) for tensor in tensors]
    return torch_compat.flattened(tensors).view(torch.uint8)


_lock = threading.Lock()
_side_streams: dict[torch.device, SideStream] = {}


def side_stream(device: torch.device) -> SideStream:
    """This process's stream for a device, made when it is first asked for."""
    with _lock:
        found = _side_streams.get(device)
        if found is None:
            found = _side_streams[device] = SideStream(device)
        return found
