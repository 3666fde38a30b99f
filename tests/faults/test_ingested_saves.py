"""What every rank had ingested when the job was killed is its next start's newest checkpoint, if asked for."""

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from pannier.v1 import save_pb2
from support.processes.daemons import Daemons
from support.processes.ranks import Ranks, start_ranks
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import await_save
from support.storage.bucket import check_whole, hold_up, listed
from support.storage.gcs_server import GcsServer

STATE = """
import os, signal, time
import torch
import torch.distributed as dist
from pannier import client

RANK, ROOT = int(os.environ["RANK"]), os.environ["ROOT"]
dist.init_process_group("gloo")

def state(step):
    return {f"w{RANK}": torch.full((4 << 20,), float(step))}
"""
SAVING = (
    STATE
    + """
client.save(state(1), checkpoint_id=f"{ROOT}/step-1")
print("COMMITTED", flush=True)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
if str(RANK) != os.environ["LACKING"]:
    handle = client.async_save(state(2), checkpoint_id=f"{ROOT}/step-2")
    print("STAGED", flush=True)
    handle.ingest_completion.result()
    print("INGESTED", flush=True)
signal.pause()
"""
)
LOADING = (
    STATE
    + """
print("ASKING", flush=True)
if os.environ["HOW"] == "load":
    newest = f"{ROOT}/step-2"
else:
    newest = client.latest(ROOT, include="ingested", timeout=float(os.environ["TIMEOUT"]))
found = state(0)
client.load(found, checkpoint_id=newest)
step = int(newest[-1])
assert torch.equal(found[f"w{RANK}"], state(step)[f"w{RANK}"])
print(f"LOADED {step}", flush=True)
"""
)


def kill_when_ingested(
    where: Mapping[str, str],
    server: GcsServer,
    root: str,
    go: Path,
    address: str,
    lacking: str = "",
) -> None:
    """Two ranks save step 1; then the bucket takes no more data, and they are killed in step 2."""
    environment = {**where, "ROOT": root, "GO": str(go), "LACKING": lacking}
    with start_ranks(SAVING, 2, environment, torchrun=False) as ranks:
        for rank in range(2):
            ranks.wait_for("COMMITTED", rank=rank)
        hold_up(server)
        go.touch()
        for rank in range(2):
            if str(rank) != lacking:
                ranks.wait_for("STAGED", rank=rank)
        if lacking:
            ingested = save_pb2.RANK_PHASE_HANDED_OVER
            await_save(
                address,
                f"{root}/step-2",
                lambda status: any(each.phase == ingested for each in status.ranks),
            )
        else:
            for rank in range(2):
                ranks.wait_for("INGESTED", rank=rank)
        for process in ranks.processes:
            process.signal(signal.SIGKILL)
        for process in ranks.processes:
            process.wait(BOUND_S)


def start_again(
    where: Mapping[str, str], root: str, *, how: str = "latest", timeout: float = 120
) -> Ranks:
    """Ranks that load the newest checkpoint, in a new start of the job."""
    environment = {**where, "ROOT": root, "HOW": how, "TIMEOUT": str(timeout)}
    ranks = start_ranks(LOADING, 2, environment, torchrun=False)
    for rank in range(2):
        ranks.wait_for("ASKING", rank=rank)
    return ranks


@pytest.mark.parametrize("how", ["latest", "load"])
def test_a_start_after_all_trainers_were_killed_loses_no_ingested_step(
    daemons: Daemons, server: GcsServer, tmp_path: Path, how: str
) -> None:
    root = f"gs://bucket/ingested-{how}"
    where = daemons.env(**daemons.environment)
    kill_when_ingested(where, server, root, tmp_path / "go", daemons.coordinator_address)
    with start_again(where, root, how=how) as ranks:
        ranks.wait_for("which an earlier start left ingested, has waited")
        assert f"{root}/step-2/.metadata".removeprefix("gs://bucket/") not in listed(
            server, root.removeprefix("gs://bucket/")
        )
        server.clear()
        for rank in range(2):
            ranks.wait_for("LOADED 2", rank=rank)
        ranks.wait(BOUND_S).check()
    check_whole(server, f"{root}/step-2")


@pytest.mark.parametrize(
    # Without a coordinator it waits for that first, and `pannier recover` imports torch.
    "coordinator",
    ["restarted", pytest.param("dead", marks=pytest.mark.extended)],
)
def test_so_it_does_after_daemons_were_killed_too(
    daemons: Daemons, server: GcsServer, tmp_path: Path, coordinator: str
) -> None:
    root = f"gs://bucket/daemons-{coordinator}"
    where = daemons.env(**daemons.environment)
    kill_when_ingested(where, server, root, tmp_path / "go", daemons.coordinator_address)
    daemons.coordinator.kill()
    daemons.sidecar.kill()
    with start_again(where, root) as ranks:
        server.clear()
        # The sidecar uploads, and writes receipts, without a coordinator.
        daemons.sidecar.start(ready=False)
        if coordinator == "restarted":
            daemons.coordinator.start()
        for rank in range(2):
            ranks.wait_for("LOADED 2", rank=rank, timeout=2 * BOUND_S)
        ranks.wait(BOUND_S).check()


def test_a_rank_that_was_not_ingested_is_named_and_the_checkpoint_before_is_loaded(
    daemons: Daemons, server: GcsServer, tmp_path: Path
) -> None:
    root = "gs://bucket/lacking"
    where = daemons.env(**daemons.environment)
    go = tmp_path / "go"
    # Others look while it is still undecided.
    daemons.sidecar.constants["pannier.common.timeouts.TRAINER_RETURN_S"] = stretched(15)
    daemons.sidecar.restart()
    kill_when_ingested(where, server, root, go, daemons.coordinator_address, lacking="1")
    with start_again(where, root) as ranks:
        for rank in range(2):
            ranks.wait_for("LOADED 1", rank=rank)
        output = ranks.output(0)
        assert re.search(
            rf"{root}/step-2 is no checkpoint yet, and not used: .*rank 1\b.*node-0", output
        ), output
        ranks.wait(BOUND_S).check()


@pytest.mark.extended
def test_embedded_daemons_are_started_to_finish_what_killed_ones_left(
    server: GcsServer, embedded: Path, tmp_path: Path
) -> None:
    import psutil

    root = "gs://bucket/embedded"
    names = ("PANNIER_RUNTIME_DIR", "PANNIER_SPOOL")
    where = {**server.env, **{name: os.environ[name] for name in names}, "PANNIER_JOB": "emb"}
    address = f"unix://{embedded}/sidecar.sock"
    kill_when_ingested(where, server, root, tmp_path / "go", address)
    supervisor = psutil.Process(int((embedded / "up.pid").read_text()))
    for process in [supervisor, *supervisor.children(recursive=True)]:
        process.kill()
    server.clear()
    with start_again(where, root) as ranks:
        for rank in range(2):
            ranks.wait_for("LOADED 2", rank=rank, timeout=2 * BOUND_S)
        ranks.wait(BOUND_S).check()
