"""The newest checkpoint is that of the last save, whichever group of the job made it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks

pytestmark = pytest.mark.slow
ORDER = [
    "lone-0",
    "w-1",
    "w-2",
    "w-3",
    "lone-1",
    "w-4",
    "t-5",
    "w-6",
    "lone-7",
    "w-8",
    "t-9",
    "w-10",
]
"""Names below the root, in the order of the saves."""


def trainer() -> None:
    import json
    import os
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from pannier import client

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    root, report = os.environ["ROOT"], Path(os.environ["REPORT"])
    tail = dist.new_group([1])
    newest = []

    def save(name: str, value: float) -> None:
        state = {"w": torch.full((100,), value)}
        if name[0] == "w":
            client.save(state, checkpoint_id=f"{root}/{name}")
        elif rank == 1 and name[0] == "t":
            client.save(state, checkpoint_id=f"{root}/{name}", process_group=tail)
        elif rank == 1:
            client.save(state, checkpoint_id=f"{root}/{name}", no_dist=True)

    for name in json.loads(os.environ["NAMES"]):
        if name == "lone-7":
            print("the coordinator may go", flush=True)
            while not (report / "restarted").exists():
                time.sleep(0.02)
        save(name, 0.0)
        dist.barrier()
        newest.append(client.latest(root, no_dist=True))
        dist.barrier()
    # The same id, by another group and by the same one again.
    if rank == 1:
        client.save({"w": torch.full((100,), 1.0)}, checkpoint_id=f"{root}/w-10", no_dist=True)
    dist.barrier()
    save("w-10", 2.0)
    (report / f"{rank}.json").write_text(json.dumps(newest))
    client.close()


@pytest.mark.parametrize("job", ["test", ""], ids=["named job", "unnamed job"])
def test_saves_of_all_groups_and_of_lone_ranks_are_in_one_order_over_a_restart_of_the_coordinator(
    tmp_path: Path, job: str
) -> None:
    root = tmp_path / "run"
    with Daemons(tmp_path) as daemons:
        env = daemons.env(ROOT=str(root), REPORT=str(tmp_path), NAMES=json.dumps(ORDER))
        if not job:
            del env["PANNIER_JOB"]
        with start_ranks(trainer, 2, env, torchrun=False) as ranks:
            ranks.wait_for("the coordinator may go")
            daemons.coordinator.kill()
            daemons.coordinator.restart()
            (tmp_path / "restarted").touch()
            ranks.wait(150).check()
    for rank in range(2):
        newest = json.loads((tmp_path / f"{rank}.json").read_text())
        assert newest == [str(root / name) for name in ORDER]
    listed = pannier("ls", str(root), "--json").json_lines()
    assert [each["checkpoint"] for each in listed] == [str(root / name) for name in ORDER]
    state = {"w": torch.zeros(100)}
    dcp.load(state, checkpoint_id=root / "w-10", no_dist=True)
    assert bool((state["w"] == 2).all())
