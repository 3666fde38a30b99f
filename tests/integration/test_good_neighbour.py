"""What training jobs do beside the client keeps working."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import forking_trainer
from support.daemons import clean_environment, short_directory
from support.scripted_sidecar import ScriptedSidecar


@pytest.fixture
def directory() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


def train(directory: Path, fork_support: str | None) -> dict[str, Any]:
    environment = clean_environment({"PYTHONPATH": str(Path(__file__).parents[1])})
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    if fork_support is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    with ScriptedSidecar(directory) as sidecar:
        done = subprocess.run(
            [sys.executable, forking_trainer.__file__, sidecar.address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Failed to shutdown" not in done.stderr
    assert "not end before a fork" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fork_support", [None, "0", "1"])
def test_forked_and_spawned_workers_work_and_end_while_a_file_is_streamed(
    directory: Path, fork_support: str | None
) -> None:
    found = train(directory, fork_support)
    # gRPC's own way around a fork takes 5 s, and hangs children, when a stream is idle.
    assert max(found["forks_s"]) < 2
    assert max(found["children_s"]) < 5
    assert max(found["rounds_s"]["fork"]) < 5
    assert found["exits"] == [7] * forking_trainer.ROUNDS
    assert found["whole"] == [1] * len(found["whole"])
    assert not found["sending"]
