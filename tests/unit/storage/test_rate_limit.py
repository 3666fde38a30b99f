"""The limit of bytes per second, on a clock of the test's."""

import asyncio

import pytest

from pannier.storage import rate_limit
from pannier.storage.rate_limit import RateLimit


class Clock:
    """Stands still unless something sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in "time", "asyncio":
        monkeypatch.setattr(rate_limit, module, made)
    return made


def seconds(clock: Clock, limit: RateLimit, share: float, count: int) -> float:
    before = clock.now

    async def run() -> None:
        for _ in range(count):
            await limit.take(10, share)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return clock.now - before


def test_bytes_are_sent_at_the_limit_and_at_a_share_of_it(clock: Clock) -> None:
    limit = RateLimit(100)
    # The first 0.1 s and what is about to be sent are free.
    assert seconds(clock, limit, 1.0, 102) == pytest.approx(10.0)
    assert seconds(clock, limit, 0.5, 100) == pytest.approx(20.0, abs=0.2)


def test_it_says_when_it_limits_and_for_how_long_it_has(clock: Clock) -> None:
    limit = RateLimit(100)
    assert not limit.limits
    assert limit.reserve(10) == 0
    assert not limit.limits
    # Two wait at the same time: their seconds count once.
    assert limit.reserve(100) == pytest.approx(0.0)
    assert limit.reserve(100) == pytest.approx(1.0)
    assert limit.reserve(100) == pytest.approx(2.0)
    assert limit.limits
    assert limit.waited_s == pytest.approx(0.0)
    clock.now += 0.5
    assert limit.waited_s == pytest.approx(0.5)
    clock.now += 2.0
    assert limit.limits
    clock.now += 1.0
    assert not limit.limits
    assert limit.waited_s == pytest.approx(2.0)
    # A wait after a pause counts again.
    limit.reserve(100)
    limit.reserve(100)
    clock.now += 10
    assert limit.waited_s == pytest.approx(2.9)


def test_what_was_not_used_for_long_is_not_made_up_for(clock: Clock) -> None:
    limit = RateLimit(100)
    seconds(clock, limit, 1.0, 102)
    clock.now += 3600
    assert seconds(clock, limit, 1.0, 102) == pytest.approx(10.0)
