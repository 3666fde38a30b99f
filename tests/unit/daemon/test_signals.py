"""SIGTERM and SIGINT end a daemon's wait."""

import asyncio
import os
import signal

from pannier.daemon.signals import AioStopSignals, StopSignals
from support.processes.stretch import BOUND_S


def test_sigterm_ends_the_wait_and_the_second_one_too() -> None:
    with StopSignals() as stop:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(BOUND_S)
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(BOUND_S)
    assert signal.getsignal(signal.SIGTERM) is not stop._handle


def test_sigterm_ends_the_wait_on_a_loop() -> None:
    async def wait() -> bool:
        async with AioStopSignals() as stop:
            assert not await stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            return await stop.wait(BOUND_S)

    assert asyncio.run(wait())
