"""The command line as a whole: help, variables, checked values, and what it imports."""

import subprocess
from pathlib import Path

import click
import pytest

from pannier.cli.errors import UNREACHABLE, report_errors
from pannier.cli.main import cli
from pannier.cli.options import Address, JsonObject, Location, Seconds, Size
from pannier.storage.base import DeniedError, NotFoundError, StorageError, UnreachableError
from support.processes.cli import pannier
from support.processes.daemons import clean_environment
from support.processes.processes import python
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write

COMMANDS = list(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_names_its_variables(command: str) -> None:
    result = pannier(command, "--help")
    assert result.code == 0, result
    assert f"Usage: pannier {command}" in result.out
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    for option in found.params:
        if isinstance(option, click.Option) and option.envvar and not option.hidden:
            names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
            assert all(name.startswith("PANNIER_") and name in result.out for name in names)
            assert option.help


def test_no_command_is_an_error_in_a_line() -> None:
    result = pannier()
    assert result.code == 2
    assert result.err == "error: Missing command.\nhint: `pannier --help` lists what there is\n"


def test_a_reader_of_the_output_may_leave(tmp_path: Path) -> None:
    for number in range(2000):
        write(tmp_path / f"step-{number}" / ".metadata", b"pickle")
    command = [*python("-m", "pannier.cli", "ls", str(tmp_path), "--json")]
    with subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


def test_the_shell_completes_commands_and_options() -> None:
    for words, position, expected in (
        ("pannier stat", "1", "plain,status"),
        ("pannier status --jo", "2", "plain,--job"),
        ("pannier status --state comm", "3", "plain,committed"),
    ):
        asked = {"COMP_WORDS": words, "COMP_CWORD": position}
        result = pannier(env={"_PANNIER_COMPLETE": "bash_complete", **asked})
        assert result.out.split() == [expected], result


def test_help_lists_the_commands_and_exit_statuses() -> None:
    out = pannier("--help").out
    for command in COMMANDS:
        assert f"\n  {command} " in out
    assert "Exit status" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1000000", 1000000),
        ("192MiB", 192 << 20),
        ("192mib", 192 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2_000_000_000),
        ("3TiB", 3 << 40),
        ("7B", 7),
    ],
)
def test_sizes_in_the_units_people_write(text: str, expected: int) -> None:
    assert Size().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "0.2B", "1 XB", "1e9", "nan", "10 Mi"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"size|positive"):
        Size().convert(text, None, None)


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "inf", "nan", "3s"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="seconds"):
        Seconds().convert(text, None, None)


def test_durations_are_seconds() -> None:
    assert Seconds().convert("2.5", None, None) == 2.5


@pytest.mark.parametrize("text", ["/run/x.sock", "unix://relative", "host", "host:0", "host:99999"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="unix:///path"):
        Address().convert(text, None, None)


@pytest.mark.parametrize("text", ["{", "[]", "3", "x"])
def test_storage_options_are_a_json_object(text: str) -> None:
    with pytest.raises(click.BadParameter, match="JSON"):
        JsonObject().convert(text, None, None)
    assert JsonObject().convert('{"a": [1]}', None, None) == {"a": [1]}


def test_relative_paths_are_taken_from_the_working_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(directory)
    assert Location().convert("runs", None, None) == str(directory / "runs")
    assert Location().convert("gs://bucket/runs", None, None) == "gs://bucket/runs"


def test_a_bad_value_in_a_variable_is_named_and_exits_with_2() -> None:
    result = pannier(
        *("sidecar", "--coordinator", "localhost:1", "--spool", "/tmp/never-made"),
        env={"PANNIER_MEMORY": "lots"},
    )
    assert result.code == 2
    assert "PANNIER_MEMORY" in result.err
    assert "'lots'" in result.err


def test_a_socket_path_that_is_too_long_is_refused_before_anything_starts() -> None:
    result = pannier("up", "--runtime-dir", "/tmp/" + "x" * 100)
    assert result.code == 2
    assert "105 bytes" in result.err


def test_a_planner_is_not_for_a_sidecar_alone() -> None:
    result = pannier("up", "--coordinator", "10.0.0.2:7070", "--planner", "module:Class")
    assert result.code == 2
    assert "PANNIER_PLANNER" in result.err
    assert "10.0.0.2:7070" in result.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["stauts"], "Did you mean `pannier status`?"),
        (["list", "/tmp"], "Did you mean `pannier ls`?"),
        (["frobnicate"], ""),
        (["status", "--adress", "x"], "--address"),
        (["status", "--frobnicate"], ""),
    ],
)
def test_unknown_commands_and_options_exit_with_2_and_similar_names(
    words: list[str], meant: str
) -> None:
    result = pannier(*words)
    assert result.code == 2
    assert "error: No such" in result.err
    assert meant in result.err
    assert ("Did you mean" in result.err) == bool(meant)
    assert "--help` lists what there is" in result.err


def test_errors_are_wrapped_between_words_of_a_terminal() -> None:
    place = "/tmp/" + "x" * 90
    result = pannier("ls", place, columns=80)
    assert result.code == 1
    assert place in result.err.splitlines(), "an address can be copied"
    assert all(len(line) <= 80 for line in result.err.splitlines() if line != place), result


@pytest.mark.parametrize(
    "module",
    [
        "pannier.cli.main",
        *(f"pannier.cli.commands.{command}" for command in COMMANDS),
        "pannier.supervisor.up",
        "pannier.storage",
    ],
)
def test_importing_it_leaves_torch_out(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    subprocess.run(python("-c", code), check=True, timeout=2 * BOUND_S)


def test_running_the_sidecars_code_leaves_torch_out() -> None:
    code = (
        "import sys, pannier.sidecar.server, pannier.sidecar.config; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run(python("-c", code), check=True, timeout=2 * BOUND_S)


def test_the_supervisor_stays_small() -> None:
    code = "import sys, pannier.supervisor.up; sys.exit('grpc' in sys.modules)"
    subprocess.run(python("-c", code), check=True, timeout=2 * BOUND_S)


def test_a_sidecar_without_a_socket_is_asked_for_its_spool() -> None:
    result = pannier("sidecar", "--address", "127.0.0.1:1", "--coordinator", "127.0.0.1:2")
    assert result.code == 2
    assert "--spool" in result.err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (UnreachableError("s3://b/x: connection refused"), "check the endpoint"),
        (DeniedError("s3://b/x: 403"), "check the credentials"),
        (NotFoundError("s3://b/x: 404 NoSuchBucket"), "check the URL"),
        (StorageError("s3://b/x: 503 (given up after 9 tries in 300 s)"), ""),
    ],
    ids=["unreachable", "denied", "missing", "other"],
)
def test_the_hint_of_a_storage_error_is_about_its_own_cause(
    capsys: pytest.CaptureFixture[str], error: Exception, hint: str
) -> None:
    with pytest.raises(SystemExit) as stop, report_errors():
        raise error
    assert stop.value.code == UNREACHABLE
    said = capsys.readouterr().err
    assert str(error) in said
    assert (f"hint: {hint}" in said) if hint else "hint" not in said
    assert "daemon" not in said
    assert ("credentials" in said) is isinstance(error, DeniedError)
