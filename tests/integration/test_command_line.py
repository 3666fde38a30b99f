"""The command line with real daemons."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pannier.wire import addresses
from support.cli import pannier
from support.daemons import Daemons, await_serving, clean_environment
from support.processes import Process, python
from support.ranks import run_ranks


def test_both_daemons_tell_their_status_and_end_on_sigterm(daemons: Daemons) -> None:
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
    client.save(state, checkpoint_id=os.environ["CHECKPOINT"])
    client.close()
    dist.destroy_process_group()
"""


def test_every_command_tells_of_a_real_save(daemons: Daemons, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "run" / "step-7")
    run_ranks(TWO_RANKS, 2, {**daemons.env(), "CHECKPOINT": checkpoint}, torchrun=False)
    for address in (daemons.sidecar_address, daemons.coordinator_address):
        for words in (["status", checkpoint], ["watch"], ["watch", checkpoint]):
            result = pannier(*words, "--address", address)
            assert result.code == 0, result
            assert "COMMITTED" in result.out
        (save,) = pannier("status", "--json", "--address", address).json()["saves"]
        assert (save["state"], len(save["ranks"])) == ("SAVE_STATE_COMMITTED", 2)
    (listed,) = pannier("ls", "--json", str(tmp_path / "run")).json_lines()
    assert (listed["checkpoint"], listed["state"]) == (checkpoint, "committed")
    assert listed["bytes"] > 4 << 20
    assert pannier("verify", checkpoint).code == 0
    data = next(Path(checkpoint).glob("*_0.distcp"))
    content = bytearray(data.read_bytes())
    content[2 << 20] ^= 4
    data.write_bytes(content)
    damaged = pannier("verify", checkpoint)
    assert damaged.code == 1
    assert data.name in damaged.out


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
        for socket in embedded.glob("*.sock"):
            assert stat.S_IMODE(socket.stat().st_mode) == 0o600, socket
        for child in psutil.Process(process.pid).children():
            listening = [c for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
            assert not listening, "an embedded daemon listens on TCP"
        sidecar = _child(process.pid, "sidecar")
        sidecar.kill()
        sidecar.wait(5)
        await_serving(address, process=process)
        assert _child(process.pid, "sidecar").pid != sidecar.pid
        assert process.stop(30) == 0
        assert pannier("status").code == 3


def test_up_leaves_when_the_sidecar_is_idle(embedded: Path, tmp_path: Path) -> None:
    with up(embedded, tmp_path, "--idle-exit", "0.5") as process:
        assert process.wait(60) == 0
        assert not (embedded / "up.pid").exists()


def _child(parent: int, command: str) -> psutil.Process:
    for child in psutil.Process(parent).children():
        if command in child.cmdline():
            return child
    raise AssertionError(f"no {command} below process {parent}")
