"""Both daemons as an operator's tools see them: a client that isn't ours, over reflection."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemons, str]]:
    """Daemons that have carried one checkpoint."""
    directory = tmp_path_factory.mktemp("reflection")
    checkpoint = str(directory / "step-7")
    with Daemons(directory) as running:
        environment = running.env(CHECKPOINT=checkpoint)
        with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
            ranks.wait(BOUND_S).check()
        yield running, checkpoint


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
