"""Arenas are pinned once and let go before they are unmapped; the ring stays bounded."""

import gc
import threading
from collections.abc import Iterator
from ctypes import c_char

import pytest
import torch

from pannier.client.staging import pinned_memory
from pannier.client.staging.arena import ArenaPool, MemoryMapping
from pannier.client.staging.pinned_memory import PinnedBufferPool, pin
from support.processes.stretch import BOUND_S
from support.states.host_streams import CurrentDevice


class Runtime:
    """Stands for ``torch.cuda.cudart()``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.code = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert (size % 4096, flags) == (0, 1)
        self.calls.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        # It is still there.
        torch.frombuffer((c_char * 1).from_address(address), dtype=torch.uint8)
        self.calls.append(("unregister", address))
        return self.code

    def cudaGetErrorString(self, code: int) -> str:
        return "operation not supported"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned_memory, "_forget_error", lambda: runtime.calls.append(("forget", 0)))
    yield runtime
    gc.collect()


def mapping(pool: ArenaPool) -> MemoryMapping:
    found = pool.acquire([1 << 20]).files[0].mapping
    assert found is not None
    return found


def test_a_mapping_is_registered_once_and_until_it_is_unmapped(runtime: Runtime) -> None:
    pool = ArenaPool(1)
    arena = pool.acquire([1 << 20])
    address = arena.files[0].address
    for _ in range(3):
        assert arena.files[0].mapping is not None
        assert pin(arena.files[0].mapping, "cuda") == ""
        pool.release(arena)
        arena = pool.acquire([1 << 20])
        assert arena.files[0].address == address
    assert runtime.calls == [("register", address)]
    pool.release(arena)
    del arena
    pool.close()
    gc.collect()
    assert runtime.calls == [("register", address), ("unregister", address)]


def test_a_mapping_is_let_go_on_the_device_of_the_thread_that_registered_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CurrentDevice()
    let_go_on: list[bool] = []

    def unregister(address: int) -> int:
        let_go_on.append(device.is_set)
        return 0

    monkeypatch.setattr(pinned_memory, "on_current_device", lambda: device)
    monkeypatch.setattr(runtime, "cudaHostUnregister", unregister)
    found = mapping(pool := ArenaPool(1))
    assert pin(found, "cuda") == ""
    pool.close()
    releasing = threading.Thread(target=found.unpin)
    releasing.start()
    releasing.join(BOUND_S)
    assert let_go_on == [True]


def test_what_cannot_be_registered_says_why_and_is_not_tried_again(runtime: Runtime) -> None:
    pool = ArenaPool(1)
    runtime.code = 801
    found = mapping(pool)
    reason = "cudaHostRegister refuses 1048576 bytes of the arena: operation not supported"
    assert pin(found, "cuda") == reason
    assert pin(found, "cuda") == reason
    # No later call may find the error.
    assert [what for what, _ in runtime.calls] == ["register", "forget"]
    pool.close()
    del found
    gc.collect()
    assert len(runtime.calls) == 2


def test_other_devices_get_the_ring(runtime: Runtime) -> None:
    pool = ArenaPool(1)
    assert pin(mapping(pool), "xpu") == "memory can't be registered for xpu"
    assert not runtime.calls
    pool.close()


def test_the_ring_makes_its_buffers_when_they_are_needed_and_waits_for_one() -> None:
    made = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    pool = PinnedBufferPool(allocate, buffers=2, buffer_bytes=64)
    assert made == []
    first, second = pool.acquire(wait=False), pool.acquire(wait=True)
    assert first is not None
    assert second is not None
    assert first.address != second.address
    assert made == [64, 64]
    assert pool.acquire(wait=False) is None
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pool.acquire(wait=True)))
    waiting.start()
    pool.release(first)
    waiting.join(BOUND_S)
    assert taken == [first]
    assert made == [64, 64]


def test_without_pinned_memory_there_is_other(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuses(*shape: int, pin_memory: bool = False, **how: torch.dtype) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuses)
    buffer = PinnedBufferPool(buffers=1, buffer_bytes=64).acquire(wait=False)
    assert buffer is not None
    assert buffer.memory.numel() == 64
