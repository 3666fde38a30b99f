"""What training jobs do beside the client keeps working."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.actors.scripted_sidecar import ScriptedSidecar
from support.processes import forking_trainer
from support.processes.daemons import clean_environment
from support.processes.ranks import free_port

FORK_SUPPORT = [None, pytest.param("1", marks=pytest.mark.extended)]
"""Of gRPC, by its variable in the environment: unset, the client switches it off."""


def trainers_environment(fork_support: str | None) -> dict[str, str]:
    environment = clean_environment({"PYTHONPATH": str(Path(__file__).parents[1])})
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    if fork_support is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    return environment


def train(sockets: Path, fork_support: str | None) -> dict[str, Any]:
    # A spawned worker isn't a fork of the trainer, whatever gRPC does about forks.
    methods = ["fork"] * forking_trainer.ROUNDS + ["spawn"] * (fork_support is None)
    environment = trainers_environment(fork_support)
    with ScriptedSidecar(sockets) as sidecar:
        # As on a network: a stream is there all the time, and leaves room for the rest.
        sidecar.pause_s = 0.02
        done = subprocess.run(
            [sys.executable, forking_trainer.__file__, sidecar.address, *methods],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Failed to shutdown" not in done.stderr
    if fork_support is None:
        assert "fork() handlers" not in done.stderr, (
            "gRPC prints to the user's terminal or notebook"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fork_support", FORK_SUPPORT)
def test_forked_and_spawned_workers_work_and_end_while_a_file_is_streamed(
    sockets: Path, fork_support: str | None
) -> None:
    found = train(sockets, fork_support)
    # gRPC's own way around a fork takes 5 s when a stream is idle; on a busy machine one may, anyway.
    assert sorted(found["forks_s"])[forking_trainer.ROUNDS // 2] < 4.5
    assert found["exits"] == [7] * forking_trainer.ROUNDS
    assert found["whole"] == [1] * len(found["whole"])
    assert not found["sending"]


_PARENT = """
import os, sys, time
from pannier.client.config import Settings
from pannier.client.identity import Identity
from pannier.client.transport.sidecar_client import SidecarClient

who = Identity(job="job", incarnation="a", rank=0, world_size=1, host="h", client="c")
sessions = [SidecarClient.connect(Settings(sidecar=address), who) for address in sys.argv[1:]]
child = os.fork()
if child == 0:
    os.write(1, b"child\\n")
    time.sleep(100)
    os._exit(0)
os.write(1, b"%d\\n" % child)
time.sleep(100)
"""


@pytest.mark.parametrize("fork_support", FORK_SUPPORT)
def test_a_trainers_death_is_seen_while_its_children_live(
    sockets: Path, fork_support: str | None
) -> None:
    local, remote = ScriptedSidecar(sockets), ScriptedSidecar(sockets, name="remote.sock")
    remote.address = f"localhost:{free_port()}"
    with (
        local,
        remote,
        subprocess.Popen(
            [sys.executable, "-c", _PARENT, local.address, remote.address],
            env=trainers_environment(fork_support),
            stdout=subprocess.PIPE,
            text=True,
        ) as parent,
    ):
        assert parent.stdout is not None
        child = None
        try:
            # The child is past what runs after a fork, too.
            words = [parent.stdout.readline().strip() for _ in range(2)]
            child = int(next(word for word in words if word != "child"))
            for sidecar in (local, remote):
                sidecar.wait_for(lambda each=sidecar: len(each.connects) > len(each.ended))
            parent.kill()
            for sidecar in (local, remote):
                sidecar.wait_for(lambda each=sidecar: len(each.ended) == len(each.connects))
            os.kill(child, 0)
        finally:
            parent.kill()
            if child is not None:
                os.kill(child, signal.SIGKILL)
