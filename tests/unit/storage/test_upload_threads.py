"""Upload threads: how many work at a time, at which rate, and how they are stopped."""

import asyncio
import os
import select
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pannier.storage import StorageError
from pannier.storage.rate_limit import RateLimit
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import StoppedError, Turn, UploadThreads
from support.processes.stretch import BOUND_S
from support.storage.sources import FileSource, some_bytes


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, BOUND_S))


class Gauge:
    """Calls that work at the same time, each until all that may have begun."""

    def __init__(self, cores: int) -> None:
        self.together = threading.Barrier(cores)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def work(self, turn: Turn) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.together.wait(BOUND_S)
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_as_many_calls_work_at_a_time_as_there_are_cores(cores: int) -> None:
    async def test() -> None:
        threads, gauge = UploadThreads(cores), Gauge(cores)
        await asyncio.gather(*(threads.run(gauge.work) for _ in range(3 * cores)))
        assert gauge.most == cores

    run(test())


def test_a_call_that_waits_leaves_its_core_to_others() -> None:
    async def test() -> None:
        threads = UploadThreads(1)
        reading, writing = os.pipe()
        waiting = asyncio.create_task(
            threads.run(lambda turn: turn.wait_for(reading, select.POLLIN))
        )
        await threads.run(lambda turn: os.write(writing, b"x"))
        await waiting
        os.close(reading)
        os.close(writing)

    run(test())


def test_a_cancelled_call_is_stopped_and_waited_for() -> None:
    ended: list[BaseException] = []

    async def test() -> None:
        threads = UploadThreads(1)
        begun, (reading, writing) = threading.Event(), os.pipe()

        def wait(turn: Turn) -> None:
            begun.set()
            try:
                turn.wait_for(reading, select.POLLIN)
            except StoppedError as error:
                ended.append(error)
                raise

        call = asyncio.create_task(threads.run(wait))
        await asyncio.to_thread(begun.wait, BOUND_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(ended) == 1
        os.close(reading)
        os.close(writing)

    run(test())


def test_a_call_that_has_not_begun_when_it_is_cancelled_never_does() -> None:
    async def test() -> None:
        threads, begun, go_on = UploadThreads(1), threading.Event(), threading.Event()

        def hold(turn: Turn) -> None:
            begun.set()
            go_on.wait(BOUND_S)

        holding = asyncio.create_task(threads.run(hold))
        await asyncio.to_thread(begun.wait, BOUND_S)
        done: list[int] = []
        late = asyncio.create_task(threads.run(lambda turn: done.append(1)))
        await asyncio.sleep(0)
        late.cancel()
        # It is stopped before it could have the core.
        for _ in range(5):
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await late
        await holding
        assert not done

    run(test())


def test_an_error_of_a_call_is_its_callers() -> None:
    def fail(turn: Turn) -> None:
        raise MemoryError("no page")

    async def test() -> None:
        threads = UploadThreads(1)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no page"):
                await threads.run(fail)
        assert await threads.run(lambda turn: 7) == 7

    run(test())


def test_a_thread_that_can_not_be_started_fails_the_call_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        threads = UploadThreads(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StorageError, match=r"no thread for uploads .*can't start new"):
                await threads.run(lambda turn: 7)
        assert await threads.run(lambda turn: 8) == 8

    run(test())


def test_uploads_share_one_limit(tmp_path: Path) -> None:
    size, rate = 1 << 20, 4 << 20

    async def test() -> None:
        limit = RateLimit(rate)
        threads = UploadThreads(2, limit)
        began = time.monotonic()

        async def read(number: int) -> None:
            source = FileSource(tmp_path / str(number), some_bytes(size))
            reader = SourceReader(source, threads)
            await reader.fill(memoryview(bytearray(size)), 0)
            assert await reader.confirm() == source.crc
            reader.close()

        await asyncio.gather(*map(read, range(3)))
        # What may be made up for, and a piece of 256 KiB, are free.
        least_s = (3 * size - (256 << 10)) / rate - 0.1
        assert time.monotonic() - began >= least_s
        assert limit.waited_s >= least_s / 2

    run(test())


def test_a_cancelled_call_does_not_wait_for_the_limit() -> None:
    async def test() -> None:
        threads = UploadThreads(1, RateLimit(1))
        await threads.run(lambda turn: turn.take(1_000_000))
        waiting = asyncio.create_task(threads.run(lambda turn: turn.take(1)))
        # It holds no core meanwhile.
        await threads.run(lambda turn: None)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(test())


@pytest.mark.parametrize(
    ("bytes_per_s", "size"),
    [
        (None, 32 << 20),
        (1 << 20, 1 << 20),
        (300 << 10, 256 << 10),
        (1, 256 << 10),
        (1 << 30, 32 << 20),
    ],
)
def test_a_limit_bounds_the_requests(bytes_per_s: int | None, size: int) -> None:
    limit = None if bytes_per_s is None else RateLimit(bytes_per_s)
    assert UploadThreads(1, limit).request_bytes(32 << 20, 256 << 10) == size
