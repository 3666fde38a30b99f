"""SIGTERM and SIGINT as requests that a daemon's main thread, or its event loop, waits for."""

import asyncio
import queue
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager for a daemon whose main thread only waits.

    Outside the main thread (an in-process daemon of a test) no signal handler is
    installed; :meth:`request` stops it. :meth:`wait` is for one thread.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        # Its put is reentrant, as signal handlers need; an Event's set may deadlock.
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Requests a stop, as a signal does. Any thread."""
        self._requests.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the next request; False when none came within ``timeout_s`` seconds.

        The second request ends the grace period of the first.
        """
        try:
            self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()


class AioStopSignals:
    """Asynchronous context manager for a daemon whose main thread runs an event loop; entered on it."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[None] = asyncio.Queue()
        self._installed: list[signal.Signals] = []

    async def __aenter__(self) -> "AioStopSignals":
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
        try:
            await asyncio.wait_for(self._requests.get(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True
