"""The error of a failed save, which a later call raises, costs no other save."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks

STEPS = range(1, 9)
FAILING = (3, 5)
"""These hold checkpoints that Pannier didn't write."""


def trainer() -> None:
    import json
    import os
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from pannier import client
    from pannier.wire.errors import PannierError

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    root = os.environ["ROOT"]
    blocking = os.environ["BLOCKING"] == "1"
    report = []
    for step in range(1, 9):
        state = {f"weight.{rank}": torch.full((100,), float(step))}
        try:
            if blocking and step not in (3, 5):
                client.save(state, checkpoint_id=f"{root}/step-{step}")
            else:
                client.async_save(state, checkpoint_id=f"{root}/step-{step}")
        except PannierError as error:
            report.append([step, type(error).__name__, str(error), getattr(error, "__notes__", [])])
        if step in (3, 5) and rank == 0:
            # The other rank mostly gets the error at another step.
            while client.default_client().saves:
                dist.get_rank()
    try:
        client.wait_all()
    except PannierError as error:
        report.append([9, type(error).__name__, str(error), []])
    Path(os.environ["REPORT"], f"{rank}.json").write_text(json.dumps(report))
    client.close()


@pytest.mark.parametrize("blocking", [False, True], ids=["async_save", "save"])
def test_a_failed_saves_error_is_raised_by_a_later_call_that_saves_on_all_ranks_nevertheless(
    tmp_path: Path, blocking: bool
) -> None:
    root = tmp_path / "run"
    for step in FAILING:
        dcp.save({"other": torch.zeros(3)}, checkpoint_id=root / f"step-{step}", no_dist=True)
    with Daemons(tmp_path) as daemons:
        env = daemons.env(ROOT=str(root), REPORT=str(tmp_path), BLOCKING=str(int(blocking)))
        run_ranks(trainer, 2, env, timeout=150, torchrun=False)
        saves = pannier("status", "--json", "--address", daemons.coordinator_address).json()[
            "saves"
        ]
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report, "the errors of both saves are raised"
        for step, kind, _, notes in report:
            assert kind == "CheckpointExistsError"
            assert step in (*FAILING, 9) or "whose own save is made all the same" in " ".join(notes)
        text = " ".join(each[2] for each in report)
        assert all(
            f"step-{step} holds a checkpoint that Pannier didn't write" in text for step in FAILING
        )
    for step in STEPS:
        if step in FAILING:
            continue
        state = {f"weight.{rank}": torch.zeros(100) for rank in range(2)}
        dcp.load(state, checkpoint_id=root / f"step-{step}", no_dist=True)
        assert all(bool((value == step).all()) for value in state.values())
    ended = {each["checkpoint_id"].rpartition("-")[2]: each for each in saves}
    for step in STEPS:
        kinds = {each["kind"] for each in ended[str(step)].get("failures", [])}
        assert kinds == ({"FAILURE_KIND_EXISTS"} if step in FAILING else set())
