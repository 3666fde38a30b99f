"""Copies on several threads are still copies."""

import ctypes
import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable

import pytest

from pannier.client.staging import host_copy
from pannier.client.staging.host_copy import HostCopies

MIB = 1 << 20


class Buffer:
    def __init__(self, size: int, content: bytes | None = None) -> None:
        self.data = ctypes.create_string_buffer(content or b"\0", size)
        self.address = ctypes.addressof(self.data)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 8 * MIB, 8 * MIB + 1, 50 * MIB + 3])
def test_every_byte_arrives(count: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "threads", lambda: count)
    content = os.urandom(4096) * (size // 4096 + 1)
    source, target = Buffer(size, content[:size]), Buffer(size)
    copies = HostCopies()
    copies.add(target.address, source.address, size, source)
    copies.run()
    assert target.data.raw == content[:size]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_copies_of_any_sizes_arrive_together(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "threads", lambda: count)
    sizes = [0, 1, 77, 8 * MIB, 40 * MIB + 5, 3 * MIB, 8 * MIB + 1]
    content = os.urandom(1 << 16) * (41 << 4)
    pairs = [(Buffer(max(1, size), content[:size]), Buffer(max(1, size))) for size in sizes]
    copies = HostCopies()
    for size, (source, target) in zip(sizes, pairs, strict=True):
        copies.add(target.address, source.address, size, source)
    copies.run()
    for size, (_, target) in zip(sizes, pairs, strict=True):
        assert target.data.raw[:size] == content[:size]


def test_nothing_is_a_size() -> None:
    source = Buffer(1)
    copies = HostCopies()
    copies.run()
    copies.add(source.address, source.address, 0, source)
    copies.run()


def test_a_second_run_copies_nothing_again() -> None:
    source, target = Buffer(5, b"first"), Buffer(5)
    copies = HostCopies()
    copies.add(target.address, source.address, 5, source)
    copies.run()
    source.data.raw = b"later"
    copies.run()
    assert target.data.raw == b"first"


def test_sources_live_until_they_are_copied_and_no_longer() -> None:
    source, target = Buffer(4, b"kept"), Buffer(4)
    reference = weakref.ref(source)
    copies = HostCopies()
    copies.add(target.address, source.address, 4, source)
    del source
    gc.collect()
    assert reference() is not None
    copies.run()
    gc.collect()
    assert target.data.raw == b"kept"
    assert reference() is None


class InterruptedQueue(queue.SimpleQueue[None]):
    """Its first wait is interrupted, if asked to; the next one lets the helpers go on."""

    def __init__(self, interrupt: bool, go_on: threading.Event) -> None:
        self.interrupt, self.go_on = interrupt, go_on

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        self.go_on.set()
        return super().get(block, timeout)


@pytest.mark.parametrize("while_", ["copying", "waiting"])
def test_no_thread_copies_after_an_interrupt(while_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the calling thread copies a piece or waits for those of the other threads."""
    monkeypatch.setattr(host_copy, "threads", lambda: 3)
    main = threading.current_thread()
    helped, go_on = threading.Event(), threading.Event()
    memmove: Callable[..., int] = ctypes.memmove
    at_it = 0

    def copy(*arguments: int) -> int:
        nonlocal at_it
        if threading.current_thread() is not main:
            at_it += 1
            helped.set()
            go_on.wait()
            copied = memmove(*arguments)
            at_it -= 1
            return copied
        helped.wait()
        if while_ == "copying":
            raise KeyboardInterrupt
        return memmove(*arguments)

    monkeypatch.setattr(ctypes, "memmove", copy)
    source, target = Buffer(100 * MIB), Buffer(100 * MIB)
    copies = HostCopies()
    copies._helper_ended = InterruptedQueue(while_ == "waiting", go_on)
    copies.add(target.address, source.address, 100 * MIB, source)
    try:
        with pytest.raises(KeyboardInterrupt):
            copies.run()
        assert at_it == 0
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(1, "", 1), (2, "", 2), (2, "2", 1), (96, "8", 4), (4, "8", 1), (3, "x", 3)],
)
def test_ranks_share_the_cores_of_their_host(
    cores: int, ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_copy.threads() == expected
