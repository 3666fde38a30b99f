"""A planner with global planning of its own, and daemons that the client starts."""

from pathlib import Path

from support.processes.cli import run_python
from support.processes.daemons import clean_environment

MODULE = """
import os
from torch.distributed.checkpoint import DefaultSavePlanner

class Planner(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        with open(os.environ["PLACE"] + "/planned", "a") as file:
            file.write(f"{os.getpid()}\\n")
        return super().create_global_plan(all_plans)
"""
TRAINER = """
import os, sys, torch
from pannier import client

sys.path.insert(0, os.environ["PYTHONPATH"])
from own_planners import Planner

class Here(Planner):
    pass

place, state = os.environ["PLACE"], {"w": torch.ones(8)}
print("trainer", os.getpid())
client.save(state, checkpoint_id=f"{place}/root/step-1", planner=Planner())
try:
    client.save(state, checkpoint_id=f"{place}/root/step-2", planner=Here())
except client.SaveAbortedError as error:
    print("refused:", error)
"""


def test_embedded_daemons_take_the_class_along_or_say_at_once_why_not(
    tmp_path: Path, embedded: Path
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/own_planners.py").write_text(MODULE)
    ran = run_python(
        TRAINER,
        env=clean_environment({"PYTHONPATH": str(tmp_path / "modules"), "PLACE": str(tmp_path)}),
    )
    assert ran.code == 0, ran
    assert (tmp_path / "root/step-1/.metadata").exists()
    (planned,) = (tmp_path / "planned").read_text().split()
    assert f"trainer {planned}\n" not in ran.out
    assert "refused: " in ran.out, ran
    for word in (
        "__main__:Here overrides global planning",
        "PYTHONPATH",
        "not in the script itself",
    ):
        assert word in ran.out
