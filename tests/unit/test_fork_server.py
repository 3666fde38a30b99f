"""What comes from a fork server is a process like one that a command starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.actors.scripted_sidecar import wait_until
from support.processes import fork_server
from support.processes.daemons import clean_environment
from support.processes.fork_server import server_for
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S

MODULES = ("json",)
"""Of a server that starts quickly."""
WHO = """
import json, os, signal, sys
if __name__ == "__main__":
    print(json.dumps({
        "arguments": sys.argv,
        "cwd": os.getcwd(),
        "name": os.environ.get("NAME"),
        "home": os.environ.get("HOME"),
        "path": sys.path[0],
        "session": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "children": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }))
    sys.exit(7)
"""


@pytest.fixture(scope="module", autouse=True)
def _end_server() -> Iterator[None]:
    yield
    made = fork_server._servers.pop(MODULES, None)
    if made is not None:
        made.close()


def process(
    directory: Path, source: str, *, imported: tuple[str, ...] = MODULES, **environment: str
) -> Process:
    script = directory / "script.py"
    script.write_text(source)
    return Process(
        "script",
        python(str(script), "one"),
        environment={**clean_environment(), **environment},
        log=directory / "log",
        cwd=directory,
        imported=imported,
    )


def test_it_finds_what_a_new_interpreter_would(tmp_path: Path) -> None:
    found = []
    for imported in (MODULES, ()):
        own = tmp_path / str(len(imported))
        own.mkdir()
        started = process(own, WHO, imported=imported, NAME="value")
        assert started.wait(BOUND_S) == 7
        found.append(json.loads(started.log()))
        started.close()
    forked, started_alone = found
    assert all(forked[name] for name in ("session", "interrupt", "children"))
    assert forked["arguments"] == [str(tmp_path / "1" / "script.py"), "one"]
    assert {k: v for k, v in forked.items() if k not in ("arguments", "cwd", "path")} == {
        k: v for k, v in started_alone.items() if k not in ("arguments", "cwd", "path")
    }
    assert forked["cwd"] == forked["path"] == str(tmp_path / "1")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_is_its_status(tmp_path: Path, number: signal.Signals) -> None:
    # Not one long wait, which a signal that came just before would not end.
    waiting = "import time\nprint('ready')\nwhile True: time.sleep(0.05)\n"
    started = process(tmp_path, waiting)
    wait_until(lambda: "ready" in started.log(), 60)
    started.signal(number)
    assert started.wait(BOUND_S) == -number
    assert ("KeyboardInterrupt" in started.log()) == (number == signal.SIGINT)
    started.close()


def test_an_uncaught_error_is_status_1_with_its_traceback(tmp_path: Path) -> None:
    started = process(tmp_path, "raise ValueError('reported')\n")
    assert started.wait(BOUND_S) == 1
    assert "ValueError: reported" in started.log()
    started.close()


@pytest.mark.parametrize(
    "name", ["PYTHONHASHSEED", "GRPC_ENABLE_FORK_SUPPORT", "LD_PRELOAD", "OMP_NUM_THREADS"]
)
def test_what_is_read_at_the_start_needs_an_interpreter_of_its_own(name: str) -> None:
    assert server_for(MODULES, {**os.environ, name: "2"}) is None
    assert server_for(MODULES, {**os.environ, "PYTHONPATH": "/another"}) is None
    assert server_for(MODULES, {**os.environ, "PANNIER_JOB": "another"}) is not None


def test_all_ends_with_the_test_process() -> None:
    code = f"""
import os, time
from support.processes.fork_server import ForkServer
sink = os.open(os.devnull, os.O_WRONLY)
server = ForkServer((), {{**os.environ, "PYTHONPATH": {fork_server.TESTS!r}}})
child = server.start(["-m", "http.server", "0", "--bind", "127.0.0.1"],
                     environment=dict(os.environ), out=sink, err=sink)
print(server.pid, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": fork_server.TESTS},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    left = []
    for pid in map(int, done.stdout.split()):
        try:
            left.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(left, timeout=BOUND_S)
    assert not alive


def test_one_that_hangs_says_where(tmp_path: Path) -> None:
    source = (
        "import time\ndef hangs():\n    print('here', flush=True)\n    time.sleep(1000)\nhangs()\n"
    )
    started = process(tmp_path, source)
    wait_until(lambda: "here" in started.log())
    with pytest.raises(AssertionError, match=r"script still runs.*\n(.*\n)+.*line 4 in hangs"):
        started.wait(0)
    started.close()
