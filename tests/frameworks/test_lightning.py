"""Lightning's trainer with Pannier's ``ModelParallelStrategy``."""

import re
from pathlib import Path

from frameworks.killed_runs import PROGRAMS, check_resumes
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer


def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path
) -> None:
    program = PROGRAMS / "lightning_job.py"
    check_resumes(program, "lightning", daemons, server, tmp_path, lambda step: f"step={step}.ckpt")


def test_checkpoints_are_lightnings_and_its_removals_are_refused(
    daemons: Daemons, tmp_path: Path
) -> None:
    env = daemons.env(**daemons.environment, ROOT=str(tmp_path))
    program = PROGRAMS / "lightning_formats.py"
    (output,) = run_ranks(program, 1, env, 2 * BOUND_S, torchrun=False).outputs
    assert "Lightning reads Pannier's" in output
    assert "Pannier reads Lightning's sharded" in output
    assert "Pannier reads Lightning's single" in output
    assert "Pannier replaces Lightning's" in output
    assert re.search(r"refused: ModelCheckpoint\(save_top_k=1\) .*PANNIER_KEEP_NEWEST", output)
    assert "refused: save_last='link'" in output
    assert re.search(r"refused: CHECKPOINT_NAME_LAST='{step}-last' .*PANNIER_KEEP_NEWEST", output)
    assert "refused: LearningRateFinder" in output
    assert "OnExceptionCheckpoint ends well" in output
    assert "a requeued job's is committed" in output
