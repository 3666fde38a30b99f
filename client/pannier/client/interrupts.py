"""Locks and waits that stay usable when a signal handler raises an exception.

Python runs signal handlers on the main thread, between any two bytecodes. What a handler raises
(KeyboardInterrupt, or ``sys.exit`` in a handler of SIGTERM) may therefore leave ``threading.Condition``,
``Event``, ``Future``, ``Thread.start`` or gRPC with a lock that is never released, and every other
thread that needs it waits for ever. So on the main thread the client takes only locks whose
``with`` statement acquires and releases them in C: plain ones, and :class:`Condition` and
:class:`Event` of this module. All else runs in another thread (:func:`aside`), for which the main
thread waits without a lock; an exception ends only that wait.
"""

import _thread
import contextvars
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, ParamSpec, TypeVar

from pannier.client.fork_hooks import reset_in_child

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_P = ParamSpec("_P")
_RLock: Final[Any] = type(threading.RLock())


class Condition(_RLock):
    """Like ``threading.Condition()``, but a subclass of its lock, whose ``with`` is implemented in C."""

    def __init__(self) -> None:
        self._waiters: deque[_thread.LockType] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until notified; False after ``timeout`` seconds. The lock is held before and after."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        held: Any = (1, threading.get_ident())
        notified = False
        try:
            self._waiters.append(waiter)
            held = self._release_save()
            seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            notified = waiter.acquire(True, seconds)
        finally:
            if not self._is_owned():
                self._acquire_restore(held)
            if not notified and waiter in self._waiters:
                self._waiters.remove(waiter)
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> bool:
        """Waits until ``predicate()`` is true; False after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not predicate():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, count: int = 1) -> None:
        """Wakes up to ``count`` waiting threads. The lock is held."""
        while count > 0 and self._waiters:
            self._waiters.popleft().release()
            count -= 1

    def notify_all(self) -> None:
        """Wakes all waiting threads. The lock is held."""
        self.notify(len(self._waiters))


class Event:
    """As ``threading.Event()``, without ``clear``."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Wakes all waiting threads; later waits return at once."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, timeout)


class SafeFuture(Future[_T]):
    """A future that the main thread may wait for.

    What its callbacks raise is logged, SystemExit too: they run on threads that all saves need.
    """

    _done_callbacks: list[Callable[[Future[_T]], object]]

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def _invoke_callbacks(self) -> None:
        for callback in self._done_callbacks:
            was_in_callback, _here.in_callback = in_callback(), True
            try:
                callback(self)
            except BaseException:  # noqa: BLE001 - the user's code
                _log.exception("a callback of %r failed", self)
            finally:
                _here.in_callback = was_in_callback


class _Here(threading.local):
    in_callback = False


_here: Final = _Here()


def in_callback() -> bool:
    """Whether this thread runs a callback of a :class:`SafeFuture` that it has ended itself."""
    return _here.in_callback


Outcome = tuple[Any, BaseException | None]
"""The result of a function in another thread, or what it raised."""
_Job = tuple[Callable[[], Any], contextvars.Context, Callable[[Outcome], object]]
_Inbox = queue.SimpleQueue[_Job]
_idle: queue.SimpleQueue[_Inbox] = queue.SimpleQueue()
"""Inboxes of idle threads. Operations on it are in C, and so safe on the main thread."""


class UnansweredError(Exception):
    """A :class:`Call` has not ended yet."""


class Call(Generic[_T]):
    """A function that runs in another thread, for which the caller may wait with a time-out.

    An exception in the caller's thread ends only the wait, not the function: what the function acquires
    must belong to an object that existed before. Raises RuntimeError when the interpreter is ending and
    starts no threads.

    Args:
        function: what runs.
        answer: called with its result and error, in its thread; by default :meth:`result` has them.
    """

    def __init__(
        self, function: Callable[[], _T], answer: Callable[[Outcome], object] | None = None
    ) -> None:
        self._answer: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        try:
            inbox = _idle.get_nowait()
        except queue.Empty:
            inbox = queue.SimpleQueue()
            # Not Thread.start, which waits on an event for the thread to run.
            _thread.start_new_thread(_start_worker, (inbox,))
        inbox.put((function, contextvars.copy_context(), answer or self._answer.put))

    def result(self, timeout: float | None = None) -> _T:
        """Returns or raises, once, what the function did; UnansweredError after ``timeout`` seconds."""
        returned: _T = answer_of(self._answer, timeout)
        return returned


def answer_of(answers: "queue.SimpleQueue[Outcome]", timeout: float | None = None) -> Any:
    """Returns or raises what a function in another thread did, once it is in the queue.

    Raises:
        UnansweredError: it isn't after ``timeout`` seconds.
    """
    try:
        result, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise UnansweredError(f"no answer within {timeout:g} s") from None
    if error is not None:
        try:
            raise error
        finally:
            # Its traceback holds this frame.
            del error
    return result


def aside(function: Callable[[], _T]) -> _T:
    """Calls ``function``, in another thread when this is the main thread; returns its result.

    The function continues when a signal handler's exception ends the wait: what it acquires must
    belong to an object that existed before. The wait has no time-out besides the function's own.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return function()
    try:
        call = Call(function)
    except RuntimeError:  # the interpreter is ending and starts no threads
        return function()
    return call.result()


def _start_worker(inbox: _Inbox) -> None:
    # threading would keep a dummy object for ever for a thread that _thread started.
    try:
        threading.Thread(target=_work, args=(inbox,), name="pannier-work", daemon=True).start()
    except RuntimeError:  # no second thread can be started, and a caller waits for this inbox
        _work(inbox)


def _work(inbox: _Inbox) -> None:
    while True:
        function, context, answer = inbox.get()
        outcome: Outcome
        try:
            outcome = context.run(function), None
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome = None, error
        # First, so that the next call finds this thread.
        _idle.put(inbox)
        answer(outcome)
        # An idle thread must not reference objects of the last call.
        del function, context, answer, outcome


def _after_fork() -> None:
    global _idle
    _idle = queue.SimpleQueue()


reset_in_child(_after_fork)


def shielded(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps ``function``, which then runs by :func:`aside`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return aside(lambda: function(*args, **kwargs))

    return run
