"""Keeps one sidecar, and usually a coordinator, running for the jobs of one user.

In: their command lines and a runtime directory. Out: an exit status, after the idle exit of a
daemon, after a signal, or when a daemon can't run. Single-threaded: waits for signals only. Imports
little, since it runs as long as the daemons do.
"""

import ctypes
import logging
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock

from pannier.common import env_fingerprint

_log = logging.getLogger(__name__)

LOCK = "up.lock"
PID = "up.pid"

_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0
_STEADY_S = 30.0
"""After running this long, a daemon's back-off and count of crashes are reset."""
_MAX_CRASHES = 12
"""Crashes in a row before the supervisor gives up: after about a minute."""
_OK, _GAVE_UP, _MISCONFIGURED = 0, 1, 2
_PR_SET_PDEATHSIG = 1


class AlreadyRunningError(Exception):
    """Another supervisor holds this runtime directory."""


class UnsafeDirectoryError(Exception):
    """The runtime directory belongs to another user, or isn't a directory."""


class _Daemon:
    """A child process, and when to start it again."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self.crashes = 0
        self.due: float | None = 0.0
        """When to start it, on the monotonic clock; None while it runs."""

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            # Ctrl-C goes to the supervisor only, which stops the daemons in order.
            start_new_session=True,
            preexec_fn=_child_setup(os.getpid()),
        )
        self._started = time.monotonic()
        self.due = None
        _log.info("%s started, process %d", self.name, self._process.pid)

    def poll(self) -> int | None:
        """Exit status when the process has just ended."""
        if self.due is not None or self._process is None:
            return None
        return self._process.poll()

    def crashed(self, code: int) -> None:
        """Schedules the next start."""
        now = time.monotonic()
        if now - self._started >= _STEADY_S:
            self.crashes = 0
        delay = min(_FIRST_BACKOFF_S * 2**self.crashes, _LAST_BACKOFF_S)
        self.crashes += 1
        self.due = now + delay
        _log.warning("%s ended with %s; restart in %.1f s", self.name, _ending(code), delay)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Returns when the process has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Supervisor:
    """Owner of the daemons. :meth:`run` is called once, in the main thread.

    Args:
        directory: holds the lock and the pid file; created with mode 0700.
        sidecar: command line.
        coordinator: command line; None when the sidecar uses one elsewhere.
        shared: the coordinator serves other hosts as well: its idle exit counts, not the sidecar's.
        decisive: the environment record that trainers compare theirs with.
        grace_s: the sidecar's time to finish uploads after SIGTERM.
        margin_s: a daemon's time to exit on top of that, before SIGKILL.
    """

    def __init__(
        self,
        directory: Path,
        *,
        coordinator: Sequence[str] | None,
        sidecar: Sequence[str],
        shared: bool = False,
        decisive: env_fingerprint.Record,
        grace_s: float,
        margin_s: float = 5.0,
    ) -> None:
        self._directory = directory
        self._decisive = decisive
        self._grace_s = grace_s
        self._margin_s = margin_s
        environment = {k: v for k, v in os.environ.items() if k not in _OF_OTHER_DAEMONS}
        self._sidecar = _Daemon("sidecar", sidecar, environment)
        self._daemons = [self._sidecar]
        if coordinator is not None:
            self._daemons.insert(0, _Daemon("coordinator", coordinator, environment))
        self._lasting = self._daemons[0] if shared else self._sidecar
        self.idle = False
        """Whether :meth:`run` returned after an idle exit."""
        # Signals that the parent ignores (nohup, a shell's background job) stay ignored.
        self._stops = {
            number
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def run(self) -> int:
        """Exit status: 0 idle or stopped by a signal, 1 a daemon keeps crashing, 2 one refuses its configuration.

        Raises:
            AlreadyRunningError: another supervisor holds this directory.
            UnsafeDirectoryError: another user could have put sockets there.
        """
        _own_directory(self._directory)
        lock = self._lock()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *self._stops})
        pid_file = self._directory / PID
        try:
            self._leave_record()
            pid_file.write_text(f"{os.getpid()}\n")
            return self._supervise()
        finally:
            # Removed before the daemons end, so that the next supervisor waits for the lock.
            pid_file.unlink(missing_ok=True)
            hurried = False
            for daemon in reversed(self._daemons):
                grace_s = self._grace_s if daemon is self._sidecar else 0.0
                hurried = self._end(daemon, 0.0 if hurried else grace_s + self._margin_s)
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            lock.release()

    def _leave_record(self) -> None:
        """Written before a daemon serves, and atomically, since trainers may be reading it."""
        path = self._directory / env_fingerprint.FILE
        new = path.with_suffix(".new")
        new.write_text(env_fingerprint.encode(self._decisive))
        new.chmod(0o600)
        new.replace(path)

    def _lock(self) -> filelock.BaseFileLock:
        lock = filelock.FileLock(self._directory / LOCK, mode=0o600)
        while True:
            try:
                lock.acquire(timeout=0.5)
            except filelock.Timeout:
                pid = _read(self._directory / PID)
                if pid:
                    raise AlreadyRunningError(
                        f"process {pid} already supervises {self._directory}"
                    ) from None
                # Its holder is stopping, within its grace period.
            else:
                return lock

    def _supervise(self) -> int:
        while True:
            for daemon in self._daemons:
                if daemon.due is not None and daemon.due <= time.monotonic():
                    daemon.start()
            if self._wait_for_signal(self._next_start()) in self._stops:
                _log.info("stopping: received a signal")
                return _OK
            for daemon in self._daemons:
                code = daemon.poll()
                if code is None:
                    continue
                if daemon is self._lasting and code == _OK:
                    _log.info("the %s was idle and exited", daemon.name)
                    self.idle = True
                    return _OK
                if code == _MISCONFIGURED:
                    _log.error("%s refuses its configuration; see its message above", daemon.name)
                    return _MISCONFIGURED
                daemon.crashed(code)
                if daemon.crashes > _MAX_CRASHES:
                    _log.error("%s crashed %d times in a row; giving up", daemon.name, _MAX_CRASHES)
                    return _GAVE_UP

    def _next_start(self) -> float | None:
        """Seconds until the next start of a daemon; None when all run."""
        due = [daemon.due for daemon in self._daemons if daemon.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _wait_for_signal(self, timeout: float | None) -> int | None:
        waited = {signal.SIGCHLD, *self._stops}
        if timeout is None:
            return signal.sigwaitinfo(waited).si_signo
        info = signal.sigtimedwait(waited, timeout)
        return info.si_signo if info is not None else None

    def _end(self, daemon: _Daemon, grace_s: float) -> bool:
        """Sends SIGTERM, and SIGKILL at the deadline or after a second stop signal.

        Returns whether the next daemon gets no grace period either.
        """
        hurried = grace_s <= 0
        if not daemon.running():
            return hurried
        daemon.terminate()
        deadline = time.monotonic() + grace_s
        while daemon.running():
            left = deadline - time.monotonic()
            hurried = hurried or (left > 0 and self._wait_for_signal(left) in self._stops)
            if hurried or left <= 0:
                _log.warning("%s did not end in time; killed", daemon.name)
                daemon.kill()
        return hurried


_OF_OTHER_DAEMONS = frozenset(
    f"PANNIER_{name}"
    for name in (
        *("ADDRESS", "LISTEN", "SIDECAR", "COORDINATOR", "IDLE_EXIT"),
        # Two daemons can't share a port.
        *("HEALTH", "METRICS"),
    )
)
"""Variables that may configure a trainer's other daemons; embedded ones get flags."""


def _child_setup(parent: int) -> Callable[[], None]:
    """Returns what a child runs before exec: it unblocks signals, and asks to die with the supervisor."""
    prctl = ctypes.CDLL(None).prctl

    def setup() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return setup


def _own_directory(directory: Path) -> None:
    """Creates the runtime directory with mode 0700, or checks its owner and sets its mode."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UnsafeDirectoryError(
                f"{directory} is not a directory of user {os.getuid()}; name another one with "
                "--runtime-dir or PANNIER_RUNTIME_DIR"
            ) from None
        directory.chmod(0o700)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _ending(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"
