"""A device whose copies happen when the test says: its tensors are the host's own."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from pannier.client.staging.arena import MemoryMapping
from pannier.client.staging.device_copy import CopyBackend
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.staging.pinned_memory import PinnedBufferPool


class CurrentDevice(threading.local):
    """Whether this thread has made the caller's device its own; stands for ``on_current_device``."""

    is_set = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_set = True
        yield


class FakeEvent:
    def __init__(self, stream: "FakeStream", position: int) -> None:
        self._lane = stream
        self._position = position

    def query(self) -> bool:
        return self._lane.done >= self._position

    def synchronize(self) -> None:
        self._lane.advance(self._position)


class FakeStream(SideStream):
    """A side stream that stands still until a thread waits for it.

    What the test does to tensors itself is the training stream, which runs at once; so to hold it
    back is to let this one run.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._lock = threading.RLock()
        self._queue: deque[Callable[[], object]] = deque()
        self.done = 0
        self.queued = 0
        self.followed_at: list[int] = []
        """How much was queued when ``wait_for_caller`` was called."""
        self.copied: list[int] = []
        """Bytes of each copy to the host."""
        self.stream_waits = 0
        self.runs = threading.Event()
        """Cleared: the device stands still, and every wait for it lasts."""
        self.runs.set()
        self.failure: Exception | None = None

    def wait_for_caller(self) -> None:
        self.followed_at.append(self.queued)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.copied.append(target.nbytes)
            self._put(functools.partial(_copy, target, source))

    def pack(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = torch.empty(sum(source.nbytes for source in sources), dtype=torch.uint8)

        def work() -> None:
            at = 0
            for source in sources:
                data = source.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
                packed[at : at + data.numel()] = data
                at += data.numel()

        self._put(work)
        return packed

    def record_event(self) -> DeviceEvent:
        return FakeEvent(self, self.queued)

    def make_caller_wait(self, event: DeviceEvent) -> None:
        self.stream_waits += 1
        event.synchronize()

    def advance(self, position: int | None = None) -> None:
        """Lets the device work, up to a position."""
        assert self.runs.wait(60)
        with self._lock:
            while self._queue and (position is None or self.done < position):
                self.done += 1
                self._queue.popleft()()

    def _put(self, work: Callable[[], object]) -> None:
        if self.failure is not None:
            raise self.failure
        with self._lock:
            self.queued += 1
            self._queue.append(work)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def fake_backend(
    stream: FakeStream, *, refusal: str = "", buffers: int = 4, buffer_bytes: int = 1 << 20
) -> CopyBackend:
    """By which a test's copies are made.

    Args:
        stream: of all tensors.
        refusal: why arenas can't be pinned; "": they can.
        buffers, buffer_bytes: of the ring.
    """

    def pin(mapping: MemoryMapping, kind: str) -> str:
        return refusal

    pool = PinnedBufferPool(
        lambda size: torch.zeros(size, dtype=torch.uint8), buffers, buffer_bytes
    )
    return CopyBackend(lambda device: stream, pin, pool)


@contextmanager
def host_as_device(
    monkeypatch: pytest.MonkeyPatch, usual: CopyBackend | None = None
) -> Iterator[None]:
    """Tensors of the host are taken for those of a device, copied by ``usual``."""
    with monkeypatch.context() as patch:
        if usual is not None:
            patch.setattr("pannier.client.staging.device_copy.DEFAULT_BACKEND", usual)
        patch.setattr("pannier.client.staging.device_stream.ASYNC_DEVICES", frozenset({"cpu"}))
        yield
