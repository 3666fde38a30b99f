"""torchtitan's trainer with Pannier's ``CheckpointManager``."""

from pathlib import Path

import pytest

from frameworks.killed_runs import PROGRAMS, check_resumes
from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path, mode: str
) -> None:
    program = PROGRAMS / "torchtitan_job.py"
    check_resumes(program, mode, daemons, server, tmp_path, lambda step: f"step-{step}", MODE=mode)


def test_a_number_of_checkpoints_to_keep_is_refused_with_the_setting_that_has_it() -> None:
    from pannier.client.integrations.torchtitan import CheckpointManager

    with pytest.raises(
        ValueError, match=r"keep_latest_k=3 would remove committed .*PANNIER_KEEP_NEWEST"
    ):
        CheckpointManager.Config(enable=True, keep_latest_k=3)
    assert CheckpointManager.Config(enable=True).keep_latest_k == 0
