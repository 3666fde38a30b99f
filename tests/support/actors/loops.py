"""An event loop in a thread of this process, for the parts of a daemon that a test drives by hand."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TIMEOUT_S = 60.0


class LoopThread:
    """A context manager. Coroutines of the loop's owner run in its thread, one scenario after the other."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = TIMEOUT_S) -> T:
        """Awaits ``work`` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls ``function`` on the loop."""

        async def run() -> T:
            return function(*args)

        return self.run(run())

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
