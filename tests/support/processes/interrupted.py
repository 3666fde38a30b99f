"""Raises in a call of the main thread, wherever Python could run a signal handler there."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptedByTestError(BaseException):
    """What the handler raises."""


def moments(call: Callable[[], Any]) -> int:
    """How often a handler could raise in ``call``: when functions begin and return."""
    return _trace(call, 0)


def interrupted(call: Callable[[], Any], moment: int) -> bool:
    """Whether ``call``, interrupted at the ``moment``-th, raised what the handler raised."""
    try:
        _trace(call, moment)
    except InterruptedByTestError:
        return True
    return False


def _trace(call: Callable[[], Any], moment: int) -> int:
    assert threading.current_thread() is threading.main_thread()
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines = False
        if event in ("call", "return") and _is_interruptible(frame):
            count += 1
            if count == moment:
                sys.settrace(None)
                raise InterruptedByTestError(f"{event} of {frame.f_code.co_qualname}")
        return trace

    def swallow(unraisable: Any) -> None:
        # Python goes on after what is raised in a callback of the garbage collector or of a weak
        # reference, so ``call`` wasn't interrupted.
        if not isinstance(unraisable.exc_value, InterruptedByTestError):
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, swallow
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        sys.unraisablehook = hook
    return count


def _is_interruptible(frame: FrameType) -> bool:
    # A finalizer or a callback of a weak reference swallows what is raised in it.
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_remove", "remove"):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True
