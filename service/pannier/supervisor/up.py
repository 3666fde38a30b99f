"""Keeps one sidecar, and usually a coordinator, running for the jobs of one user.

In: the function that runs each, and a runtime directory. Out: an exit status, after the idle exit of a
daemon, after a signal, or when a daemon can't run. Single-threaded: waits for signals only. The daemons
are forked from this process: modules that it has imported are imported once, and their memory is shared.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pannier.common import timeouts
from pannier.common.daemon_process import PID, UP_LOCK, await_restored, is_supervised
from pannier.common.daemon_record import DaemonRecord
from pannier.common.machine import process_start_s, process_state
from pannier.supervisor.processes import (
    GAVE_UP,
    MISCONFIGURED,
    OK,
    ChildProcess,
    Daemon,
    Signals,
    fork,
    next_start,
)
from pannier.supervisor.runtime_directory import (
    RuntimeDirectory,
    UnsafeDirectoryError,
    check_directory,
    read,
)

_log = logging.getLogger(__name__)

_STDIN, _STDERR = 0, 2

_MAX_CRASHES = 12
"""Crashes and failed starts in a row before the supervisor gives up: after about a minute."""


def stop(directory: Path, timeout_s: float) -> bool:
    """Ends the supervisor of a runtime directory, and with it the daemons; whether one ran.

    Raises:
        TimeoutError: they have not exited after ``timeout_s`` seconds.
        UnsafeDirectoryError: the directory is another user's, or its supervisor another container's.
    """
    await_restored(directory, is_supervised)
    if not directory.exists():
        return False
    check_directory(directory)
    if not is_supervised(directory):
        return False
    pid, started_s = "", 0.0
    deadline = time.monotonic() + timeout_s
    # It gives up the lock just before it exits.
    while is_supervised(directory) or (pid and process_state(int(pid), started_s) != "ended"):
        # Not there while it is exiting, and in the moment after it has made its files again.
        if not pid and (pid := read(directory / PID)):
            if not _has_open(int(pid), directory / UP_LOCK):
                raise UnsafeDirectoryError(
                    f"the daemons in {directory} were started in another container, where their supervisor is "
                    f"process {pid}: end them there"
                )
            started_s = process_start_s(int(pid))
            os.kill(int(pid), signal.SIGTERM)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the daemons in {directory} (process {pid or 'exiting'}) have not exited within "
                f"{timeout_s:g} s: they finish uploads within the --grace that they were started with; "
                "their log is there"
            )
        time.sleep(timeouts.DAEMONS_START_POLL_S)
    return True


class Supervisor:
    """Owner of the daemons. :meth:`run` is called once, in the main thread.

    Args:
        directory: the runtime directory.
        sidecar: runs the sidecar, in a copy of this process; returns, or exits with, its exit status.
        coordinator: runs the coordinator in the same way; None when the sidecar uses one elsewhere.
        shared: the coordinator serves other hosts as well: its idle exit counts, not the sidecar's.
        record: what trainers compare their own environment and version with.
        grace_s: the sidecar's time to finish uploads after SIGTERM.
        margin_s: a daemon's time to exit on top of that, before SIGKILL.
    """

    def __init__(
        self,
        directory: Path,
        *,
        coordinator: Callable[[], int] | None,
        sidecar: Callable[[], int],
        shared: bool = False,
        record: DaemonRecord,
        grace_s: float,
        margin_s: float = 5.0,
    ) -> None:
        self._directory = RuntimeDirectory(directory, record)
        self._sockets: dict[str, set[Path]] = {}
        """By daemon: those that were seen since it started."""
        self._missing: set[Path] = set()
        """Those that were gone at the last look."""
        self._grace_s = grace_s
        self._margin_s = margin_s
        self._sidecar = Daemon("sidecar", lambda: self._launch("sidecar", sidecar))
        self._daemons = [self._sidecar]
        if coordinator is not None:
            self._daemons.insert(
                0, Daemon("coordinator", lambda: self._launch("coordinator", coordinator))
            )
        self._lasting = self._daemons[0] if shared else self._sidecar
        self.idle = False
        """Whether :meth:`run` returned after an idle exit."""
        self._signals = Signals()

    def run(self) -> int:
        """Exit status: 0 idle or stopped by a signal, 1 a daemon keeps crashing, 2 one refuses its configuration.

        Raises:
            AlreadyRunningError: another supervisor holds this directory.
            UnsafeDirectoryError: another user could have put sockets there.
        """
        self._directory.acquire()
        with self._signals.blocked():
            try:
                self._directory.publish()
                return self._supervise()
            finally:
                self._directory.withdraw()
                hurried = False
                for daemon in reversed(self._daemons):
                    grace_s = self._grace_s if daemon is self._sidecar else 0.0
                    hurried = self._signals.end(
                        [daemon], 0.0 if hurried else grace_s + self._margin_s
                    )
                self._directory.release()

    def _launch(self, name: str, run: Callable[[], int]) -> ChildProcess:
        self._directory.remove_sockets(name)
        self._sockets[name] = set()
        self._missing = {path for path in self._missing if not path.name.startswith(f"{name}.")}
        return _fork(run)

    def _keep_directory(self) -> None:
        """Makes the directory's files again. A daemon whose socket is gone is started again, to bind it.

        gRPC (1.85) binds no address once it serves. Trainers survive that as any end of a daemon.
        """
        try:
            self._directory.keep()
        except OSError as error:
            _log.warning("the runtime directory's files can't be made again: %s", error)
        for daemon in self._daemons:
            there = self._directory.sockets(daemon.name)
            missing = self._sockets.get(daemon.name, set()) - there
            # A daemon that exits removes its sockets, too: it is gone at the next look.
            if missing & self._missing and daemon.running():
                _log.warning(
                    "%s is gone, does something clean up there? The %s is started again",
                    *(min(missing), daemon.name),
                )
                daemon.signal(signal.SIGKILL)
                missing = set()
            self._missing = (self._missing - there) | missing
            self._sockets.setdefault(daemon.name, set()).update(there)

    def _supervise(self) -> int:
        while True:
            for daemon in self._daemons:
                daemon.start_if_due()
                if daemon.crashes > _MAX_CRASHES:
                    _log.error("%s crashed %d times in a row; giving up", daemon.name, _MAX_CRASHES)
                    return GAVE_UP
            self._keep_directory()
            due_s = next_start(self._daemons)
            starting = any(not (self._sockets.get(d.name) or d.steady()) for d in self._daemons)
            check_s = timeouts.DAEMONS_START_POLL_S if starting else timeouts.RUNTIME_DIR_CHECK_S
            if self._signals.stop_requested(check_s if due_s is None else min(due_s, check_s)):
                _log.info("stopping: received a signal")
                return OK
            for daemon in self._daemons:
                code = daemon.poll()
                if code is None:
                    continue
                if daemon is self._lasting and code == OK:
                    _log.info("the %s was idle and exited", daemon.name)
                    self.idle = True
                    return OK
                if code == MISCONFIGURED:
                    _log.error("%s refuses its configuration; see its message above", daemon.name)
                    return MISCONFIGURED
                daemon.crashed(code)


_OF_OTHER_DAEMONS = frozenset(
    f"PANNIER_{name}"
    for name in (
        *("ADDRESS", "LISTEN", "SIDECAR", "COORDINATOR", "IDLE_EXIT"),
        # Two daemons can't share a port.
        *("HEALTH", "METRICS", "PEERS", "PEERS_NAME"),
    )
)
"""Variables that may configure a trainer's other daemons; embedded ones get flags."""


def _fork(run: Callable[[], int]) -> ChildProcess:
    def run_daemon() -> int:
        _leave_supervisor()
        return run()

    # When the supervisor dies, a daemon finishes uploads within its grace period, as after any SIGTERM.
    return fork(run_daemon, on_death=signal.SIGTERM)


def _leave_supervisor() -> None:
    """Drops what belongs to the supervisor: its lock, whatever its own parent left open, and its log."""
    with open(os.devnull) as null:
        os.dup2(null.fileno(), _STDIN)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _STDERR:
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    logging.getLogger().handlers.clear()
    for name in _OF_OTHER_DAEMONS:
        os.environ.pop(name, None)


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has a file open. A pid of another PID namespace is another process."""
    with suppress(FileNotFoundError, PermissionError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if descriptor.samefile(path):
                    return True
    return False
