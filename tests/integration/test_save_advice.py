"""How often to save: what trainers, ``pannier status`` and both daemons say of the same saves."""

import json
from pathlib import Path

import pytest

from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks

TWO_RANKS = """
    import dataclasses
    import json
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from pannier import client

    dist.init_process_group("gloo")
    state = {"weight": torch.arange(1 << 18, dtype=torch.float32)}
    for step in (1, 2, 3):
        client.save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}")
    client.save({"own": 1}, checkpoint_id=f"{os.environ['ROOT']}/own-{dist.get_rank()}", no_dist=True)
    before = client.advice(mtbf=timedelta(hours=6))
    client.load(state, checkpoint_id=f"{os.environ['ROOT']}/step-3")
    after = client.advice(mtbf=timedelta(hours=6))
    print("ADVICE", json.dumps([dataclasses.asdict(before), dataclasses.asdict(after), str(after)]))
    client.close()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_trainers_and_operators_get_the_same_advice(daemons: Daemons, tmp_path: Path) -> None:
    environment = daemons.env(PANNIER_JOB="llama", ROOT=str(tmp_path / "run"))
    finished = run_ranks(TWO_RANKS, 2, environment, torchrun=False)
    by_rank = [
        json.loads(line.removeprefix("ADVICE "))
        for output in finished.outputs
        for line in output.splitlines()
        if line.startswith("ADVICE ")
    ]
    assert len(by_rank) == 2
    for before, after, text in by_rank:
        assert (before["saves"], before["restores"], after["restores"]) == (3, 0, 1)
        assert before["restore_s"] == before["cost"]["durable_s"]
        assert after["interval_s"] >= after["cost"]["durable_s"]
        assert text.startswith("save every ")
        assert "(1 load)" in text
    for daemon in (daemons.sidecar, daemons.coordinator):
        asked = ("status", "--address", daemon.address)
        assert "advice" not in pannier(*asked, "--json").json()
        answer = pannier(*asked, "--json", "--mtbf", "6h").json()
        (group,) = [each for each in answer["advice"] if each["saves"] == 3]
        assert (group["job"], group["mtbf_s"]) == ("llama", 21600)
        # A short load is reported after it has returned: the process may have ended before.
        assert group["restores"] in (0, 1)
        assert group["ranks"] == 2
        # Each rank's own save is of a group of its own.
        assert [each["saves"] for each in answer["advice"]] == [1, 1, 3]
        for before, _, _ in by_rank:
            # The slowest rank's, on both.
            assert group["cost"]["stalled_s"] == pytest.approx(before["cost"]["stalled_s"])
        assert group["cost"]["ingested_s"] <= group["cost"]["durable_s"] <= group["interval_s"]
        shown = pannier(*asked, "--mtbf", "6h", columns=120).out
        name = f"llama, 2 ranks (group {group['group']}):"
        assert f"{name} save every " in shown
        words = " ".join(shown.split())
        assert "no load was measured" in words or "(1 load)" in words
        assert "save every" not in pannier(*asked).out
        assert f"{name} a save costs " in pannier(*asked).out
    name = f"{tmp_path}/run/step-3"
    asked = ("status", name, "--address", daemons.sidecar.address)
    one = pannier(*asked, "--mtbf", "90min", "--json").json()
    (only,) = one["advice"]
    assert (only["saves"], only["mtbf_s"]) == (1, 5400)
