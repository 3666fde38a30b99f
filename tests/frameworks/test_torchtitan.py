"""torchtitan's trainer with Pannier's ``CheckpointManager``."""

from pathlib import Path

import pytest

from frameworks.killed_runs import PROGRAMS, STEPS, Job, listed, steps
from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer

PROGRAM = PROGRAMS / "torchtitan_job.py"


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path, mode: str
) -> None:
    job = Job(PROGRAM, mode, daemons, lambda step: f"step-{step}", MODE=mode, DUMP=str(tmp_path))
    whole = [steps(output) for output in job.train("whole")]
    killed = job.kill_in_a_save("killed", server, tmp_path / "go")
    outputs = job.train("killed")
    for rank, output in enumerate(outputs):
        assert "resumes after 4\n" in output
        again = steps(output)
        assert [*again] == [5, 6, 7, 8]
        assert {**killed[rank], **again} == whole[rank]
    for root in ("whole", "killed"):
        assert listed(f"{job.root}/{root}", daemons.environment) == ["step-6", f"step-{STEPS}"]
