"""Hooks of the interpreter's exit: they wait for saves in progress, and log a long wait.

In: objects with saves in progress. Out: calls of their two methods, one before the interpreter waits
for threads, the other after. The first comes before anything else that ends with the program: functions of
atexit, pools of threads. Thread-safe.
"""

import atexit
import logging
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class _Closing(Protocol):
    """See :class:`pannier.client.ending.Ending`."""

    def send_at_exit(self) -> None:
        """The program has ended, but for threads of its own."""

    def close_at_exit(self) -> None:
        """These threads have ended."""


_known: "weakref.WeakSet[_Closing]" = weakref.WeakSet()
_is_ending = False
_kept: set[_Closing] = set()
"""Objects that are called even if nothing else references them."""


def add(closing: _Closing) -> None:
    """Registers an object, which is called as long as something else references it."""
    _known.add(closing)


def keep(closing: _Closing) -> None:
    """Keeps a registered object alive, so that it is called, until :func:`let_go`."""
    _kept.add(closing)


def let_go(closing: _Closing) -> None:
    """Ends :func:`keep`; idempotent."""
    _kept.discard(closing)


def is_ending() -> bool:
    """Whether the interpreter is ending, and waits for saves."""
    return _is_ending


def _before_threads_end() -> None:
    global _is_ending
    _is_ending = True
    for each in list(_known):
        try:
            each.send_at_exit()
        except Exception:  # noqa: BLE001 - the hooks of other modules, which end threads, must run
            _log.exception("saves may not have been waited for at exit")


@atexit.register
def _after_threads_end() -> None:
    for each in list(_known):
        try:
            each.close_at_exit()
        except Exception:  # noqa: BLE001 - the others must be closed, too
            _log.exception("saves may not have been waited for at exit")


# Functions of atexit run only after the wait for threads.
threading._register_atexit(_before_threads_end)  # type: ignore[attr-defined]
