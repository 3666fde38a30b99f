"""The client's event loop: one thread that owns what runs on it, and workers for what blocks.

In: functions and coroutines, from any thread. Out: their results. Who calls waits in a queue of C code and
holds no lock that the loop needs: what a signal handler raises in its thread ends that wait and nothing else.
One per process, started on first use, in a daemon thread; a forked child has none of its parent's.
Thread-safe, except where noted.
"""

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from pannier.client import fork_hooks
from pannier.client.interrupts import Call, Outcome, answer_of, aside
from pannier.common import timeouts
from pannier.common.deadline import Deadline

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_lock = threading.Lock()
_engine: "Engine | None" = None


class Cancellable(Protocol):
    """A call of gRPC."""

    def cancel(self) -> object:
        """Ends it."""


class Stop:
    """Ends what blocks in a worker thread. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._calls: list[Cancellable] = []

    @property
    def is_set(self) -> bool:
        """Whether the result is no longer needed."""
        return self._is_set

    def set(self) -> None:
        """Cancels the calls, and those to come."""
        with self._lock:
            self._is_set = True
            calls, self._calls = self._calls, []
        for call in calls:
            call.cancel()

    def add(self, call: Cancellable) -> None:
        """``call`` is to be cancelled, too."""
        with self._lock:
            if not self._is_set:
                self._calls.append(call)
                return
        call.cancel()


class Engine:
    """See the module. Use :func:`engine`, which makes the process's only one."""

    def __init__(self) -> None:
        # Not the policy's: the program may have set another one for its own loops.
        self.loop = asyncio.SelectorEventLoop()
        self._freed: queue.SimpleQueue[weakref.ref[Any]] = queue.SimpleQueue()
        self._on_freed: dict[weakref.ref[Any], Callable[[], Coroutine[Any, Any, object]]] = {}
        self._watches_freed = False
        self.running: set[Work] = set()
        """The loop itself references its tasks weakly."""
        self.is_inherited = False
        """In a forked child, which has no such thread: nothing runs any more."""
        self._thread = thread = threading.Thread(
            target=self.loop.run_forever, name="pannier", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # a limit of threads: the next use tries again
            self.loop.close()
            raise
        # A loop that is freed removes its sockets from the parent's epoll instance, which a fork shares.
        fork_hooks.keep(self)

    def call(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Runs ``work()`` on the loop, and returns or raises what it does. Not on the loop itself.

        An exception of a signal handler ends the wait, not ``work()``.

        Raises:
            InvalidRequestError: this process was forked from the engine's.
        """
        if self.is_inherited:
            raise fork_hooks.forked_error()
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError("the loop can't wait for itself")
        answer: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

        async def run() -> None:
            try:
                answer.put((await work(), None))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                answer.put((None, error))

        self.start(run)
        returned: _T = answer_of(answer)
        return returned

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls ``function`` on the loop, soon. It must not block, and logs what it raises."""
        if not self.is_inherited:
            self.loop.call_soon_threadsafe(function, *arguments)

    def start(self, work: Callable[[], Coroutine[Any, Any, object]]) -> "Work":
        """Runs ``work()`` on the loop, soon, as a task of its own, which logs what it raises."""
        started = Work(self)
        self.post(started.begin, work)
        return started

    async def in_thread(self, function: Callable[[], _T]) -> _T:
        """Runs a function that blocks in a worker thread. A cancelled wait doesn't end it. On the loop.

        Where no further thread can be started it waits for one that becomes idle.

        Raises:
            RuntimeError: none does.
        """
        done: asyncio.Future[_T] = self.loop.create_future()

        def answer(outcome: Outcome) -> None:
            self.post(_resolve, done, outcome)

        deadline = Deadline(timeouts.CALL_S)
        while True:
            try:
                Call(function, answer)
                break
            except RuntimeError:
                if deadline.passed:
                    raise
                await asyncio.sleep(timeouts.CALL_AGAIN_S)
        return await done

    async def in_stoppable_thread(self, function: Callable[[Stop], _T]) -> _T:
        """As :meth:`in_thread`, but a cancelled wait stops the function, and waits until it has ended. On the loop."""
        stop = Stop()
        working = asyncio.ensure_future(self.in_thread(partial(function, stop)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            stop.set()
            await _all_done({working})
            raise

    def after(self, delay_s: float, function: Callable[[], object]) -> "Timer":
        """Calls ``function`` on the loop in ``delay_s`` seconds, unless the timer is cancelled or renewed."""
        timer = Timer(self, delay_s, function)
        self.post(timer.wait)
        return timer

    def every(self, period_s: float, function: Callable[[], object]) -> "Work":
        """Calls ``function``, which may block, in a worker thread, each ``period_s`` seconds until cancelled."""

        async def run() -> None:
            while True:
                await asyncio.sleep(period_s)
                await self.in_thread(function)

        return self.start(run)

    def at_end_of_call(self, work: Callable[[], Coroutine[Any, Any, object]]) -> object:
        """Runs ``work()`` on the loop, within about a second of the end of the calling function.

        A signal handler may raise a second time, in the ``except`` block that cleans up, and so cut the
        clean-up short. The callback of the weak reference is a queue's method in C, which no handler can
        interrupt.

        Args:
            work: idempotent, since the call may have cleaned up itself.

        Returns:
            What the call references until its end: a local variable of its own.
        """
        frame = _Frame()
        if not self._watches_freed:
            self.post(self._watch_freed)
        self._on_freed[weakref.ref(frame, self._freed.put)] = work
        return frame

    def _watch_freed(self) -> None:
        if not self._watches_freed:
            self._watches_freed = True
            self.start(self._clean_up)

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(timeouts.FREED_CHECK_S)
            while not self._freed.empty():
                work = self._on_freed.pop(self._freed.get(), None)
                if work is not None:
                    self.start(work)


class _Frame:
    """Referenced by the stack frame of a call alone, and freed with it."""


class Work:
    """A coroutine that was started on the loop. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[Any] | None = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """On the loop."""
        self._task = self._engine.loop.create_task(work())
        self._engine.running.add(self)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Ends it, soon."""
        self._engine.post(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._engine.running.discard(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the client failed", exc_info=error)


class Timer:
    """One pending call on the loop. Thread-safe."""

    def __init__(self, engine: Engine, delay_s: float, function: Callable[[], object]) -> None:
        self._engine = engine
        self._delay_s = delay_s
        self._due = time.monotonic() + delay_s
        self._function: Callable[[], object] | None = function

    def renew(self) -> None:
        """Starts the delay again."""
        self._due = time.monotonic() + self._delay_s

    def cancel(self) -> None:
        """The function won't run, unless it is running already; it is no longer referenced."""
        self._function = None

    def wait(self) -> None:
        """Waits for the rest of the delay, then calls the function, once. On the loop."""
        left_s = self._due - time.monotonic()
        if self._function is not None and left_s > 0:
            self._engine.loop.call_later(left_s, self.wait)
            return
        function, self._function = self._function, None
        if function is not None:
            function()


async def side_by_side(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of all. If one raises, or the wait is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await _all_done(set(tasks))


async def first_of(seconds: float, *futures: "asyncio.Future[Any]") -> None:
    """Waits until one is done, at most ``seconds``."""
    await asyncio.wait(futures, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)


async def _all_done(futures: "set[asyncio.Future[Any]]") -> None:
    """Waits for all, also when the wait is cancelled; what they raise is of no account."""
    cancelled = False
    while running := {each for each in futures if not each.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    for each in futures:
        if not each.cancelled():
            each.exception()  # Or it is logged as lost.
    if cancelled:
        raise asyncio.CancelledError


def engine() -> Engine:
    """The engine of this process."""
    return _engine or aside(_make)


def _make() -> Engine:
    global _engine
    with _lock:
        if _engine is None:
            _engine = Engine()
        return _engine


def _resolve(future: "asyncio.Future[Any]", outcome: Outcome) -> None:
    result, error = outcome
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError("StopIteration"))
    else:
        future.set_exception(error)


def _reset_in_child() -> None:
    global _lock, _engine
    if _engine is not None:
        _engine.is_inherited = True
    _lock, _engine = threading.Lock(), None


fork_hooks.reset_in_child(_reset_in_child)
