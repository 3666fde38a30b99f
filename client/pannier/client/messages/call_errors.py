"""Shortens tracebacks of Pannier's errors to the caller's line and the message.

In: the functions and methods that users call. Out: the same functions, whose PannierErrors have no
frames and causes from inside the package; these are logged at level DEBUG. Exceptions of the user's
own code pass unchanged, and remain the cause of a LoadError. No state; any thread.
"""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pannier.wire.errors import LoadError, PannierError

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def at_call(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps ``function``, so that tracebacks of its PannierErrors end at the call."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except PannierError as error:
            _log.debug("%s failed", function.__qualname__, exc_info=True)
            shown = error
        try:
            # Outside the except block, whose exception would become the context. One that the caller is
            # handling still becomes it.
            raise _without_inner_frames(shown)
        finally:
            # Its traceback holds this frame.
            del shown

    return call


def _without_inner_frames(error: PannierError) -> PannierError:
    cause = error.__cause__ if isinstance(error, LoadError) else None
    error.__cause__ = None if isinstance(cause, PannierError) else cause
    error.__suppress_context__ = error.__cause__ is not None
    error.__context__ = None
    return error.with_traceback(None)
