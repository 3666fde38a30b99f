"""Retries of a store: which errors, for how long, and an earlier end set by the caller."""

import asyncio
import itertools
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from pannier.common.deadline import within
from pannier.storage import StorageError
from pannier.storage.base import DeniedError, end_of, limited, unlimited
from pannier.storage.connections import SharedConnection
from pannier.storage.retry import TransientError, asked_pause_s, clean_up, retry
from support.processes.stretch import BOUND_S, until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.01)


class Flaky:
    """Fails ``times`` (-1: always) before it answers, each try taking ``seconds``."""

    def __init__(self, times: int = -1, *, seconds: float = 0, error: Exception | None = None):
        self.times = times
        self.seconds = seconds
        self.error = error or TransientError("gs://b/o: 503 busy")
        self.tries: list[float] = []
        self.cut = 0

    async def __call__(self) -> str:
        self.tries.append(time.monotonic())
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cut += 1
            raise
        if self.times:
            self.times -= 1
            raise self.error
        return "done"


def timed(work: Coroutine[Any, Any, Any]) -> float:
    began = time.monotonic()
    asyncio.run(asyncio.wait_for(work, BOUND_S))
    return time.monotonic() - began


def test_what_is_transient_is_tried_again_and_each_retry_is_reported() -> None:
    flaky, counted, notified = Flaky(3), list[str](), list[str]()

    async def body() -> None:
        with limited(retried=notified.append):
            assert await retry(flaky, what="o", deadline_s=20, retried=counted.append) == "done"

    timed(body())
    assert len(flaky.tries) == 4
    assert counted == notified == ["gs://b/o: 503 busy"] * 3


def test_what_can_not_succeed_is_tried_once() -> None:
    flaky = Flaky(error=DeniedError("gs://b/o: 403 no"))

    async def body() -> None:
        with pytest.raises(DeniedError):
            await retry(flaky, what="o", deadline_s=20)

    timed(body())
    assert len(flaky.tries) == 1


def test_waits_are_random() -> None:
    async def waits(flaky: Flaky) -> list[float]:
        await retry(flaky, what="o", deadline_s=20)
        return [later - sooner for sooner, later in itertools.pairwise(flaky.tries)]

    async def body() -> list[list[float]]:
        return list(await asyncio.gather(*(waits(Flaky(4)) for _ in range(8))))

    found = asyncio.run(body())
    # Many who failed together don't come back together.
    assert len({round(each[-1], 3) for each in found}) > 1


def test_a_store_that_asks_to_wait_is_obeyed() -> None:
    flaky = Flaky(1, error=TransientError("429", after_s=0.3))
    timed(retry(flaky, what="o", deadline_s=20))
    assert flaky.tries[1] - flaky.tries[0] >= 0.3


def test_no_wait_goes_beyond_the_deadline() -> None:
    flaky = Flaky(error=TransientError("429", after_s=2 * BOUND_S))

    async def body() -> None:
        with pytest.raises(StorageError, match=r"429 \(given up after 1 try"):
            await retry(flaky, what="o", deadline_s=BOUND_S / 2)

    assert timed(body()) < BOUND_S / 2


@pytest.mark.parametrize("whose", ["the store's", "the caller's"])
def test_a_try_that_hangs_is_cut_off_at_the_end(whose: str) -> None:
    flaky = Flaky(seconds=60)

    async def body() -> None:
        end = time.monotonic() + 0.2
        until = None if whose == "the store's" else lambda: end
        with limited(until=until), pytest.raises(StorageError, match="o: no answer"):
            await retry(flaky, what="o", deadline_s=0.2 if until is None else 30)

    assert timed(body()) < 5
    assert flaky.cut == 1


def test_the_callers_end_holds_for_tasks_begun_within_and_not_for_what_tidies_up() -> None:
    async def body() -> None:
        past = time.monotonic() - 1
        with limited(until=lambda: past):
            task = asyncio.create_task(asyncio.to_thread(end_of, 100))
            assert end_of(100) == past
            with unlimited():
                assert end_of(100) > past
            tidied = Flaky(0)
            await clean_up(retry(tidied, what="o", deadline_s=10), "left")
            assert tidied.tries
        assert await task == past
        assert end_of(100) > past

    timed(body())


def test_what_tidies_up_does_not_swallow_a_cancellation() -> None:
    async def body() -> None:
        tidied = Flaky(0, seconds=60)
        task = asyncio.create_task(clean_up(tidied(), "left"))
        await until(lambda: tidied.tries)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tidied.cut == 1

    timed(body())


@pytest.mark.parametrize("opened", [True, False])
def test_a_connection_that_is_opened_for_no_one_any_more_is_given_up(opened: bool) -> None:
    async def body() -> None:
        closed: list[str] = []
        gate = asyncio.Event()

        async def open() -> str:
            await gate.wait()
            if not opened:
                raise StorageError("no credentials")
            return "connection"

        async def close(connection: str) -> None:
            closed.append(connection)

        shared = SharedConnection("key", open, close)
        asked = asyncio.create_task(shared.get(time.monotonic() + BOUND_S))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        await shared.release()
        assert closed == ["connection"] * opened

    timed(body())


def test_an_end_that_moves_is_asked_again() -> None:
    async def body() -> None:
        end = time.monotonic() + 2.0

        async def work() -> None:
            nonlocal end
            for _ in range(4):
                await asyncio.sleep(0.1)
                end = time.monotonic() + 2.0
            await asyncio.sleep(60)

        with pytest.raises(asyncio.TimeoutError):
            await within(30, work(), sooner=lambda: end)

    assert 2.3 <= timed(body()) < 30


def test_who_is_cancelled_leaves_nothing_running() -> None:
    flaky = Flaky(seconds=60)

    async def body() -> None:
        task = asyncio.create_task(within(30, flaky()))
        await asyncio.sleep(0.05)
        assert flaky.tries
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert flaky.cut == 1

    timed(body())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("", 0),
        ("7", 7),
        ("Fri, 27 Nov 2026 12:00:30 GMT", 30),
        ("Fri, 27 Nov 2026 11:00:00 GMT", 0),
        ("soon", 0),
        ("-1", 0),
    ],
)
def test_a_pause_is_asked_for_in_seconds_or_by_the_servers_clock(value: str, seconds: int) -> None:
    headers = {"retry-after": value, "date": "Fri, 27 Nov 2026 12:00:00 GMT"}
    assert asked_pause_s(headers) == seconds


def test_a_pause_until_a_date_is_unknown_without_the_servers_clock() -> None:
    assert asked_pause_s({"retry-after": "Fri, 27 Nov 2026 12:00:30 GMT"}) == 0
