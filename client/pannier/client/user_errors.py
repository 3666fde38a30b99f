"""Exceptions of the user's code and devices, which reach the caller as they were raised.

In: what a planner, a ``state_dict()``, a pickled object or a copy from a device raised. Out: the
same exception, with notes where it happened and which save it ended; its description for the
other ranks; and, for a handle, a copy that references no frame. Of Pannier's own errors, tracebacks that end at the
user's call; their inner frames and causes are logged at level DEBUG. No state; any thread.
"""

import copy
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

from pannier.wire.errors import LoadError, PannierError

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def add_note(error: BaseException, text: str) -> None:
    """``error.add_note(text)``, once; also before Python 3.11, where no traceback prints it."""
    notes = getattr(error, "__notes__", [])
    if text not in notes:
        # What BaseException.add_note does.
        error.__notes__ = [*notes, text]  # type: ignore[attr-defined]  # unknown to 3.10


@contextmanager
def located(where: str) -> Iterator[None]:
    """Adds the note ``where`` to an exception that isn't Pannier's own, and lets it pass."""
    try:
        yield
    except PannierError:
        raise
    except Exception as error:
        add_note(error, where)
        raise


def name_save(error: BaseException, save: str, checkpoint_id: str) -> None:
    """Adds a note with the save that an exception ended; Pannier's own errors contain it."""
    if isinstance(error, Exception) and not isinstance(error, PannierError):
        add_note(error, f"raised in save {save} to {checkpoint_id}, which it ended on all ranks")


def description(error: BaseException) -> str:
    """Type, message and notes, for the other ranks; for a PannierError its message."""
    if isinstance(error, PannierError):
        return str(error)
    notes = "; ".join(map(str, getattr(error, "__notes__", ())))
    return (f"{notes}: " if notes else "") + f"{type(error).__name__}: {error}"


def without_frames(error: Exception) -> Exception:
    """A copy without traceback and causes, whose frames keep arenas alive; itself if it can't be copied."""
    kept = error
    # Exceptions with a signature of their own can't be made of their args.
    with suppress(Exception):
        copied = copy.copy(error)
        kept = copied if type(copied) is type(error) else error
    kept.__traceback__ = kept.__cause__ = kept.__context__ = None
    return kept


def clear_frames(error: BaseException) -> None:
    """The frames of its tracebacks, which have ended, keep no arena alive."""
    chain: list[BaseException | None] = [error]
    for each in chain:
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            chain += [one for one in (each.__cause__, each.__context__) if one not in chain]


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
