"""Logs long waits in the caller's thread: which call, how long, and what it waits for.

In: a call, and a function that returns what it waits for. Out: a warning after 2 s (on ranks other
than 0 after 8 s), repeated at growing intervals; and the longest wait of a training loop, for the sidecar and
operators. Logs on the engine's loop. Thread-safe.
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pannier.client.engine import engine
from pannier.client.fork_hooks import reset_in_child
from pannier.client.process_group import process_rank
from pannier.common import timeouts
from pannier.common.message_json import duration
from pannier.v1 import save_pb2

_log = logging.getLogger(__name__)

_FACTOR: Final = 4.0
"""Growth of the interval between warnings."""

_training: Final[dict[int, "weakref.ref[Wait]"]] = {}
"""Calls that keep the training loop waiting, by id."""


class Wait:
    """One wait in progress.

    Args:
        call: the user's call, with its target.
        reason: returns what it waits for; empty: not known; None: it waits for nothing now.
        of: the name and the target of a call that keeps the training loop waiting; None: of another one.
        why: reason of such a call.
    """

    def __init__(
        self,
        call: str,
        reason: Callable[[], str | None],
        *,
        of: tuple[str, str] | None = None,
        why: "save_pb2.WaitReason" = save_pb2.WAIT_REASON_UNSPECIFIED,
    ) -> None:
        self.call = call
        self.reason = reason
        self.why = why
        self._of = of
        if of is not None:
            _training[id(self)] = weakref.ref(self)
        self._began = time.monotonic()
        self._over = False
        # Weakly, so that an interrupted call, which never ends its wait, doesn't log for ever.
        self._warn_if_alive = _weakly(self._warn)
        self._patience_s = (
            timeouts.WAIT_WARNING_OTHERS_S if process_rank() else timeouts.WAIT_WARNING_S
        )
        self._timer = engine().after(self._patience_s, self._warn_if_alive)

    def end(self) -> None:
        """Stops logging."""
        self._over = True
        _training.pop(id(self), None)
        self._timer.cancel()

    def change(self, reason: Callable[[], str | None], why: "save_pb2.WaitReason") -> None:
        """It waits for something else from now on."""
        self.reason, self.why = reason, why

    def message(self) -> save_pb2.TrainingWait:
        """For the sidecar."""
        name, checkpoint_id = self._of or ("", "")
        return save_pb2.TrainingWait(
            call=name,
            checkpoint_id=checkpoint_id,
            reason=self.why,
            duration=duration(self.seconds),
        )

    @property
    def seconds(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._began

    def _warn(self) -> None:
        now, reason = time.monotonic(), self.reason()
        pause_s = self._patience_s
        if reason is None:
            self._began = now
        else:
            seconds = now - self._began
            _log.warning("%s has waited %.0f s: for %s", self.call, seconds, reason or "an answer")
            pause_s = (_FACTOR - 1) * seconds
        self._timer = engine().after(pause_s, self._warn_if_alive)
        if self._over:
            self._timer.cancel()


def training_wait() -> save_pb2.TrainingWait | None:
    """The wait that has kept the training loop for the longest, if for more than 2 s. Any thread."""
    # Weakly, as above; copied at once, while other threads add and remove.
    waits = [each for reference in list(_training.values()) if (each := reference()) is not None]
    longest = max(waits, key=lambda each: each.seconds, default=None)
    if longest is None or longest.seconds < timeouts.WAIT_WARNING_S:
        return None
    return longest.message()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method as long as something else refers to its object."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


@contextmanager
def logged(
    call: str,
    reason: Callable[[], str | None],
    *,
    of: tuple[str, str] | None = None,
    why: "save_pb2.WaitReason" = save_pb2.WAIT_REASON_UNSPECIFIED,
) -> Iterator[Wait]:
    """Logs the wait in this block, which may change its reason; arguments as of :class:`Wait`."""
    wait = Wait(call, reason, of=of, why=why)
    try:
        yield wait
    finally:
        wait.end()


def _reset_in_child() -> None:
    _training.clear()


reset_in_child(_reset_in_child)
