"""What happens when the interpreter ends: saves are waited for, and a long wait is logged.

In: whatever has saves in progress. Out: its two calls, before the interpreter waits for threads, and
after. Thread-safe.
"""

import atexit
import logging
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class _Closing(Protocol):
    """See :class:`pannier.client.save_factory.SaveFactory`."""

    def log_exit(self) -> None:
        """The interpreter is about to wait for threads that send."""

    def close_at_exit(self) -> None:
        """These threads have ended."""


_known: "weakref.WeakSet[_Closing]" = weakref.WeakSet()
_kept: set[_Closing] = set()
"""Those that must be called though nothing else refers to them any more."""


def add(closing: _Closing) -> None:
    """Has it called as long as something else refers to it."""
    _known.add(closing)


def keep(closing: _Closing) -> None:
    """Has it called also when nothing else refers to it, until :func:`let_go`."""
    _kept.add(closing)


def let_go(closing: _Closing) -> None:
    """Ends :func:`keep`; idempotent."""
    _kept.discard(closing)


def _before_threads_end() -> None:
    for each in list(_known):
        try:
            each.log_exit()
        except Exception:  # noqa: BLE001 - the hooks of other modules, which end threads, must run
            _log.exception("the wait at exit can't be logged")


@atexit.register
def _after_threads_end() -> None:
    for each in list(_known):
        each.close_at_exit()


# What atexit runs comes after the wait for threads.
threading._register_atexit(_before_threads_end)  # type: ignore[attr-defined]
