"""The command line with real daemons."""

import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import torch

from pannier.client.client import Client
from pannier.client.config import load_settings
from pannier.client.embedded.certificates import issue
from pannier.wire import addresses
from support.network.certificates import write_tls
from support.network.status_pages import Scrape
from support.processes import fork_server
from support.processes.cli import Result, pannier
from support.processes.daemons import Daemons, await_serving, clean_environment
from support.processes.processes import Process, python
from support.processes.ranks import free_port, run_ranks
from support.processes.stretch import BOUND_S


def test_both_daemons_serve_their_status_and_end_on_sigterm(daemons: Daemons) -> None:
    for daemon in (daemons.coordinator, daemons.sidecar):
        answer = pannier("status", "--json", "--address", daemon.address).json()
        assert answer["saves"] == []
        assert answer["daemon_state"] == "serving"
    for daemon in (daemons.sidecar, daemons.coordinator):
        assert daemon.stop() == 0, daemon.log()
        assert pannier("status", "--address", daemon.address).code == 3


def test_a_killed_daemon_starts_again_on_the_same_socket(daemons: Daemons) -> None:
    for daemon in (daemons.coordinator, daemons.sidecar):
        daemon.kill()
        assert pannier("status", "--address", daemon.address).code == 3
        daemon.start()
        assert pannier("status", "--address", daemon.address).code == 0


def test_the_sidecar_runs_without_torch(daemons: Daemons) -> None:
    maps = Path(f"/proc/{daemons.sidecar.pid}/maps").read_text()
    assert "cygrpc" in maps
    assert "libtorch" not in maps
    assert "numpy" not in maps


TWO_RANKS = """
    import os
    import torch
    import torch.distributed as dist
    from pannier import client

    dist.init_process_group("gloo")
    state = {"weight": torch.arange(1 << 20, dtype=torch.float32), "step": 7}
    for root in os.environ["ROOTS"].split():
        for step in (10, 20, 30):
            client.save(state, checkpoint_id=f"{root}/step-{step}")
    client.close()
    dist.destroy_process_group()
"""


REFERENCE = Path(__file__).parents[2] / "docs" / "cli.md"
WIDTHS = (80, 200)


def test_the_reference_is_what_the_commands_say() -> None:
    script = REFERENCE.with_name("write_cli.py")
    done = subprocess.run(
        python(str(script)), capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    assert done.stdout == REFERENCE.read_text(), "run `make docs`"


def test_every_command_of_the_reference_shows_real_saves_in_80_and_200_columns(
    daemons: Daemons, tmp_path: Path
) -> None:
    roots = {columns: str(tmp_path / "run" / f"of-{columns}") for columns in WIDTHS}
    environment = daemons.env(PANNIER_JOB="llama", ROOTS=" ".join(roots.values()))
    run_ranks(TWO_RANKS, 2, environment, torchrun=False)
    text = REFERENCE.read_text()
    commands = re.findall("^## pannier (.+)$", text, re.MULTILINE)
    examples = re.findall(r"^\$ pannier (.+)$", text, re.MULTILINE)
    assert {example.split()[0] for example in examples} >= {*commands} - DAEMONS
    addresses = [daemons.sidecar_address, daemons.coordinator_address]
    for columns, root in roots.items():
        for command in commands:
            assert_fits(pannier(command, "--help", columns=columns), columns)
        for example in examples:
            words = example.replace("/tmp/checkpoints", root).split()
            for address in addresses if words[0] in ASKING else addresses[:1]:
                result = pannier(*words, columns=columns, env={"PANNIER_SIDECAR": address})
                assert result.code == 0, result
                if "--json" in words:
                    assert all(isinstance(each, dict) for each in result.json_lines())
                    continue
                if "wide" not in words:
                    assert_fits(result, columns)
                assert_shows(words, result.out, whole=columns > 80 or "wide" in words)
        assert_verify_names_what_is_damaged(f"{root}/step-30", columns)


DAEMONS = {"sidecar", "coordinator", "up", "down"}
"""What starts or ends them has no example there."""
ASKING = {"status", "health", "watch", "doctor"}


def assert_fits(result: Result, columns: int) -> None:
    for line in (result.out + result.err).splitlines():
        # An address is not broken, so that it can be copied.
        assert len(line) <= columns or " " not in line.strip(), f"{columns} columns: {line}"


def assert_shows(words: list[str], out: str, *, whole: bool) -> None:
    """Names, states and sizes are not cut; where there is room, neither is anything else."""
    sentences = " ".join(out.split())
    match words:
        case ["status", checkpoint]:
            assert re.match(f"step-30 COMMITTED llama/[^ ]+ {checkpoint} ", sentences)
            assert len(re.findall("  DURABLE  +4.0 MiB  .* ago", out)) == 1
        case ["status", *_]:
            shown = re.findall("step-[0-9]0  +COMMITTED +2 of 2 +4.0 MiB", out)
            assert len(shown) == (5 if "--limit" in words else 6)
            assert not whole or len(re.findall(" llama/[0-9a-f]+/g[0-9a-f]+/[1-6]", out)) == len(
                shown
            )
        case ["watch", *_]:
            assert re.search("step-30 COMMITTED llama/[^ ]+ [^ ]+/step-30 ", sentences)
        case ["ls", *_]:
            lines = re.findall(
                "^step-([0-9]0) +committed +4.0 MiB .* ago +llama", out, re.MULTILINE
            )
            assert lines == ["10", "20", "30"]
            assert not whole or out.count("-s") == 3
        case ["retain", *_]:
            assert len(re.findall("^step-[0-9]0 +stays +4.0 MiB", out, re.MULTILINE)) == 2
            assert len(re.findall("^step-10 +would be removed ", out, re.MULTILINE)) == 1
        case ["verify", *_]:
            assert re.match("ok: .*4.0 MiB, all as committed", sentences)
        case ["doctor", *_]:
            assert "✗" not in out
            assert "written, replaced, read, listed and removed" in sentences


def assert_verify_names_what_is_damaged(checkpoint: str, columns: int) -> None:
    data = next(Path(checkpoint).glob("*_0.distcp"))
    content = bytearray(data.read_bytes())
    content[2 << 20] ^= 4
    data.write_bytes(content)
    damaged = pannier("verify", checkpoint, columns=columns)
    assert damaged.code == 1
    assert_fits(damaged, columns)
    assert "crc32c is" in damaged.out
    # Folded, but not cut.
    assert columns < 200 or data.name in damaged.out


def test_a_wrong_setting_stops_a_daemon_with_2_and_its_name(daemons: Daemons) -> None:
    result = pannier(
        *("sidecar", "--address", f"unix://{daemons.directory}/x.sock", "--memory", "1MiB"),
        *("--coordinator", daemons.coordinator_address, "--spool", str(daemons.spool / "x")),
    )
    assert result.code == 2, result
    assert "--memory" in result.err
    assert "Traceback" not in result.err


@contextmanager
def up(directory: Path, logs: Path, *arguments: str) -> Iterator[Process]:
    """``pannier up`` for the runtime directory ``directory``."""
    process = Process(
        "up",
        python("-m", "pannier.cli", "up", "--runtime-dir", str(directory), *arguments),
        environment=clean_environment(),
        log=logs / "up.log",
        imported=fork_server.modules_of("up"),
    )
    try:
        yield process
    finally:
        process.close()


def test_up_runs_both_daemons_for_this_user_alone(embedded: Path, tmp_path: Path) -> None:
    with up(embedded, tmp_path) as process:
        address = addresses.embedded_sidecar(embedded)
        await_serving(address, process=process)
        await_serving(addresses.embedded_coordinator(embedded), process=process)
        assert pannier("status").code == 0, "the default address is the embedded sidecar's"
        assert stat.S_IMODE(embedded.stat().st_mode) == 0o700
        for path in embedded.glob("*.sock"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        for child in psutil.Process(process.pid).children():
            listening = [c for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
            assert not listening, "an embedded daemon listens on TCP"
            held = {file.path for file in child.open_files()}
            assert str(embedded / "up.lock") not in held, "it would keep the next supervisor out"
            assert os.readlink(f"/proc/{child.pid}/fd/0") == os.devnull
        sidecar = _child(process.pid, "sidecar")
        sidecar.kill()
        sidecar.wait(BOUND_S)
        await_serving(address, process=process)
        assert _child(process.pid, "sidecar").pid != sidecar.pid
        assert process.stop() == 0
        assert pannier("status").code == 3


def test_up_shows_both_daemons_to_browsers(embedded: Path, tmp_path: Path) -> None:
    port = free_pair()
    with up(embedded, tmp_path, "--metrics", str(port)) as process:
        await_serving(addresses.embedded_sidecar(embedded), process=process)
        await_serving(addresses.embedded_coordinator(embedded), process=process)
        for number, daemon in enumerate(("coordinator", "sidecar")):
            (about,) = Scrape(f"127.0.0.1:{port + number}").labels("pannier_build_info")
            assert about["daemon"] == daemon
        assert process.stop() == 0
    last = pannier("up", "--metrics", "65535")
    assert (last.code, "needs the next port" in last.err) == (2, True)


def free_pair() -> int:
    """A port that is free now, as is the next one."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def test_up_leaves_when_the_sidecar_is_idle(embedded: Path, tmp_path: Path) -> None:
    with up(embedded, tmp_path, "--idle-exit", "0.5") as process:
        assert process.wait(BOUND_S) == 0
        assert not (embedded / "up.pid").exists()


def test_up_for_several_hosts_leaves_when_all_are_idle_and_takes_its_keys_along(
    embedded: Path, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    spool = Path(os.environ["PANNIER_SPOOL"])
    commands = []
    for name, papers in zip("ab", issue("127.0.0.1"), strict=True):
        directory = addresses.job_dir(embedded, "a job", name, "a host")
        directory.mkdir(mode=0o700)
        (tmp_path / name).mkdir()
        files = write_tls(papers, directory)
        # The second one's sidecar leaves by itself unless a trainer comes in time.
        idle = {"a": "1", "b": "10"}[name]
        flags = ["--spool", str(spool / name), "--idle-exit", idle, "--discard"]
        for flag, path in zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True):
            flags += [flag, str(path)]
        flags += ["--listen" if name == "a" else "--coordinator", address]
        commands.append((directory, tmp_path / name, *flags))
    with ExitStack() as daemons:
        first = daemons.enter_context(up(*commands[0]))
        # It waits for the second one, however long that takes to start.
        await_serving(addresses.embedded_coordinator(commands[0][0]), process=first)
        second = daemons.enter_context(up(*commands[1]))
        # The second one's trainer keeps the first one, whose coordinator it needs.
        sidecar = addresses.embedded_sidecar(commands[1][0])
        await_serving(sidecar, process=second)
        with Client(load_settings(sidecar=sidecar)) as client:
            client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
            time.sleep(3)
            assert first.returncode is None
            status = pannier("status")
            assert status.code == 0
            assert "hint: this user has another sidecar" in status.err
        assert first.wait(BOUND_S) == 0
        assert second.wait(BOUND_S) == 0
    assert [list(command[0].iterdir()) for command in commands] == [[], []]
    assert list(spool.iterdir()) == []
    with up(embedded, tmp_path, "--listen", address, "--coordinator", address) as both:
        assert both.wait(BOUND_S) == 2
        assert "give only one of them" in both.log()


def _child(parent: int, command: str) -> psutil.Process:
    for child in psutil.Process(parent).children():
        if command in child.cmdline():
            return child
    raise AssertionError(f"no {command} below process {parent}")
