"""Both daemons as an operator's tools see them: a client that isn't ours, over reflection."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.network.certificates import Authority
from support.processes.daemons import Daemons
from support.processes.ranks import free_port, start_ranks
from support.processes.stretch import BOUND_S

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or "buf"

TRAINER = """
import os
import torch
from pannier import client

state = {"weight": torch.arange(1000.0), "step": 7}
client.save(state, checkpoint_id=os.environ["CHECKPOINT"])
"""


def curl(address: str, method: str, **request: Any) -> list[dict[str, Any]]:
    """Calls ``method`` knowing only what the server's reflection returns."""
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--emit-defaults"]
    command += ["--unix-socket", address.removeprefix("unix://"), "--data", json.dumps(request)]
    command += [f"http://localhost/{method}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert finished.returncode == 0, finished.stderr
    decoder, text, answers = json.JSONDecoder(), finished.stdout.strip(), []
    while text:
        answer, end = decoder.raw_decode(text)
        answers.append(answer)
        text = text[end:].lstrip()
    return answers


PAGES = [Path(__file__).parents[2] / name for name in ("README.md", "docs/operations.md")]
GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or "grpcurl"


def grpcurl(*arguments: str) -> str:
    """Runs the real one, of version 1.8.6."""
    command = [GRPCURL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemons, str]]:
    """Daemons that have carried one checkpoint."""
    directory = tmp_path_factory.mktemp("reflection")
    checkpoint = str(directory / "step-7")
    authority = Authority(directory / "tls")
    ports = {name: f"127.0.0.1:{free_port()}" for name in ("--listen", "--health")}
    listening = [word for flag in ports.items() for word in flag]
    own = authority.issue("host")
    with Daemons(directory, coordinator_arguments=[*listening, *own.flags]) as running:
        environment = running.env(CHECKPOINT=checkpoint)
        with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
            ranks.wait(BOUND_S).check()
        yield running, checkpoint


def test_the_documented_lines_of_grpcurl_do_what_they_say(saved: tuple[Daemons, str]) -> None:
    running, checkpoint = saved
    listen, health = (
        running.coordinator.arguments[running.coordinator.arguments.index(flag) + 1]
        for flag in ("--listen", "--health")
    )
    flags = running.coordinator.arguments
    names = {
        "unix:///run/pannier/sidecar.sock": running.sidecar_address,
        "gs://bucket/run/step-30": checkpoint,
        "10.0.0.2:7070": listen,
        "10.0.0.2:7071": health,
        "host.pem": flags[flags.index("--tls-cert") + 1],
        "host.key": flags[flags.index("--tls-key") + 1],
        "ca.pem": flags[flags.index("--tls-ca") + 1],
        '"llama"': '"test"',
    }
    text = "\n".join(page.read_text() for page in PAGES)
    lines = re.findall(r"^grpcurl\$ (.*)", text, re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        for name, real in names.items():
            line = line.replace(name, real)
        words = shlex.split(line)[1:]
        if "-authority" in words:
            # What the page says of 1.8.
            at = words.index("-authority")
            words[at : at + 2] = ["-unix"]
            words = [word.removeprefix("unix://") for word in words]
        shown = grpcurl(*words)
        if words[-1].startswith("pannier.v1.Status/"):
            assert checkpoint in shown, line
            assert re.search(r'"created_at": "20\d\d-\d\d-\d\dT', shown)
            assert re.search(r'"summary": "step-7 was committed after ', shown)
            assert "plan_id" not in shown
            assert "e+09" not in shown
            assert "ListSaves" in words[-1] or re.search(r'"rank": 0\b', shown), shown
        elif words[-1].endswith("Check"):
            assert "SERVING" in shown


def test_the_health_port_describes_itself(saved: tuple[Daemons, str]) -> None:
    arguments = saved[0].coordinator.arguments
    health = arguments[arguments.index("--health") + 1]
    assert "grpc.health.v1.Health" in grpcurl("-plaintext", health, "list")


@pytest.mark.parametrize("daemon", ["sidecar", "coordinator"])
def test_status_is_there_for_any_grpc_client(saved: tuple[Daemons, str], daemon: str) -> None:
    running, checkpoint = saved
    address = getattr(running, daemon).address
    (listed,) = curl(address, "pannier.v1.Status/ListSaves")
    (save,) = listed["saves"]
    assert save["checkpointId"] == checkpoint
    assert save["state"] == "SAVE_STATE_COMMITTED"
    (got,) = curl(address, "pannier.v1.Status/GetSave", id=save["id"])
    (rank,) = got["save"]["ranks"]
    assert rank["phase"] == "RANK_PHASE_DURABLE"
    assert int(rank["bytesIngested"]) >= 4000
    assert rank["bytesStaged"] == rank["bytesIngested"] == rank["bytesDurable"]
    watched = curl(address, "pannier.v1.Status/WatchSave", id=checkpoint)
    assert watched[-1]["save"]["state"] == "SAVE_STATE_COMMITTED"
    (health,) = curl(address, "grpc.health.v1.Health/Check")
    assert health["status"] == "SERVING"
