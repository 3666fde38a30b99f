"""Ranks on two machines agree on their start though the first of them stands still for long."""

import os
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pannier.wire import object_names
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S

TRAINER = """
import ctypes, logging, os, signal, subprocess, tempfile, time
from pathlib import Path

RANK, ROOT, GO = int(os.environ["RANK"]), os.environ["ROOT"], Path(os.environ["GO"])
CLONE_NEWNS = 0x20000

def move_to_another_machine():
    # Another kernel's boot id, in a mount namespace of this process.
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, ctypes.get_errno()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    other = GO / "boot_id"
    other.write_text("00000000-0000-4000-8000-000000000000")
    subprocess.run(["mount", "--bind", other, "/proc/sys/kernel/random/boot_id"], check=True)

if RANK:
    move_to_another_machine()

import torch
import torch.distributed as dist
from pannier import client
from pannier.common import timeouts

logging.basicConfig(level=logging.INFO)
timeouts.WAIT_WARNING_OTHERS_S = 0.5
# Served by none of the ranks, as torchrun's.
store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=3)
state = {"w": torch.full((6,), 1.0), f"own.{RANK}": torch.ones(3)}

def load(number):
    loaded = {"w": torch.zeros(6), f"own.{RANK}": torch.zeros(3)}
    client.load(loaded, checkpoint_id=f"{ROOT}/step-{number}")
    assert torch.equal(loaded["w"], torch.full((6,), float(number))), loaded

def save(number):
    state["w"].fill_(number)
    client.async_save(state, checkpoint_id=f"{ROOT}/step-{number}").result()

if RANK == 0:
    client.latest(ROOT)
    print("STARTED", os.getpid(), flush=True)
    if os.environ["STANDS"] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        # A call in C that keeps the interpreter's lock until the other side opens the pipe.
        ctypes.PyDLL(None).open(os.fsencode(GO / "pipe"), os.O_RDONLY)
else:
    while not (GO / "go").exists():
        time.sleep(0.01)
if os.environ["FIRST"] == "load":
    load(0)
for number in (1, 2):
    save(number)
if RANK:
    # The n-th calls of all ranks belong together.
    client.latest(ROOT)
assert client.latest(ROOT) == f"{ROOT}/step-2"
for number in (1, 2):
    load(number)
print("DONE", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a boot id of its own")
@pytest.mark.parametrize(("stands", "first"), [("stopped", "save"), ("without the GIL", "load")])
def test_a_first_rank_that_stands_still_at_its_first_call_splits_no_job(
    daemons: Daemons, tmp_path: Path, stands: str, first: str
) -> None:
    root, go = tmp_path / "root", tmp_path / "go"
    go.mkdir()
    os.mkfifo(go / "pipe")
    state = {"w": torch.zeros(6), **{f"own.{rank}": torch.ones(3) for rank in range(3)}}
    dcp.save(state, checkpoint_id=root / "step-0", no_dist=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = daemons.env(
        ROOT=str(root), GO=str(go), STORE=str(store.port), STANDS=stands, FIRST=first
    )
    with start_ranks(TRAINER, 3, environment, torchrun=False) as ranks:
        ranks.wait_for("STARTED")
        if stands == "stopped":
            pid = ranks.processes[0].pid
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        (go / "go").touch()
        for rank in (1, 2):
            ranks.wait_for("to confirm this start of the job", rank=rank)
            assert "DONE" not in ranks.output(rank)
        if stands == "stopped":
            ranks.processes[0].resume()
        else:
            (go / "pipe").write_text("")
        ranks.wait(BOUND_S).check()
    # All ranks were of one incarnation.
    assert len(list((root / object_names.incarnations_prefix()).iterdir())) == 1
