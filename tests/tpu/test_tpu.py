"""TorchTPU's device ``tpu`` is copied as any device without streams is: a stand-in for it, and its package."""

import importlib.util
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.processes.daemons import clean_environment
from support.processes.stretch import BOUND_S
from support.states import foreign_device

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("programs") / "save_and_load.py"


def run(*arguments: str) -> str:
    """What a Python process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=clean_environment({"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in is compiled with g++")
def test_its_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    """A device whose memory reads as something else where it is taken for the host's."""
    library = tmp_path / "device.so"
    foreign_device.build(library)
    assert "passed" in run(str(PROGRAM), str(library), str(tmp_path))


BESIDE = """
    import sys
    from pathlib import Path
    import torch
    import torch_tpu
    from pannier import client
    from support.actors.staged_saves import StagedSaves, assert_same, values_of
    from support.actors.staged import plan, stage_all, write_checkpoint

    saves = StagedSaves()
    state = {"w": torch.arange(5.0), "o": {"lr": 0.1}}
    for number in range(2):
        save = saves.stage(state)
        assert save.was_planned == (number == 0)
        assert_same(save.contents(), values_of(state, save.fresh.items))
    planning = plan({"w": state["w"]})
    write_checkpoint(Path(sys.argv[1]), planning.message, planning.items, stage_all(planning, saves.pool)[0])
    target = {"w": torch.zeros(5)}
    client.load(target, checkpoint_id=sys.argv[1], no_dist=True)
    assert torch.equal(target["w"], state["w"])
    print("passed")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="torch_tpu isn't there")
def test_its_package_is_imported_beside_the_client(tmp_path: Path) -> None:
    """Without a TPU it adds no device."""
    assert "passed" in run("-c", textwrap.dedent(BESIDE), str(tmp_path))
