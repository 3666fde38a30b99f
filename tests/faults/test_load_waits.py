"""A load waits for other ranks by name and to a deadline, whatever keeps one of them from coming."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.ranks import start_ranks
from support.processes.stretch import stretched

ENDING = """
import os, signal
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from pannier import client
from pannier.client.loading.storage_reader import StorageReader

RANK = int(os.environ["RANK"])
SIGNAL = getattr(signal, os.environ["SIGNAL"])
dist.init_process_group("gloo")
client.latest(os.environ["ROOT"])

def end(step):
    if RANK == int(os.environ["CULPRIT"]) and os.environ["STEP"] == step:
        os.kill(os.getpid(), SIGNAL)

class Planner(DefaultLoadPlanner):
    def create_local_plan(self):
        end("plan")
        return super().create_local_plan()

class Reader(StorageReader):
    def read_data(self, *arguments):
        end("read")
        return super().read_data(*arguments)

gather = dist.gather_object

def gather_object(*arguments, **keywords):
    end("gather")
    return gather(*arguments, **keywords)

dist.gather_object = gather_object
end("call")
state = {"w": torch.zeros(6)}
reader = Reader(os.environ["ROOT"] + "/step-1")
try:
    client.load(state, reader, planner=Planner(), timeout=float(os.environ["TIMEOUT"]))
except client.LoadError as error:
    failures = {rank: (each.host, each.kind) for rank, each in error.failures.items()}
    print("FAILED", error, failures, flush=True)
    os._exit(0)
print("LOADED", flush=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=path / "step-1", no_dist=True)
    return path


HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("culprit", "step", "name", "timeout", "text"),
    [
        (2, "call", "SIGKILL", 300, f"still waiting for rank 2 (host {HOST}, ended) to call load"),
        (
            2,
            "read",
            "SIGKILL",
            300,
            f"still waiting for rank 2 (host {HOST}, ended) to read its part",
        ),
        pytest.param(
            *(2, "call", "SIGSTOP", 3),
            f"still waiting for rank 2 (host {HOST}, stopped) to call load",
            marks=pytest.mark.extended,
        ),
        (2, "plan", "SIGSTOP", 3, f"still waiting for rank 2 (host {HOST}, stopped) to plan"),
        # Within torch's collective.
        (2, "gather", "SIGKILL", 300, f"still waiting for rank 2 (host {HOST}, ended) to put"),
        (2, "gather", "SIGSTOP", 3, f"still waiting for rank 2 (host {HOST}, stopped) to put"),
        # It serves the process group's store.
        (0, "plan", "SIGSTOP", 3, f"store, which rank 0 (host {HOST}, stopped) or its launcher"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_on_all_others(
    root: Path, culprit: int, step: str, name: str, timeout: int, text: str
) -> None:
    environment = {
        "ROOT": str(root),
        "CULPRIT": str(culprit),
        "STEP": step,
        "SIGNAL": name,
        "TIMEOUT": str(stretched(timeout)),
    }
    with start_ranks(ENDING, 3, environment, torchrun=False) as ranks:
        for rank in {0, 1, 2} - {culprit}:
            ranks.wait_for("FAILED", rank=rank)
            output = ranks.output(rank)
            assert text in output, output
            assert f"{{{culprit}: ('{HOST}', " in output
