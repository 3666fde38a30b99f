"""A load waits for other ranks by name and to a deadline, whatever keeps one of them from coming."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support.processes.ranks import free_port, run_ranks, start_ranks
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
    print(f"FAILED {error} {failures}\\n", end="", flush=True)
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
            *(2, "call", "SIGSTOP", 8),
            f"still waiting for rank 2 (host {HOST}, stopped) to call load",
            marks=pytest.mark.extended,
        ),
        (2, "plan", "SIGSTOP", 8, f"still waiting for rank 2 (host {HOST}, stopped) to plan"),
        # Within torch's collective.
        (2, "gather", "SIGKILL", 300, f"still waiting for rank 2 (host {HOST}, ended) to put"),
        (2, "gather", "SIGSTOP", 8, f"still waiting for rank 2 (host {HOST}, stopped) to put"),
        # It serves the process group's store.
        (0, "plan", "SIGSTOP", 8, f"store, which rank 0 (host {HOST}, stopped) or its launcher"),
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


STARTED_AGAIN = """
import os, threading
import torch
import torch.distributed as dist
from pannier import client
from pannier.client import torch_compat
from pannier.client.ranks.store_barrier import StoreBarrier

RANK, ROOT = int(os.environ["RANK"]), os.environ["ROOT"]
dist.init_process_group("gloo")
kept = dist.TCPStore("127.0.0.1", int(os.environ["KEPT"]), is_master=False, wait_for_workers=False)
torch_compat.group_store = lambda process_group: dist.PrefixStore("group", kept)

def load():
    state = {"w": torch.zeros(6)}
    client.load(state, checkpoint_id=client.latest(ROOT), timeout=float(os.environ["TIMEOUT"]))
    return state["w"]

if os.environ["NEWEST"] == "1":
    waiting = threading.Event()
    StoreBarrier.catch_up = lambda *arguments: waiting.set() or threading.Event().wait()
    if RANK == 0:
        threading.Thread(target=load, daemon=True).start()
        waiting.wait()
    os._exit(0)
assert client.latest(ROOT).endswith("step-2")
assert torch.equal(load(), torch.full((6,), 2.0))
"""


def test_ranks_that_are_started_again_are_in_step_whatever_their_dead_predecessors_called(
    tmp_path: Path,
) -> None:
    # As torchrun's store, which outlives its workers.
    port = free_port()
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for newest in (1, 2):
        state = {"w": torch.full((6,), float(newest))}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{newest}", no_dist=True)
        environment = {
            "ROOT": str(tmp_path),
            "KEPT": str(port),
            "NEWEST": str(newest),
            "TIMEOUT": str(stretched(20.0)),
        }
        # Of the first two, rank 0 is in its first load when rank 1 ends without a call.
        run_ranks(STARTED_AGAIN, 2, environment, torchrun=False)
    del kept
