"""The runtime directory of embedded daemons, and what cleaners do to it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.common.daemon_process import is_supervised
from pannier.common.daemon_record import DaemonRecord, read
from pannier.supervisor.runtime_directory import AlreadyRunningError, RuntimeDirectory
from pannier.supervisor.up import stop
from support.actors.scripted_sidecar import wait_until

DAYS_S = 10 * 86_400


def taken(path: Path) -> RuntimeDirectory:
    directory = RuntimeDirectory(path, DaemonRecord.of_this_process({}, exits_idle=True))
    directory.acquire()
    directory.publish()
    return directory


def age_days(path: Path) -> float:
    return (time.time() - path.stat().st_mtime) / 86_400


def test_files_of_running_daemons_never_look_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = taken(tmp_path / "run")
    left = tmp_path / "run" / "start.lock"
    left.touch()
    monkeypatch.setattr(timeouts, "RUNTIME_DIR_TOUCH_S", 0.0)
    old = time.time() - DAYS_S
    for path in (tmp_path / "run", *(tmp_path / "run").iterdir()):
        os.utime(path, (old, old))
    directory.keep()
    assert all(age_days(path) < 1 for path in (tmp_path / "run", *(tmp_path / "run").iterdir()))
    directory.release()


def test_a_directory_that_was_removed_is_made_again_with_its_lock_and_record(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    directory = taken(path)
    for each in path.iterdir():
        each.unlink()
    path.rmdir()
    assert not is_supervised(path)
    directory.keep()
    assert is_supervised(path)
    assert (path / "up.pid").read_text() == f"{os.getpid()}\n"
    assert read(path) is not None
    directory.withdraw()
    directory.release()
    assert not is_supervised(path)


def test_a_directory_that_another_supervisor_has_made_again_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = taken(path)
    (path / "up.lock").unlink()
    second = taken(path)
    with pytest.raises(AlreadyRunningError):
        first.keep()
    first.withdraw()
    first.release()
    assert is_supervised(path)
    assert (path / "up.pid").exists()
    second.release()


_LINGERING = """
import signal, sys
from pathlib import Path
from pannier.common.daemon_record import DaemonRecord
from pannier.supervisor.runtime_directory import RuntimeDirectory

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
directory = RuntimeDirectory(Path(sys.argv[1]), DaemonRecord.of_this_process({}, exits_idle=True))
directory.acquire()
directory.publish()
print("published", flush=True)
signal.sigwait([signal.SIGTERM])
directory.withdraw()
directory.release()
sys.stdin.read()
"""


def test_a_supervisor_that_has_given_up_its_lock_has_not_exited_yet(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", _LINGERING, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "published\n"
            with pytest.raises(TimeoutError, match=rf"process {process.pid}.* have not exited"):
                stop(path, timeout_s=1.0)
            wait_until(lambda: not is_supervised(path))
        finally:
            process.kill()
    assert not stop(path, timeout_s=1.0)
