"""Requests for many objects: some at a time, answers in order, and what a failure does to the others."""

import asyncio

import pytest

from pannier.storage.many import for_each


def test_answers_are_in_order_and_no_more_run_than_may() -> None:
    running = most = 0

    async def call(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5 - number % 5):
            await asyncio.sleep(0)
        running -= 1
        return -number

    answers = asyncio.run(for_each(call, range(20), parallel=3))
    assert answers == [-number for number in range(20)]
    assert most == 3


@pytest.mark.parametrize("try_all", [False, True])
def test_the_first_error_is_raised_at_once_or_when_all_were_tried(try_all: bool) -> None:
    numbers = []

    async def call(number: int) -> None:
        numbers.append(number)
        if number in (3, 6):
            raise OSError(f"{number}")
        await asyncio.sleep(0)

    async def main() -> None:
        with pytest.raises(OSError, match="3"):
            await for_each(call, range(9), parallel=1, try_all=try_all)
        assert (len(numbers) == 9) == try_all

    asyncio.run(main())


def test_a_caller_that_is_cancelled_cancels_the_calls() -> None:
    cancelled = []

    async def call(number: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # As a call in a thread, whose end it awaits.
            for _ in range(number):
                await asyncio.sleep(0)
            cancelled.append(number)
            raise

    async def main() -> None:
        for try_all in (False, True):
            cancelled.clear()
            task = asyncio.ensure_future(for_each(call, range(4), try_all=try_all))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert sorted(cancelled) == [0, 1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("try_all", [False, True])
def test_no_call_is_running_when_an_error_is_raised(try_all: bool) -> None:
    running: set[int] = set()

    async def call(number: int) -> None:
        running.add(number)
        try:
            if number == 1:
                raise OSError("1")
            await asyncio.sleep(0.01)
        finally:
            # As a call in a thread, whose end a cancelled call awaits.
            await asyncio.sleep(0)
            running.discard(number)

    async def main() -> None:
        with pytest.raises(OSError, match="1"):
            await for_each(call, range(4), try_all=try_all)
        assert not running

    asyncio.run(main())
