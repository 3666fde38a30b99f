"""What the client prints: its log records on stderr, the lines of saves and loads, and of long waits.

In: log records, ``PANNIER_LOG``, ended saves and loads, and calls that wait. Out: lines ``pannier: ...``, as long as
the program has not set up logging itself: once the ``pannier`` logger or one above it has a handler of the program's,
records go there alone, at the levels that the program chose. By default warnings and the lines of :func:`info` are
shown. ``PANNIER_LOG`` sets the level of the ``pannier`` logger: a level's name, or ``off``. A wait is logged as a
warning after 2 s (on ranks other than 0 after 8 s), repeated at growing intervals, by the engine's loop; the longest
wait of a training loop is kept for the sidecar and operators. Thread-safe.
"""

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pannier.client.engine import engine
from pannier.client.fork_hooks import reset_in_child
from pannier.client.process_group import process_rank
from pannier.common import timeouts
from pannier.common.message_json import duration
from pannier.common.units import duration_text, size_text
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import ConfigurationError

_VARIABLE: Final = "PANNIER_LOG"
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
_top: Final = logging.getLogger("pannier")
_log: Final = logging.getLogger("pannier.client")
_FACTOR: Final = 4.0
"""Growth of the interval between warnings."""

_training: Final[dict[int, "weakref.ref[Wait]"]] = {}
"""Calls that keep the training loop waiting, by id."""


class _Stderr(logging.Handler):
    """Writes what no other handler gets."""

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        if _has_other_handlers(logging.getLogger(record.name)):
            return
        try:
            rank = process_rank()
            who = f"pannier rank {rank}" if rank else "pannier"
            # Looked up now: programs and tests replace it. One call: ranks share a terminal.
            sys.stderr.write(f"{who}: {self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler: logging must not end the program
            self.handleError(record)


_stderr: Final = _Stderr()


def install() -> None:
    """Adds the default handler; once.

    Raises ConfigurationError: ``PANNIER_LOG`` is not a level.
    """
    if _stderr not in _top.handlers:
        _top.addHandler(_stderr)
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return
    level = _LEVELS.get(text.lower())
    if level is None:
        raise ConfigurationError(f"{_VARIABLE}={text!r}: use one of {', '.join(_LEVELS)}")
    _top.setLevel(level)


def info(message: str, *args: Any) -> None:
    """Logs a line of level INFO that is shown even if the program has not set up logging."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(message, *args, stacklevel=2)
    elif _log.manager.disable < logging.INFO and not _is_configured():
        _log.handle(
            _log.makeRecord(_log.name, logging.INFO, __file__, 0, message, args, exc_info=None)
        )


def log_loaded(checkpoint_id: str, size: int, seconds: float, files: str) -> None:
    """Logs the line.

    Args:
        size: bytes of all ranks.
        files: the numbers of files by source.
    """
    info("loaded %s, %s in %.1f s, %s", checkpoint_id, size_text(size), seconds, files)


def log_committed(
    context: sidecar_pb2.SaveContext,
    size: int,
    durable_s: float,
    stalled_s: float | None = None,
) -> None:
    """Logs the line on the first rank; nothing on the others.

    Args:
        size: bytes of all ranks.
        durable_s: from the call to the commit.
        stalled_s: for how long the call kept the training loop, on the slowest rank; None: until the commit.
    """
    if context.rank != context.ranks[0]:
        return
    ranks = f"{len(context.ranks)} rank{'s' if len(context.ranks) > 1 else ''}"
    stall = "" if stalled_s is None else f"stalled {duration_text(stalled_s)}, "
    info(
        "saved %s, %s from %s, %sdurable after %s",
        *(context.checkpoint_id, size_text(size), ranks, stall, duration_text(durable_s)),
    )


@contextmanager
def logged(
    call: str,
    reason: Callable[[], str | None],
    *,
    of: tuple[str, str] | None = None,
    why: "save_pb2.WaitReason" = save_pb2.WAIT_REASON_UNSPECIFIED,
) -> Iterator["Wait"]:
    """Logs the wait in this block, which may change its reason; arguments as of :class:`Wait`."""
    wait = Wait(call, reason, of=of, why=why)
    try:
        yield wait
    finally:
        wait.end()


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


def _is_configured() -> bool:
    return bool(_log.level or _top.level) or _has_other_handlers(_log)


def _has_other_handlers(logger: logging.Logger | None) -> bool:
    while logger is not None:
        if any(handler is not _stderr for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method as long as something else refers to its object."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def _reset_in_child() -> None:
    _training.clear()


reset_in_child(_reset_in_child)
