"""Finding and starting the embedded daemons, with a small program in their place."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import host_daemons
from pannier.common import timeouts
from pannier.common.daemon_record import DaemonRecord, decisive_variables
from pannier.wire.errors import ConfigurationError, UnavailableError, VersionMismatchError
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import short_directory
from support.processes.stretch import BOUND_S

FAKE = """#!{python}
import json, os, socket, sys
directory = sys.argv[sys.argv.index("--runtime-dir") + 1]
print("starting up", flush=True)
if os.environ.get("FAKE") == "fail":
    sys.exit("no room on the disk")
with open(directory + "/started", "a") as file:
    file.write(json.dumps(dict(
        pid=os.getpid(), ppid=os.getppid(), sid=os.getsid(0), cwd=os.getcwd(),
        env=dict(os.environ), arguments=sys.argv[1:], fds=sorted(os.listdir("/proc/self/fd")),
    )) + "\\n")
coordinator = socket.socket(socket.AF_UNIX)
coordinator.bind(directory + "/coordinator.sock")
coordinator.listen()
server = socket.socket(socket.AF_UNIX)
server.bind(directory + "/sidecar.sock")
server.listen()
while True:
    server.accept()
"""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = short_directory()
    fake = path / "fake"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    run = path / "run"
    yield run
    for one in started(run):
        with suppress(ProcessLookupError):
            os.kill(one["pid"], signal.SIGKILL)
    shutil.rmtree(path)


def ensure(settings: Settings) -> str:
    """The address of the sidecar that then runs."""
    daemons = host_daemons(settings)
    launcher.ensure(settings, daemons)
    return daemons.sidecar


def started(run: Path) -> list[dict[str, Any]]:
    log = run / "started"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_daemons_are_started_once_by_many_and_found_by_all(directory: Path) -> None:
    settings = Settings(runtime_dir=directory)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ensure(settings))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert found == [f"unix://{directory}/sidecar.sock"] * 4
    assert len(started(directory)) == 1
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_they_are_nobodys_children_and_know_no_rank(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with socket.socket() as open_here:
        os.set_inheritable(open_here.fileno(), True)
        ensure(Settings(runtime_dir=directory, spool=Path("/tmp/some-spool")))
        number = str(open_here.fileno())
    (one,) = started(directory)
    assert one["sid"] != os.getsid(0)
    assert one["ppid"] != os.getpid()
    assert one["cwd"] == "/"
    assert not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & one["env"].keys()
    assert one["env"]["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:1"
    assert "LD_PRELOAD" in one["env"]
    assert number not in one["fds"]
    assert one["env"]["PANNIER_SPOOL"] == "/tmp/some-spool"
    assert "starting up" in (directory / "up.log").read_text()


def test_they_outlive_ctrl_c_and_the_end_of_the_trainers_group(directory: Path) -> None:
    code = (
        "import sys; sys.executable = sys.argv[1]\n"
        "from pathlib import Path\n"
        "from pannier.client.embedded import launcher\n"
        "from pannier.client.embedded.daemon_spec import host_daemons\n"
        "from pannier.client.config import Settings\n"
        "settings = Settings(runtime_dir=Path(sys.argv[2]))\n"
        "launcher.ensure(settings, host_daemons(settings))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    python = os.path.join(sys.prefix, "bin", "python")
    with subprocess.Popen(
        [python, "-c", code, sys.executable, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        os.killpg(trainer.pid, signal.SIGINT)
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait(BOUND_S)
    (one,) = started(directory)
    os.kill(one["pid"], 0)
    assert ensure(Settings(runtime_dir=directory)).endswith("sidecar.sock")
    assert len(started(directory)) == 1


def test_daemons_that_end_while_starting_are_an_error_with_their_last_words(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "fail")
    with pytest.raises(UnavailableError, match=r"(?s)exited while starting.*no room on the disk"):
        ensure(Settings(runtime_dir=directory))


def test_an_error_has_only_the_lines_of_this_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    (directory / "up.log").write_text("old lines\n" * 100)
    monkeypatch.setenv("FAKE", "fail")
    with pytest.raises(UnavailableError, match="no room on the disk") as caught:
        ensure(Settings(runtime_dir=directory))
    assert "old lines" not in str(caught.value)


def test_daemons_that_do_not_come_up_are_an_error_with_their_last_words(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_accepts(_: object) -> bool:
        log = directory / "up.log"
        if log.exists():
            wait_until(lambda: "starting up" in log.read_text())
        return False

    monkeypatch.setattr(timeouts, "DAEMONS_START_S", 0.2)
    monkeypatch.setattr(launcher, "is_serving", never_accepts)
    with pytest.raises(UnavailableError, match=r"(?s)did not start within 0.2 s.*starting up"):
        ensure(Settings(runtime_dir=directory))


def test_daemons_of_other_settings_are_refused_with_the_settings_names(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    settings = Settings(runtime_dir=directory, spool=Path("/tmp/some-spool"))
    ensure(settings)
    (one,) = started(directory)
    DaemonRecord.of_this_process(decisive_variables(one["env"]), exits_idle=True).write(directory)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "rotated")
    ensure(settings)
    monkeypatch.setenv("AWS_PROFILE", "another")
    with pytest.raises(ConfigurationError) as caught:
        ensure(
            Settings(
                runtime_dir=directory, spool=Path("/tmp/some-spool"), coordinator="10.0.0.2:7070"
            )
        )
    message = str(caught.value)
    assert f"of the environment {sys.prefix}, process {os.getpid()} of user" in message
    assert "value of AWS_PROFILE, PANNIER_COORDINATOR, and" in message
    assert f"`pannier down --runtime-dir {directory}`" in message
    assert "another PANNIER_RUNTIME_DIR" in message
    assert "mine" not in message
    assert len(started(directory)) == 1


def test_daemons_that_keep_other_checkpoints_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(runtime_dir=directory)
    ensure(settings)
    (one,) = started(directory)
    DaemonRecord.of_this_process(decisive_variables(one["env"]), exits_idle=True).write(directory)
    monkeypatch.setenv("PANNIER_RETENTION_PATTERN", "checkpoint-*/dcp")
    with pytest.raises(
        ConfigurationError, match=r"PANNIER_RETENTION_PATTERN, and would .* or keep others of them"
    ):
        ensure(settings)


def test_daemons_of_another_wire_version_are_refused_with_whose_they_are(directory: Path) -> None:
    settings = Settings(runtime_dir=directory)
    ensure(settings)
    record = DaemonRecord.of_this_process({}, exits_idle=False)
    replace(record, version="9.9", wire_version=77).write(directory)
    with pytest.raises(VersionMismatchError) as caught:
        ensure(settings)
    assert "(pannier 9.9 of the environment" in str(caught.value)
    assert "have wire version 77" in str(caught.value)
    assert f"`pannier down --runtime-dir {directory}`" in str(caught.value)


def test_idle_daemons_that_do_not_exit_are_an_error_with_the_reason(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(runtime_dir=directory)
    ensure(settings)
    record = DaemonRecord.of_this_process({}, exits_idle=True)
    replace(record, version="9.9").write(directory)
    monkeypatch.setattr(launcher, "is_idle", lambda _: True)
    monkeypatch.setenv("FAKE", "fail")
    with pytest.raises(UnavailableError, match=r"(?s)could not be ended: .*no room on the disk"):
        ensure(settings)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    os.chown(directory, 65534, 65534)
    with pytest.raises(ConfigurationError, match=r"PANNIER_RUNTIME_DIR=.* not a directory of user"):
        ensure(Settings(runtime_dir=directory))
