"""Child processes: forked, forked again after a crash, and stopped within a grace period.

In: the function that each runs. Out: exit statuses. Single-threaded: waits for signals only.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from pannier.common import timeouts

_log = logging.getLogger(__name__)

OK, GAVE_UP, MISCONFIGURED = 0, 1, 2
"""Exit statuses of a daemon and of a supervisor."""
_PR_SET_PDEATHSIG: Final = 1


class ChildProcess:
    """A copy of this process; see :func:`fork`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Returns the exit status when it has ended."""
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal; does nothing when the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def fork(run: Callable[[], int], *, on_death: signal.Signals = signal.SIGKILL) -> ChildProcess:
    """Calls ``run`` in a copy of this process, and exits there with what it returns.

    The copy shares the memory of imported modules with this process. Its exit handlers are not run. Call it
    while this process has one thread, and no gRPC object.

    Args:
        on_death: the signal that the copy gets when this process dies.
    """
    setup = child_setup(os.getpid(), on_death)
    _flush()
    pid = os.fork()
    if pid:
        return ChildProcess(pid)
    code = GAVE_UP
    try:
        # Ctrl-C goes to the supervisor only, which stops its processes in order.
        os.setsid()
        setup()
        code = run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else GAVE_UP
    except BaseException:  # noqa: BLE001 - top of the process: becomes its exit status
        _log.exception("process %d failed", os.getpid())
    finally:
        # Not the parent's exit handlers.
        _flush()
        os._exit(code)


def _flush() -> None:
    """Flushes stdout and stderr if possible: the log's disk may be full, or its reader may have exited."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


class Daemon:
    """A child process, and when to start it again.

    Args:
        launch: starts the process.
    """

    def __init__(self, name: str, launch: Callable[[], ChildProcess]) -> None:
        self.name = name
        self._launch = launch
        self._process: ChildProcess | None = None
        self._started = 0.0
        self.crashes = 0
        self.starts = 0
        self.due: float | None = 0.0
        """When to start it, on the monotonic clock; None while it runs."""

    def start_if_due(self) -> OSError | None:
        """Starts it unless it runs, or is to be started later.

        Returns the error when it can't be started; then the next start is scheduled.
        """
        if self.due is None or self.due > time.monotonic():
            return None
        self._started = time.monotonic()
        try:
            self._process = self._launch()
        except OSError as error:
            # The host may lack memory or processes for a while. Other daemons must not end because of it.
            self._schedule(f"can't be started: {error}")
            return error
        self.starts += 1
        self.due = None
        _log.info("%s started, process %d", self.name, self._process.pid)
        return None

    def poll(self) -> int | None:
        """Exit status once the process has ended; None while it runs, or while a start is scheduled."""
        if self.due is not None or self._process is None:
            return None
        return self._process.poll()

    def crashed(self, code: int) -> None:
        """Schedules the next start."""
        self._schedule(f"ended with {ending(code)}")

    def _schedule(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._started >= timeouts.DAEMON_STEADY_S:
            self.crashes = 0
        # Bounded: the sidecar of a job is started again however often it crashes.
        delay = timeouts.DAEMON_AGAIN_S * 2 ** min(self.crashes, 16)
        delay = min(delay, timeouts.DAEMON_LONGEST_AGAIN_S)
        self.crashes += 1
        self.due = now + delay
        _log.warning("%s %s; restart in %.1f s", self.name, problem, delay)

    def steady(self) -> bool:
        """Whether it has run for so long that its crashes no longer count."""
        return self.due is None and time.monotonic() - self._started >= timeouts.DAEMON_STEADY_S

    def restart(self) -> None:
        """Schedules a start at once, after the process has ended as it was asked to."""
        self.crashes, self.due = 0, 0.0

    def running(self) -> bool:
        """Whether it has a process."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        """Sends a signal to its process, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)


class Signals:
    """What a supervisor waits for: a stop signal, the end of a child, or time."""

    def __init__(self) -> None:
        # Signals that the parent ignores (nohup, a shell's background job) stay ignored.
        self._stops = {
            number
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """As long as the context lasts, only :meth:`stop_requested` receives these signals."""
        waited = {signal.SIGCHLD, *self._stops}
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def stop_requested(self, timeout_s: float | None) -> bool:
        """Waits for one of these signals, at most ``timeout_s`` seconds; whether it was a stop signal."""
        waited = {signal.SIGCHLD, *self._stops}
        if timeout_s is None:
            return signal.sigwaitinfo(waited).si_signo in self._stops
        info = signal.sigtimedwait(waited, timeout_s)
        return info is not None and info.si_signo in self._stops

    def end(self, daemons: Collection[Daemon], grace_s: float) -> bool:
        """Sends SIGTERM to all, and SIGKILL at the deadline or after a second stop signal.

        A process that is stuck in the kernel is left behind; it ends with its system call. Returns whether
        further daemons get no grace period either.
        """
        hurried = grace_s <= 0
        for daemon in daemons:
            daemon.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while running := _running(daemons):
            left = deadline - time.monotonic()
            hurried = hurried or (left > 0 and self.stop_requested(left))
            if hurried or left <= 0:
                self._kill(running)
                break
        return hurried

    def _kill(self, daemons: Collection[Daemon]) -> None:
        # All of them before the first wait: one that is stuck in the kernel doesn't end.
        for daemon in daemons:
            _log.warning("%s did not end in time; killed", daemon.name)
            daemon.signal(signal.SIGKILL)
        deadline = time.monotonic() + timeouts.HUNG_CALL_S
        while running := _running(daemons):
            left = deadline - time.monotonic()
            if left <= 0:
                for daemon in running:
                    _log.error(
                        "%s has not ended %.0f s after SIGKILL: a system call of it hangs. Does its "
                        "spool's file system respond?",
                        *(daemon.name, timeouts.HUNG_CALL_S),
                    )
                return
            self.stop_requested(left)


def _running(daemons: Collection[Daemon]) -> list[Daemon]:
    return [daemon for daemon in daemons if daemon.running()]


def next_start(daemons: Collection[Daemon]) -> float | None:
    """Seconds until the next start of a daemon; None when all run."""
    due = [daemon.due for daemon in daemons if daemon.due is not None]
    return max(0.0, min(due) - time.monotonic()) if due else None


def ending(code: int) -> str:
    """``SIGKILL``, or ``exit status 1``."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"


def child_setup(parent: int, on_death: signal.Signals) -> Callable[[], None]:
    """Returns what a child runs first: it unblocks signals, and gets ``on_death`` when the parent dies.

    Args:
        parent: the process id of the parent, which may have died before the child ran.
    """
    prctl = ctypes.CDLL(None).prctl

    def setup() -> None:
        prctl(_PR_SET_PDEATHSIG, on_death)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return setup
