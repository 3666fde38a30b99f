"""Calls that are made again while the sidecar can't be reached, until their deadline.

In: a call, and how long it may take. Out: its answer, or the error of the last try. Blocking
code; thread-safe. A pause is cut short when the connection is back.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from pannier.client.transport.channel import InterruptedCallError
from pannier.common.deadline import Deadline
from pannier.wire.errors import UnavailableError

Result = TypeVar("Result")


class Retry:
    """Repeats the calls of one session.

    Args:
        unreachable: what to say when a fork has ended the last try.
        connected: set while the sidecar is there.
        closed: set at the session's end.
        at_exit_s: how long the interpreter waits for a sidecar that is away when it is ending.
    """

    def __init__(
        self,
        unreachable: str,
        *,
        connected: threading.Event,
        closed: threading.Event,
        at_exit_s: float,
    ) -> None:
        self._unreachable = unreachable
        self._connected = connected
        self._closed = closed
        self._at_exit_s = at_exit_s

    def __call__(
        self, call: Callable[[], Result], deadline: Deadline, patience_s: float = float("inf")
    ) -> Result:
        """``call()``, again while the sidecar can't be reached, until ``deadline``."""
        patience = Deadline(min(patience_s, deadline.remaining()))
        at_exit: Deadline | None = None

        def enough(_: tenacity.RetryCallState) -> bool:
            nonlocal at_exit
            if at_exit is None and not threading.main_thread().is_alive():
                # The interpreter is ending and waits for us: not for long.
                at_exit = Deadline(self._at_exit_s)
            return (
                patience.passed or self._closed.is_set() or (at_exit is not None and at_exit.passed)
            )

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((UnavailableError, InterruptedCallError)),
            wait=_pause,
            stop=enough,
            sleep=self._await_connection,
            reraise=True,
        )
        try:
            return tries(call)
        except InterruptedCallError as error:
            raise UnavailableError(self._unreachable) from error

    def _await_connection(self, seconds: float) -> None:
        if self._connected.is_set():
            # Connected, or not yet noticed that it isn't: don't hurry.
            self._closed.wait(seconds)
        else:
            self._connected.wait(seconds)


def _pause(state: tenacity.RetryCallState) -> float:
    if state.outcome is not None and isinstance(state.outcome.exception(), InterruptedCallError):
        return 0.0
    return min(1.0, 0.05 * 2.0 ** min(state.attempt_number, 5))
