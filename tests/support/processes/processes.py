"""Child processes of tests: each in its own process group, logged to a file, killed at the end."""

import atexit
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from support.processes.fork_server import STACKS, Forked, server_for, server_pids
from support.processes.stretch import BOUND_S

SESSION = uuid.uuid4().hex[:8]
"""Id of this pytest process; part of the names of all it creates in /tmp and /dev/shm."""
MARKER = "PANNIER_TEST_SESSION"
"""Environment variable that every process of this session inherits, however far it detaches."""
LOG_TAIL = 64 << 10
_WRITTEN_S = 2.0
"""Until a process that hangs has written its stacks."""

_running: set["Process"] = set()
_logs: dict[str, tuple[str, str]] = {}
"""Title and text by file: processes that follow each other may share one."""


class Process:
    """One child process.

    Args:
        name: for people: ``sidecar 0``.
        command: arguments; started in a new session, so that signals of the
            terminal and of pytest don't reach it.
        environment: the whole environment; the session's marker is added.
        log: file that takes standard output and error.
        stdin: descriptor that is standard input; None: empty.
        imported: modules of the fork server that saves the seconds of their imports
            (:mod:`support.processes.fork_server`); empty: a new interpreter.
        host: network namespace and hostname that the fork server runs it with.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        stdin: int | None = None,
        imported: tuple[str, ...] = (),
        host: tuple[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        environment = {**environment, MARKER: SESSION, "PYTHONUNBUFFERED": "1"}
        own = command[0] == sys.executable
        server = server_for(imported, environment) if imported and own else None
        assert server is not None or host is None, f"{name} can't come from a fork server"
        self._process: subprocess.Popen[bytes] | Forked
        with log.open("ab") as sink:
            if server is not None:
                self._process = server.start(
                    command[1:],
                    environment=environment,
                    out=sink.fileno(),
                    err=sink.fileno(),
                    cwd=cwd,
                    host=host,
                    stdin=stdin,
                )
            else:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=cwd,
                )
        _running.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """End of what it wrote so far."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL))
            return file.read().decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone."""
        self._process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float) -> int:
        """Exit status. Raises AssertionError with the log when it is still there."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._write_stacks()
            raise AssertionError(
                f"{self.name} still runs after {timeout} s:\n{self.log()}"
            ) from None

    def _write_stacks(self) -> None:
        if isinstance(self._process, Forked):
            self.signal(STACKS)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_WRITTEN_S)

    def stop(self, timeout: float = BOUND_S) -> int:
        """SIGTERM, then the exit status."""
        if self.returncode is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL to it and all its descendants, without a chance to clean up or to notice."""
        with suppress(psutil.NoSuchProcess):
            # torchrun's workers lead sessions of their own: a process group isn't enough.
            root = psutil.Process(self.pid)
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGSTOP)
            for process in (*root.children(recursive=True), root):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(BOUND_S)

    def close(self) -> None:
        """Kills what is left and keeps the log for the report of a failed test."""
        if self not in _running:
            return
        self.kill()
        _running.discard(self)
        _logs[str(self._log)] = (f"{self.name} (exit {self.returncode})", self.log())


def logs() -> list[tuple[str, str]]:
    """Title and text of the logs of this test's processes, ended or not."""
    return [*_logs.values(), *((f"{p.name} (running)", p.log()) for p in _running)]


def keep_logs(more: list[tuple[str, str]]) -> None:
    """Adds logs of processes that were not started here."""
    _logs.update({title: (title, text) for title, text in more})


def forget_logs() -> None:
    """Called when a test begins."""
    _logs.clear()


def end(found: Iterable[psutil.Process]) -> None:
    """Kills processes that watch over each other; returns when they are gone."""
    listed = list(found)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        # A supervisor may start again what is killed: all are stopped first.
        for process in listed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    psutil.wait_procs(listed, timeout=BOUND_S)


def marked(known: Container[int] = ()) -> Iterator[psutil.Process]:
    """Living processes of this pytest session, also those that detached from it.

    But for its fork servers and known ids. After each test, so it reads no more of /proc than the
    environment, which a zombie has none of.
    """
    mark = f"{MARKER}={SESSION}".encode()
    others = {os.getpid(), *server_pids()}
    for pid in psutil.pids():
        if pid in known or pid in others:
            continue
        with suppress(psutil.Error, OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield psutil.Process(pid)


def python(*arguments: str) -> list[str]:
    """Command line of this interpreter."""
    return [sys.executable, *arguments]


def _kill_all() -> None:
    for process in list(_running):
        process.close()


atexit.register(_kill_all)
