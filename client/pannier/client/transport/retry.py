"""Repeats calls while the sidecar can't be reached, until their deadline.

In: a call, and how long it may take. Out: its answer, or the error of the last try. Blocking code;
thread-safe. A pause ends early when the connection is back.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.common.retry import RetryPolicy
from pannier.wire.errors import UnavailableError

Result = TypeVar("Result")


class Retry:
    """Repeats calls of one sidecar client while its sidecar can't be reached.

    Args:
        connected: set while the sidecar is connected.
        closed: set when the client is closed.
        at_exit_s: seconds for which an ending interpreter tries to reach the sidecar.
    """

    def __init__(
        self,
        *,
        connected: threading.Event,
        closed: threading.Event,
        at_exit_s: float,
    ) -> None:
        self._connected = connected
        self._closed = closed
        self._at_exit_s = at_exit_s

    def __call__(
        self, call: Callable[[], Result], deadline: Deadline, patience_s: float = float("inf")
    ) -> Result:
        """``call()``, repeated while the sidecar can't be reached, until ``deadline``."""
        patience = Deadline(min(patience_s, deadline.remaining()))
        at_exit: Deadline | None = None

        def stop() -> bool:
            nonlocal at_exit
            if at_exit is None and not threading.main_thread().is_alive():
                # The interpreter waits for this thread before it exits.
                at_exit = Deadline(self._at_exit_s)
            return (
                patience.passed or self._closed.is_set() or (at_exit is not None and at_exit.passed)
            )

        policy = RetryPolicy(
            retriable=lambda error: isinstance(error, UnavailableError),
            first_s=timeouts.CALL_AGAIN_S,
            longest_s=timeouts.CALL_LONGEST_AGAIN_S,
            stop=stop,
        )
        return policy.call(call, sleep=self._await_connection)

    def _await_connection(self, seconds: float) -> None:
        if self._connected.is_set():
            # Connected, or the disconnect isn't noticed yet: the whole pause.
            self._closed.wait(seconds)
        else:
            self._connected.wait(seconds)
