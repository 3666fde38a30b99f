"""The command line as a user runs it."""

import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any

from support.processes import fork_server
from support.processes.daemons import clean_environment
from support.processes.processes import MARKER, SESSION, python
from support.processes.stretch import BOUND_S

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Result:
    """Output and exit status of one ``pannier`` command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def json(self) -> Any:
        """Standard output as one JSON value."""
        return json.loads(self.out)

    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def __repr__(self) -> str:
        return f"exit status {self.code}\n{self.out}\n{self.err}"


def pannier_here(*arguments: str) -> Result:
    """The same within this process: quick, but deaf to what is set in the environment."""
    from pannier.cli.errors import report_errors
    from pannier.cli.main import cli

    def main() -> None:
        with report_errors():
            code = cli.main(list(arguments), prog_name="pannier", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0
    return Result(status, out.getvalue(), err.getvalue())


def pannier(
    *arguments: str,
    env: Mapping[str, str] = {},
    columns: int | None = None,
    timeout: float = BOUND_S,
) -> Result:
    """Runs ``pannier`` with these arguments to its end, in a process of its own.

    Args:
        columns: width of the terminal that its output must fit; None: that of a pipe, any.
    """
    environment = {**clean_environment(env), MARKER: SESSION}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    command = ["-m", "pannier.cli", *arguments]
    return _run(command, fork_server.modules_of("".join(arguments[:1])), environment, timeout)


def pannier_in_terminal(
    *arguments: str, columns: int, lines: int = 24, term: str = "xterm"
) -> Result:
    """Runs ``pannier`` in a terminal of this size; ``out`` is all that it showed, without control sequences."""
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        process = subprocess.Popen(
            python("-m", "pannier.cli", *arguments),
            env={**clean_environment(), MARKER: SESSION, "TERM": term},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    with process, open(ours, "rb", buffering=0) as terminal:
        killer = threading.Timer(BOUND_S, process.kill)
        killer.start()
        try:
            shown = b""
            # The read fails once no process has the terminal any more.
            with suppress(OSError):
                while data := terminal.read(1 << 16):
                    shown += data
            code = process.wait()
        finally:
            killer.cancel()
            process.kill()
    return Result(code, _CONTROL.sub("", shown.decode()).replace("\r", "\n"), "")


def _run(
    command: Sequence[str],
    imported: tuple[str, ...],
    environment: Mapping[str, str],
    timeout: float,
) -> Result:
    server = fork_server.server_for(imported, environment)
    if server is None:
        done = subprocess.run(
            python(*command),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = server.start(command, environment=environment, out=out.fileno(), err=err.fileno())
        try:
            code = process.wait(timeout)
        finally:
            process.send_signal(signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Result(code, *texts)


def run_python(
    code: str, *arguments: str, env: Mapping[str, str], timeout: float = 2 * BOUND_S
) -> Result:
    """Runs a program of torch and the client, to its end, in a process of its own.

    Args:
        code: ``sys.argv[1:]`` are ``arguments``.
        env: the whole environment, as of :func:`clean_environment`.
    """
    environment = {**env, MARKER: SESSION}
    with NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        return _run([script.name, *arguments], fork_server.TORCH, environment, timeout)
