"""``pannier up``'s supervisor, with small programs in the daemons' place."""

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from pannier.cli.commands import up as up_command
from pannier.cli.main import cli
from pannier.sidecar.spool.journal import Journal
from pannier.v1 import journal_pb2, records_pb2, save_pb2
from pannier.wire import addresses
from support.processes.cli import run_python
from support.processes.daemons import clean_environment, short_directory
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S

# Appends "<name> <pid>" to a file; on SIGTERM appends "<name> stopped" and exits with 0.
OBEDIENT = """
import os, signal, sys, time
name, diary = sys.argv[1:3]
def note(text):
    with open(diary, "a") as file:
        file.write(f"{name} {text}\\n")
def stop(*_):
    note("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note(os.getpid())
"""
# Not one long wait, which a signal that came just before would not end.
FOREVER = OBEDIENT + "while True: time.sleep(0.05)\n"
STUBBORN = FOREVER.replace("SIGTERM, stop", "SIGTERM, signal.SIG_IGN")

DRIVER = """
import json, logging, os, sys
from pathlib import Path
from pannier.common.daemon_record import DaemonRecord
from pannier.supervisor.runtime_directory import AlreadyRunningError
from pannier.supervisor.up import Supervisor
logging.basicConfig(level=logging.INFO)
directory, coordinator, sidecar, grace, margin = json.loads(sys.argv[1])
def program(command):
    return command and (lambda: os.execv(command[0], command))
try:
    record = DaemonRecord.of_this_process({}, exits_idle=True)
    sys.exit(Supervisor(Path(directory), coordinator=program(coordinator), sidecar=program(sidecar), record=record, grace_s=grace, margin_s=margin).run())
except AlreadyRunningError as error:
    print(error)
    sys.exit(17)
"""


class Up:
    """A supervisor of two programs and what they wrote."""

    def __init__(self, directory: Path, diary: Path) -> None:
        self.directory = directory
        self.diary = diary
        self.processes: list[Process] = []

    def start(
        self,
        sidecar: str = FOREVER,
        coordinator: str | None = FOREVER,
        margin: float = 10 * BOUND_S,
    ) -> Process:
        commands = [
            python("-c", program, name, str(self.diary)) if program is not None else None
            for name, program in (("coordinator", coordinator), ("sidecar", sidecar))
        ]
        process = Process(
            "up",
            python("-c", DRIVER, json.dumps([str(self.directory), *commands, 1.0, margin])),
            environment=clean_environment(
                {"PANNIER_LISTEN": "0.0.0.0:1", "PANNIER_MEMORY": "1GiB"}
            ),
            log=self.diary.with_suffix(f".{len(self.processes)}.log"),
        )
        self.processes.append(process)
        return process

    def notes(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []

    def pids(self, name: str) -> list[int]:
        """Of all starts so far."""
        return [int(line.split()[1]) for line in self.notes() if _is_start(line, name)]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            logs = "\n".join(process.log() for process in self.processes)
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.notes()}\n{logs}"
            time.sleep(0.01)

    def both_started(self, times: int = 1) -> None:
        self.wait_for(
            lambda: len(self.pids("sidecar")) >= times and bool(self.pids("coordinator")),
            f"start number {times}",
        )


def _is_start(line: str, name: str) -> bool:
    word, _, rest = line.partition(" ")
    return word == name and rest.isdigit()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    directory = short_directory()
    running = Up(directory, tmp_path / "diary")
    yield running
    for process in running.processes:
        process.close()
    for name in ("sidecar", "coordinator"):
        for pid in running.pids(name):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
    shutil.rmtree(directory, ignore_errors=True)


def test_sigterm_stops_the_sidecar_before_the_coordinator_it_needs(up: Up) -> None:
    process = up.start()
    up.both_started()
    assert int((up.directory / "up.pid").read_text()) == process.pid
    assert process.stop() == 0
    assert up.notes()[-2:] == ["sidecar stopped", "coordinator stopped"]
    assert not (up.directory / "up.pid").exists()


def down(directory: Path, *flags: str) -> Result:
    return CliRunner().invoke(cli, ["down", "--runtime-dir", str(directory), *flags])


def test_down_ends_the_sidecar_before_the_coordinator_and_waits_for_both(up: Up) -> None:
    process = up.start()
    up.both_started()
    ended = down(up.directory)
    assert (ended.exit_code, ended.output) == (0, f"the daemons have exited: {up.directory}\n")
    assert up.notes()[-2:] == ["sidecar stopped", "coordinator stopped"]
    assert process.wait(BOUND_S) == 0
    again = down(up.directory)
    assert (again.exit_code, again.output) == (0, f"no daemons run: {up.directory}\n")


def test_down_names_daemons_that_do_not_exit_in_time(up: Up) -> None:
    process = up.start(sidecar=STUBBORN)
    up.both_started()
    late = down(up.directory, "--timeout", "0.1")
    assert late.exit_code == 1
    assert f"(process {process.pid}) have not exited within 0.1 s" in late.output


def test_down_kills_no_process_that_an_old_file_names(up: Up) -> None:
    up.directory.mkdir(exist_ok=True)
    (up.directory / "up.pid").write_text(f"{os.getpid()}\n")
    assert down(up.directory).output == f"no daemons run: {up.directory}\n"


def test_down_names_other_daemons_that_run_and_none_that_were_killed(up: Up) -> None:
    """As after an upgrade: the runtime directory of another version, or of a job on several hosts."""
    usual = up.directory
    up.directory = addresses.job_dir(usual, "a job", "1", "a host")
    process = up.start()
    up.both_started()
    assert f"other daemons run in {up.directory} (pannier " in down(usual).output
    for pid in (process.pid, *up.pids("sidecar"), *up.pids("coordinator")):
        with suppress(ProcessLookupError):  # they end with their supervisor
            os.kill(pid, signal.SIGKILL)
    process.wait(BOUND_S)
    assert (up.directory / "up.pid").exists()
    assert down(usual).output == f"no daemons run: {usual}\n"
    up.directory = usual


def test_down_signals_no_process_of_another_container(up: Up) -> None:
    process = up.start()
    up.both_started()
    # As it is seen where the number is another process'.
    (up.directory / "up.pid").write_text(f"{os.getpid()}\n")
    refused = down(up.directory)
    assert refused.exit_code == 2
    assert f"another container, where their supervisor is process {os.getpid()}" in refused.output
    assert process.returncode is None


TITLED = """
import os, sys
from pathlib import Path
from pannier.supervisor.process_title import set_process_title
set_process_title("pannier", os.environ["SECOND"])
sys.stdout.buffer.write(Path("/proc/self/cmdline").read_bytes())
"""


@pytest.mark.parametrize("second", ["sidecar", "x" * 10_000])
def test_a_process_shows_other_words_as_its_command_line(second: str) -> None:
    command = python("-c", TITLED)
    environment = clean_environment({"SECOND": second})
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    # In the room that the arguments had.
    assert len(output) == sum(len(word) + 1 for word in command)
    assert output.rstrip(b"\0").decode() == f"pannier\0{second}"[: len(output) - 1]


def test_storage_options_are_not_shown_to_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(up_command, "set_process_title", lambda *words: shown.extend(words))
    monkeypatch.setattr("pannier.cli.main.main", lambda words: ran.extend(words))
    ran: list[str] = []
    words = ["sidecar", "--storage-options", '{"secret": "s3cr3t"}', "--grace", "20"]
    # It returns only here.
    up_command._run(*words)
    assert ran == words
    assert shown == ["pannier", "sidecar", "--storage-options", "...", "--grace", "20"]


class CommandsError(Exception):
    """Raised instead of starting daemons, with the sidecar's command line."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The words of the sidecar's command line that ``pannier up`` makes of flags and variables."""

    def supervisor(directory: Path, *, sidecar: partial[object], **more: object) -> None:
        raise CommandsError(*sidecar.args)

    def run(*flags: str, **variables: str) -> list[str]:
        result = CliRunner().invoke(cli, ["up", *flags], env=variables)
        assert isinstance(result.exception, CommandsError), result.output
        return [str(word) for word in result.exception.args]

    monkeypatch.setattr(up_command, "Supervisor", supervisor)
    return run


def test_replicas_are_those_of_the_environment_where_there_are_peers(
    commands: Callable[..., list[str]],
) -> None:
    variables = {"PANNIER_REPLICAS": "1", "PANNIER_FAILURE_DOMAIN": "rack-7"}
    words = commands("--peers", "127.0.0.1:7", **variables)
    for flag, value in (
        ("--replicas", "1"),
        ("--failure-domain", "rack-7"),
        ("--replicas-limit", str(256 << 20)),
    ):
        assert words[words.index(flag) + 1] == value
    # The daemons of jobs on one host have no peers: the trainers' variable isn't for them.
    words = commands(**variables)
    assert words[words.index("--replicas") + 1] == "0"
    refused = CliRunner().invoke(cli, ["up", "--replicas", "1"])
    assert refused.exit_code == 2
    assert "--replicas 1 needs --peers HOST:PORT" in refused.output


def test_the_budget_of_uploads_is_that_of_flags_or_the_environment(
    commands: Callable[..., list[str]],
) -> None:
    words = commands("--upload-threads", "3", PANNIER_UPLOAD_LIMIT="500MiB")
    for flag, value in (("--upload-threads", "3"), ("--upload-limit", str(500 << 20))):
        assert words[words.index(flag) + 1] == value
    assert not {"--upload-threads", "--upload-limit"} & set(commands())


def test_sessions_of_one_user_have_the_same_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANNIER_RUNTIME_DIR", raising=False)
    found = set()
    for base in ("/run/user/0", "/tmp", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        found.add(addresses.runtime_dir())
    assert len(found) == 1


def test_the_runtime_directory_is_the_users_alone(up: Up) -> None:
    up.directory.chmod(0o777)
    process = up.start()
    up.both_started()
    assert stat.S_IMODE(up.directory.stat().st_mode) == 0o700
    process.stop()


def test_a_symbolic_link_in_its_place_is_refused(up: Up, tmp_path: Path) -> None:
    up.directory.rmdir()
    up.directory.symlink_to(tmp_path)
    process = up.start()
    assert process.wait(BOUND_S) == 1
    assert "UnsafeDirectoryError" in process.log()
    up.directory.unlink()


def test_a_killed_daemon_is_started_again(up: Up) -> None:
    process = up.start()
    up.both_started()
    coordinator = up.pids("coordinator")
    os.kill(up.pids("sidecar")[0], signal.SIGKILL)
    up.both_started(times=2)
    assert up.pids("coordinator") == coordinator
    assert "sidecar ended with SIGKILL; restart in 0.2 s" in process.log()
    assert process.stop() == 0


def test_restarts_wait_longer_each_time(up: Up) -> None:
    process = up.start(sidecar=OBEDIENT + "sys.exit(1)")
    up.wait_for(lambda: "restart in 0.8 s" in process.log(), "third crash")
    assert "restart in 0.2 s" in process.log()
    assert "restart in 0.4 s" in process.log()
    assert process.stop() == 0


def test_a_coordinator_that_leaves_is_started_again(up: Up) -> None:
    process = up.start(coordinator=OBEDIENT)
    up.wait_for(lambda: len(up.pids("coordinator")) == 2, "second start")
    assert process.stop() == 0


def test_a_sidecar_of_a_coordinator_elsewhere_runs_alone(up: Up) -> None:
    process = up.start(coordinator=None)
    up.wait_for(lambda: bool(up.pids("sidecar")), "the sidecar's start")
    assert process.stop() == 0
    assert up.notes()[1:] == ["sidecar stopped"]


def test_an_idle_sidecar_takes_the_coordinator_along(up: Up) -> None:
    idle = OBEDIENT + "import time\nwhile open(diary).read().count('\\n') < 2: time.sleep(0.01)\n"
    process = up.start(sidecar=idle)
    assert process.wait(BOUND_S) == 0
    assert up.notes()[-1] == "coordinator stopped"


def test_a_refused_configuration_is_not_tried_again(up: Up) -> None:
    process = up.start(sidecar=OBEDIENT + "sys.exit(2)")
    assert process.wait(BOUND_S) == 2
    assert len(up.pids("sidecar")) == 1
    assert "refuses its configuration" in process.log()


def test_a_daemon_that_ignores_sigterm_is_killed_in_the_end(up: Up) -> None:
    process = up.start(coordinator=STUBBORN, margin=0.3)
    up.both_started()
    assert process.stop() == 0
    assert "coordinator did not end in time; killed" in process.log()
    assert not psutil.pid_exists(up.pids("coordinator")[0])


@pytest.mark.parametrize("stubborn", ["sidecar", "coordinator"])
def test_a_second_sigterm_hurries(up: Up, stubborn: str) -> None:
    process = up.start(**{stubborn: STUBBORN})
    up.both_started()
    process.signal(signal.SIGTERM)
    if stubborn == "coordinator":
        up.wait_for(lambda: "sidecar stopped" in up.notes(), "the sidecar's end")
    else:
        up.wait_for(lambda: not (up.directory / "up.pid").exists(), "the beginning of the end")
    process.signal(signal.SIGTERM)
    # Whichever was waited for at that moment: nothing of the margin is waited out.
    assert process.wait(BOUND_S) == 0
    assert not psutil.pid_exists(up.pids("coordinator")[0])
    assert not psutil.pid_exists(up.pids("sidecar")[0])


def test_only_one_supervisor_per_directory(up: Up) -> None:
    first = up.start()
    up.both_started()
    second = up.start()
    assert second.wait(BOUND_S) == 17
    assert f"process {first.pid} already supervises {up.directory}" in second.log()
    assert first.returncode is None
    first.stop()


def test_a_successor_waits_for_one_that_is_just_leaving(up: Up) -> None:
    first = up.start(coordinator=STUBBORN, margin=1.0)
    up.both_started()
    first.signal(signal.SIGTERM)
    up.wait_for(lambda: not (up.directory / "up.pid").exists(), "the beginning of the end")
    second = up.start()
    first.wait(BOUND_S)
    up.both_started(times=2)
    assert second.stop() == 0


def test_daemons_end_with_a_killed_supervisor_and_a_new_one_can_start(up: Up) -> None:
    first = up.start()
    up.both_started()
    os.kill(first.pid, signal.SIGKILL)
    up.wait_for(
        lambda: {"sidecar stopped", "coordinator stopped"} <= set(up.notes()), "both daemons' end"
    )
    first.wait(BOUND_S)
    second = up.start()
    up.both_started(times=2)
    assert second.stop() == 0


def test_daemons_never_inherit_an_address_to_listen_on(up: Up) -> None:
    process = up.start()
    up.both_started()
    for name in ("sidecar", "coordinator"):
        environment = psutil.Process(up.pids(name)[0]).environ()
        assert "PANNIER_LISTEN" not in environment
        assert environment["PANNIER_MEMORY"] == "1GiB"
    process.stop()


def test_daemons_have_their_signals_unblocked(up: Up) -> None:
    process = up.start()
    up.both_started()
    status = Path(f"/proc/{up.pids('sidecar')[0]}/status").read_text()
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) == 0
    process.stop()


STATES = ["none", "stored", "failed", "ended", "ingested", "damaged"]
AWAIT_UPLOAD = ("ingested", "damaged")


def spool_in_state(directory: Path, state: str) -> Path:
    """A spool that a sidecar has left with one rank in this state."""
    spool = directory / "spool"
    spool.mkdir()
    (spool / "00000001.data").write_bytes(b"x" * 10)
    Record = journal_pb2.JournalRecord
    last = {
        "stored": Record(stored=journal_pb2.ReceiptStored()),
        "failed": Record(failed=save_pb2.Failure(message="403")),
        "ended": Record(ended=journal_pb2.PartEnded(state=save_pb2.SAVE_STATE_ABORTED)),
    }
    records = [
        Record(begun=journal_pb2.PartBegun(attempt="i1-a1-g00000000-s1")),
        Record(ingested=records_pb2.Receipt(plan_id="p")),
        *([last[state]] if state in last else []),
    ]
    for record in records:
        record.part = 1
    if state != "none":
        journal = Journal(spool)
        journal.rewrite(records)
        journal.close(remove=False)
    if state == "damaged":
        (spool / "journal").write_bytes(b"something else")
    return spool


@pytest.mark.parametrize("state", STATES)
def test_an_exit_discards_a_spool_only_when_nothing_in_it_awaits_upload(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "daemons.json").write_text("{}")
    spool = spool_in_state(tmp_path, state)
    up_command._discard(directory, spool)
    stays = state in AWAIT_UPLOAD
    assert (directory / "daemons.json").exists() == stays
    assert (spool / "00000001.data").exists() == stays
    assert spool.exists() == stays
    assert ("not in storage yet" in caplog.text) == stays


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("status", [0, 1])
def test_a_sidecar_that_discards_removes_its_own_files_when_all_are_in_storage(
    tmp_path: Path, state: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_in_state(tmp_path, state)
    before = {*spool.iterdir()}
    monkeypatch.setattr("pannier.sidecar.main.run", lambda config: status)
    flags = ["sidecar", "--coordinator", "localhost:1", "--spool", str(spool)]
    assert CliRunner().invoke(cli, flags).exit_code == status
    assert {*spool.iterdir()} == before
    (spool / "another's").touch()
    assert CliRunner().invoke(cli, [*flags, "--discard"]).exit_code == status
    stays = status != 0 or state in AWAIT_UPLOAD
    assert {*spool.iterdir()} == ({*before} if stays else set()) | {spool / "another's"}
    refused = CliRunner().invoke(cli, ["sidecar", "--jobs", str(tmp_path), "--discard"])
    assert (refused.exit_code, "--jobs" in refused.output) == (2, True)


def test_a_log_that_takes_nothing_stops_no_process() -> None:
    done = run_python(
        "import os, sys\n"
        "from pannier.supervisor.processes import fork\n"
        "sys.stderr = open('/dev/full', 'w')\n"
        "def say():\n"
        "    sys.stderr.write('a line')\n"
        "    return 3\n"
        "say()\n"
        "child = fork(say)\n"
        "print('ended with', os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]), flush=True)\n"
        "os._exit(0)\n",
        env=clean_environment(),
    )
    assert done.out == "ended with 3\n", done
