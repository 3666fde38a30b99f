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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec
from pannier.client.embedded.launcher import await_others
from pannier.common import env_fingerprint, timeouts
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, UnavailableError
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


def started(run: Path) -> list[dict[str, Any]]:
    log = run / "started"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_daemons_are_started_once_by_many_and_found_by_all(directory: Path) -> None:
    settings = Settings(runtime_dir=directory)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(launcher.ensure(settings))) for _ in range(4)
    ]
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
        launcher.ensure(Settings(runtime_dir=directory, spool=Path("/tmp/some-spool")))
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
    assert "starting up" in (directory / launcher.LOG).read_text()


def test_they_outlive_ctrl_c_and_the_end_of_the_trainers_group(directory: Path) -> None:
    code = (
        "import sys; sys.executable = sys.argv[1]\n"
        "from pathlib import Path\n"
        "from pannier.client.embedded import launcher\n"
        "from pannier.client.config import Settings\n"
        "launcher.ensure(Settings(runtime_dir=Path(sys.argv[2])))\n"
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
    assert launcher.ensure(Settings(runtime_dir=directory)).endswith("sidecar.sock")
    assert len(started(directory)) == 1


def test_daemons_that_end_while_starting_are_an_error_with_their_last_words(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "fail")
    with pytest.raises(UnavailableError, match=r"(?s)exited while starting.*no room on the disk"):
        launcher.ensure(Settings(runtime_dir=directory))


def test_daemons_that_do_not_come_up_are_an_error_with_their_last_words(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_accepts(_: object) -> bool:
        log = directory / launcher.LOG
        if log.exists():
            wait_until(lambda: "starting up" in log.read_text())
        return False

    monkeypatch.setattr(timeouts, "DAEMONS_START_S", 0.2)
    monkeypatch.setattr(launcher, "_accepts", never_accepts)
    with pytest.raises(UnavailableError, match=r"(?s)did not start within 0.2 s.*starting up"):
        launcher.ensure(Settings(runtime_dir=directory))


def test_daemons_of_other_settings_are_refused_with_the_settings_names(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    settings = Settings(runtime_dir=directory, spool=Path("/tmp/some-spool"))
    launcher.ensure(settings)
    (one,) = started(directory)
    (directory / env_fingerprint.FILE).write_text(
        env_fingerprint.encode(env_fingerprint.record(one["env"]))
    )
    monkeypatch.setenv("AWS_SESSION_TOKEN", "rotated")
    launcher.ensure(settings)
    monkeypatch.setenv("AWS_PROFILE", "another")
    with pytest.raises(ConfigurationError) as caught:
        launcher.ensure(
            Settings(
                runtime_dir=directory, spool=Path("/tmp/some-spool"), coordinator="10.0.0.2:7070"
            )
        )
    message = str(caught.value)
    assert "value of AWS_PROFILE, PANNIER_COORDINATOR, and" in message
    assert f"`pannier down --runtime-dir {directory}`" in message
    assert "another PANNIER_RUNTIME_DIR" in message
    assert "mine" not in message
    assert len(started(directory)) == 1


def test_a_stale_socket_is_no_daemon(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "sidecar.sock"))
    assert not launcher._accepts(str(directory / "sidecar.sock"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    os.chown(directory, 65534, 65534)
    with pytest.raises(ConfigurationError, match=r"PANNIER_RUNTIME_DIR=.* not a directory of user"):
        launcher.ensure(Settings(runtime_dir=directory))


@pytest.mark.parametrize("mark", ["KUBERNETES_SERVICE_HOST", "SLURM_STEP_ID"])
def test_daemons_in_a_pod_or_a_slurm_step_end_with_it(
    monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert launcher.outlives_trainer()
    monkeypatch.setenv(mark, "1")
    assert not launcher.outlives_trainer()


SERVING = ("--listen", "10.0.0.1:7070")


class Status(status_pb2_grpc.StatusServicer):
    """A coordinator with one save under way, for so many questions."""

    def __init__(self) -> None:
        self.left = 3
        self.asked: list[status_pb2.ListSavesRequest] = []

    def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: grpc.ServicerContext
    ) -> status_pb2.ListSavesResponse:
        self.asked.append(request)
        self.left -= 1
        saves = [
            save_pb2.SaveStatus(
                checkpoint_id="gs://bucket/run/step-1", save=save_pb2.SaveId(incarnation="aa")
            )
        ]
        return status_pb2.ListSavesResponse(saves=saves if self.left > 0 else [])


@pytest.fixture
def status(sockets: Path) -> Iterator[Status]:
    servicer = Status()
    server = grpc.server(ThreadPoolExecutor(2))
    status_pb2_grpc.add_StatusServicer_to_server(servicer, server)
    server.add_insecure_port(addresses.embedded_coordinator(sockets))
    server.start()
    yield servicer
    server.stop(0).wait()


def test_exit_waits_until_nothing_of_the_job_is_under_way(sockets: Path, status: Status) -> None:
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", None) == ""
    assert len(status.asked) == 3
    request = status.asked[0]
    assert request.job == "llama"
    ended = {save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED}
    assert set(request.states).isdisjoint(ended)
    assert save_pb2.SAVE_STATE_UPLOADING in request.states


def test_exit_names_saves_still_under_way_at_its_deadline(sockets: Path, status: Status) -> None:
    status.left = 1 << 30
    left = await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", 0.3)
    assert left == "gs://bucket/run/step-1"


def test_exit_waits_a_while_for_what_earlier_starts_left(
    sockets: Path, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 0.1)
    monkeypatch.setattr(timeouts, "DAEMONS_STATUS_POLL_S", 0.15)
    status.left = 1 << 30
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "bb", None) == ""
    assert len(status.asked) == 2


def test_exit_does_not_ask_a_coordinator_that_serves_this_host_alone(
    sockets: Path, status: Status
) -> None:
    assert await_others(DaemonSpec(sockets, None), "llama", "aa", None) == ""
    assert status.asked == []


def test_exit_does_not_wait_for_a_coordinator_that_is_gone(sockets: Path) -> None:
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", None) == ""
