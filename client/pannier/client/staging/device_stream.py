"""A device's side stream, on which copies to the host run beside the training step.

In: tensors on one device and tensors over host memory. Out: events in the stream, on which the host
or the training stream waits. The only module that uses streams and events, by what torch offers for
every accelerator (``torch.get_device_module``). Only :meth:`DeviceEvent.synchronize` blocks the
host. Thread-safe, as streams are.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from pannier.client import torch_compat

ASYNC_DEVICES: Final = frozenset({"cuda", "xpu"})
"""Device types whose copies to the host can be queued."""
_CONCATENATED: Final = frozenset(
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
"""Dtypes that devices can concatenate, by size in bytes."""


class DeviceEvent(Protocol):
    """A point in a stream: torch's ``Event``."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Returns when the device has passed it; releases the GIL."""


class SideStream:
    """The side stream of one device. What is queued here runs in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        # A wait for a CUDA event spins on a core by default.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}

    def wait_for_caller(self) -> None:
        """Makes work queued here from now on wait for all work that the caller's stream has now."""
        self._stream.wait_stream(self._module.current_stream(self.device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to the host. The sources must live until a later event has passed."""
        with torch.no_grad(), self._module.stream(self._stream):
            torch_compat.copy_all(list(targets), list(map(_resolved, sources)), non_blocking=True)

    def pack(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Queues the concatenation of tensors of one dtype, row-major; returns their bytes.

        The result belongs to this stream: it is for :meth:`copy` alone, and may be dropped at once.
        """
        with torch.no_grad(), self._module.stream(self._stream):
            return _packed(sources)

    def snapshot(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in the device's memory, made in the order of the caller's stream."""
        with torch.no_grad():
            return _resolved(source).clone(memory_format=torch.contiguous_format)

    def record_event(self) -> DeviceEvent:
        """An event that passes when all that was queued here has run."""
        recorded: Any = self._module.Event(**self._event_options)
        recorded.record(self._stream)
        event: DeviceEvent = recorded
        return event

    def make_caller_wait(self, event: DeviceEvent) -> None:
        """Makes work queued on the caller's stream from now on wait, on the device, for ``event``."""
        self._module.current_stream(self.device).wait_event(event)


def is_capturing() -> bool:
    """Whether the calling thread's kernels are captured into a CUDA graph instead of run."""
    return (
        torch.cuda.is_available()
        and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and torch.cuda.is_current_stream_capturing()
    )


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    # A queued copy would apply these bits on the host, before the data has arrived.
    return tensor.resolve_conj().resolve_neg()


def _packed(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    tensors = [_resolved(source) for source in sources]
    dtype = tensors[0].dtype
    if dtype not in _CONCATENATED:
        tensors = [tensor.view(_BITS[dtype.itemsize]) for tensor in tensors]
    return torch_compat.flattened(tensors).view(torch.uint8)


_lock = threading.Lock()
_side_streams: dict[torch.device, SideStream] = {}


def side_stream(device: torch.device) -> SideStream:
    """This process's side stream of a device; created on first use."""
    with _lock:
        found = _side_streams.get(device)
        if found is None:
            found = _side_streams[device] = SideStream(device)
        return found
