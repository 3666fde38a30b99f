"""The number of streams finds what is fastest, and no more than that."""

import threading
from collections.abc import Callable

import pytest

from pannier.client.transport.file_stream import StreamLimit
from support.processes.stretch import BOUND_S

MIB = 1 << 20


class World:
    """Files of 256 MiB that never end, sent at a rate that depends on how many are."""

    def __init__(self, most: int, rate: Callable[[int], float]) -> None:
        self.now = 0.0
        self.streams = StreamLimit(most, lambda: self.now)
        self._rate = rate
        self._left: list[int] = []
        self.seen: list[int] = []

    def run(self, mib: int) -> None:
        for _ in range(mib // 16):
            while len(self._left) < self.streams.limit:
                assert self.streams.acquire(0)
                self._left.append(256)
            self.seen.append(len(self._left))
            self.now += 16 / self._rate(len(self._left))
            self.streams.add_bytes(16 * MIB)
            self._left = [left - 16 / len(self._left) for left in self._left]  # type: ignore[misc]
            for _ in [left for left in self._left if left <= 0]:
                self.streams.release()
            self._left = [left for left in self._left if left > 0]


@pytest.mark.parametrize(
    ("most", "rate", "expected"),
    [
        (4, lambda n: 500.0 * n, 4),
        (4, lambda n: 500.0 * min(n, 3), 3),
        (4, lambda n: 1000.0, 1),
        (4, lambda n: 1000.0 / n, 1),
        (2, lambda n: 500.0 * n, 2),
        (1, lambda n: 500.0, 1),
    ],
    ids=["each helps", "three help", "one is enough", "more disturb", "two cores", "one core"],
)
def test_the_limit_follows_the_throughput(
    most: int, rate: Callable[[int], float], expected: int
) -> None:
    world = World(most, rate)
    world.run(16 << 10)
    late = world.seen[len(world.seen) // 2 :]
    assert late.count(expected) > 0.8 * len(late)
    assert max(world.seen) <= most


def test_a_stream_waits_for_permission() -> None:
    streams = StreamLimit(1)
    assert streams.acquire(1)
    assert not streams.acquire(0.01)
    taken = threading.Event()

    def wait() -> None:
        assert streams.acquire(30)
        taken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    streams.release()
    assert taken.wait(BOUND_S)
    waiting.join()
