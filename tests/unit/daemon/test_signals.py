"""SIGTERM and SIGINT end a daemon's wait."""

import asyncio
import os
import signal

from pannier.daemon.signals import StopSignals
from support.processes.stretch import BOUND_S


def test_sigterm_ends_the_wait_and_the_second_one_too() -> None:
    async def wait() -> None:
        async with StopSignals() as stop:
            assert not await stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await stop.wait(BOUND_S)
            assert not await stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)
            # One that has come already is seen without a wait.
            assert await stop.wait(0)

    asyncio.run(wait())
