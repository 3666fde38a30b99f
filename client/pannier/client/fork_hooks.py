"""What a forked child does with what it inherits from the client: the only hook of forks, with its order.

In: objects, weakly referenced, and functions. Out: in the child, before ``os.fork`` returns there, what it must
never free is leaked, then inherited connections and files are closed, then modules replace what threads of the
parent hold or serve. Takes no lock of the parent's: its other threads don't exist in the child. Thread-safe.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from pannier.wire.errors import InvalidRequestError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def forked_error() -> InvalidRequestError:
    """The error of a child that uses what belongs to its parent."""
    return InvalidRequestError(
        f"process {os.getpid()} was forked from one whose client was connected, and gRPC doesn't survive a "
        'fork: use the client in the parent, or start this process with "spawn"'
    )


_kept: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
_inherited: Final["weakref.WeakKeyDictionary[Any, Callable[[Any], object]]"] = (
    weakref.WeakKeyDictionary()
)
_resets: Final[list[Callable[[], object]]] = []


def keep(thing: Any) -> None:
    """The child never frees ``thing``, which owns memory that isn't mapped there, or runs gRPC's code."""
    _kept.add(thing)


def close_in_child(owner: _T, close: Callable[[_T], object]) -> None:
    """The child calls ``close(owner)``: its copy of a descriptor would outlive the parent, which seemed alive."""
    _inherited[owner] = close


def reset_in_child(reset: Callable[[], object]) -> None:
    """The child calls ``reset``, which replaces what threads of the parent may hold or serve."""
    _resets.append(reset)


def _after_fork() -> None:
    # First: what the later functions drop may hold the last reference.
    for thing in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    closes = [partial(close, owner) for owner, close in list(_inherited.items())]
    functions: list[Callable[[], object]] = [*closes, *_resets]
    for function in functions:
        try:
            function()
        except Exception:  # noqa: BLE001 - the functions of other modules must run, too
            _log.exception("after a fork")


os.register_at_fork(after_in_child=_after_fork)
