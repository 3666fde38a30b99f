"""A coroutine that is cut off."""

import asyncio
import gc
import logging

import pytest

from pannier.common.deadline import within


@pytest.mark.parametrize("turns", range(1, 5))
def test_an_error_that_comes_with_a_cancellation_is_not_logged(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("too late")

    async def main() -> None:
        waiting = asyncio.ensure_future(within(10.0, fail()))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            assert isinstance(waiting.exception(), ValueError)

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(main())
        gc.collect()
    assert not caplog.text
