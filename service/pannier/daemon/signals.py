"""SIGTERM and SIGINT as requests that a daemon's event loop waits for."""

import asyncio
import math
import signal
import threading
from types import TracebackType
from typing import Final

from pannier.common.deadline import within

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Asynchronous context manager for a daemon whose main thread runs an event loop; entered on it."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[None] = asyncio.Queue()
        self._installed: list[signal.Signals] = []

    async def __aenter__(self) -> "StopSignals":
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._loop.add_signal_handler(number, self._requests.put_nowait, None)
                self._installed.append(number)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in self._installed:
            self._loop.remove_signal_handler(number)

    def request(self) -> None:
        """Requests a stop, as a signal does. Any thread."""
        self._loop.call_soon_threadsafe(self._requests.put_nowait, None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the next request; False when none came within ``timeout_s`` seconds."""
        if not self._requests.empty():
            # A wait of 0 seconds would end before it looks at the queue.
            self._requests.get_nowait()
            return True
        try:
            await within(math.inf if timeout_s is None else timeout_s, self._requests.get())
        except asyncio.TimeoutError:
            return False
        return True
